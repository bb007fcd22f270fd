"""Runs that are killed with kill -9 at random moments and resumed until they complete.

Their checkpoints equal those of an unbroken run. A run validates at every step and saves so often that most kills are
within a save. For each chain of resumed runs, the test draws if a thread writes checkpoints and how often.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from exp.engine.checkpoint import read_checkpoint

COMMON = (
    *("model=sequential", "hooks=[]", "logger=[]", "test=false", "data.batch_size=16", "trainer.limit_train_batches=6"),
    *("trainer.limit_val_batches=1", "trainer.val_check_interval=1", "trainer.enable_progress_bar=false"),
)
PLAIN = (*COMMON, "trainer.max_epochs=3")
FULL = (
    *COMMON,
    *("trainer.max_epochs=4", "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "precision=fp16"),
    *("data.num_workers=2", "trainer.accumulate_grad_batches=3", "callbacks=[ema]", "phases=[body_and_head]"),
)
DUE = ("checkpoint.every_n_steps=1", "checkpoint.every_n_steps=4", "checkpoint.every_n_minutes=0.0001")
# Entries that differ between two unbroken runs: times, memory, checksums, and the path of the resumed checkpoint.
DIFFERENT = ("exp_seconds", "exp_latest", "exp_manifest", "exp_config")
# A kill between two saves may lose the ranking of checkpoints, which the repeated steps restore.
RANKING = ("exp_best",)
# Lightning's counters of steps and validations since the start of the epoch or the resume, which have no effect.
COUNTERS = re.compile(r"\.loops\..*\.(optim_progress\.optimizer\.\w+\.current|val_loop\.batch_progress\.\w+)\.\w+")


@dataclass(frozen=True, kw_only=True)
class Unbroken:
    """Checkpoints of a run that is not killed, and its seconds before and after the first checkpoint."""

    last: dict[str, Any]
    best: dict[str, dict[str, Any]]
    until_saved: float
    afterwards: float


def test_a_killed_run_resumes_exactly(commands, tmp_path):
    reference = unbroken(commands, tmp_path / "outputs" / "unbroken" / "1", PLAIN)
    killed, resumed = (tmp_path / "outputs" / "chain" / name for name in ("killed", "resumed"))
    command = start(commands, (*PLAIN, DUE[0]), killed)
    until(command, (killed / "checkpoints" / "last.ckpt").is_file)
    kill(command, random.Random(0))
    assert_readable(killed)
    assert start(commands, (*PLAIN, "resume=auto"), resumed).end().returncode == 0
    assert_equal(resumed, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "chains"), [(PLAIN, 80), (FULL, 30)], ids=["plain", "full"])
def test_a_run_killed_at_random_moments_resumes_exactly(commands, tmp_path, share, overrides, chains):
    draws = share.random()
    reference = unbroken(commands, tmp_path / "outputs" / "unbroken", overrides)
    for number in range(share.count(chains)):
        drawn = (f"checkpoint.async={draws.choice(['true', 'false'])}", draws.choice(DUE))
        print(number, drawn)  # pytest shows it if the test fails
        place = tmp_path / "outputs" / f"chain{number}"
        runs = chain(commands, place, (*overrides, *drawn), reference, draws=draws)
        assert_equal(runs[-1], reference)
        assert [str(path) for run in runs for path in half_written(run)] == []


def chain(
    commands: Any,
    place: Path,
    overrides: tuple[str, ...],
    reference: Unbroken,
    *,
    draws: random.Random,
) -> list[Path]:
    """Kill a run and up to four runs that resume it, let the last one complete, and return the run directories."""
    runs: list[Path] = []
    for left in range(draws.randint(1, 4), -1, -1):
        saved = [run / "checkpoints" / "last.ckpt" for run in reversed(runs)]
        last = next((path for path in saved if path.is_file()), None)
        resume = [] if last is None else [f"resume={draws.choice(['auto', last])}"]
        runs.append(place / f"run{len(runs)}")
        command = start(commands, (*overrides, *resume), runs[-1])
        if left:
            wait(command, runs[-1], reference, draws=draws)
        if not left or not kill(command, draws):
            done = command.end()
            assert done.returncode == 0, done.stdout + done.stderr
            break
        assert_readable(runs[-1])
    return runs


def start(commands: Any, overrides: tuple[str, ...], directory: Path) -> Any:
    """Start a run in outputs/NAME/RUN, where resume=auto finds earlier runs with the same name."""
    words = (*overrides, f"name={directory.parent.name}", f"hydra.run.dir={directory}")
    return commands.start(*words, cwd=directory.parents[2])


def unbroken(commands: Any, directory: Path, overrides: tuple[str, ...]) -> Unbroken:
    command = start(commands, (*overrides, DUE[0]), directory)
    until(command, directory.exists)
    began = time.monotonic()
    until(command, (directory / "checkpoints" / "last.ckpt").is_file)
    saved = time.monotonic()
    done = command.end()
    assert done.returncode == 0, done.stdout + done.stderr
    afterwards = time.monotonic() - saved
    last = content(directory / "checkpoints" / "last.ckpt")
    return Unbroken(last=last, best=best(directory), until_saved=saved - began, afterwards=afterwards)


def until(command: Any, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for a condition, at most until the command ends."""
    ends = time.monotonic() + seconds
    while command.process.is_alive() and not condition() and time.monotonic() < ends:
        time.sleep(0.001)


def wait(command: Any, directory: Path, reference: Unbroken, *, draws: random.Random) -> None:
    """Wait for a random moment: before the first checkpoint, or any later one."""
    checkpoints = directory / "checkpoints"
    if draws.random() < 0.2:
        until(command, directory.exists)
        command.process.join(draws.random() * reference.until_saved)
        return
    until(command, (checkpoints / "last.ckpt").is_file)
    command.process.join(draws.uniform(0, 0.6) * reference.afterwards)


def kill(command: Any, draws: random.Random) -> bool:
    """Kill the command or one of its ranks, and wait for all processes; return False if the run was complete."""
    try:
        process = psutil.Process(command.process.pid)
        tree = [process, *process.children(recursive=True)]
        draws.choice([process, *process.children()]).kill()
    except psutil.NoSuchProcess:
        return False
    _, alive = psutil.wait_procs(tree[1:], timeout=60)
    command.process.join(60)
    assert not command.process.is_alive(), "the run continues after one of its ranks was killed"
    assert not alive, f"processes are left: {alive}"
    return bool(command.process.exitcode)


def assert_readable(directory: Path) -> None:
    """Assert that all checkpoints in a run directory are complete."""
    for path in (directory / "checkpoints").glob("*.ckpt"):
        assert "exp_position" in read_checkpoint(path), path


def assert_equal(directory: Path, reference: Unbroken) -> None:
    last, found = content(directory / "checkpoints" / "last.ckpt"), best(directory)
    assert difference(last, reference.last) is None
    assert found.keys() == reference.best.keys() == {"best.ckpt"}
    for name, state in found.items():
        assert difference(state, reference.best[name]) is None, name


def content(path: Path, *, without: tuple[str, ...] = DIFFERENT) -> dict[str, Any]:
    return {name: value for name, value in read_checkpoint(path).items() if name not in without}


def best(directory: Path) -> dict[str, dict[str, Any]]:
    paths = (directory / "checkpoints").glob("best*.ckpt")
    return {path.name: content(path, without=(*DIFFERENT, *RANKING)) for path in paths}


def half_written(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "partial" in path.name or path.name.endswith(".tmp")]


def difference(one: Any, other: Any, key: str = "") -> str | None:
    """Return the first key at which two checkpoints differ, or None. Tensors are compared bit for bit."""
    if COUNTERS.fullmatch(key):
        return None
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return None if same and one.numpy().tobytes() == other.numpy().tobytes() else key
    if type(one) is not type(other):
        return key
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{key}: {sorted(map(str, one.keys() ^ other.keys()))}"
        pairs = [(str(name), one[name], other[name]) for name in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return key
        pairs = [(str(place), *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other or (one != one and other != other) else f"{key}: {one!r} and {other!r}"
    return next((found for name, *both in pairs if (found := difference(*both, f"{key}.{name}"))), None)
