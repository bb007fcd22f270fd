"""Tags are a public contract: runs with all observing hooks write exactly the tags of the snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp

SNAPSHOT = Path(__file__).with_name("tags.txt")
HOOKS = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "hooks").glob("*.yaml"))
# Hooks that change gradients or outputs, which log no values.
TRANSFORMS = {"clip_module", "gradient_reversal", "scale_gradient"}
OVERRIDES = yaml.safe_load(Path(__file__).with_name("tags_overrides.yaml").read_text())
# Tags that exist only on a GPU. With several ranks, they also have /min, /mean and /max.
ONLY_ON_CUDA = [
    "memory/allocated_mib",
    "memory/fragmentation",
    "memory/peak_backward_mib",
    "memory/peak_forward_mib",
    "memory/peak_mib",
    "memory/peak_step_mib",
    "memory/reserved_mib",
]


def written(directory: Path) -> set[str]:
    """Return the tags of a run that TensorBoard's reader finds."""
    tags = EventAccumulator(str(directory / "tensorboard")).Reload().Tags()
    found = {*tags["scalars"], *tags["histograms"], *tags["images"], *tags["tensors"]}
    # The tag `git` exists only in a repository.
    return found - {"git"}


@pytest.fixture
def tags_of_text(ranks, tmp_path) -> set[str]:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    return written(ranks.train(*OVERRIDES["text"], ranks=2).directory)


def test_runs_write_every_tag_of_the_snapshot(ranks, tags_of_text):
    hooks = ",".join(name for name in HOOKS if name not in TRANSFORMS)
    command = (f"hooks=[{hooks}]", *OVERRIDES["images"], "strategy=ddp")
    found = written(ranks.train(*command, ranks=2).directory)
    found |= {tag for tag in tags_of_text if tag.startswith("throughput/")}
    known = set(SNAPSHOT.read_text().split())
    missing, new = sorted(known - found), sorted(found - known)
    message = f"not written: {missing}; new, for tags.txt, docs/tensorboard.md and CHANGELOG.md: {new}"
    assert (missing, new) == ([], []), message
    assert SNAPSHOT.read_text().split() == sorted(known)


@pytest.mark.gpu
def test_a_gpu_has_tags_of_its_allocator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = exp.fit(exp.compose(["hooks=[memory]", "hooks.memory.details=true", "trainer.max_steps=2", "test=false"]))
    read = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload()
    assert [tag for tag in ONLY_ON_CUDA if tag not in read.Tags()["scalars"]] == []
