"""kill -9 at random moments of a run, again and again, until it is done; then it is held against the unbroken one.

    python tests/attacks/kills.py [--kills 1000] [--full] [--seed 0] [--by-thread]

A run validates at every step and saves so often that most moments are inside a save. Each kill is followed by a run in
a new directory that goes on from what is there, `resume=` it or `resume=auto` by draw, as a person would type it, and
that is killed as well: while it reads, sweeps, brings along, trains, saves or prunes. How many of the best are kept,
whether a thread writes and what makes a save due is drawn anew for each chain.
--full: two ranks, fp16 with its scaler, two workers, accumulation over 3 batches, averaged weights, phases; the kill
hits the launching process or one of its ranks. --by-thread: a thread writes in every chain.
Counted are checkpoints that cannot be read, chains whose checkpoints differ from the unbroken run's by a bit, files
half written that a later run left, sets of the best that are not what last.ckpt says, and runs that failed.
tests/attacks/test_kills.py does the same with 23 kills.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import shutil
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
    *("trainer.limit_val_batches=1", "trainer.val_check_interval=1", "trainer.enable_progress_bar=false"),
    *("name={chain}", "hydra.run.dir=outputs/{chain}/{run}"),
)
KEPT = (1, 2, 3)
DUE = ("checkpoint.every_n_steps=1", "checkpoint.every_n_steps=4", "checkpoint.every_n_minutes=0.0001")
PLAIN = (*COMMON, "trainer.max_epochs=3")
FULL = (
    *COMMON,
    *("trainer.max_epochs=4", "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "precision=fp16"),
    *("data.num_workers=2", "trainer.accumulate_grad_batches=3", "callbacks=[ema]", "phases=[body_and_head]"),
)
# What two unbroken runs do not share either: the clock, times and memory, their checksum, and the config, which names
# the resume.
APART = ("exp_seconds", "exp_latest", "exp_manifest", "exp_config")
# What a kill between two saves may have cost, and steps that are done again give back.
RANKING = ("exp_best", "exp_kept")
# How often Lightning stepped and validated since the epoch began or the run went on; nothing is decided by it.
COUNTERS = re.compile(r"\.loops\..*\.(optim_progress\.optimizer\.\w+\.current|val_loop\.batch_progress\.\w+)\.\w+")


@dataclass(kw_only=True)
class Found:
    """What so many kills did."""

    kills: int = 0
    chains: int = 0
    inside_saving: int = 0
    of_them_threaded: int = 0
    inside_pruning: int = 0
    inside_resuming: int = 0
    unreadable: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    inconsistent: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Unbroken:
    """What a run that nothing disturbs comes to, and the seconds to its first checkpoint and from there to its end."""

    last: dict[str, Any]
    best: dict[str, dict[str, Any]]
    until_saved: float
    seconds: float


def attack(
    commands: Any,
    place: Path,
    overrides: tuple[str, ...],
    *,
    kills: int,
    seed: int,
    by_thread: bool = False,
    tell: int | None = None,
) -> Found:
    """commands: of tests/conftest.py. place: an empty folder. tell: after how many kills the counts are printed."""
    draws, found, began = random.Random(seed), Found(), time.monotonic()
    unbroken: dict[int, Unbroken] = {}
    while found.kills < kills:
        found.chains += 1
        keep, is_threaded = draws.choice(KEPT), draws.random() < 0.5 or by_thread
        drawn = (f"checkpoint.keep={keep}", f"checkpoint.async={str(is_threaded).lower()}", draws.choice(DUE))
        if keep not in unbroken:
            unbroken[keep] = _unbroken(commands, place, (*overrides, drawn[0]), keep)
        chain = place / "outputs" / f"chain{found.chains}"
        directories: list[Path] = []
        ended = False
        while not ended:
            directories.append(chain / f"run{len(directories)}")
            last = _newest(directories)
            resume = [] if last is None else [f"resume={draws.choice(['auto', last.relative_to(place)])}"]
            command = commands.start(*_words((*overrides, *drawn), directories[-1]), *resume, cwd=place)
            checkpoints = directories[-1] / "checkpoints"
            if found.kills == kills:  # the last chain is left to end
                _wait(command, checkpoints, 300.0)
            elif draws.random() < 0.2:
                _wait(command, directories[-1], draws.random() * unbroken[keep].until_saved)
            else:
                # To hit the moment of pruning takes more than luck.
                aim = keep if keep > 1 and draws.random() < 0.3 else None
                delay = draws.uniform(0, 0.6) * unbroken[keep].seconds
                _wait(command, checkpoints / "last.ckpt", delay, aim=aim)
            ended = not _kill(command, draws)
            if ended:
                done = command.end()
                if done.returncode:
                    found.failed.append(f"{directories[-1]} {drawn}: {done.stdout}{done.stderr}")
            else:
                found.kills += 1
                _look(directories, found, keep=keep, is_threaded=is_threaded)
                if tell is not None and found.kills % tell == 0:
                    print(f"{time.monotonic() - began:.0f} s: {_counts(found)}", flush=True)
        faults = len(_faults(found))
        _judge(directories, unbroken[keep], found, drawn=drawn)
        if len(_faults(found)) == faults:
            shutil.rmtree(chain)
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


def _unbroken(commands: Any, place: Path, overrides: tuple[str, ...], keep: int) -> Unbroken:
    directory = place / "outputs" / "unbroken" / str(keep)
    command = commands.start(*_words((*overrides, DUE[0]), directory), cwd=place)
    _wait(command, directory, 0.0)
    began = time.monotonic()
    last = directory / "checkpoints" / "last.ckpt"
    _wait(command, last, 0.0)
    saved = time.monotonic()
    done = command.end()
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = time.monotonic() - saved
    best = _contents_of_best(directory)
    return Unbroken(last=_content(last), best=best, until_saved=saved - began, seconds=seconds)


def _words(overrides: tuple[str, ...], directory: Path) -> list[str]:
    names = {"{chain}": directory.parent.name, "{run}": directory.name}
    words = list(overrides)
    for place, name in names.items():
        words = [word.replace(place, name) for word in words]
    return words


def _content(path: Path, *, apart: tuple[str, ...] = APART) -> dict[str, Any]:
    return {name: value for name, value in read_checkpoint(path).items() if name not in apart}


def _contents_of_best(directory: Path) -> dict[str, dict[str, Any]]:
    paths = (directory / "checkpoints").glob("best*.ckpt")
    return {path.name: _content(path, apart=(*APART, *RANKING)) for path in paths}


def _newest(directories: list[Path]) -> Path | None:
    saved = [directory / "checkpoints" / "last.ckpt" for directory in directories]
    return next((path for path in reversed(saved) if path.is_file()), None)


def _wait(command: Any, path: Path, delay: float, *, aim: int | None = None) -> None:
    """Until a run has made this, and so many seconds more; less where it ends, or more than `aim` lie beside it."""
    while not path.exists() and command.process.is_alive():
        time.sleep(0.002)
    ends = time.monotonic() + delay
    while aim is not None and time.monotonic() < ends and command.process.is_alive():
        if len([*path.parent.glob("best-*.ckpt")]) > aim:
            return
        time.sleep(0.0005)
    command.process.join(max(0.0, ends - time.monotonic()))


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


def _look(directories: list[Path], found: Found, *, keep: int, is_threaded: bool) -> None:
    """At what a kill left."""
    checkpoints = directories[-1] / "checkpoints"
    is_saving = bool(_half_written(directories[-1]))
    found.inside_saving += is_saving
    found.of_them_threaded += is_saving and is_threaded
    found.inside_pruning += len([*checkpoints.glob("best-*.ckpt")]) > (keep if keep > 1 else 0)
    found.inside_resuming += _newest(directories[:-1]) is not None and not (checkpoints / "last.ckpt").is_file()
    for path in checkpoints.glob("*.ckpt"):
        try:
            state = read_checkpoint(path)
        except RunError as error:
            found.unreadable.append(str(error))
            continue
        step = re.fullmatch(r"best-(\d+)\.ckpt", path.name)
        if step and state["exp_position"]["step"] != int(step[1]):
            found.inconsistent.append(f"{path} is of step {state['exp_position']['step']}")


def _half_written(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "partial" in path.name or path.name.endswith(".tmp")]


def _judge(directories: list[Path], unbroken: Unbroken, found: Found, *, drawn: tuple[str, ...]) -> None:
    """A chain that has come to its end, or to the last of its kills."""
    directory = directories[-1]
    where = f"{directory} {' '.join(drawn)}"
    if not (directory / "checkpoints" / "last.ckpt").is_file():
        found.failed.append(f"{where}: no last.ckpt")
        return
    last, best = _content(directory / "checkpoints" / "last.ckpt"), _contents_of_best(directory)
    if told := difference(last, unbroken.last):
        found.different.append(f"{where}: {told}")
    for name in best.keys() & unbroken.best.keys():
        if told := difference(best[name], unbroken.best[name]):
            found.different.append(f"{where}: {name}: {told}")
    if best.keys() != unbroken.best.keys():
        found.different.append(f"{where}: {sorted(best)} are there, and {sorted(unbroken.best)} of the unbroken run")
    kept = {"best.ckpt", *(f"best-{entry['step']}.ckpt" for entry in last["exp_kept"])}
    if kept != best.keys():
        found.inconsistent.append(f"{where}: {sorted(best)} are there, and {sorted(kept)} are kept")
    found.partial += [str(path) for one in directories for path in _half_written(one)]


def _faults(found: Found) -> list[str]:
    return [*found.unreadable, *found.different, *found.partial, *found.inconsistent, *found.failed]


def _counts(found: Found) -> str:
    values = vars(found).items()
    return ", ".join(f"{key} {value if isinstance(value, int) else len(value)}" for key, value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-thread", action="store_true")
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
        found = attack(
            commands,
            place,
            overrides,
            kills=arguments.kills,
            seed=arguments.seed,
            by_thread=arguments.by_thread,
            tell=50,
        )
        commands.close()
    print(_counts(found))
    for told in _faults(found):
        print(f"\n{told}")
    sys.exit(bool(_faults(found)))


if __name__ == "__main__":
    main()
