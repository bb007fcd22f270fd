"""Tests of Hugging Face data sets from folders, files and functions, without network access."""

from __future__ import annotations

import socket
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import exp
from exp.errors import ConfigError, RunError, is_installed

if not is_installed("datasets"):
    pytest.skip("the extra `hf` is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets

from exp.cli.train import main as train
from exp.data.data import Data
from exp.extras.hf.hf import HuggingFace

ROWS = 40
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 3))
KINDS = ["no", "yes"]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Use a cache in the test's directory, and fail if a host name is resolved."""

    def refuse(*_):
        raise AssertionError("a host name was resolved")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def table(rows=range(ROWS), **more) -> datasets.Dataset:
    rows = list(rows)
    held = {"row": NUMBERS[rows].tolist(), "age": NUMBERS[rows, 0].tolist(), "kind": [place % 2 for place in rows]}
    features = datasets.Features({
        "row": datasets.List(datasets.Value("float64")),
        "age": datasets.Value("float32"),
        "kind": datasets.ClassLabel(names=KINDS),
    })  # fmt: skip
    made = datasets.Dataset.from_dict(held, features=features)
    for name, column in more.items():
        made = made.add_column(name, column)
    return made


def settings(**own):
    return {"source": table(), "inputs": "row", "target": "kind", **own}


def test_columns_become_inputs_and_targets():
    made = Data(dataset=HuggingFace(**settings()), parts={"train": 30, "val": 10}, batch_size=4, keeps_doubles=True)
    assert made.fitted == {"hf": {"classes": KINDS}}
    assert (made.spec.input_shape, made.spec.num_classes, made.spec.num_outputs) == ((3,), 2, 2)
    seen = [
        pair for stage in ("train", "val") for batch in made.loader(stage) for pair in zip(*batch.data, strict=True)
    ]
    place = {tuple(row): number for number, row in enumerate(NUMBERS.astype(np.float32).tolist())}
    assert sorted(place[tuple(row.tolist())] for row, _ in seen) == list(range(ROWS))
    assert all(int(target) == place[tuple(row.tolist())] % 2 for row, target in seen)
    numbers = Data(dataset=HuggingFace(**settings(inputs=["age", "kind"], target="row", task="regression")))
    assert (numbers.spec.input_shape, numbers.spec.num_classes, numbers.spec.num_outputs) == ((2,), None, 3)
    named = Data(dataset=HuggingFace(**settings(inputs={"table": ["age"], "more": "row"})))
    assert {name: one.shape for name, one in named.spec.inputs.items()} == {"table": (1,), "more": (3,)}


def test_splits_are_used_and_missing_ones_are_divided_from_train():
    splits = {"train": table(range(20)), "validation": table(range(20, 30)), "test": table(range(30, 40))}
    whole = Data(dataset=HuggingFace(**settings(source=datasets.DatasetDict(splits))))
    assert {stage: len(whole.part(stage)) for stage in whole.stages} == {"train": 20, "val": 10, "test": 10}
    assert whole.part("val")[0][0].tolist() == NUMBERS[20].astype(np.float32).tolist()
    two = {"train": splits["train"], "test": splits["test"]}
    made = Data(dataset=HuggingFace(**settings(source=two)), parts={"train": 0.6, "val": 0.2, "test": 0.2})
    assert {stage: len(made.part(stage)) for stage in made.stages} == {"train": 15, "val": 5, "test": 10}
    rows = [made.part(stage)[index][0].tolist() for stage in ("train", "val") for index in range(len(made.part(stage)))]
    assert sorted(rows) == sorted(NUMBERS[:20].astype(np.float32).tolist())
    without = Data(dataset=HuggingFace(**settings(source=two)), parts={"train": 1.0, "val": 0})
    assert without.stages == ("train",)
    one = Data(train=HuggingFace(**settings(source=two, split="test")))
    assert len(one.part("train")) == 10
    with pytest.raises(ConfigError, match=r"split: tset; expected a split of the data set. Did you mean test"):
        HuggingFace(**settings(source=two, split="tset"))
    other = HuggingFace(**settings(source={"train": splits["train"], "odd": splits["test"]}))
    with pytest.raises(
        ConfigError, match=r"data.dataset.split: null, and splits train, odd, with the unknown name odd"
    ):
        Data(dataset=other)


def test_texts_and_numbers_become_classes():
    words = table(colour=[["blue", "red"][place % 2] for place in range(ROWS)])
    parts = {"train": words.select(range(30)), "validation": words.select(range(30, 40))}
    made = Data(dataset=HuggingFace(**settings(source=parts, target="colour")))
    assert made.fitted == {"hf": {"classes": ["blue", "red"]}}
    assert [int(made.part("val")[index][1]) for index in range(3)] == [0, 1, 0]
    assert made.part("val").targets.tolist() == [0, 1] * 5
    swapped = table(range(10)).cast_column("kind", datasets.ClassLabel(names=KINDS[::-1]))
    numbered = Data(dataset=HuggingFace(**settings(source={"train": table(), "validation": swapped})))
    assert int(numbered.part("val")[0][1]) == 1, "the class must have its number in the training split"
    levels = table(level=[place % 5 for place in range(ROWS)])
    whole = Data(dataset=HuggingFace(**settings(source=levels, target="level")))
    assert (whole.spec.num_classes, whole.fitted) == (5, {"hf": {"classes": None}})
    alien = {"train": words.select(range(0, 30, 2)), "validation": words.select([31])}
    with pytest.raises((ConfigError, RunError), match=r"row 0 of .* class red; expected one of the classes blue"):
        Data(dataset=HuggingFace(**settings(source=alien, target="colour"))).first_samples("val", seconds=9)


def test_pictures_are_decoded_from_local_files(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 255, (6, 5, 7, 3), dtype=np.uint8)
    files = []
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
        files.append(str(tmp_path / f"{number}.png"))
    held = {"image": files, "label": [0, 1, 0, 1, 0, 1]}
    made = datasets.Dataset.from_dict(held).cast_column("image", datasets.Image())
    taken = Data(train=HuggingFace(source=made, target="label"), batch_size=6, shuffle=False)
    pictures = next(iter(taken.loader("train"))).data[0]
    assert torch.equal((pictures * 255).round().permute(0, 2, 3, 1).to(torch.uint8), torch.from_numpy(pixels))
    small = HuggingFace(source=made, target="label", resize=[4, 4], mode="L")
    assert Data(train=small).spec.input_shape == (1, 4, 4)
    away = datasets.Dataset.from_dict({"image": ["https://example.com/a.png"], "label": [0]})
    with pytest.raises((ConfigError, RunError), match=r"image of row 0 .*, which cannot be read: .*No such file"):
        Data(train=HuggingFace(source=away.cast_column("image", datasets.Image()), target="label"))


def test_the_transform_of_a_data_set_is_applied():
    made = table().with_transform(lambda rows: {"twice": 2 * np.array(rows["row"]), "kind": rows["kind"]})
    taken = Data(train=HuggingFace(source=made, inputs="twice", target="kind"), shuffle=False, batch_size=2)
    assert np.allclose(next(iter(taken.loader("train"))).data[0], 2 * NUMBERS[:2])


@pytest.mark.parametrize("kind", ["folder", "folders"])
def test_folders_give_the_same_samples(kind):
    plain = table().remove_columns("row")
    (plain if kind == "folder" else datasets.DatasetDict({"train": plain, "test": plain})).save_to_disk("saved")
    made = HuggingFace(path="saved", inputs="age", target="kind", split="train")
    read = Data(train=made, batch_size=ROWS, shuffle=False)
    inputs, targets = next(iter(read.loader("train"))).data
    assert np.allclose(inputs[:, 0], NUMBERS[:, 0].astype(np.float32))
    assert targets.tolist() == [place % 2 for place in range(ROWS)]
    assert read.spec.num_classes == 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"source": None}, r"data.dataset: no data set; expected one of data.dataset.path and data.dataset.source"),
        ({"inputs": "aeg"}, r"data.dataset.inputs: aeg; expected a column of the data set. Did you mean age"),
        ({"target": "knid"}, r"data.dataset.target: knid; .* Did you mean kind"),
        ({"source": None, "path": "script"}, r"script.py, which is never run, and without state.json"),
        (
            {"source": None, "path": "cut"},
            r"data.dataset.path: cut \(.*\); expected an undamaged folder of save_to_disk",
        ),
        ({"source": [1]}, r"data.dataset.source: a list; expected a datasets.Dataset or DatasetDict"),
        ({"source": "stream"}, r"has no index; data=stream reads files"),
        ({"source": "empty"}, r"a data set without rows"),
    ],
)
def test_errors_of_data_sets(own, message, tmp_path):
    (tmp_path / "script").mkdir()
    (tmp_path / "script/script.py").write_text("raise SystemExit('run')")
    table().save_to_disk("cut")
    next((tmp_path / "cut").glob("*.arrow")).write_bytes(b"no")
    made = {"stream": table().to_iterable_dataset(), "empty": table([])}
    if isinstance(own.get("source"), str):
        own = {"source": made[own["source"]]}
    with pytest.raises(ConfigError, match=message):
        HuggingFace(**settings(**own))


def test_unsupported_columns_are_refused():
    held = {"words": ["a b"] * 3, "kind": [0, 1, None], "sub": [{"a": 1}] * 3}
    made = datasets.Dataset.from_dict(held)
    with pytest.raises(ConfigError, match=r"words, a column of texts; .*data=tokens turns"):
        HuggingFace(source=made, inputs="words", target="kind")
    with pytest.raises(ConfigError, match=r"data.dataset.inputs: sub, a column of dict; expected columns of numbers"):
        HuggingFace(source=made, inputs="sub", target="kind")
    numbers = table(range(3)).remove_columns("kind").add_column("kind", [0, 1, None])
    taken = Data(train=HuggingFace(**settings(source=numbers)), num_classes=2)
    with pytest.raises(RunError, match=r"null in kind of row 2"):
        list(taken.loader("train"))
    unlabelled = table(range(4)).map(lambda row, place: {"kind": -1 if place == 3 else 0}, with_indices=True)
    with pytest.raises(RunError, match=r"row 3 .*of the class -1; expected one of the classes no, yes"):
        list(Data(train=HuggingFace(**settings(source=unlabelled))).loader("train"))


def test_a_run_uses_the_function_of_a_user(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)  # the module of a user is next to conf
    (tmp_path / "hf_rows.py").write_text(
        "import datasets\n\n\ndef make(rows):\n"
        "    held = {'x': [[float(place), 1.0] for place in range(rows)], 'y': [place % 2 for place in range(rows)]}\n"
        "    return datasets.Dataset.from_dict(held).train_test_split(0.25, seed=0)\n"
    )
    words = ["data=hf", "data.dataset.source={_target_: hf_rows.make, rows: 40}", "data.dataset.target=y", "model=mlp"]
    exp.validate(exp.compose(words))
    assert (
        train([*words, "trainer.max_epochs=1", "hooks=[]", "logger=[]", "data.num_workers=2", "hydra.run.dir=a"]) == 0
    )
    assert (tmp_path / "a/checkpoints/last.ckpt").is_file()
