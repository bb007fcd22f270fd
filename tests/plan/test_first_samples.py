"""Wrong samples, which a loss refuses or uses wrongly, are errors before the run or when the run reads them."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

import exp
from exp.check.examination import plan
from exp.check.first_samples import refuse_other_data
from exp.check.resolution import resolve
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
WEIGHTED = ("~objective.cross_entropy", "+objective.ce={_target_: torch.nn.CrossEntropyLoss, weight: [1, 5, 2]}")
DOUBLE = ("+data.dataset.input=double", "data.input_dtype=float64", "precision=fp64")
ANSWERS = ("data.num_classes=null", "objective=[bce_with_logits]")
GATHERED = "data.dataset._target_=own_rows.Gathered"
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


ERRORS = yaml.safe_load(Path(__file__).with_name("first_samples.yaml").read_text())


@pytest.mark.parametrize(("overrides", "key", "words"), [(first, key, words) for first, key, *words in ERRORS])
def test_wrong_first_samples_are_errors_before_the_run(overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        exp.fit(composed(*overrides.split()))
    (error,) = caught.value.errors
    assert str(error).startswith(key)
    for word in words:
        assert word in str(error)
    assert not Path("outputs").exists()


def test_an_input_that_is_not_finite_is_noted():
    (note,) = refuse_other_data(plan(resolve(composed(*row(input="missing")))))
    assert "sample 2 of train has a value that is not finite in input" in note


@pytest.mark.parametrize(
    ("overrides", "sample"),
    [
        (row(target="late"), "sample 35 of train (sample 70 of data.dataset)"),
        ((*row(target="late"), "data.num_workers=2"), "sample 35 of train (sample 70 of data.dataset)"),
        ((GATHERED, *row(target="late")), "sample 35 of train (sample 70 of data.da"),
        ((*STREAM, "+data.train={_target_: own_rows.Stream, target: late}"), "sample 70 of train"),
        ((*row(target="late"), "+data.collate={_target_: own_rows.Twice}"), "one of the samples from sample"),
    ],
)
def test_a_later_wrong_label_ends_the_run(overrides, sample):
    with pytest.raises(RunError) as caught:
        exp.fit(composed(*overrides))
    assert f"data.num_classes: 3; expected 8 or more, because {sample}" in str(caught.value)
    assert "has the class 7" in str(caught.value)
    assert "The classes are 0 to 2" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (row(target="uint8"), ()),
        ((*row(target="void"), "+objective.cross_entropy.loss.ignore_index=255"), (*row(target="ignored"), *TORCHS)),
        ((*row(target="many"), *ANSWERS), (*row(target="many_floats"), *ANSWERS)),
        ((*DOUBLE, "objective.cross_entropy.loss.class_weights=[1,5,2]"), (*DOUBLE, *WEIGHTED)),
    ],
)
def test_equivalent_targets_train_the_same(overrides, same):
    one, other = (exp.fit(composed(*given)).metrics["loss/val"] for given in (overrides, same))
    assert one == pytest.approx(other, rel=1e-6)
