"""debug=cuda_blocking: a step that fails is run again on the CPU, and layer, operator and index are named.

On a CPU the first error is already one; on a GPU it would be a device-side assert, which is simulated by an error that
says as little.
"""

import os
from pathlib import Path

import pytest

import exp
from exp.errors import RunError
from exp.run_report import read_report

ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, bad=None, at=3, words=False):
        self.bad, self.at, self.words = bad, at, words
    def __len__(self):
        return 32
    def __getitem__(self, index):
        value = torch.arange(4) % 5 if self.words else torch.full((4,), float(index))
        label = index % 3
        if self.bad is not None and index == self.at:
            if self.words:
                value[2] = self.bad
            else:
                label = self.bad
        return value, label

class Picking(torch.nn.Module):
    def forward(self, x):
        return x.gather(1, (x[:, :1] >= 20).long() * 9)

class Plain(torch.nn.CrossEntropyLoss):
    pass

class Asserting(torch.nn.CrossEntropyLoss):
    # As a kernel on a GPU that is told of an index: by an error without one.
    is_on_gpu = True
    def forward(self, output, target):
        if Asserting.is_on_gpu and bool((target >= output.shape[1]).any()):
            Asserting.is_on_gpu = False
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().forward(output, target)

class Flaky(torch.nn.Module):
    calls = 0
    def forward(self, x):
        Flaky.calls += 1
        if Flaky.calls == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x
"""
DATA = """# Rows of the user's own
_target_: exp.data.data.Data
train: {_target_: blocked.Rows}
val: {_target_: blocked.Rows}
input_shape: [4]
input_dtype: float32
num_classes: 3
num_outputs: 3
batch_size: 8
shuffle: false
"""
LINEAR = "head: {_target_: torch.nn.Linear, out_features: 3}"
SMALL = [
    "debug=cuda_blocking", "model=mine", "data=rows", "hooks=[]", "metrics=[]", "test=false", "trainer.max_epochs=1",
    "trainer.limit_val_batches=0", "launch.accelerator=cpu", "launch.devices=1", "monitor=loss/train",
]  # fmt: skip


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """What is told of a run of these layers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # put back behind the test
    import sys

    monkeypatch.delitem(sys.modules, "blocked", raising=False)
    (tmp_path / "blocked.py").write_text(ROWS)

    def run(layers, *overrides, data=DATA):
        for group, name, text in (
            ("data", "rows", data),
            ("model", "mine", "# Own\n_target_: exp.models.containers.SequentialModel\nlayers:\n" + layers),
        ):
            (tmp_path / "conf" / group).mkdir(parents=True, exist_ok=True)
            (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
        with pytest.raises(RunError) as caught:
            exp.fit(exp.compose([*SMALL, *overrides]))
        (report,) = Path("outputs").rglob("report.json")
        assert read_report(report.parent).error["message"] == str(caught.value)
        return str(caught.value)

    return run


WORDS = DATA.replace("float32", "int64")
EMBEDDING = (
    "  embed: {_target_: torch.nn.Embedding, num_embeddings: 5, embedding_dim: 2}\n"
    "  flatten: {_target_: torch.nn.Flatten}\n"
    f"  {LINEAR}\n"
)


# Where exp knows the classes, and with torch's own losses, the check or the data refuse the label before.
LOSS = ("data.num_classes=null", "~objective.cross_entropy")


def test_a_label_out_of_range_is_named(failed):
    loss = "+objective.plain={_target_: blocked.Plain}"
    told = failed(f"  {LINEAR}\n", *LOSS, loss, "+data.train.bad=10", "+data.train.at=11")
    assert told.startswith("batch 1 of train failed with IndexError: Target 10 is out of bounds.")
    assert "in `objective.plain" in told
    assert "in the operator nll_loss_forward: target 10 of sample 3 is out of 0..2" in told
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"


def test_what_exp_itself_says_of_a_label_stays(failed):
    told = failed(f"  {LINEAR}\n", "+data.train.bad=10", "+data.train.at=11")
    assert told.startswith(
        "data.num_classes: 3; expected 11 or more: the data holds the class 10, in sample 11 of train"
    )


def test_an_index_of_an_embedding_out_of_range_is_named(failed):
    told = failed(EMBEDDING, "data.train.words=true", "+data.train.bad=7", "data.val.words=true", data=WORDS)
    assert "in `embed` (Embedding), in the operator embedding: index 7 of sample 3, at [2], is out of 0..4" in told


def test_an_index_that_a_layer_makes_is_named(failed):
    told = failed(f"  pick: {{_target_: blocked.Picking}}\n  {LINEAR}\n")
    assert "in `pick` (Picking), in the operator gather: index 9 of sample 4, at [0], is out of 0..3" in told
    assert told.startswith("batch 2 of train failed with ")
    assert "4 of 8 numbers are" in told


def test_an_error_that_names_nothing_is_explained_by_the_step_on_the_cpu(failed):
    loss = "+objective.mine={_target_: blocked.Asserting}"
    told = failed(f"  {LINEAR}\n", *LOSS, loss, "+data.train.bad=3", "+data.train.at=11")
    assert "failed with RuntimeError: CUDA error: device-side assert triggered" in told
    assert "in the operator nll_loss_forward: target 3 of sample 3 is out of 0..2" in told


def test_a_step_that_does_not_fail_on_the_cpu_is_said(failed):
    told = failed(f"  flaky: {{_target_: blocked.Flaky}}\n  {LINEAR}\n")
    assert "an illegal memory access" in told
    assert "it does not fail" in told


def test_without_it_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = exp.compose(["model=mlp"])
    assert config.runtime.cuda_blocking is False
    assert exp.compose(["debug=cuda_blocking"]).runtime.cuda_blocking is True
