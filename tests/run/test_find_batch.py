"""python -m exp.find_batch finds the largest size that fits, for all kinds of errors about memory."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exp.cli.check import main as check
from exp.errors import RunError
from exp.extras.finders.find_batch import Trial, search, step_of

# A step with more than 100 samples ends the process.
OWN = """
import os, signal
import torch
from torch import nn

class Killed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        if len(x) > 100 and self.training and x.device.type == "cpu":
            self.end()
        return self.head(x.flatten(1))

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Full(Killed):
    def end(self):
        torch.empty(2**48)

class Wrong(Killed):
    def end(self):
        raise ValueError("more than I can count")
"""
SHORT = ["data=digits", "model=mine", "optimizer=sgd", "launch.accelerator=cpu"]


@pytest.fixture(autouse=True)
def own(write: Any) -> None:
    write("mine.py", OWN)
    write("conf/model/mine.yaml", "# A network of the user: model=mine\n_target_: mine.Killed\n")


def trials_in(place: Path) -> tuple[Path, dict[int, bool]]:
    (directory,) = place.glob("outputs/train/find_batch/*/*")
    rows = csv.DictReader((directory / "batch.csv").read_text().splitlines())
    return directory, {int(row["size"]): row["fits"] == "True" for row in rows}


@pytest.mark.parametrize("name", ["Killed", "Full"])
def test_the_search_continues_below_a_size_without_memory(name: str, commands, place: Path) -> None:
    words = [*SHORT, f"model._target_=mine.{name}", "data.batch_size=400", "--memory", "20GiB", "--steps", "3"]
    done = commands.run(*words, module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    directory, sizes = trials_in(place)
    assert (directory / "batch.csv").read_text().startswith("size,fits,peak,samples_per_second\n")
    assert not list(place.glob("outputs/**/*.ckpt"))
    assert all(fits == (size <= 100) for size, fits in sizes.items())
    tried = [int(line.split()[0]) for line in done.stdout.splitlines()[1 : len(sizes) + 1]]
    assert tried[:3] == [400, 200, 100]
    found = max(size for size, fits in sizes.items() if fits)
    assert min(size for size, fits in sizes.items() if not fits) <= found + step_of(found)
    assert done.stdout.count("out of memory\n") == sum(not fits for fits in sizes.values())
    assert done.stdout.splitlines()[-1].endswith(f"data.batch_size={found}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model._target_=mine.Wrong", "--memory", "20GiB"], "more than I can count"),
        (["data.batch_size=1", "--memory", "1MiB"], "not even one sample fits into the memory: 1 "),
    ],
    ids=["another error", "too little memory"],
)
def test_a_search_without_a_size_exits_1(words: list[str], message: str, commands, place: Path) -> None:
    done = commands.run(*SHORT, *words, "--steps", "3", module="exp.find_batch", cwd=place)
    assert done.returncode == 1
    assert message in done.stderr


ERRORS: Mapping[str, tuple[list[str], str]] = {
    "no limit on a CPU": ([], "--memory: no limit, on cpu; expected a memory limit"),
    "no unit": (["--memory", "2"], "--memory: '2'; expected a number and "),
    "no samples": (["--memory", "1GiB", "--max", "0"], "--max: 0; expected a number above 0"),
    "few steps": (["--memory", "1GiB", "--steps", "2"], "--steps: 2; expected a number above 2"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_command_is_refused_before_anything_is_written(name: str, commands, place: Path) -> None:
    more, message = ERRORS[name]
    done = commands.run("data=wine", "launch.accelerator=cpu", *more, module="exp.find_batch", cwd=place)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (place / "outputs").exists()


class Modelled:
    """Simulated trials on a machine with `limit` bytes, where a batch of b samples takes base + each * b bytes."""

    def __init__(self, *, limit: int, base: int, each: float) -> None:
        self.limit, self.base, self.each = limit, base, each
        self.done: list[Trial] = []

    def __call__(self, size: int) -> Trial:
        assert size not in [one.size for one in self.done]
        peak = int(self.base + self.each * size)
        trial = Trial(size=size, fits=peak <= self.limit, peak=peak, samples_per_second=1.0)
        self.done.append(trial)
        return trial


@pytest.mark.parametrize("each", [1.0, 37.0, 5000.0])
@pytest.mark.parametrize("start", [1, 64, 100_000])
def test_few_trials_find_the_limit(start: int, each: float) -> None:
    trials = Modelled(limit=10**6, base=300_000, each=each)
    found = search(trials, start=start, most=None)
    beyond = min(one.size for one in trials.done if not one.fits)
    assert found.fits
    assert found.size < beyond <= found.size + step_of(found.size)
    # 21 doublings from 1 to more than 700,000, and 5 halves.
    assert len(trials.done) <= 26
    # A search that starts with a small size uses at most twice the limit.
    assert start > 100 or all(one.peak <= 2 * trials.limit for one in trials.done)


def test_the_search_ends_at_all_samples_or_one_sample() -> None:
    assert search(Modelled(limit=10**6, base=0, each=1.0), start=10, most=500).size == 500
    with pytest.raises(RunError, match="not even one sample fits"):
        search(Modelled(limit=10, base=20, each=1.0), start=8, most=None)


def test_the_printed_command_passes_the_check(commands, place: Path) -> None:
    words = ["data=wine", "launch.accelerator=cpu", "tags=[a]", "data.batch_size=8"]
    done = commands.run(*words, "--memory", "20GiB", "--max", "40", module="exp.find_batch", cwd=place)
    assert done.returncode == 0, done.stderr
    typed = shlex.split(done.stdout.splitlines()[-1])[3:]
    assert typed == [*words[:3], "data.batch_size=40"]
    assert check(typed) == 0
