"""A gradient that is not finite at each step of a run of 60, with each checkpoint setting, and what it leaves behind.

    python tests/attacks/non_finite.py [--share 1.0] [--seed 0] [--settings "every step" ...] [--kinds stop skip rewind]

A small network on digits, in this process. At one step its loss stays finite and the gradient of its first layer is
nan or infinite. runtime.non_finite is stop, skip, rewind, or rewind where the same step is spoilt again each time.
Counted are, over every checkpoint that is written and every file that is left, those that hold a number that is not
finite; runs that end `completed` and should not, or the other way round; and runs whose newest checkpoint is not of
the step that the error or the config says. tests/attacks/test_non_finite_steps.py does a share of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

import exp
from exp.check.plan import Plan, Resolved, adopt, frozen, plan, resolve
from exp.config.freeze import freeze
from exp.engine.checkpoint import AtomicCheckpointIO
from exp.errors import NonFiniteError
from exp.nested import tensors_in
from exp.run import run
from exp.strategies.rank import ALONE

STEPS = 60
COMMON = (
    *("security.allow=[non_finite]", "data=digits", "data.batch_size=16", "model=sequential", "scheduler=cosine"),
    *("model.layers.hidden.out_features=8", "~model.layers.hidden2", "~model.layers.activation2"),
    *("+model.layers.spoils={_target_: non_finite.Spoils}", "+callbacks.spoiler={_target_: non_finite.Spoiler}"),
    *("hooks=[]", "logger=[]", "metrics=[]", "test=false", "trainer.enable_progress_bar=false"),
    *("trainer.max_epochs=6", "trainer.limit_train_batches=10", "trainer.limit_val_batches=1"),
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "each epoch": (),
    "every step": ("checkpoint.every_n_steps=1",),
    "every 7 steps": ("checkpoint.every_n_steps=7",),
    "by the clock": ("checkpoint.every_n_minutes=0.0002",),
    "three best": ("checkpoint.keep=3", "trainer.val_check_interval=5"),
    "three best by the training's loss": ("checkpoint.keep=3", "monitor=loss/train", "trainer.limit_val_batches=0"),
    "best by the training's loss": ("monitor=loss/train_epoch", "trainer.limit_val_batches=0"),
    "best alone": ("checkpoint.save_last=false",),
    "last alone": ("checkpoint.save_best=false", "checkpoint.every_n_steps=3"),
    "nothing": ("checkpoint.save_last=false", "checkpoint.save_best=false"),
    "by a thread, every step": ("checkpoint.async=true", "checkpoint.every_n_steps=1"),
    "by a thread, three best": ("checkpoint.async=true", "checkpoint.keep=3", "checkpoint.every_n_steps=4"),
    "validation within an epoch": ("trainer.val_check_interval=3", "checkpoint.every_n_steps=4"),
    "averaged weights": ("callbacks=[ema]", "checkpoint.every_n_steps=2"),
    "accumulation": (
        *("trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=20", "checkpoint.every_n_steps=1"),
    ),
    "Lightning's loop": ("runtime.steps_per_execution=1", "checkpoint.every_n_steps=5"),
    "phases": ("phases=[body_and_head]", "checkpoint.every_n_steps=2"),
    "ends within an epoch": ("trainer.max_epochs=null", "trainer.max_steps=60", "trainer.limit_train_batches=25"),
}
KINDS = ("stop", "skip", "rewind", "rewind again")
VALUES = (float("nan"), float("inf"))


class Spoils(nn.Module):
    """Gives its input back; while it is `active`, with a gradient of `value`."""

    active, value = False, VALUES[0]

    def forward(self, x: Tensor) -> Tensor:
        if Spoils.active and x.requires_grad:
            x.register_hook(lambda gradient: gradient + Spoils.value)
        return x


class Spoiler(Callback):
    """Makes `Spoils` active at optimizer step `at`, the first `times` times that it comes."""

    at, times = 1, 1

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        if trainer.global_step + 1 == Spoiler.at and Spoiler.times:
            Spoils.active = True

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if Spoils.active and trainer.global_step >= Spoiler.at:
            self._has_spoilt()

    def on_exception(self, *_: object) -> None:
        # A loss that is nan in the same step ends it before its batch does.
        if Spoils.active:
            self._has_spoilt()

    def _has_spoilt(self) -> None:
        Spoils.active = False
        Spoiler.times -= 1


@dataclass(kw_only=True)
class Found:
    """What so many runs left."""

    runs: int = 0
    written: int = 0
    files: int = 0
    completed: int = 0
    failed: int = 0
    not_finite: list[str] = field(default_factory=list)
    wrong_end: list[str] = field(default_factory=list)
    wrong_step: list[str] = field(default_factory=list)


def cases(share: float, seed: int, *, settings: list[str], kinds: list[str]) -> list[tuple[str, str, int, float]]:
    """The setting, the kind, the step and the value of each run; of a share, at random."""
    draws = random.Random(seed)
    every = itertools.product(settings, kinds, range(1, STEPS + 1))
    return [(*case, draws.choice(VALUES)) for case in every if draws.random() < share]


def attack(place: Path, chosen: list[tuple[str, str, int, float]]) -> Found:
    """place: an empty folder, the working directory."""
    found = Found()
    known: dict[tuple[str, str], tuple[Path, Resolved]] = {}
    for number, (setting, kind, step, value) in enumerate(chosen):
        if (setting, kind) not in known:
            known[setting, kind] = _frozen(place / f"frozen{number}", setting, kind)
        decided = adopt(known[setting, kind][1], rank=ALONE)
        directory = shutil.copytree(known[setting, kind][0], place / f"run{number}")
        case = f"{setting}, {kind}, {value} at step {step}"
        with _looking_at_what_is_written(case, found):
            error = _run(directory, decided, step, value, times=100 if kind == "rewind again" else 1)
        _judge(directory, case, kind=kind, step=step, error=error, found=found)
        shutil.rmtree(directory)
        found.runs += 1
    return found


def _frozen(directory: Path, setting: str, kind: str) -> tuple[Path, Resolved]:
    words = (*COMMON, *SETTINGS[setting], f"runtime.non_finite={kind.split()[0]}", f"hydra.run.dir={directory}")
    if kind == "rewind again":
        words += ("runtime.max_rewinds=1",)
    # A group's words would take the callback away that was added to it before.
    words = tuple(word for word in words if not word.startswith("callbacks="))
    if "callbacks=[ema]" in SETTINGS[setting]:
        words += ("+callbacks=ema",)
    freeze(plan(resolve(exp.compose(list(words)))).resolved.config)
    return directory, frozen(directory)


def _run(directory: Path, decided: Plan, step: int, value: float, *, times: int) -> str | None:
    """What the run failed with, as it is told; None where it completes."""
    Spoils.active, Spoils.value, Spoiler.at, Spoiler.times = False, value, step, times
    try:
        run(directory, decided=decided)
    except NonFiniteError as error:
        return str(error)
    return None


@contextmanager
def _looking_at_what_is_written(case: str, found: Found) -> Iterator[None]:
    write = AtomicCheckpointIO.save_checkpoint

    def looking(io: AtomicCheckpointIO, checkpoint: dict[str, Any], path: Any, *more: Any, **named: Any) -> None:
        found.written += 1
        if not _is_finite(checkpoint):
            found.not_finite.append(f"{case}: written as {Path(path).name} at step {checkpoint['global_step']}")
        write(io, checkpoint, path, *more, **named)

    AtomicCheckpointIO.save_checkpoint = looking  # type: ignore[method-assign]
    try:
        yield
    finally:
        AtomicCheckpointIO.save_checkpoint = write  # type: ignore[method-assign]


def _is_finite(checkpoint: dict[str, Any]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(checkpoint) if tensor.is_floating_point())


def _judge(directory: Path, case: str, *, kind: str, step: int, error: str | None, found: Found) -> None:
    report = json.loads((directory / "report.json").read_text())
    status = report["status"]
    found.completed += status == "completed"
    found.failed += status == "failed"
    expected = "completed" if kind in ("skip", "rewind") else "failed"
    if status != expected or (error is None) != (expected == "completed"):
        found.wrong_end.append(f"{case}: {status}, {error}")
    steps = {}
    for path in sorted((directory / "checkpoints").glob("*.ckpt")):
        # Not as exp reads it.
        checkpoint = torch.load(path, weights_only=True)
        found.files += 1
        steps[path.name] = checkpoint["global_step"]
        if not _is_finite(checkpoint):
            found.not_finite.append(f"{case}: left as {path.name} of step {steps[path.name]}")
    if expected == "failed":
        newest = max(steps.values(), default=0)
        told = [f"checkpoints/{name} is of step {newest}, and good" for name in steps if steps[name] == newest]
        if newest >= step or not any(words in str(error) for words in told or ["no checkpoint was saved before it"]):
            found.wrong_step.append(f"{case}: {steps}, {error}")
    elif steps.get("last.ckpt", STEPS) != STEPS or report["steps"] != STEPS:
        found.wrong_step.append(f"{case}: {steps}, {report['steps']} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all runs, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    chosen = cases(arguments.share, arguments.seed, settings=arguments.settings, kinds=arguments.kinds)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="non-finite-") as name:
        os.chdir(name)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what the runs print
        found = attack(Path(name).resolve(), chosen)
        sys.stdout = sys.__stdout__
        os.chdir("/")
    for key, value in vars(found).items():
        print(f"{key:16}{value if isinstance(value, int) else len(value)}")
    print(f"{'processor':16}{time.process_time() - began:.0f} s")
    for told in [*found.not_finite, *found.wrong_end, *found.wrong_step]:
        print(f"\n{told}")
    sys.exit(bool(found.not_finite or found.wrong_end or found.wrong_step))


if __name__ == "__main__":
    # As the configs name it: the classes are those of that module.
    import non_finite

    non_finite.main()
