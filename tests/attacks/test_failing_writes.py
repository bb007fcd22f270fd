"""Each write of a run fails once, with what a full, broken, closed or forbidden place gives.

The run ends completed, or failed with the path and the system's own words; what it had saved before can be read.
A share of all writes and errors, more with ATTACKS=200 in the environment; every write is among the first of each.
"""

import errno
import itertools
import os
import random
import re
from pathlib import Path

import pytest

from exp.engine.checkpoint import read_checkpoint

RUN = (
    *("hooks=[gradients]", "model=mlp", "data.batch_size=16", "trainer.limit_train_batches=2", "trainer.max_epochs=2"),
    *("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "checkpoint.every_n_steps=2"),
    *("trainer.enable_progress_bar=false", "hydra.run.dir=outputs/run"),
)
PRUNING = ("checkpoint.keep=2", "trainer.val_check_interval=1")
# With how many writes that fail.
VARIANTS = {
    "plain": ((), 12),
    "a thread": ((*PRUNING, "checkpoint.async=true", "logger=[tensorboard,csv]"), 4),
    "ranks": ((*PRUNING, "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"), 2),
}
ERRORS = ("ENOSPC", "EIO", "EPIPE", "EACCES")
PARTIAL = re.compile(r"\.(.+)\.\d+\.\d+\.partial")
EVENTS = re.compile(r"events\.out\.tfevents\..*")
EXCHANGE = re.compile(r"\.launch-.*")


@pytest.fixture
def run(commands, tmp_path):
    """A function that lives the run in a folder of its own, and tells its writes: kind, path, whether it failed."""
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
    """The file that a write is for, whatever stands beside it until it is whole."""
    name = PARTIAL.sub(r"\1", Path(path).name)
    return EXCHANGE.sub(".launch", EVENTS.sub("events.out.tfevents", name))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_write_that_fails_ends_the_run_with_its_path_or_not_at_all(run, variant):
    more, usual = VARIANTS[variant]
    done, _, writes = run(*more, at=0, error="EIO")
    assert done.returncode == 0, done.stderr
    different = {(kind, target(path)): number for number, (kind, path, _) in enumerate(writes, start=1)}
    assert len(different) >= 40
    numbers = random.Random(variant).sample(sorted(different.values()), len(different))
    cases = [(number, ERRORS[(place + turn) % 4]) for turn in range(4) for place, number in enumerate(numbers)]
    for number, error in cases[: int(os.environ.get("ATTACKS", usual))]:
        done, place, seen = run(*more, at=number, error=error)
        told = done.stdout + done.stderr
        ((kind, path, _),) = [write for write in seen if write[2]]
        where = f"{error} at {kind} {path}: {told}"
        assert done.returncode in (0, 1), where
        assert "Traceback" not in told, where
        if done.returncode:
            assert os.strerror(getattr(errno, error)) in told, where
            assert target(path) in told or str(Path(path).parent) in told, where
        for checkpoint in place.rglob("*.ckpt"):
            read_checkpoint(checkpoint)
        assert not list(place.rglob("*.partial")), where
