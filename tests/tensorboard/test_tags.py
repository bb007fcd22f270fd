"""Tags are a public contract: real runs with every hook that observes write those of the snapshot, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp

SNAPSHOT = Path(__file__).with_name("tags.txt")
HOOKS = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "hooks").glob("*.yaml"))
# They change gradients or outputs, and log nothing.
TRANSFORMS = {"clip_module", "gradient_reversal", "scale_gradient"}
# fp16 for its scale, two terms for their tags, a convolution for its features, a bound for what saturates, two ranks
# for what is told over ranks, and every kind of page. Few layers: a tag of each says no more than that of one.
OVERRIDES = [
    f"hooks=[{','.join(name for name in HOOKS if name not in TRANSFORMS)}]",
    "precision=fp16",
    "model=lenet",
    *(f"~model.layers.{name}" for name in ("conv2", "relu2", "pool2", "linear1", "relu3", "linear2", "relu4")),
    "model.layers.relu1._target_=torch.nn.ReLU6",
    "objective=[cross_entropy]",
    "+objective.second={_target_: torch.nn.MultiMarginLoss}",
    "hooks.activations.modules=[relu1]",
    "hooks.activations.histogram=true",
    "hooks.gradients.clipped=each",
    "hooks.gradients.each_parameter=true",
    "hooks.gradients.shares_every_n_steps=4",
    "hooks.activations.each_layer=true",
    "hooks.memory.details=true",
    "hooks.retain_gradients.each_module=true",
    "hooks.throughput.each_part=true",
    "hooks.pr_curve.max_classes=2",
    "hooks.retain_gradients.modules=[relu1]",
    "hooks.retain_gradients.histogram=true",
    "hooks.samples.stages=[train,val,test]",
    "hooks.throughput.peak_flops=1e12",
    "trainer.gradient_clip_val=1.0",
    "hooks.throughput.every_n_steps=4",
    "trainer.max_steps=13",
    "logger.tensorboard.graph=true",
]
# Only a text has tokens, and only a pipeline runs forward and backward by turns.
OF_TEXT = [
    "data=text",
    "data.dataset.block_size=8",
    "data.dataset.files=text.txt",
    "hooks=[throughput]",
    "hooks.throughput.each_part=true",
    "hooks.throughput.every_n_steps=2",
    "trainer.max_steps=4",
    "test=false",
    "strategy=pipeline",
    "launch.accelerator=cpu",
]
# What no machine without a GPU writes. Over ranks they have /min, /mean and /max, too.
ONLY_ON_CUDA = [
    "memory/allocated_mib",
    "memory/fragmentation",
    "memory/peak_backward_mib",
    "memory/peak_forward_mib",
    "memory/peak_mib",
    "memory/peak_step_mib",
    "memory/reserved_mib",
]


def written(directory: Path) -> tuple[set[str], bool]:
    """The tags of a run, as an independent reader finds them, and whether there is a graph."""
    tags = EventAccumulator(str(directory / "tensorboard")).Reload().Tags()
    found = {*tags["scalars"], *tags["histograms"], *tags["images"], *tags["tensors"]}
    # `git` is there only inside a repository.
    return found - {"git"}, tags["graph"]


def test_every_tag_of_the_snapshot_is_in_the_event_file_of_a_real_run(ranks, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    found, has_graph = written(ranks.train(*OVERRIDES, "strategy=ddp", ranks=2).directory)
    assert has_graph
    of_text, _ = written(ranks.train(*OF_TEXT, ranks=2).directory)
    found |= {tag for tag in of_text if tag.startswith("throughput/")}
    known = set(SNAPSHOT.read_text().split())
    missing, new = sorted(known - found), sorted(found - known)
    told = f"not written: {missing}; new, for tags.txt, docs/tensorboard.md and CHANGELOG.md: {new}"
    assert (missing, new) == ([], []), told
    assert SNAPSHOT.read_text().split() == sorted(known)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA allocator's figures need a CUDA device")
def test_on_a_gpu_there_are_those_of_its_allocator_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = exp.fit(exp.compose(["hooks=[memory]", "hooks.memory.details=true", "trainer.max_steps=2", "test=false"]))
    read = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload()
    assert [tag for tag in ONLY_ON_CUDA if tag not in read.Tags()["scalars"]] == []
