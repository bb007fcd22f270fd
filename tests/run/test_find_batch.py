"""python -m exp.find_batch finds a size that fits when the next does not, however a trial runs out of memory."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exp.check.__main__ import main as check
from exp.errors import RunError
from exp.find_batch import Trial, search, step_of

MIB = 2**20
# Wide needs more than a MiB of activations a sample; the others end a step of more than 100 samples.
OWN = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        wide = x.repeat(1, 512)
        for _ in range(8):
            wide = torch.relu(wide)  # keeps its output, and computes little
        return self.head(x + wide.unflatten(1, (512, 64)).mean(1))

class Narrow(Wide):
    most = 100

    def forward(self, x):
        if len(x) > self.most and self.training and x.device.type == "cpu":
            self.end()
        return self.head(x.flatten(1))

class OnlyOne(Narrow):
    most = 1
    def end(self):
        torch.empty(2**48)

class InLibrary(Narrow):
    def end(self):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

class Slow(Narrow):
    def forward(self, x):
        if self.training and x.device.type == "cpu" and len(x) == 64:
            for path in Path("outputs").glob("train/find_batch/*/*/64"):
                (path / "began").touch()
                time.sleep(0.05)
        return self.head(x.flatten(1))

class Killed(Narrow):
    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Wrong(Narrow):
    def end(self):
        raise ValueError("more than I can count")
"""
SHORT = ["data=digits", "model=mine", "optimizer=sgd", "launch.accelerator=cpu"]


@pytest.fixture(autouse=True)
def own(write: Any) -> None:
    write("mine.py", OWN)
    write("conf/model/mine.yaml", "# A network of the user: model=mine\n_target_: mine.Wide\n")


def trials_in(place: Path) -> tuple[Path, dict[str, Any]]:
    (directory,) = place.glob("outputs/train/find_batch/*/*")
    return directory, json.loads((directory / "batch.json").read_text())


@pytest.mark.slow
def test_the_size_found_fits_and_the_next_does_not(commands, place: Path) -> None:
    done = commands.run(*SHORT, "--memory", "500MiB", "--steps", "3", module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    directory, summary = trials_in(place)
    assert summary["limit"] == 500 * MIB
    fitting = {one["size"]: one for one in summary["trials"] if one["fits"]}
    others = {one["size"]: one for one in summary["trials"] if not one["fits"]}
    size, beyond = max(fitting), min(others)
    assert max(fitting) < min(others) <= size + step_of(size)
    assert all(one["peak"] <= 500 * MIB for one in fitting.values())
    assert all(one["peak"] > 500 * MIB for one in others.values())
    # The report of the run with that size has its own measurement.
    report = json.loads((directory / str(size) / "report.json").read_text())
    assert report["status"] == "completed"
    assert report["peak_memory_mib"] * MIB == pytest.approx(fitting[size]["peak"], rel=0.1)
    assert all(one["samples_per_second"] > 0 for one in fitting.values())
    assert len(summary["trials"]) <= 10
    assert not list(place.glob("outputs/**/*.ckpt"))
    lines = done.stdout.splitlines()
    assert any(line.startswith(f"largest   {size}: ") and f"; {beyond} does not fit" in line for line in lines)
    assert any("learning rate stays what it is, 0.1" in line for line in lines)
    typed = shlex.split(lines[-1])[3:]
    assert typed == [*SHORT, f"data.batch_size={size}"]
    assert (directory / "batch.csv").read_text().startswith("size,fits,peak,samples_per_second\n")


@pytest.mark.parametrize("name", ["Killed", pytest.param("InLibrary", marks=pytest.mark.slow)])
def test_the_search_continues_below_a_size_without_memory(name: str, commands, place: Path) -> None:
    words = [*SHORT, f"model._target_=mine.{name}", "data.batch_size=400", "--memory", "20GiB", "--steps", "3"]
    done = commands.run(*words, module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    _, summary = trials_in(place)
    sizes = {one["size"]: one["fits"] for one in summary["trials"]}
    assert all(fits == (size <= 100) for size, fits in sizes.items())
    assert list(sizes)[:3] == [400, 200, 100]
    found = max(size for size, fits in sizes.items() if fits)
    assert min(size for size, fits in sizes.items() if not fits) <= found + step_of(found)
    assert done.stdout.count("out of memory\n") == sum(not fits for fits in sizes.values())
    assert done.stdout.splitlines()[-1].endswith(f"data.batch_size={found}")


def test_the_size_is_the_global_batch_of_all_ranks(commands, place: Path) -> None:
    words = [*SHORT, "strategy=ddp", "launch.devices=2", "data.batch_size=2", "model._target_=mine.OnlyOne"]
    words += ["--memory", "20GiB", "--steps", "3", "--max", "3"]
    done = commands.run(*words, module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    sizes = {one["size"]: one["fits"] for one in trials_in(place)[1]["trials"]}
    assert sizes == {2: True, 3: False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model._target_=mine.Wrong", "--memory", "20GiB"], "more than I can count"),
        (["model._target_=mine.Narrow", "data.batch_size=1", "--memory", "1MiB"], "not one sample fits: 1 "),
    ],
    ids=["another error", "too little memory"],
)
def test_a_search_without_a_size_exits_1(words: list[str], message: str, commands, place: Path) -> None:
    done = commands.run(*SHORT, *words, "--steps", "3", module="exp.find_batch", cwd=place)
    assert done.returncode == 1
    assert message in done.stderr


def test_ctrl_c_ends_the_search_and_its_trial(commands, place: Path) -> None:
    words = [*SHORT, "model._target_=mine.Slow", "--memory", "20GiB", "--steps", "1000"]
    started = commands.start(*words, module="exp.find_batch", cwd=place)
    deadline = time.monotonic() + 60
    while not list(place.glob("outputs/train/find_batch/*/*/64/began")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(started.process.pid, signal.SIGINT)
    done = started.end()
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "interrupted by signal 2; a test that did not end says nothing" in done.stderr
    assert not list(place.glob("outputs/**/*.ckpt"))


ERRORS: Mapping[str, tuple[list[str], str]] = {
    "no limit on a CPU": ([], "--memory: no limit, on cpu; expected one"),
    "no unit": (["--memory", "2"], "--memory: '2'; expected a number and "),
    "nothing": (["--memory", "0GiB"], "--memory: '0GiB'"),
    "no samples": (["--memory", "1GiB", "--max", "0"], "--max: 0; expected 1 or more"),
    "few steps": (["--memory", "1GiB", "--steps", "2"], "--steps: 2; expected 3 or more"),
    "a sweep": (["--memory", "1GiB", "-m"], "--multirun: several runs"),
    "a word of the config": (["--memory", "1GiB", "data.batch_size=-1"], "data.batch_size: -1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_command_is_refused_before_anything_is_written(name: str, commands, place: Path) -> None:
    more, message = ERRORS[name]
    done = commands.run("data=wine", "launch.accelerator=cpu", *more, module="exp.find_batch", cwd=place)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (place / "outputs").exists()


class Modelled:
    """Trials on a machine with `limit` bytes, where a run of size b takes base + each b + bend b**2 bytes.

    measures: whether a trial that does not fit reports its bytes. room: the largest size for which the host has memory.
    """

    def __init__(
        self, *, limit: int, base: int, each: float, bend: float = 0.0, measures: bool = True, room: int | None = None
    ) -> None:
        self.limit, self.base, self.each, self.bend, self.measures, self.room = limit, base, each, bend, measures, room
        self.done: list[Trial] = []

    def __call__(self, size: int) -> Trial:
        assert size not in [one.size for one in self.done]
        peak = int(self.base + self.each * size + self.bend * size**2)
        fits = peak <= self.limit
        trial = Trial(size=size, fits=fits, peak=peak if fits or self.measures else None, samples_per_second=1.0)
        self.done.append(trial)
        return trial

    def most_here(self, trial: Trial) -> int | None:
        return self.room


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("bend", [0.0, 0.02])
@pytest.mark.parametrize("each", [1.0, 37.0, 5000.0])
@pytest.mark.parametrize("start", [1, 64, 100_000])
def test_few_trials_find_the_limit(start: int, each: float, bend: float, measures: bool) -> None:
    trials = Modelled(limit=10**6, base=300_000, each=each, bend=bend, measures=measures)
    found = search(trials, start=start, most=None)
    beyond = min(one.size for one in trials.done if not one.fits)
    assert found.fits
    assert found.size < beyond <= found.size + step_of(found.size)
    # Doubling and halving from 1 to 700,000 would take 20 and 15 of them.
    assert len(trials.done) <= 22
    # Except for the first, no trial takes many times the limit.
    assert all((one.peak or 0) <= 8 * trials.limit for one in trials.done if one.size != start and measures)


def test_the_line_through_two_sizes_saves_trials() -> None:
    trials = Modelled(limit=10**6, base=300_000, each=5000.0)
    assert search(trials, start=16, most=None).size == 140
    assert [one.size for one in trials.done] == [16, 32, 140, 147]


def test_the_search_ends_at_all_samples_one_sample_or_the_host() -> None:
    assert search(Modelled(limit=10**6, base=0, each=1.0), start=10, most=500).size == 500
    with pytest.raises(RunError, match="not one sample fits"):
        search(Modelled(limit=10, base=20, each=1.0), start=8, most=None)
    trials = Modelled(limit=10**9, base=1000, each=10.0, room=700)
    assert search(trials, start=64, most=None).size == 700
    assert max(one.size for one in trials.done) == 700


def test_the_printed_command_passes_the_check(commands, place: Path) -> None:
    words = ["data=wine", "launch.accelerator=cpu", "tags=[a]", "data.batch_size=8"]
    done = commands.run(*words, "--memory", "20GiB", "--max", "40", module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    typed = shlex.split(done.stdout.splitlines()[-1])[3:]
    assert typed == [*words[:3], "data.batch_size=40"]
    assert "; the largest of --max\n" in done.stdout
    assert check(typed) == 0
