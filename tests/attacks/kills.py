"""kill -9 at random moments of a run, again and again, until it is done; then it is held against the unbroken one.

    python tests/attacks/kills.py [--kills 1000] [--full] [--seed 0]

A run saves at every step, so that most moments are inside a save. Each kill is followed by `resume=` of what is there,
in a new directory, as a person would type it, and that is killed as well: while it reads, sweeps, trains or saves.
--full: two ranks, fp16 with its scaler, two workers, accumulation over 3 batches, averaged weights, phases; the kill
hits the launching process or one of its ranks. Counted are checkpoints that cannot be read, chains whose last
checkpoint differs from the unbroken run's by a bit, files half written that a later run left, and runs that failed.
tests/attacks/test_kills.py does the same with 50 kills.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from exp.engine.checkpoint import read_checkpoint
from exp.errors import RunError

COMMON = (
    *("model=sequential", "hooks=[]", "logger=[]", "test=false", "data.batch_size=16", "trainer.limit_train_batches=6"),
    *("trainer.limit_val_batches=1", "checkpoint.every_n_steps=1", "trainer.enable_progress_bar=false"),
    "hydra.run.dir=outputs/{number}",
)
PLAIN = (*COMMON, "trainer.max_epochs=5")
FULL = (
    *COMMON,
    *("trainer.max_epochs=4", "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "precision=fp16"),
    *("data.num_workers=2", "trainer.accumulate_grad_batches=3", "callbacks=[ema]", "phases=[body_and_head]"),
)
# What two unbroken runs do not share either: the clock, the checksum of it, and the config, which names the resume.
APART = ("exp_seconds", "exp_manifest", "exp_config")
# How often Lightning stepped since the epoch began or the run went on; nothing is decided by it, its totals are equal.
COUNTERS = re.compile(r"\.loops\..*\.optim_progress\.optimizer\.\w+\.current\.\w+")


@dataclass(kw_only=True)
class Found:
    """What so many kills did."""

    kills: int = 0
    chains: int = 0
    inside_saving: int = 0
    before_a_step: int = 0
    unreadable: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def attack(commands: Any, place: Path, overrides: tuple[str, ...], *, kills: int, seed: int) -> Found:
    """commands: of tests/conftest.py. place: an empty folder."""
    draws, found, numbers = random.Random(seed), Found(), itertools.count()
    unbroken, seconds = _unbroken(commands, place, overrides)
    while found.kills < kills:
        found.chains += 1
        directories: list[Path] = []
        ended = False
        while not ended:
            directories.append(place / "outputs" / f"run{next(numbers)}")
            last = _newest(directories)
            resume = [] if last is None else [f"resume={last.relative_to(place)}"]
            command = commands.start(*_words(overrides, directories[-1]), *resume, cwd=place)
            # The last chain is left to end.
            delay = draws.uniform(0, 0.7 * seconds) if found.kills < kills else 300.0
            _wait(command, directories[-1], delay)
            ended = not _kill(command, draws)
            if ended:
                done = command.end()
                if done.returncode:
                    found.failed.append(f"{directories[-1].name}: {done.stdout}{done.stderr}")
            else:
                found.kills += 1
                _look(directories[-1], found)
        _judge(directories, unbroken, found)
    return found


def difference(one: Any, other: Any, key: str = "") -> str | None:
    """The first place where two checkpoints differ; tensors are compared bit for bit."""
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
    return next((told for name, *both in pairs if (told := difference(*both, f"{key}.{name}"))), None)


def _unbroken(commands: Any, place: Path, overrides: tuple[str, ...]) -> tuple[dict[str, Any], float]:
    """The last checkpoint of a run that nothing disturbs, and the seconds from its directory to its end."""
    directory = place / "outputs" / "unbroken"
    command = commands.start(*_words(overrides, directory), cwd=place)
    _wait(command, directory, 0.0)
    began = time.monotonic()
    done = command.end()
    assert done.returncode == 0, done.stdout + done.stderr
    return _content(directory / "checkpoints" / "last.ckpt"), time.monotonic() - began


def _words(overrides: tuple[str, ...], directory: Path) -> list[str]:
    return [word.replace("{number}", directory.name) for word in overrides]


def _content(path: Path) -> dict[str, Any]:
    return {name: value for name, value in read_checkpoint(path).items() if name not in APART}


def _newest(directories: list[Path]) -> Path | None:
    saved = [directory / "checkpoints" / "last.ckpt" for directory in directories]
    return next((path for path in reversed(saved) if path.is_file()), None)


def _wait(command: Any, directory: Path, delay: float) -> None:
    """Until a run has its directory, and so many seconds more; less where it ends."""
    while not directory.exists() and command.process.is_alive():
        time.sleep(0.002)
    command.process.join(delay)


def _kill(command: Any, draws: random.Random) -> bool:
    """Kill the process, or with several ranks one of all, and wait for the others; False where it was done before."""
    try:
        process = psutil.Process(command.process.pid)
        tree = [process, *process.children(recursive=True)]
        draws.choice([process, *process.children()]).kill()
    except psutil.NoSuchProcess:
        return False
    command.process.join(60)
    assert not command.process.is_alive(), "a run does not end when one of its ranks is killed"
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive, f"processes are left: {alive}"
    return bool(command.process.exitcode)


def _look(directory: Path, found: Found) -> None:
    """At what a kill left."""
    checkpoints = directory / "checkpoints"
    found.inside_saving += bool(_half_written(directory))
    found.before_a_step += not checkpoints.exists()
    for path in checkpoints.glob("*.ckpt"):
        try:
            read_checkpoint(path)
        except RunError as error:
            found.unreadable.append(str(error))


def _half_written(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "partial" in path.name or path.name.endswith(".tmp")]


def _judge(directories: list[Path], unbroken: dict[str, Any], found: Found) -> None:
    """A chain that has come to its end, or to the last of its kills."""
    last = directories[-1] / "checkpoints" / "last.ckpt"
    if not last.is_file():
        found.failed.append(f"{directories[-1].name}: no last.ckpt")
        return
    if told := difference(_content(last), unbroken):
        found.different.append(f"{directories[-1].name}: {told}")
    # Nobody goes on from a run that was killed before its first whole checkpoint.
    gone_on_from = [one for one in directories if (one / "checkpoints" / "last.ckpt").is_file()]
    found.partial += [str(path) for directory in gone_on_from for path in _half_written(directory)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    spec = importlib.util.spec_from_file_location("warm", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    warm = importlib.util.module_from_spec(spec)
    sys.modules["warm"] = warm
    spec.loader.exec_module(warm)
    # Else every forked process would run this file as its own main module first.
    del sys.modules["__main__"].__file__
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        place = Path(name).resolve()
        commands = warm.Commands(place)
        overrides = FULL if arguments.full else PLAIN
        found = attack(commands, place, overrides, kills=arguments.kills, seed=arguments.seed)
        commands.close()
    for key, value in vars(found).items():
        print(f"{key:16}{value if isinstance(value, int) else len(value)}")
    for told in [*found.unreadable, *found.different, *found.partial, *found.failed]:
        print(f"\n{told}")
    sys.exit(bool(found.unreadable or found.different or found.partial or found.failed))


if __name__ == "__main__":
    main()
