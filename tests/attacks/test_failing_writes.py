"""Runs in which one write fails, as on a full, broken or forbidden disk.

The run completes, or fails with the path and the system's message. Earlier checkpoints can be read.
"""

import errno
import itertools
import os
import re
from pathlib import Path

import pytest

from exp.engine.checkpoint import read_checkpoint

RUN = (
    *("hooks=[gradients]", "model=mlp", "data.batch_size=16", "trainer.limit_train_batches=2", "trainer.max_epochs=2"),
    *("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "checkpoint.every_n_steps=2"),
    *("trainer.enable_progress_bar=false", "hydra.run.dir=outputs/run"),
)
OFTEN = ("trainer.val_check_interval=1",)
# Overrides, and the number of failing writes with --share 1.
VARIANTS = {
    "plain": ((), 200),
    "a thread": ((*OFTEN, "checkpoint.async=true", "logger=[tensorboard,csv]"), 80),
    "ranks": ((*OFTEN, "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"), 40),
}
ERRORS = ("ENOSPC", "EIO", "EPIPE", "EACCES")
PARTIAL = re.compile(r"\.(.+)\.\d+\.\d+\.partial")
EVENTS = re.compile(r"events\.out\.tfevents\..*")
EXCHANGE = re.compile(r"\.launch-.*")


@pytest.fixture
def run(commands, tmp_path):
    """A function that runs a command in a new folder, and returns kind, path and success of each write."""
    numbers = itertools.count()

    def run(*more: str, at: int, error: str):
        place = tmp_path / str(next(numbers))
        (place / "work").mkdir(parents=True)
        environment = {
            "PYTHONPATH": str(Path(__file__).parent), "FAIL_AT": str(at), "FAIL_WITH": error,
            "WRITES": str(place / "writes"),
        }  # fmt: skip
        done = commands.run(*RUN, *more, module="failing_write", cwd=place / "work", environment=environment)
        return done, place / "work", [line.split("\t") for line in (place / "writes").read_text().splitlines()]

    return run


def target(path: str) -> str:
    """Return the name of the final file if the path is that of an unfinished copy."""
    name = PARTIAL.sub(r"\1", Path(path).name)
    return EXCHANGE.sub(".launch", EVENTS.sub("events.out.tfevents", name))


def numbers_of_writes(run, more: tuple[str, ...]) -> dict[tuple[str, str], int]:
    """Return the number of the last write of each kind to each file."""
    done, _, writes = run(*more, at=0, error="EIO")
    assert done.returncode == 0, done.stderr
    return {(kind, target(path)): number for number, (kind, path, _) in enumerate(writes, start=1)}


def assert_reported(run, more: tuple[str, ...], *, at: int, error: str) -> None:
    done, place, writes = run(*more, at=at, error=error)
    printed = done.stdout + done.stderr
    ((kind, path, _),) = [write for write in writes if write[2]]
    where = f"{error} at {kind} {path}: {printed}"
    assert done.returncode in (0, 1), where
    assert "Traceback" not in printed, where
    if done.returncode:
        assert os.strerror(getattr(errno, error)) in printed, where
        assert target(path) in printed or str(Path(path).parent) in printed, where
    for checkpoint in place.rglob("*.ckpt"):
        read_checkpoint(checkpoint)
    assert not list(place.rglob("*.partial")), where


def test_a_failing_write_is_reported_with_its_path(run):
    assert_reported(run, (), at=numbers_of_writes(run, ())["rename", "last.ckpt"], error="ENOSPC")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_failing_write_is_reported_with_its_path(run, share, variant):
    more, most = VARIANTS[variant]
    numbers = numbers_of_writes(run, more)
    assert len(numbers) >= 40
    cases = [*itertools.product(sorted(numbers.values()), ERRORS)]
    for number, error in share.random().sample(cases, min(share.count(most), len(cases))):
        assert_reported(run, more, at=number, error=error)
