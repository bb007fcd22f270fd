"""A table of numbers, words, dates and holes is encoded as scikit-learn's transformers do, by the training part."""

from __future__ import annotations

import random
from datetime import datetime

import numpy as np
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import exp
from exp.data.data import Data
from exp.data.delimited import Csv
from exp.data.tables import moments
from exp.engine.checkpoint import read_checkpoint
from exp.engine.datamodule import fitted_in
from exp.errors import ConfigError

HEAD = "age,colour,income,size,when,kind,price,rent"


def lines(rows: int = 60, *, holes: float = 0.15, seed: int = 0) -> list[list[str]]:
    draw = random.Random(seed)

    def some(value: object) -> str:
        return draw.choice(["", "NA"]) if draw.random() < holes else str(value)

    return [
        [
            some(draw.randint(18, 90)),
            some(draw.choice(["red", "blue", "green"] if row % 20 else ["violet"])),
            some(draw.gauss(3e4, 9e3)),
            some(draw.choice(["s", "m", "l", "xl"])),
            f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
            draw.choice(["flat", "house", "hut"]),
            str(draw.gauss(100, 30)),
            str(draw.gauss(9, 2)),
        ]
        for row in range(rows)
    ]


@pytest.fixture
def homes(tmp_path):
    path = tmp_path / "homes.csv"
    path.write_text("\n".join([HEAD, *(",".join(row) for row in lines())]))
    return str(path)


def columns(rows: list[list[str]]) -> np.ndarray:
    """As a data frame has them: numbers, dates as days, words; nan for what is not there."""
    epoch = datetime(1970, 1, 1)
    table = np.empty((len(rows), 5), dtype=object)
    for place, (age, colour, income, size, when, *_) in enumerate(rows):
        numbers = [float("nan") if text in ("", "NA") else float(text) for text in (age, income)]
        words = [np.nan if text in ("", "NA") else text for text in (colour, size)]
        table[place] = [*numbers, (datetime.fromisoformat(when) - epoch).days, *words]
    return table


@pytest.mark.parametrize("impute", ["mean", "median", "most_frequent"])
def test_the_encoding_is_scikit_learns(homes, impute):
    raw = Csv(
        path=homes,
        target="kind",
        categorical=["colour", "size"],
        dates=["when"],
        ignore=["price", "rent"],
        impute=impute,
    )
    training, others = raw.select(torch.arange(40)), raw.select(torch.arange(40, 60))
    words = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    if impute == "most_frequent":
        words = make_pipeline(SimpleImputer(strategy="most_frequent"), words)
    theirs = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(strategy=impute), StandardScaler()), [0, 1, 2]),
            ("words", words, [3, 4]),
        ]
    )
    table = columns(lines())
    theirs.fit(table[:40])
    fitted = training.fit()
    for part, rows in ((training, table[:40]), (others, table[40:])):
        np.testing.assert_allclose(
            part.encoded(fitted)["input"].numpy(), theirs.transform(rows), rtol=1e-12, atol=1e-12
        )
        assert part.prepare(fitted).entries[0].dtype == torch.float32


def test_words_by_number_are_an_input_of_their_own(homes):
    settings = {"path": homes, "target": "kind", "categorical": ["colour", "size"], "impute": "mean"}
    raw = Csv(**settings, ignore=["when", "price", "rent"], encoding="index")
    entries = Data(train=raw.select(torch.arange(1, 20)), val=raw).part("val").entries
    assert list(entries) == ["input", "categories", "target"]
    assert entries["input"].shape == (60, 2)
    known = raw.select(torch.arange(1, 20)).fit()["table"]["words"]["colour"]
    told = [row[1] if row[1] not in ("", "NA") else "" for row in lines()]
    expected = [known.index(word) + 1 if word in known else 0 for word in told]
    assert entries["categories"][:, 0].tolist() == expected
    assert 0 in expected, "violet was not in training"


def test_several_numbers_are_one_target_and_targets_by_name_are_entries(homes):
    settings = {"path": homes, "categorical": ["colour", "size"], "dates": ["when"], "impute": "mean"}
    both = Data(dataset=Csv(**settings, target=["price", "rent"], task="regression", ignore=["kind"]))
    assert (both.spec.num_outputs, both.spec.num_classes) == (2, None)
    targets = both.part("train").entries[1]
    assert torch.allclose(targets.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(targets.std(0, correction=0), torch.ones(2), atol=1e-5)
    heads = Data(
        dataset=Csv(
            **settings,
            target={"kind": "kind", "cost": ["price", "rent"]},
            task={"kind": "classification", "cost": "regression"},
        )
    )
    entries = heads.part("test").entries
    assert list(entries) == ["input", "kind", "cost"]
    assert (entries["kind"].dtype, entries["cost"].shape[1]) == (torch.int64, 2)
    assert (heads.spec.num_outputs, heads.spec.num_classes) == (5, None)
    assert heads.fitted["table"]["classes"] == {"kind": ["flat", "house", "hut"]}


def test_dates_in_a_form_of_their_own_and_a_column_that_hardly_changes(tmp_path):
    path = tmp_path / "days.csv"
    path.write_text("when,same,y\n31.01.2024,0.1,1\n2.2.2024,0.1,2\n3.2.2024,0.1,3\n")
    raw = Csv(path=str(path), target="y", dates={"when": "%d.%m.%Y"}, standardise=False)
    assert raw.encoded(raw.fit())["input"][:, 0].tolist() == [19753.0, 19755.0, 19756.0]
    # Of ten times 0.1 the mean is not 0.1; what rounding leaves is no spread.
    mean, deviation = moments(np.full((10, 1), 0.1))
    assert ((np.full((10, 1), 0.1) - mean.numpy()) / deviation.numpy()).max() < 1e-15


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ("1,red,x", {}, r"'red' in line 2 of .*column b; expected a number. Put it in data.dataset.categorical"),
        ("1,2,x\n?,3,y", {}, r"'\?' in line 3 of .*data.dataset.missing_values"),
        ("1,2,x\n,3,y\n,3,y", {}, r"no value there and in 1 more rows, in line 3 of .*column a"),
        (",2,x\n,3,y", {"impute": "mean"}, r"the column a, without a single number in the training part"),
        ("1,yesterday,x", {"dates": ["b"]}, r"'yesterday' in line 2 of .*column b; expected a date in ISO 8601"),
        ("1,2,x", {"dates": {"b": "%Y"}}, r"expected a date like %Y. data.dataset.dates"),
        ("1,2,x", {"target": ["a", "b"]}, r"2 columns in a classification; expected one column.*task=regression"),
        ("1,2,x", {"target": []}, r"data.dataset.target: no column"),
        ("1,2,x", {"target": {"k": "c", "p": "a"}, "task": {"k": "classification"}}, r"a task for each target, k, p"),
    ],
)
def test_faults_of_columns(tmp_path, row, settings, message):
    path = tmp_path / "table.csv"
    path.write_text(f"a,b,c\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        Data(train=Csv(**{"path": str(path), "target": "c", **settings}))


def test_all_columns_that_cannot_be_read_are_told_at_once(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b,c\nx,,1\n")
    with pytest.raises(ConfigError) as caught:
        Csv(path=str(path), target="c")
    assert len(caught.value.faults) == 2


def test_a_class_that_training_has_not_is_named(tmp_path):
    for name, label in (("train", "x"), ("val", "z")):
        (tmp_path / f"{name}.csv").write_text(f"a,c\n1,x\n2,{label}\n")
    train, val = (Csv(path=str(tmp_path / f"{name}.csv"), target="c") for name in ("train", "val"))
    with pytest.raises(
        ConfigError, match=r"the class z of target in row 1, which training does not know; .*classes, x"
    ):
        Data(train=train, val=val)
    assert Data(train=val, val=train).part("val").entries[1].tolist() == [0, 0]


def test_a_checkpoint_keeps_what_training_told_and_a_later_run_takes_it(ranks, homes, tmp_path):
    words = ["data=csv", f"data.dataset.path={homes}", "data.dataset.target=kind", "data.dataset.impute=mean",
             "data.dataset.categorical=[colour,size]", "data.dataset.ignore=[when,price,rent]", "model=mlp",
             "callbacks=[]", "hooks=[]", "trainer.max_epochs=1"]  # fmt: skip
    trained = ranks.train(*words, "test=false")
    path = trained.directory / "checkpoints" / "last.ckpt"
    told = fitted_in(path)["table"]
    assert told["numbers"] == ["age", "income"]
    assert told["classes"] == {"target": ["flat", "house", "hut"]}
    assert "RunData" in read_checkpoint(path)
    # The file has changed since: other figures, and a word more.
    changed = [[*row[:2], "7e5", "xxl", *row[4:]] for row in lines(seed=3)]
    (tmp_path / "homes.csv").write_text("\n".join([HEAD, *(",".join(row) for row in changed)]))
    again = ranks.train(*words, "train=false", "test=true", f"resume={path}")
    assert again.report["status"] == "completed"
    raw = Csv(
        path=homes,
        target="kind",
        categorical=["colour", "size"],
        impute="mean",
        ignore=["when", "price", "rent"],
    )
    assert Data(dataset=raw, earlier=lambda: fitted_in(path)).fitted["table"]["means"].equal(told["means"])
    assert not Data(dataset=raw).fitted["table"]["means"].equal(told["means"])


def test_a_parquet_file_is_the_same_table(homes, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    from pyarrow import parquet

    from exp.data.parquet import Parquet

    names = HEAD.split(",")
    held = {name: [None if row[at] in ("", "NA") else row[at] for row in lines()] for at, name in enumerate(names)}
    for name, kind in (("age", int), ("income", float), ("price", float), ("rent", float)):
        held[name] = [None if value is None else kind(value) for value in held[name]]
    held["when"] = [datetime.fromisoformat(value) for value in held["when"]]
    path = str(tmp_path / "homes.parquet")
    parquet.write_table(pyarrow.table(held), path)
    settings = {"target": {"kind": "kind", "price": "price"}, "task": {"kind": "classification", "price": "regression"}}
    settings |= {"categorical": ["colour", "size"], "impute": "median"}
    mine, theirs = Parquet(path=path, **settings), Csv(path=homes, dates=["when"], **settings)
    assert mine.encoded(mine.fit())["input"].equal(theirs.encoded(theirs.fit())["input"])
    assert all(mine.entries[name].nan_to_num().equal(value.nan_to_num()) for name, value in theirs.entries.items())
    with pytest.raises(ConfigError, match=r"'\w+' in row \d+ of .*column size; expected a number. Put it in data"):
        Parquet(path=path, target="kind", categorical=["colour"], impute="mean")
    with pytest.raises(ConfigError, match=r"no value there and in .* more rows, in row \d+ of .*column age"):
        Parquet(path=path, target="kind", categorical=["colour", "size"])
    with pytest.raises(ConfigError, match=r"homes.csv \(.*\); expected a Parquet file"):
        Parquet(path=homes, target="kind")


def test_an_extra_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("exp.data.faults.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"data=parquet needs the package pyarrow.*'exp-framework\[parquet\]'"):
        exp.validate(exp.compose(["data=parquet", "data.dataset.path=a.parquet", "data.dataset.target=y"]))
