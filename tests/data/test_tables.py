"""Tests of tables: encodings equal to scikit-learn's, splits, memory, and errors of CSV files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import tracemalloc
from datetime import datetime

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import exp
from exp.check.examination import examine, plan
from exp.check.resolution import resolve
from exp.construct import build_data
from exp.data.cells import finite_number
from exp.data.data import Data
from exp.data.delimited import Csv
from exp.data.unlabelled import UnlabelledTable
from exp.data.windows import Windows
from exp.engine.checkpoint import read_checkpoint
from exp.engine.datamodule import fitted_in
from exp.errors import ConfigError

HEAD = "age,colour,income,size,when,kind,price,rent"
# Rows of a file that is longer than 2**20 characters, the size of the pieces in which exp reads a file.
LONG = 20_000
FLOWERS = """\
id,colour,height,kind
1,red,1.5,rose
2,blue,2.5,iris

3,red,"3.5",rose
4,blue,4.5,tulip
"""


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


def write(path, rows: list[list[str]]) -> str:
    path.write_text("\n".join([HEAD, *(",".join(row) for row in rows)]))
    return str(path)


@pytest.fixture
def homes(tmp_path):
    return write(tmp_path / "homes.csv", lines())


@pytest.fixture
def flowers(tmp_path):
    path = tmp_path / "flowers.csv"
    path.write_text(FLOWERS)
    return str(path)


def values(made: Csv) -> np.ndarray:
    """Return the encoded inputs of a table, fitted to itself."""
    return made.encode(made.fit())["input"].numpy()


def columns(rows: list[list[str]]) -> np.ndarray:
    """Return an array with numbers, dates as days since 1970, words, and nan for missing values."""
    epoch = datetime(1970, 1, 1)
    table = np.empty((len(rows), 5), dtype=object)
    for place, (age, colour, income, size, when, *_) in enumerate(rows):
        numbers = [float("nan") if text in ("", "NA") else float(text) for text in (age, income)]
        words = [np.nan if text in ("", "NA") else text for text in (colour, size)]
        table[place] = [*numbers, (datetime.fromisoformat(when) - epoch).days, *words]
    return table


@pytest.mark.parametrize("impute", ["mean", "median", "most_frequent"])
def test_the_encoding_equals_that_of_scikit_learn(homes, impute):
    settings = {"categorical": ["colour", "size"], "dates": ["when"], "ignore": ["price", "rent"], "impute": impute}
    raw = Csv(path=homes, target="kind", **settings)
    training, others = raw.select(torch.arange(40)), raw.select(torch.arange(40, 60))
    words = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    if impute == "most_frequent":
        words = make_pipeline(SimpleImputer(strategy="most_frequent"), words)
    numbers = make_pipeline(SimpleImputer(strategy=impute), StandardScaler())
    theirs = ColumnTransformer([("numbers", numbers, [0, 1, 2]), ("words", words, [3, 4])])
    table = columns(lines())
    theirs.fit(table[:40])
    fitted = training.fit()
    for part, rows in ((training, table[:40]), (others, table[40:])):
        found = part.encode(fitted)["input"].numpy()
        np.testing.assert_allclose(found, theirs.transform(rows), rtol=1e-12, atol=1e-12)
        assert part.prepare(fitted).entries[0].dtype == torch.float32


def test_words_by_number_are_a_separate_input(homes):
    settings = {"path": homes, "target": "kind", "categorical": ["colour", "size"], "impute": "mean"}
    raw = Csv(**settings, ignore=["when", "price", "rent"], encoding="index")
    entries = Data(train=raw.select(torch.arange(1, 20)), val=raw).part("val").entries
    assert list(entries) == ["input", "categories", "target"]
    assert entries["input"].shape == (60, 2)
    known = raw.select(torch.arange(1, 20)).fit()["table"]["words"]["colour"]
    held = [row[1] if row[1] not in ("", "NA") else "" for row in lines()]
    expected = [known.index(word) + 1 if word in known else 0 for word in held]
    assert entries["categories"][:, 0].tolist() == expected
    assert 0 in expected, "violet must be a word that is not in the training split"


def test_a_target_may_have_several_columns_or_a_name(homes):
    settings = {"path": homes, "categorical": ["colour", "size"], "dates": ["when"], "impute": "mean"}
    both = Data(dataset=Csv(**settings, target=["price", "rent"], task="regression", ignore=["kind"]))
    assert (both.spec.num_outputs, both.spec.num_classes) == (2, None)
    targets = both.part("train").entries[1]
    assert torch.allclose(targets.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(targets.std(0, correction=0), torch.ones(2), atol=1e-5)
    task = {"kind": "classification", "cost": "regression"}
    heads = Data(dataset=Csv(**settings, target={"kind": "kind", "cost": ["price", "rent"]}, task=task))
    entries = heads.part("test").entries
    assert list(entries) == ["input", "kind", "cost"]
    assert (entries["kind"].dtype, entries["cost"].shape[1]) == (torch.int64, 2)
    assert (heads.spec.num_outputs, heads.spec.num_classes) == (5, None)
    assert heads.fitted["table"]["classes"] == {"kind": ["flat", "house", "hut"]}


def test_a_classification_and_a_regression(flowers):
    made = Csv(path=flowers, target="kind", categorical=["colour"], ignore=["id"], standardise=False)
    assert made.fit()["table"]["words"] == {"colour": ["blue", "red"]}
    assert made.classes == {"target": ("iris", "rose", "tulip")}
    features, targets = made.prepare(made.fit()).entries
    assert features.tolist() == [[1.5, 0, 1], [2.5, 1, 0], [3.5, 0, 1], [4.5, 1, 0]]
    assert targets.tolist() == [1, 0, 1, 2]
    spec = Data(dataset=made, parts={"train": 2, "val": 2}).spec
    assert (spec.input_shape, spec.num_classes, spec.num_outputs) == ((3,), 3, 3)
    settings = {"path": flowers, "target": "height", "task": "regression", "ignore": ["colour", "kind"]}
    data = Data(train=Csv(**settings, standardise=False))
    assert data.part("train").entries[1].tolist() == [[1.5], [2.5], [3.5], [4.5]]
    assert (data.spec.num_classes, data.spec.num_outputs) == (None, 1)
    standardised = Data(train=Csv(**settings)).part("train").entries[1]
    assert standardised.flatten().tolist() == pytest.approx([-1.341641, -0.447214, 0.447214, 1.341641])


def test_numeric_labels_are_sorted_as_numbers(tmp_path):
    (tmp_path / "plain.txt").write_text("10;0.5\n9;1.5\n10;2.5\n")
    made = Csv(path=str(tmp_path / "plain.txt"), target=0, delimiter=";", header=False)
    assert made.classes == {"target": ("9", "10")}
    assert made.prepare(made.fit()).entries[1].tolist() == [1, 0, 1]
    assert made.columns == ("1",)


def test_a_comma_may_precede_fractions(tmp_path):
    (tmp_path / "t.csv").write_text("a;b;c\n-1,5;1e1;0,5\n2;3,25;?\n")
    settings = {"path": str(tmp_path / "t.csv"), "delimiter": ";", "decimal": ",", "missing_values": ["?"]}
    made = Csv(**settings, target="a", task="regression", standardise=False, impute="mean")
    assert values(made).tolist() == [[10, 0.5], [3.25, 0.5]]
    assert made.prepare(made.fit()).entries[1].tolist() == [[-1.5], [2.0]]
    del settings["missing_values"]
    series = Windows(**settings, targets="a", columns=["a", "b"], length=1, standardise=False)
    assert series.values.tolist() == [[-1.5, 10], [2, 3.25]]
    (tmp_path / "t.csv").write_text("a;b\n1,5;1,50\n-999,00;7,0\n1,50;7\n")
    made = Csv(**settings, target="b", categorical=["a"], missing_values=["-999,0"], impute="mean")
    assert (made.fit()["table"]["words"], made.classes) == ({"a": ["1.5", ""]}, {"target": ("1.50", "7.0")})


def test_words_may_be_what_else_is_missing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("region,n,kind\nNA,-999.0,None\nEU,2,yes\nNA,-9.99e2,yes\n")
    made = Csv(path=str(path), target="kind", categorical=["region"], missing_values=[-999], impute="mean")
    assert made.fit()["table"]["words"] == {"region": ["EU", "NA"]}
    assert made.classes == {"target": ("None", "yes")}
    assert made.fit()["table"]["fills"].tolist() == [2.0]


def test_missing_numbers_are_no_days(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("when,n,kind\n1997-05-18,9999,a\n1970-01-01,1,b\n")
    made = Csv(
        path=str(path), target="kind", dates=["when"], missing_values=[0, 9999], impute="mean", standardise=False
    )
    assert values(made).tolist() == [[9999, 1], [0, 1]]


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_a_nameless_column_of_row_numbers_is_left_out(name, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"{name},a,c\n7,0.5,x\n3,1.5,y\n4,2.5,y\n")
    data = Data(train=Csv(path=str(path), target="c"))
    assert data.spec.input_shape == (1,)
    assert "is not an input, because pandas gives this name to an index" in data.notes[0]
    path.write_text(f"{name},a,b\n7,0,1\n3,2,1\n")
    assert Windows(path=str(path), targets="a", length=1).inputs == ("a", "b")
    assert Windows(path=str(path), targets="a", length=1, columns=["b", name]).inputs == ("b", name)


def test_dates_may_have_a_format(tmp_path):
    (tmp_path / "days.csv").write_text("when,same,y\n31.01.2024,0.1,1\n2.2.2024,0.1,2\n3.2.2024,0.1,3\n")
    raw = Csv(path=str(tmp_path / "days.csv"), target="y", dates={"when": "%d.%m.%Y"}, standardise=False)
    assert values(raw)[:, 0].tolist() == [19753.0, 19755.0, 19756.0]


def test_a_table_holds_its_numbers_once(tmp_path):
    path = tmp_path / "long.csv"
    row = "0.12345678,1.2345678,12.345678,123.45678,1234.5678,red,0.87654321\n"
    path.write_text("a,b,c,d,e,colour,target\n" + row * 100_000)
    tracemalloc.start()
    made = Csv(path=str(path), target="target", task="regression", categorical=["colour"])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made) == 100_000
    # Six numbers and one index of a word with 8 bytes each.
    assert held < 1.2 * 100_000 * 7 * 8


def test_plan_reuses_data_read_to_complete_the_config(homes):
    table = f"data.dataset={{path: {homes}, target: kind, ignore: [colour, size, when], impute: mean}}"
    command = ["data=csv", table, "model=mlp", "launch.accelerator=cpu"]
    resolved = resolve(exp.compose(command))
    decided = plan(resolved)
    assert resolved.data is not None
    assert decided.data is resolved.data
    assert decided.data.spec == build_data(decided.settings).spec == decided.spec
    # The labels to ignore depend on a value that is read from the data.
    ignored = "objective.cross_entropy.loss.ignore_index=${data.num_classes}"
    other = plan(resolve(exp.compose([*command, ignored])))
    assert other.resolved.data is None
    assert other.data.labels.ignored == (3,)


numbers = st.floats(-1e100, 1e100)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)
words = words.filter(lambda word: finite_number(word) is None)


@given(rows=st.lists(st.tuples(numbers, words, numbers), min_size=1, max_size=8))
def test_a_table_is_read_as_pythons_csv_module_wrote_it(tmp_path, rows):
    text = io.StringIO()
    csv.writer(text).writerows([("x", "word", "y"), *rows])
    path = tmp_path / "table.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    settings = {"path": str(path), "categorical": ["word"], "standardise": False, "missing_values": []}
    made = Csv(**settings, target="y", task="regression")
    known = sorted({word for _, word, _ in rows})
    assert made.fit()["table"]["words"] == {"word": known}
    expected = [[x, *(float(word == one) for one in known)] for x, word, _ in rows]
    np.testing.assert_array_equal(values(made), expected)


@given(content=st.binary(max_size=60))
def test_any_bytes_are_a_table_or_an_error(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(Csv(path=str(path), target="0", header=False)) > 0


def test_all_bad_columns_are_found_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("id,colour,when,size,kind\nA1,red,3.5.24,,x\nA2,blue,4.5.24,2,y\n")
    table = ["data=csv", "data.dataset={path: x.csv, target: kind, dates: [when]}"]
    errors = examine(resolve(exp.compose(table))).errors
    assert [(error.key, error.subject) for error in errors] == [
        ("data.dataset.path", name) for name in ("id", "colour", "when", "size")
    ]
    wrong = ["data.dataset.ignore=[idd,colours]", "data.dataset.target=knd"]
    errors = examine(resolve(exp.compose([*table, *wrong]))).errors
    assert sorted(error.subject for error in errors) == ["colours", "idd", "knd"]


ABC = "a,b,c\n"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (FLOWERS, {"target": "knd"}, r"data.dataset.target: knd; expected a column of .*Did you mean kind\?"),
        (FLOWERS, {"target": "kind", "ignore": ["idd"]}, r"data.dataset.ignore: idd; .*mean id\?"),
        (FLOWERS, {"target": "kind", "ignore": ["id", "colour", "height"]}, r"ignore: every column except the target"),
        (ABC + "1,red,x\n", {}, r"'red' in line 2 of .*column b; .* Put the column in data.dataset.categorical"),
        (ABC + "1,2,x\n?,3,y\n", {}, r"'\?' in line 3 of .*data.dataset.missing_values"),
        (ABC + "1,2,x\n-inf,1,y\n", {}, r"'-inf' in line 3 of"),
        (ABC + "1,1,x\n,1,y\n", {}, r"no value in line 3 of .*column a; .*data.dataset.impute=mean"),
        (ABC + "1,2,x\n,3,y\n,3,y\n", {}, r"2 missing values, the first in line 3 of .*column a"),
        (ABC + ",2,x\n,3,y\n", {"impute": "mean"}, r"the column a, which has no number in the training split"),
        (ABC + '"x\ny",2,x\n1,inf,y\n', {"categorical": ["a"]}, r"'inf' in line 4 of"),
        (ABC + "1,1,x\n2\n", {}, r"1 values in line 3 of .*; expected 3 values, as in the first line"),
        (ABC + "1,yesterday,x\n", {"dates": ["b"]}, r"'yesterday' in line 2 of .*column b; .* date in ISO 8601"),
        (ABC + "1,2,x\n", {"target": ["a", "b"]}, r"2 columns in a classification; .*task=regression"),
        (ABC + "1,2,x\n", {"target": []}, r"data.dataset.target: no column"),
        (ABC + "1,2,x\n", {"target": {"k": "c", "p": "a"}, "task": {"k": "classification"}}, r"a task for each"),
        ("a,a,c\n1,2,x\n", {}, r"with several columns named a"),
        (ABC, {}, r"without a sample"),
        (ABC + '1,"1,x\n', {}, r"after line 1.*expected CSV in UTF-8"),
        (ABC + "1,1,x\n" * 4000 + "1,1,\udcff\n", {}, r"after line 4001: 'utf-8' codec .*expected CSV in UTF-8"),
        (ABC + "1,1,x\n1,1,\udcff\n", {}, r"after line 2: 'utf-8' codec .*expected CSV in UTF-8"),
        (ABC + "2_31,1,x\n", {}, r"'2_31' in line 2 of .*column a; expected a finite number"),
        (ABC + "1,1,x\n\u0661\uff12,1,y\n", {}, r"'\u0661\uff12' in line 3 of .*column a; expected a finite number"),
        (ABC + "1,\uff1224-1,x\n", {"dates": {"b": "%Y-%m"}}, r"column b; expected a date"),
        ("a;b;c\n1,234;2;x\n", {"delimiter": ";"}, r"column a; .*data.dataset.decimal is the decimal sign"),
        (ABC + '"1,5",2,x\n', {}, r"'1,5' in line 2 of .*column a; .*data.dataset.decimal is the decimal sign"),
        (ABC + "1,2,x\n", {"decimal": ","}, r"data.dataset.decimal: ',', which is also the delimiter"),
        ("a;b;c\n1.234,5;2;x\n", {"decimal": ",", "delimiter": ";"}, r"'1.234,5' in line 2 of .*; expected a finite"),
        (ABC + "1,NA,x\n", {"categorical": ["b"]}, r"no value in line 2 .*data.dataset.missing_values lists"),
        (ABC + "1,2,None\n", {}, r"no value in line 2 of .*column c; .*data.dataset.missing_values lists"),
        (ABC + "1,2,\n", {"missing_values": ["?"]}, r"no value in line 2 of .*column c"),
        (ABC + "1,2,x\n-999.0,2,x\n", {"missing_values": ["-999"]}, r"no value in line 3 of .*column a"),
        (ABC + "".join(f"1,1,{i}.5\n" for i in range(30)), {}, r"although c has 30 labels.*csv_regression"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_the_column(tmp_path, text, settings, message):
    (tmp_path / "table.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        Data(train=Csv(**{"path": str(tmp_path / "table.csv"), "target": "c", **settings}))


def test_one_error_of_each_column_is_reported(tmp_path):
    table = lines(LONG, holes=0)
    table[15_000][4] = "soon"
    table[16_000][0] = "inf"
    table[17_000][0] = "many"
    path = write(tmp_path / "long.csv", table)
    with pytest.raises(ConfigError) as error:
        Csv(path=path, target="kind", dates=["when"], categorical=["colour", "size"])
    message = str(error.value)
    assert "'soon' in line 15002 of" in message
    assert "column when; expected a date in ISO 8601" in message
    assert "'inf' in line 16002 of" in message
    assert "column age; expected a finite number" in message
    assert "line 17002" not in message


def test_a_file_is_searched_in_the_data_directory(flowers, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert len(Csv(path="flowers.csv", directory=str(tmp_path), target="kind", ignore=["colour"])) == 4
    with pytest.raises(ConfigError, match=r"path: no file at /flower.csv or at .*Did you mean flowers.csv"):
        Csv(path="flower.csv", directory=str(tmp_path), target="kind")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "npz", "parquet"])
def test_a_number_is_one_word_in_every_format(ending, tmp_path):
    (tmp_path / "train.csv").write_text("grade,x,y\n1,0,7\n2,0,8.0\n2.0,0,7.00\n01,0,8\n0.1,0,8\n")
    train = Csv(path=str(tmp_path / "train.csv"), target="y", categorical=["grade"])
    assert train.classes == {"target": ("7", "8.0")}
    fitted, path = train.fit(), tmp_path / f"new.{ending}"
    order = fitted["table"]["words"]["grade"]
    small = np.array([1, 0.1, 9], "f4" if ending in ("npz", "parquet") else "f8")
    for grades in (np.array([1, 2, 9]), np.array([1.0, 2.0, 9.0]), small, np.array(["1.0", "+2e0", "001"])):
        if ending == "csv":
            path.write_text("grade,x\n" + "".join(f"{grade},0\n" for grade in grades))
        elif ending == "jsonl":
            path.write_text("".join(json.dumps({"grade": grade, "x": 0}) + "\n" for grade in grades.tolist()))
        elif ending == "npz":
            np.savez(path, grade=grades, x=np.zeros(3))
        else:
            pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
            parquet.write_table(pyarrow.table({"grade": grades, "x": np.zeros(3)}), path)
        part = UnlabelledTable(path=str(path))
        found = part.prepare(fitted).entries["input"][:, 1:]
        assert [order[one] for one in found.argmax(1)[:2].tolist()] == ["1", "0.1" if grades is small else "2"]
        assert found.sum(1).tolist() == [1, 1, 0]
        assert (
            "grade of 1 of 3 rows of the input is not in the training split" in part.notes_in(fitted, stage="test")[0]
        )


def test_a_table_with_a_line_that_is_no_json_names_the_path(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"x": 1, "kind": 0}\n{"x": ')
    with pytest.raises(ConfigError, match=r"data\.dataset\.path: .*train\.jsonl, .* line 2: .*; expected a JSON"):
        Csv(path=str(tmp_path / "train.jsonl"), target="kind")


def test_a_class_unknown_to_training_is_named(tmp_path):
    for name, label in (("train", "x"), ("val", "z")):
        (tmp_path / f"{name}.csv").write_text(f"a,c\n1,x\n2,{label}\n")
    train, val = (Csv(path=str(tmp_path / f"{name}.csv"), target="c") for name in ("train", "val"))
    with pytest.raises(
        ConfigError, match=r"class z of target in row 1, which is not in the training split; .*classes, x"
    ):
        Data(train=train, val=val)
    assert Data(train=val, val=train).part("val").entries[1].tolist() == [0, 0]


def test_a_later_run_uses_the_statistics_of_the_checkpoint(ranks, homes, tmp_path):
    words = ["data=csv", f"data.dataset.path={homes}", "data.dataset.target=kind", "data.dataset.impute=mean",
             "data.dataset.categorical=[colour,size]", "data.dataset.ignore=[when,price,rent]", "model=mlp",
             "callbacks=[]", "hooks=[]", "trainer.max_epochs=1"]  # fmt: skip
    trained = ranks.train(*words, "test=false")
    path = trained.directory / "checkpoints" / "last.ckpt"
    fitted = fitted_in(path)["table"]
    assert fitted["numbers"] == ["age", "income"]
    assert fitted["classes"] == {"target": ["flat", "house", "hut"]}
    assert "RunData" in read_checkpoint(path)
    # The file changes after training, with other numbers and an unknown word.
    write(tmp_path / "homes.csv", [[*row[:2], "7e5", "xxl", *row[4:]] for row in lines(seed=3)])
    again = ranks.train(*words, "train=false", "test=true", f"resume={path}")
    assert again.report["status"] == "completed"
    settings = {"categorical": ["colour", "size"], "impute": "mean", "ignore": ["when", "price", "rent"]}
    raw = Csv(path=homes, target="kind", **settings)
    assert Data(dataset=raw, earlier=lambda: fitted_in(path)).fitted["table"]["means"].equal(fitted["means"])
    assert not Data(dataset=raw).fitted["table"]["means"].equal(fitted["means"])


def test_a_parquet_file_is_the_same_table(homes, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    names = HEAD.split(",")
    held = {name: [None if row[at] in ("", "NA") else row[at] for row in lines()] for at, name in enumerate(names)}
    for name, kind in (("age", int), ("income", float), ("price", float), ("rent", float)):
        held[name] = [None if value is None else kind(value) for value in held[name]]
    held["when"] = [datetime.fromisoformat(value) for value in held["when"]]
    path = str(tmp_path / "homes.parquet")
    parquet.write_table(pyarrow.table(held), path)
    settings = {"target": {"kind": "kind", "price": "price"}, "task": {"kind": "classification", "price": "regression"}}
    settings |= {"categorical": ["colour", "size"], "impute": "median"}
    mine, theirs = Csv(path=path, **settings), Csv(path=homes, dates=["when"], **settings)
    assert mine.encode(mine.fit())["input"].equal(theirs.encode(theirs.fit())["input"])
    np.testing.assert_array_equal(mine.numbers, theirs.numbers)
    np.testing.assert_array_equal(mine.targets["price"], theirs.targets["price"])
    with pytest.raises(ConfigError, match=r"'\w+' in row \d+ of .*column size; .* Put the column in data"):
        Csv(path=path, target="kind", categorical=["colour"], impute="mean")
    with pytest.raises(ConfigError, match=r"missing values, the first in row \d+ of .*column age"):
        Csv(path=path, target="kind", categorical=["colour", "size"])
    parquet.write_table(pyarrow.table({"a": ["1,5", "2"], "kind": ["x", "y"]}), path)
    assert Csv(path=path, target="kind", decimal=",").numbers.tolist() == [[1.5], [2.0]]
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(ConfigError, match=r"bad.parquet \(.*\); expected a Parquet file"):
        Csv(path=str(tmp_path / "bad.parquet"), target="kind")
