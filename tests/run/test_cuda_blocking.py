"""debug=cuda_blocking repeats a failed step on the CPU, names the layer, and keeps the batch.

On a GPU the first error would be a device-side assert, which these tests simulate by an error without an index.
"""

import os
from pathlib import Path

import pytest
import torch

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

class Trying(torch.nn.Module):
    # Catches the error of a layer within it, and then raises one of its own.
    def __init__(self):
        super().__init__()
        self.picking = Picking()
    def forward(self, x):
        try:
            self.picking(x)
        except RuntimeError:
            pass
        return x

class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trying = Trying()
    def forward(self, x):
        self.trying(x)
        if bool((x >= 20).any()):
            raise ValueError("of the whole")
        return x

class Plain(torch.nn.CrossEntropyLoss):
    pass

class Asserting(torch.nn.CrossEntropyLoss):
    # Raises an error without an index, as a kernel on a GPU does.
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
DATA = """# Rows of a user
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
SMALL = [
    "debug=cuda_blocking", "data=rows", "hooks=[]", "metrics=[]", "test=false", "trainer.max_epochs=1",
    "trainer.limit_val_batches=0", "launch.accelerator=cpu", "launch.devices=1", "monitor=loss/train",
]  # fmt: skip
LINEAR = "head: {_target_: torch.nn.Linear, out_features: 3}"
EMBED = "embed: {_target_: torch.nn.Embedding, num_embeddings: 5, embedding_dim: 2}"
FLATTEN = "flatten: {_target_: torch.nn.Flatten}"
WORDS = ["data.input_dtype=int64", "data.train.words=true", "+data.train.bad=7", "data.val.words=true"]
# If exp knows the number of classes, or the loss, it refuses the label before the step.
LOSS = ["data.num_classes=null", "~objective.cross_entropy", "+data.train.at=11"]
CASES = {
    "a label": (
        LINEAR,
        [*LOSS, "+objective.plain={_target_: blocked.Plain}", "+data.train.bad=10"],
        [
            "batch 1 of train failed with IndexError: Target 10 is out of bounds.",
            "Run again on the CPU, it fails in `objective.plain.loss` (Plain): IndexError: Target 10 is out of bounds.",
        ],
    ),
    "an embedded index": (
        f"{EMBED}, {FLATTEN}, {LINEAR}",
        WORDS,
        ["it fails in `embed` (Embedding): IndexError: index out of range in self"],
    ),
    "an index computed by a layer": (
        f"pick: {{_target_: blocked.Picking}}, {LINEAR}",
        [],
        [
            "batch 2 of train failed with ",
            "it fails in `pick` (Picking): RuntimeError: index 9 is out of bounds for dimension 1 with size 4",
        ],
    ),
    "a layer after one that catches an error": (
        f"first: {{_target_: blocked.Trying}}, pick: {{_target_: blocked.Picking}}, {LINEAR}",
        [],
        ["it fails in `pick` (Picking): RuntimeError: index 9 is out of bounds for dimension 1 with size 4"],
    ),
    "a layer whose own code fails after that": (
        f"whole: {{_target_: blocked.Whole}}, {LINEAR}",
        [],
        ["it fails in `whole` (Whole): ValueError: of the whole"],
    ),
    "an assert on the device": (
        LINEAR,
        [*LOSS, "+objective.mine={_target_: blocked.Asserting}", "+data.train.bad=3"],
        [
            "failed with RuntimeError: CUDA error: device-side assert triggered",
            "it fails in `objective.mine.loss` (Asserting): IndexError: Target 3 is out of bounds.",
        ],
    ),
    "a step that passes on the CPU": (
        f"flaky: {{_target_: blocked.Flaky}}, {LINEAR}",
        [],
        ["an illegal memory access", "it does not fail"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_a_failed_step_is_named(name, write, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # restored after the test
    write("blocked.py", ROWS)
    write("conf/data/rows.yaml", DATA)
    layers, overrides, expected = CASES[name]
    model = f"model={{_target_: exp.models.containers.SequentialModel, layers: {{{layers}}}}}"
    with pytest.raises(RunError) as caught:
        exp.fit(exp.compose([*SMALL, model, *overrides]))
    assert [part for part in expected if part not in str(caught.value)] == [], str(caught.value)
    (report,) = Path("outputs").rglob("report.json")
    (batch,) = (report.parent / "failing_step").iterdir()
    assert str(caught.value).endswith(f"Its batch is in {batch}")
    assert len(torch.load(batch, weights_only=True)["data"]) == 2
    assert read_report(report.parent).error["message"] == str(caught.value)
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"


def test_cuda_blocking_is_off_by_default():
    assert exp.compose(["model=mlp"]).runtime.cuda_blocking is False
    assert exp.compose(["debug=cuda_blocking"]).runtime.cuda_blocking is True
