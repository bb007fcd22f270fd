"""Short run for the tests of the engine, in this process or as a program in another process.

The program reads SETTINGS (see `main`), and writes to their directory. values.<rank>.jsonl has one line for each logged
value, written immediately, so that a killed run leaves it. A run that ends normally writes weights.<rank>.pt and
result.<rank>.json.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.engine.checkpoint import AtomicCheckpointIO, ThreadedCheckpointIO, read_checkpoint
from exp.engine.checkpointing import Checkpointing
from exp.engine.datamodule import RunData
from exp.engine.ema import ExponentialMovingAverage
from exp.engine.lean_loop import run_several_at_once
from exp.engine.module import TrainingModule
from exp.engine.non_finite import UndoneForward
from exp.engine.phased_module import PhasedModule
from exp.engine.progress import take_limits
from exp.engine.recording import Recording
from exp.engine.start_hooks import StartHooks
from exp.engine.stopping import Stopping
from exp.errors import ExpError
from exp.objectives.metrics import Accuracy
from exp.objectives.objective import Objective
from exp.objectives.terms import CrossEntropy
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.optim.schedules import Cosine
from exp.precision.plugin import build_precision
from exp.strategies.ddp import DDP
from exp.strategies.placement import Machine, placement
from exp.strategies.process_group import join, meet
from exp.strategies.rank import Rank
from exp.strategies.single import Single
from exp.strategies.strategy import trainer_arguments

SCHEDULES: dict[str, tuple[Any, str]] = {
    "cosine": (functools.partial(Cosine, warmup_steps=3), "step"),
    "steps": (functools.partial(StepLR, step_size=1, gamma=0.5), "epoch"),
    # The loss never improves by the threshold of 1, so that the rate falls at every second epoch.
    "plateau": (functools.partial(ReduceLROnPlateau, patience=0, threshold=1.0), "epoch"),
}
CALLBACKS: dict[str, Any] = {
    "ema": functools.partial(ExponentialMovingAverage, decay=0.5),
    "early_stopping": functools.partial(EarlyStopping, monitor="loss/val", patience=1, min_delta=0.05),
}


# Entries of a checkpoint that are measurements, and Lightning's counters, which the saved position replaces.
NOT_COMPARED = {"exp_seconds", "exp_latest", "exp_manifest", "loops"}


def saved(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint that are equal for two equal runs, in a form that `==` compares."""
    return {key: comparable(value) for key, value in read_checkpoint(path).items() if key not in NOT_COMPARED}


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): comparable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


class Values(Logger):
    """Logger that keeps values by (tag, step), and writes each to a file immediately."""

    name, version = "values", ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.seen: dict[tuple[str, int], float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        with self.path.open("a") as file:
            for tag, value in metrics.items():
                assert (tag, step) not in self.seen, f"{tag} was logged twice at step {step}"
                self.seen[tag, step] = value
                file.write(json.dumps([tag, step, value]) + "\n")

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Killed(Exception):
    """Exception that replaces a kill in tests that run in one process."""


def kill() -> None:
    raise Killed


class At(Callback):
    """Callback that calls an action at the n-th call of one of its hooks."""

    def __init__(self, hook: str, count: int, action: Any = kill) -> None:
        self._left = count
        self._action = action
        setattr(self, hook, self._count)

    def _count(self, *_: Any, **__: Any) -> None:
        self._left -= 1
        if not self._left:
            self._action()


class Batches(Callback):
    """Callback that keeps the training batches with epoch and number."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, batch.data))


def samples(count: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long()


def network(*, dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def two_phases() -> list[Phase]:
    """Return two phases: the head trains at every step with AdamW and a schedule, the body at every second with SGD."""
    head = Optimization(
        optimizer_factory=functools.partial(torch.optim.AdamW, lr=1e-2),
        schedule_factory=functools.partial(Cosine, warmup_steps=3),
    )
    rest = Optimization(
        optimizer_factory=functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        schedule_factory=functools.partial(StepLR, step_size=1, gamma=0.5),
        interval="epoch",
    )
    return [
        Phase(name="head", terms=["ce"], parameters=["4.*"], optimization=head, gradient_clip_val=0.5, repeats=2),
        Phase(name="body", terms=["ce"], parameters=["0.*", "1.*"], optimization=rest, every_n_steps=2),
    ]


class Small:
    """Small run with 105 training samples in 7 batches of at most 16.

    The argument `io` writes the checkpoints; None writes them without a thread.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        schedule: str | None = None,
        word: str = "fp32",
        callbacks: tuple[Any, ...] = (),
        stages: tuple[Any, ...] = ("train", "val", "test"),
        every_n_steps: int | None = 4,
        batch_size: int = 16,
        data: Data | None = None,
        model: nn.Module | None = None,
        plain_network: bool = False,
        hooks: dict[str, Any] | None = None,
        terms: dict[str, nn.Module] | None = None,
        loss: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        module: Any = None,
        phases: bool = False,
        rank: int = 0,
        world_size: int = 1,
        store: str | None = None,
        steps_per_execution: int | None = None,
        non_finite: str = "stop",
        saving: dict[str, Any] | None = None,
        io: AtomicCheckpointIO | None = None,
        **trainer: Any,
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        inputs, targets = samples()
        data = data or Data(
            dataset=Tensors(entries=(inputs, targets), num_classes=2),
            batch_size=batch_size,
            parts={"train": 0.7, "val": 0.2, "test": 0.1},
        )
        arguments, limits = take_limits({"max_epochs": 4, "log_every_n_steps": 3, **trainer})
        if loss is not None:
            terms = {"ce": CrossEntropy(**loss)}
        torch.manual_seed(0)
        factory, interval = SCHEDULES[schedule] if schedule else (None, "step")
        if module is None:
            module = functools.partial(PhasedModule, phases=two_phases()) if phases else TrainingModule
        self.module = module(
            # plain_network has no dropout and batch norm, which depend on the number of ranks.
            network=model or (nn.Linear(6, 2) if plain_network else network()),
            objective=Objective(terms or {"ce": nn.CrossEntropyLoss()}),
            metrics={"accuracy": Accuracy(num_classes=2, average="micro")} if metrics is None else metrics,
            metric_stages=stages,
            optimization=Optimization(
                optimizer_factory=functools.partial(torch.optim.AdamW, lr=1e-2),
                schedule_factory=factory,
                interval=interval,
                monitor="loss/val",
            ),
            limits=limits,
            rank=rank,
        )
        self.data = RunData(data=data)
        skips = non_finite == "skip"
        self.recording = Recording(hooks=hooks, skips=skips)
        self.checkpointing = Checkpointing(directory=directory, every_n_steps=every_n_steps, **(saving or {}))
        self.stopping = Stopping(limits=limits, checkpointing=self.checkpointing)
        self.values = Values(self.directory / f"values.{rank}.jsonl")
        own = Rank(global_rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, store=store)
        placed = placement(
            "ddp" if world_size > 1 else "single",
            devices=world_size,
            accelerator="cpu",
            machine=Machine(gpus=0, mps=False),
        )
        join(own, placed, timeout_seconds=60)
        strategy = DDP() if world_size > 1 else Single(name="single")
        arguments |= trainer_arguments(strategy, placement=placed, rank=own)
        precision = build_precision(word, device_type="cpu", enabled=word == "fp16", skips=skips)
        precision.represent(self.module)
        arguments["plugins"] = [
            *arguments["plugins"],
            precision,
            io or AtomicCheckpointIO(),
        ]
        self.trainer = Trainer(
            **arguments,
            callbacks=[
                self.recording,
                *([UndoneForward()] if skips else []),
                self.checkpointing,
                self.stopping,
                StartHooks(),
                *(CALLBACKS[one]() if isinstance(one, str) else one for one in callbacks),
            ],
            logger=self.values,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        run_several_at_once(self.trainer, steps_per_execution=steps_per_execution)

    @property
    def last(self) -> Path:
        return self.checkpointing.last_path

    @property
    def is_lean(self) -> bool:
        """Return True if the run makes several steps in one call of Lightning's loop."""
        return not self.trainer.fit_loop.epoch_loop.is_one_by_one

    def fit(self, *, resume: Path | str | None = None) -> None:
        self.trainer.fit(
            self.module, datamodule=self.data, ckpt_path=None if resume is None else str(resume), weights_only=True
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.network.state_dict().items()}


def main(settings: dict[str, Any]) -> None:
    """Run with the settings of Small, and with these additional ones:

    kill: [hook, count]; the process kills itself at this call of the hook
    slow_steps: seconds of sleep per batch
    spoilt_rank: rank that gets nan weights after its third step
    resume: if true, resume from last.ckpt if it exists
    threaded: if true, a thread writes the checkpoints
    """
    torch.set_num_threads(1)
    settings = dict(settings)
    kill_at, resume = settings.pop("kill", None), settings.pop("resume", False)
    if settings.pop("threaded", False):
        settings["io"] = ThreadedCheckpointIO()
    extra: list[Any] = list(settings.pop("callbacks", ()))
    if kill_at is not None:
        extra.append(At(*kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    if seconds := settings.pop("slow_steps", 0):
        callback = Callback()
        callback.on_train_batch_start = lambda *_: time.sleep(seconds)
        extra.append(callback)
    spoilt, rank = settings.pop("spoilt_rank", None), settings.get("rank", 0)
    if spoilt is not None:  # all ranks need the callback, because it selects Lightning's loop
        value = float("nan") if spoilt == rank else 0.0
        extra.append(At("on_train_batch_end", 3, lambda: next(small.module.parameters()).data.add_(value)))
    small = Small(callbacks=tuple(extra), **settings)
    try:
        small.fit(resume=small.last if resume and small.last.is_file() else None)
        result = {"step": small.trainer.global_step, "epoch": small.trainer.current_epoch, "error": None}
    except ExpError as error:
        result = {"step": small.trainer.global_step, "error": str(error), "status": error.exit_status}
    torch.save(small.weights(), small.directory / f"weights.{rank}.pt")
    result["metrics"], result["best"] = small.recording.metrics, small.checkpointing.best
    (small.directory / f"result.{rank}.json").write_text(json.dumps(result))
    meet()
    os._exit(0 if result["error"] is None else result["status"])


if __name__ == "__main__":
    main(globals()["SETTINGS"])
