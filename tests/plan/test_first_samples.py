"""Samples of the user's own that a loss refuses, or trains wrongly by: told before the run, or by it as it reads."""

import shutil
import sys
from pathlib import Path

import pytest

import exp
from exp.check.plan import plan, refuse_other_data, resolve
from exp.errors import ConfigError, RunError

DATA = """# Rows of the user's own
defaults: [_loader, _self_]
dataset: {_target_: own_rows.Rows}
parts: {train: 0.5, val: 0.5, test: 0}
input_shape: [4]
input_dtype: float32
num_classes: 3
num_outputs: 3
batch_size: 16
"""
MODEL = """# A layer
_target_: torch.nn.Sequential
_args_: [{_target_: torch.nn.Linear, in_features: 4, out_features: 3}]
"""
SMALL = ("model=linear", "data=rows", "hooks=[]", "callbacks=[]", "logger=[]", "test=false", "metrics=[]")
TORCHS = ("~objective.cross_entropy", "+objective.ce={_target_: torch.nn.CrossEntropyLoss}")
NUMBERS = ("data.num_classes=null", "objective=[mse]")
ANSWERS = ("data.num_classes=null", "objective=[bce_with_logits]")
ONE = ("model._args_.0.out_features=1", "data.num_outputs=1")
STREAM = ("data.dataset=null", "data.parts=null")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)
    shutil.copy(Path(__file__).with_name("own_rows.py"), tmp_path)
    for name, text in (("data/rows", DATA), ("model/linear", MODEL)):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)


def composed(*overrides):
    return exp.compose([*SMALL, "trainer.enable_progress_bar=false", "trainer.max_epochs=1", *overrides])


def row(**parameters):
    return tuple(f"+data.dataset.{name}={value}" for name, value in parameters.items())


FAULTS = [
    (row(target="beyond"), "data.num_classes: 3", "8 or more", "the class 7, in sample 2 of train (sample 5 of data.d"),
    (row(target="negative"), "data.num_classes: 3", "sample 2 of train (sample 5 of data.dataset) has the label -1"),
    (row(target="ignored"), "data.num_classes: 3", "has the label -100", "ignore_index of the loss"),
    (row(target="void"), "data.num_classes: 3", "the class 255, in sample 2 of train", "ignore_index of the loss"),
    (row(target="float"), "objective.cross_entropy.loss", "needs class numbers (int64); the target is float32"),
    ((*row(target="float"), *TORCHS), "objective.ce", "[B] float32 for outputs [B, 3]", "Give class numbers as int64"),
    (row(target="bool"), "objective.cross_entropy.loss", "[B] bool", "Give class numbers as int64"),
    ((*row(target="int32"), *TORCHS), "objective.ce", "[B] int32", "Give class numbers as int64"),
    (row(target="column"), "objective.cross_entropy.loss", "it is [16, 1]. Drop the target's last axis of 1"),
    ((*row(target="column"), *TORCHS), "objective.ce", "[B, 1] int64", "Drop the target's last axis of 1"),
    (row(target="one_hot"), "objective.cross_entropy.loss", "seem to be one-hot", "target.argmax(-1)"),
    ((*row(target="one_hot"), *TORCHS), "objective.ce", "[B, 3] int64", "seem to be one-hot"),
    (row(target="text"), "objective.cross_entropy.loss", "'target' is a tuple; it must be a tensor"),
    (
        row(target="none"),
        "data.collate",
        "sample 0 of train (sample 2 of data.dataset) holds None",
        "data.collate what",
    ),
    (row(target="object"), "data.collate", "holds a object; expected samples of tensors"),
    (row(by="none"), "data.collate", "sample 0 of train (sample 2 of data.dataset) is None"),
    (row(by="one_none"), "data.collate", "sample 2 of train (sample 5 of data.dataset) is None"),
    (row(by="names"), "data.inputs", "samples with the entries image, label", "or an entry named input"),
    (
        row(by="input"),
        "objective.cross_entropy.target",
        "neither network nor batch gives; expected one of input, label",
    ),
    (row(by="alone"), "objective.cross_entropy.target", "neither network nor batch gives"),
    (row(input="wide"), "data.collate", "sample 2 of train (sample 5 of data.dataset) has the sizes [[5], []]"),
    ((*row(input="double"), "data.input_dtype=float64"), "data.input_dtype: float64", "model.0, Linear, computes in"),
    (
        (*row(target="number"), *NUMBERS, *ONE),
        "objective.mse.loss",
        "the output is [16, 1], the target [16]",
        "Flatten",
    ),
    ((*row(target="missing"), *NUMBERS), "objective.mse.loss", "sample 2 of train has a target that is not finite"),
    (
        (*row(target="answers"), *ANSWERS),
        "objective.bce_with_logits.loss",
        "sample 2 of train has the target 2",
        "0 to",
    ),
    (row(samples=0), "data.parts.train", "an empty part"),
    ((*row(samples=3), "data.drop_last=true"), "data.batch_size: 16 with drop_last=true", "no batch at all"),
    (
        ("data.dataset._target_=own_rows.Gathered", *row(target="beyond")),
        "data.num_classes: 3",
        "sample 5 of data.data",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "words"), [(first, key, words) for first, key, *words in FAULTS])
def test_what_the_first_samples_show_is_a_fault_before_the_run(overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        exp.fit(composed(*overrides))
    (fault,) = caught.value.faults
    assert str(fault).startswith(key)
    for word in words:
        assert word in str(fault)
    assert not Path("outputs").exists()


def test_an_input_that_is_not_finite_is_a_note_for_a_network_may_take_it_out():
    (note,) = refuse_other_data(plan(resolve(composed(*row(input="missing")))))
    assert "sample 2 of train has an input that is not finite" in note


@pytest.mark.parametrize(
    ("overrides", "sample"),
    [
        (row(target="late"), "sample 35 of train (sample 70 of data.dataset)"),
        ((*row(target="late"), "data.num_workers=2"), "sample 35 of train (sample 70 of data.dataset)"),
        (("data.dataset._target_=own_rows.Gathered", *row(target="late")), "sample 35 of train (sample 70 of data.da"),
        ((*STREAM, "+data.train={_target_: own_rows.Stream, target: late}"), "sample 70 of train"),
        ((*row(target="late"), "+data.collate={_target_: own_rows.Twice}"), "one of the samples from sample"),
    ],
)
def test_a_label_behind_the_first_samples_is_told_by_the_run_with_its_place_in_the_data_set(overrides, sample):
    with pytest.raises(RunError) as caught:
        exp.fit(composed(*overrides))
    assert f"data.num_classes: 3; expected 8 or more: the data holds the class 7, in {sample}" in str(caught.value)
    assert "Its classes are 0 to 2" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (row(target="uint8"), ()),
        ((*row(target="void"), "+objective.cross_entropy.loss.ignore_index=255"), (*row(target="ignored"), *TORCHS)),
        ((*row(target="many"), *ANSWERS), (*row(target="many_floats"), *ANSWERS)),
    ],
)
def test_targets_that_mean_the_same_train_the_same(overrides, same):
    one, other = (exp.fit(composed(*given)).metrics["loss/val"] for given in (overrides, same))
    assert one == pytest.approx(other, rel=1e-6)
