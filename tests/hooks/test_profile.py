"""The profile hook: what it records and leaves, when it says what, and that it changes nothing."""

from __future__ import annotations

import csv
import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image as PILImage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.hooks.profile import Profile, ProfileWindow
from exp.hooks.profile_files import changes_in

FILES = ["memory.rank0.csv", "memory.rank0.png", "operators.rank0.md", "trace.rank0.json.gz"]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(directory: Path, *overrides: str) -> None:
    given = ["trainer.enable_progress_bar=false", "test=false", "logger=[csv]", f"hydra.run.dir={directory}"]
    exp.fit(exp.compose([*given, *overrides]))


def profiled(directory: Path, *overrides: str, start=4, steps=2, warmup=1) -> None:
    window = [f"hooks.profile.start_step={start}", f"hooks.profile.steps={steps}", f"hooks.profile.warmup={warmup}"]
    run(directory, "hooks=[profile]", "trainer.max_steps=8", *window, *overrides)


def trace_of(directory: Path, rank: int = 0) -> dict:
    return json.loads(gzip.decompress((directory / "profile" / f"trace.rank{rank}.json.gz").read_bytes()))


def ranges(trace: dict) -> list[str]:
    """The names of the ranges of a trace, by their beginnings."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def operators(trace: dict) -> Counter[str]:
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op")


def losses(directory: Path) -> list[str]:
    with (directory / "metrics.csv").open() as file:
        return [row["loss/train"] for row in csv.DictReader(file) if row.get("loss/train")]


STEP = ["forward", "backward", "Optimizer.step#AdamW.step"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": 4, "steps": 2, "warmup": 1}, [4, 5]),
        ({"start": 1, "steps": 1, "warmup": 0}, [1]),
        ({"start": 6, "steps": 3, "warmup": 3}, [6, 7, 8]),
    ],
)
def test_the_window_is_recorded_and_nothing_else(tmp_path, options, expected):
    profiled(tmp_path / "run", **options)
    assert sorted(path.name for path in (tmp_path / "run" / "profile").iterdir()) == FILES
    trace = trace_of(tmp_path / "run")
    seen = [name for name in ranges(trace) if not name.startswith("Optimizer.zero_grad")]
    assert seen == [name for step in expected for name in (f"step {step}", *STEP)]
    assert operators(trace)["aten::addmm"] == 3 * len(expected)  # a product a layer


def test_accumulated_batches_are_all_in_their_step(tmp_path):
    profiled(tmp_path / "run", "trainer.accumulate_grad_batches=3", steps=1)
    trace = trace_of(tmp_path / "run")
    micro = ["forward", "backward"]
    assert [name for name in ranges(trace) if "zero_grad" not in name] == ["step 4", *micro, *micro, *micro, STEP[-1]]
    assert operators(trace)["aten::addmm"] == 9


def test_each_phase_has_its_ranges(tmp_path):
    profiled(tmp_path / "run", "experiment=gan", steps=1)
    names = ranges(trace_of(tmp_path / "run"))
    count = Counter(name.partition("#")[0] for name in names)
    assert (
        count["forward"] == count["backward"] == count["Optimizer.step"] == len(exp.compose(["experiment=gan"]).phases)
    )


def test_losses_are_the_same_bit_for_bit(tmp_path):
    run(tmp_path / "without", "hooks=[]", "trainer.max_steps=8", "model=lenet")
    profiled(tmp_path / "with", "model=lenet", "hooks.profile.stacks=true")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_the_table_and_the_timeline_are_what_the_trace_says(tmp_path):
    profiled(tmp_path / "run", "hooks.profile.shapes=false")
    directory = tmp_path / "run" / "profile"
    trace = trace_of(tmp_path / "run")
    rows = [line.split("|")[1:-1] for line in (directory / "operators.rank0.md").read_text().splitlines()]
    table = {cells[0].strip(" `"): [cell.strip() for cell in cells] for cells in rows if len(cells) > 5}
    counted = operators(trace)
    for name, calls in counted.items():
        # torch's averages merge an event with one of the same name that is all there is in it.
        assert 0 < int(table[name][1]) <= calls
    assert [int(table[f"aten::{name}"][1]) for name in ("addmm", "mm", "_fused_adamw_")] == [6, 10, 2]
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
    with PILImage.open(directory / "memory.rank0.png") as drawn:
        assert drawn.size == (960, 300)


def test_parts_of_the_timeline_are_those_under_way():
    def memory(at, size, total=0, device=0):
        arguments = {
            "Bytes": size,
            "Total Allocated": total,
            "Device Type": device,
            "Device Id": -1 if device == 0 else 0,
        }
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
    found = [
        (one.microseconds, one.device, one.bytes, one.allocated, one.part)
        for one in changes_in({"traceEvents": events})
    ]
    assert found == [
        (2, "cpu", 8, 8, ""),
        (3, "cpu", 0, 8, "forward"),
        (4, "cpu", 16, 24, "forward"),
        (5, "cuda:0", 100, 5000, "forward"),
        (8, "cpu", 0, 24, ""),
        (8, "cuda:0", 0, 5000, ""),
        (10, "cpu", -8, 16, ""),
    ]


def test_panels_are_in_the_event_file(tmp_path):
    profiled(tmp_path / "run", "logger=[tensorboard]", "hooks.profile.rows=5")
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.*")}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    (text,) = events.Tensors("profile/operators")
    markdown = text.tensor_proto.string_val[0].decode()
    assert text.step == 5
    assert len([line for line in markdown.splitlines() if line.startswith("| `")]) == 5
    assert "more are in operators.rank0.md." in markdown
    (image,) = events.Images("profile/memory")
    assert (image.step, image.width, image.height) == (5, 960, 300)


def test_a_run_that_ends_inside_the_window_writes_what_it_has(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="exp.hooks.profile"):
        run(
            tmp_path / "run",
            "hooks=[profile]",
            "hooks.profile.start_step=19",
            "hooks.profile.steps=9",
            "trainer.max_epochs=1",
            "trainer.limit_train_batches=20",
        )
    assert [record.getMessage() for record in caplog.records if record.name == "exp.hooks.profile"] == [
        "hooks.profile: the run ended before the end of its window, steps 19 to 27; 2 of them are written"
    ]
    assert [name for name in ranges(trace_of(tmp_path / "run")) if name.startswith("step")] == ["step 19", "step 20"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_ends_before_the_window_says_so(tmp_path, caplog, steps):
    """Before the warm-up, and in it."""
    with caplog.at_level(logging.WARNING, logger="exp.hooks.profile"):
        limits = ["trainer.max_epochs=1", f"trainer.limit_train_batches={steps}"]
        run(tmp_path / "run", "hooks=[profile]", "hooks.profile.start_step=4", "hooks.profile.steps=1", *limits)
    (record,) = [record for record in caplog.records if record.name == "exp.hooks.profile"]
    assert record.getMessage().endswith("its window, step 4; nothing is written")
    assert not (tmp_path / "run" / "profile").exists()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_run_that_fails_inside_the_window_stops_the_profiler_and_writes(tmp_path, monkeypatch, caplog, error):
    def fail(hook, step):
        if step.index == 5:
            raise error

    monkeypatch.setattr("exp.hooks.throughput.Throughput.after_step", fail)
    every_step = ["hooks=[throughput,profile]", "hooks.throughput.every_n_steps=1"]
    with pytest.raises((exp.ExpError, type(error))):
        profiled(tmp_path / "run", *every_step, steps=5)
    assert not torch.autograd._profiler_enabled()
    assert [name for name in ranges(trace_of(tmp_path / "run")) if name.startswith("step")] == ["step 4", "step 5"]
    (told,) = [record.getMessage() for record in caplog.records if record.name == "exp.hooks.profile"]
    assert told.endswith("2 of them are written, the last one in part")


def test_each_rank_has_its_own_files(ranks):
    window = ["hooks.profile.start_step=2", "hooks.profile.steps=1", "hooks.profile.warmup=1", "trainer.max_steps=4"]
    trained = ranks.train("strategy=ddp", "hooks=[profile]", *window, "hooks.profile.ranks=all", ranks=2)
    names = sorted(path.name for path in (trained.directory / "profile").iterdir())
    assert names == sorted([*FILES, *(name.replace("rank0", "rank1") for name in FILES)])
    for rank in (0, 1):
        trace = trace_of(trained.directory, rank)
        assert "step 2" in ranges(trace)
        assert trace["distributedInfo"]["rank"] == rank
    plain = ranks.train("strategy=ddp", "hooks=[]", "trainer.max_steps=4", ranks=2)
    assert trained.losses == plain.losses


def test_one_rank_of_two_can_be_chosen_and_shards_can_be_taken_off_after_a_window_that_was_cut(ranks):
    """A profiler looks at the tensors that it saw; fsdp takes its parameters off at the end."""
    window = ["hooks.profile.start_step=2", "hooks.profile.steps=9", "hooks.profile.warmup=0"]
    limits = ["trainer.max_epochs=1", "trainer.limit_train_batches=3"]
    trained = ranks.train("strategy=fsdp", "hooks=[profile]", *window, *limits, "hooks.profile.ranks=[1]", ranks=2)
    assert [path.name for path in (trained.directory / "profile").iterdir() if "rank1" not in path.name] == []
    steps = [name for name in ranges(trace_of(trained.directory, 1)) if name.startswith("step")]
    assert steps == ["step 2", "step 3"]


# --- before the run ---


def faults(*overrides: str) -> list[str]:
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose(["+hooks=profile", *overrides]))
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.max_steps=11"], ["hooks.profile.start_step: 10", "steps 10 to 12", "ends at step 11 or before"]),
        (["hooks.profile.ranks=[0,2]"], ["hooks.profile.ranks: [0, 2]", "in 1 process", "ranks from 0 to 0, or all"]),
        (["hooks.profile.start_step=2"], ["hooks.profile.start_step: 2; expected 3 or more", "2 of warm-up"]),
        (["hooks.profile.steps=0"], ["hooks.profile.steps: 0; expected an integer, 1 or more"]),
        (["hooks.profile.ranks=[]"], ["hooks.profile.ranks: []; expected ranks, counted from 0", "or all"]),
        (["hooks.profile.ranks=none"], ["hooks.profile.ranks"]),
        (["hooks.profile.rows=0"], ["hooks.profile.rows: 0; expected an integer, 1 or more"]),
    ],
)
def test_what_cannot_be_is_said_before_the_run(overrides, words):
    (fault,) = faults(*overrides)
    assert all(word in fault for word in words), fault


@pytest.mark.parametrize("profiler", ["pytorch", {"_target_": "lightning.pytorch.profilers.PyTorchProfiler"}])
def test_lightning_s_use_of_the_same_profiler_is_refused(profiler):
    config = exp.compose(["+hooks=profile", "debug=profiler"])
    config.trainer.profiler = profiler
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(config)
    (fault,) = caught.value.faults
    assert "hooks.profile: torch.profiler, beside trainer.profiler=pytorch" in str(fault)
    assert "Leave one out: ~hooks.profile, or trainer.profiler=null" in str(fault)


def test_two_windows_that_overlap_are_one_fault():
    second = "{_target_: exp.hooks.profile.Profile, start_step: 12, steps: 1, warmup: 1}"
    (fault,) = faults(f"+hooks.later={second}")
    assert "hooks.later.start_step: 12: step 12 and 1 before them, beside hooks.profile with steps 10 to 12" in fault


@pytest.mark.parametrize("overrides", [["debug=profiler"], ["trainer.max_steps=12"]])
def test_what_can_be_passes_the_check(overrides):
    apart = "{_target_: exp.hooks.profile.Profile, start_step: 3, steps: 2, warmup: 1}"
    exp.validate(exp.compose(["+hooks=profile", f"+hooks.earlier={apart}", *overrides]))


def test_windows_of_different_ranks_do_not_overlap():
    assert not ProfileWindow(ranks=[0]).overlaps(ProfileWindow(ranks=[1]))
    assert ProfileWindow(ranks="all").overlaps(ProfileWindow(ranks=[1]))
    assert not ProfileWindow(start=10, steps=3, warmup=2).overlaps(ProfileWindow(start=14, steps=1, warmup=1))
    assert ProfileWindow(start=10, steps=3, warmup=2).overlaps(ProfileWindow(start=14, steps=1, warmup=2))


def test_a_run_that_was_resumed_behind_its_window_says_nothing_of_it(tmp_path, caplog):
    hook = Profile(start_step=4, steps=2, warmup=1)
    hook.attach(torch.nn.Linear(1, 1), name="profile", directory=tmp_path)
    assert not hook.due(6)
    hook.detach()
    assert not caplog.records
