"""The hook profile: its files, ranges and warnings."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

import exp
from exp.extras.debugging.profile import Profile

FILES = ["operators.rank0.md", "trace.rank0.json.gz"]
STEP = ["forward", "backward"]
FAILING = """
from lightning.pytorch import Callback

class Fail(Callback):
    def __init__(self, *, error: str):
        self.error = {"KeyboardInterrupt": KeyboardInterrupt, "RuntimeError": RuntimeError}[error]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 4:
            raise self.error("broken")
"""


def window(start: int, steps: int, warmup: int = 1) -> list[str]:
    options = {"start_step": start, "steps": steps, "warmup": warmup}
    return ["hooks=[profile]", *(f"hooks.profile.{name}={value}" for name, value in options.items())]


def trace_of(directory: Path, rank: int = 0) -> dict:
    return json.loads(gzip.decompress((directory / "profile" / f"trace.rank{rank}.json.gz").read_bytes()))


def ranges(trace: dict) -> list[str]:
    """Return the names of the hook's ranges of a trace in the order of their start, without those of torch."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
    return [name for name in names if not name.startswith("Optimizer.")]


def steps_in(directory: Path, rank: int = 0) -> list[str]:
    return [name for name in ranges(trace_of(directory, rank)) if name.startswith("step")]


def operators(trace: dict) -> Counter[str]:
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op")


def test_files_and_panels_hold_what_the_trace_holds(fit, events):
    accumulated = ["trainer.accumulate_grad_batches=2", "trainer.max_steps=6", "logger=[tensorboard]"]
    run = fit(*window(4, 2), *accumulated, "hooks.profile.shapes=false").directory
    directory = run / "profile"
    assert sorted(path.name for path in directory.iterdir()) == FILES
    trace = trace_of(run)
    assert ranges(trace) == [name for step in (4, 5) for name in (f"step {step}", *STEP, *STEP)]
    assert operators(trace)["aten::addmm"] == 2 * 2 * 3  # one product per layer
    assert any(event.get("name") == "[memory]" for event in trace["traceEvents"])
    text = (directory / "operators.rank0.md").read_text()
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith(" ") and line.split()}
    assert (rows["aten::addmm"], rows["aten::mm"], rows["aten::_fused_adamw_"]) == ("12", "20", "2")
    (panel,) = events(run).Tensors("profile/operators")
    assert panel.step == 5
    assert "aten::addmm" in panel.tensor_proto.string_val[0].decode()


@pytest.mark.slow
@pytest.mark.parametrize(("start", "steps", "warmup"), [(1, 1, 0), (6, 3, 3)])
def test_a_window_may_begin_or_end_the_run(fit, start: int, steps: int, warmup: int):
    trace = trace_of(fit(*window(start, steps, warmup), "hooks.profile.stacks=true", "trainer.max_steps=8").directory)
    assert ranges(trace) == [name for step in range(start, start + steps) for name in (f"step {step}", *STEP)]
    assert operators(trace)["aten::addmm"] == 3 * steps


@pytest.mark.slow
def test_each_phase_has_its_ranges(fit):
    gan = ["experiment=gan", "monitor=loss/val/generator", "trainer.limit_val_batches=1", "trainer.max_steps=4"]
    count = Counter(ranges(trace_of(fit(*gan, *window(4, 1)).directory)))
    phases = len(exp.compose(["experiment=gan"]).phases)
    assert count["forward"] == count["backward"] == phases


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "exp.extras.debugging.profile"]


def test_a_window_cut_by_the_end_is_written(fit, caplog):
    with caplog.at_level(logging.WARNING, logger="exp.extras.debugging.profile"):
        limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=5"]
        directory = fit(*window(4, 9), *limits).directory
    assert warnings_of(caplog) == [
        "hooks.profile: the run ended before step 12, the last step to record; number of written steps: 2"
    ]
    assert steps_in(directory) == ["step 4", "step 5"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_window_after_the_end_is_a_warning(fit, caplog, steps):
    """The run ends before or during the warm-up of the profiler."""
    with caplog.at_level(logging.WARNING, logger="exp.extras.debugging.profile"):
        directory = fit(*window(4, 1), "trainer.max_epochs=1", f"trainer.limit_train_batches={steps}").directory
    (warning,) = warnings_of(caplog)
    assert warning.endswith("step 4, the last step to record; number of written steps: 0")
    assert not (directory / "profile").exists()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("error", ["RuntimeError", pytest.param("KeyboardInterrupt", marks=pytest.mark.slow)])
def test_a_window_cut_by_an_error_is_written(fit, in_tmp, caplog, error):
    (in_tmp / "failing.py").write_text(FAILING)
    fail = [f"+callbacks.fail={{_target_: failing.Fail, error: {error}}}", "security.allow=[failing]"]
    with pytest.raises((exp.ExpError, KeyboardInterrupt)):
        fit(*window(4, 5), *fail, "trainer.max_steps=8")
    assert not torch.autograd._profiler_enabled()
    assert steps_in(in_tmp / "run0") == ["step 4", "step 5"]
    (warning,) = warnings_of(caplog)
    assert warning.endswith("number of written steps: 2")


@pytest.mark.slow
def test_a_cut_window_leaves_shards_intact(ranks):
    """A profiler keeps references to tensors, and fsdp frees its parameters at the end of the run."""
    limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "hooks.profile.ranks=[1]"]
    directory = ranks.train("strategy=fsdp", *window(2, 9, 0), *limits, ranks=2).directory
    assert {path.name.split(".")[1] for path in (directory / "profile").iterdir()} == {"rank1"}
    assert steps_in(directory, 1) == ["step 2", "step 3"]
    assert trace_of(directory, 1)["distributedInfo"]["rank"] == 1


def test_a_window_before_a_resume_is_no_warning(tmp_path, caplog):
    hook = Profile(start_step=4, steps=2, warmup=1)
    hook.attach(torch.nn.Linear(1, 1), name="profile", directory=tmp_path)
    assert not hook.due(6)
    hook.detach()
    assert not caplog.records
