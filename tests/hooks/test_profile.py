"""The hook profile: what it records and writes, and what it warns of."""

from __future__ import annotations

import csv
import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

import exp
from exp.extras.debugging.profile import Profile, ProfileWindow
from exp.extras.debugging.profile_files import changes_in

FILES = ["memory.rank0.csv", "memory.rank0.png", "operators.rank0.md", "trace.rank0.json.gz"]
STEP = ["forward", "backward", "Optimizer.step#AdamW.step"]
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
    """Return the names of the ranges of a trace, by their beginnings."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
    return [name for name in names if not name.startswith("Optimizer.zero_grad")]


def steps_in(directory: Path, rank: int = 0) -> list[str]:
    return [name for name in ranges(trace_of(directory, rank)) if name.startswith("step")]


def operators(trace: dict) -> Counter[str]:
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op")


def test_files_and_panels_hold_what_the_trace_holds(fit, events):
    accumulated = ["trainer.accumulate_grad_batches=2", "trainer.max_steps=6", "logger=[tensorboard]"]
    run = fit(*window(4, 2), *accumulated, "hooks.profile.rows=5", "hooks.profile.shapes=false").directory
    directory = run / "profile"
    assert sorted(path.name for path in directory.iterdir()) == FILES
    trace = trace_of(run)
    micro = STEP[:2]
    assert ranges(trace) == [name for step in (4, 5) for name in (f"step {step}", *micro, *micro, STEP[-1])]
    counted = operators(trace)
    assert counted["aten::addmm"] == 2 * 2 * 3  # a product for each layer
    rows = [line.split("|")[1:-1] for line in (directory / "operators.rank0.md").read_text().splitlines()]
    table = {cells[0].strip(" `"): [cell.strip() for cell in cells] for cells in rows if len(cells) > 5}
    for name, calls in counted.items():
        # torch merges an event with one of the same name that is all that it contains.
        assert 0 < int(table[name][1]) <= calls
    assert [int(table[f"aten::{name}"][1]) for name in ("addmm", "mm", "_fused_adamw_")] == [12, 20, 2]
    assert not {"forward", "backward", "step 4"} & set(table)
    own = [float(cells[3]) for name, cells in table.items() if name in counted]
    assert own == sorted(own, reverse=True)
    shares = [float(cells[2].rstrip("%")) for name, cells in table.items() if name in counted]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    with (directory / "memory.rank0.csv").open() as file:
        changes = list(csv.DictReader(file))
    moments = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    real = [one for one in changes if one["bytes"] != "0"]
    assert Counter(int(one["bytes"]) for one in real) == Counter(moment["args"]["Bytes"] for moment in moments)
    assert int(changes[-1]["allocated"]) == sum(int(one["bytes"]) for one in changes)
    times = [float(one["microseconds"]) for one in changes]
    assert times == sorted(times)
    assert {one["part"] for one in changes} >= {"forward", "backward", "optimizer"}
    with Image.open(directory / "memory.rank0.png") as drawn:
        assert drawn.size == (960, 300)
    read = events(run)
    (text,) = read.Tensors("profile/operators")
    markdown = text.tensor_proto.string_val[0].decode()
    assert text.step == 5
    assert len([line for line in markdown.splitlines() if line.startswith("| `")]) == 5
    assert "more are in operators.rank0.md." in markdown
    (image,) = read.Images("profile/memory")
    assert (image.step, image.width, image.height) == (5, 960, 300)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "steps", "warmup"), [(1, 1, 0), (6, 3, 3)])
def test_a_window_may_begin_or_end_the_run(fit, start: int, steps: int, warmup: int):
    trace = trace_of(fit(*window(start, steps, warmup), "hooks.profile.stacks=true", "trainer.max_steps=8").directory)
    assert ranges(trace) == [name for step in range(start, start + steps) for name in (f"step {step}", *STEP)]
    assert operators(trace)["aten::addmm"] == 3 * steps


@pytest.mark.slow
def test_each_phase_has_its_ranges(fit):
    gan = ["experiment=gan", "monitor=loss/val/generator", "trainer.limit_val_batches=1", "trainer.max_steps=4"]
    count = Counter(name.partition("#")[0] for name in ranges(trace_of(fit(*gan, *window(4, 1)).directory)))
    phases = len(exp.compose(["experiment=gan"]).phases)
    assert count["forward"] == count["backward"] == count["Optimizer.step"] == phases


def test_the_timeline_names_the_current_part():
    def memory(at, size, total=0, device=0):
        arguments = {"Bytes": size, "Total Allocated": total, "Device Type": device, "Device Id": device - 1}
        return {"ph": "i", "name": "[memory]", "ts": at, "args": arguments}

    def part(name, at, duration):
        return {"ph": "X", "cat": "user_annotation", "name": name, "ts": at, "dur": duration}

    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 100, "dur": 1},
        part("step 4", 101, 50),
        memory(102, 8),
        part("forward", 103, 5),
        memory(104, 16),
        memory(105, 100, total=5000, device=1),
        memory(110, -8),
    ]
    changes = changes_in({"traceEvents": events})
    found = [(one.microseconds, one.device, one.bytes, one.allocated, one.part) for one in changes]
    assert found == [
        (2, "cpu", 8, 8, ""),
        (3, "cpu", 0, 8, "forward"),
        (4, "cpu", 16, 24, "forward"),
        (5, "cuda:0", 100, 5000, "forward"),
        (8, "cpu", 0, 24, ""),
        (8, "cuda:0", 0, 5000, ""),
        (10, "cpu", -8, 16, ""),
    ]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "exp.extras.debugging.profile"]


def test_a_window_cut_by_the_end_is_written(fit, caplog):
    with caplog.at_level(logging.WARNING, logger="exp.extras.debugging.profile"):
        limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=5"]
        directory = fit(*window(4, 9), *limits).directory
    assert warnings_of(caplog) == [
        "hooks.profile: the run ended before the end of its window, steps 4 to 12; 2 of them are written"
    ]
    assert steps_in(directory) == ["step 4", "step 5"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_window_after_the_end_is_a_warning(fit, caplog, steps):
    """It ends before the warm-up, or in the warm-up."""
    with caplog.at_level(logging.WARNING, logger="exp.extras.debugging.profile"):
        directory = fit(*window(4, 1), "trainer.max_epochs=1", f"trainer.limit_train_batches={steps}").directory
    (warning,) = warnings_of(caplog)
    assert warning.endswith("its window, step 4; nothing is written")
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
    assert warning.endswith("2 of them are written, the last one in part")


@pytest.mark.slow
def test_a_cut_window_leaves_shards_intact(ranks):
    """A profiler refers to the tensors that it saw, and fsdp removes its parameters at the end."""
    limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "hooks.profile.ranks=[1]"]
    directory = ranks.train("strategy=fsdp", *window(2, 9, 0), *limits, ranks=2).directory
    assert {path.name.split(".")[1] for path in (directory / "profile").iterdir()} == {"rank1"}
    assert steps_in(directory, 1) == ["step 2", "step 3"]
    assert trace_of(directory, 1)["distributedInfo"]["rank"] == 1


def test_windows_of_different_ranks_do_not_overlap():
    assert not ProfileWindow(ranks=[0]).overlaps(ProfileWindow(ranks=[1]))
    assert ProfileWindow(ranks="all").overlaps(ProfileWindow(ranks=[1]))
    assert not ProfileWindow(start=10, steps=3, warmup=2).overlaps(ProfileWindow(start=14, steps=1, warmup=1))
    assert ProfileWindow(start=10, steps=3, warmup=2).overlaps(ProfileWindow(start=14, steps=1, warmup=2))


def test_a_window_before_a_resume_is_no_warning(tmp_path, caplog):
    hook = Profile(start_step=4, steps=2, warmup=1)
    hook.attach(torch.nn.Linear(1, 1), name="profile", directory=tmp_path)
    assert not hook.due(6)
    hook.detach()
    assert not caplog.records
