"""Run a step that failed again on the CPU, name the layer in which it fails, and keep its batch.

On a GPU an index out of range is a "device-side assert", which names nothing, and no tensor of the device can be read
after it. So the weights and the batch are copied to the CPU before each step. That is for debugging.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from exp.data.randomness import reseed
from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.module import TrainingModule
from exp.errors import ExpError, Interrupted, RunError, UserCodeError, one_line, shortened
from exp.hooks.step_trace import named_modules, watched
from exp.nested import moved
from exp.shared_types import Batch, Stage
from exp.strategies.model_parallel import ModelParallel

CPU = torch.device("cpu")
PASSED = (
    "Run again on the CPU, in float32, it does not fail. The error above is at the kernel that failed, because "
    "launches were blocking: look at its frames, or at memory that a kernel of your own writes"
)


class FailingStep(Callback):
    """A callback that keeps the beginning of each step, and finds where a failed step fails on the CPU.

    Args:
        module: Module before it is moved to a device. None for a module of the user, of which no step runs again.
    """

    def __init__(self, module: TrainingModule | None) -> None:
        super().__init__()
        self._module = module
        self._parts = None if module is None else copy.deepcopy((module.network, module.objective))
        self._step: tuple[Stage, Batch, int, int] | None = None
        self._directory = Path()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep("train", trainer, batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep("val", trainer, batch, batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep("test", trainer, batch, batch_idx)

    def _keep(self, stage: Stage, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._module is None or self._parts is None or not isinstance(batch, Batch):
            return
        epoch = trainer.current_epoch if stage == "train" else 0
        self._directory = Path(trainer.default_root_dir)
        self._step = stage, batch._replace(data=moved(batch.data, CPU)), batch_idx, epoch
        # A rank that has parts of the weights keeps the initial ones, which will do for an index.
        if not isinstance(trainer.strategy, ModelParallel):
            for target, source in zip(self._parts, (self._module.network, self._module.objective), strict=True):
                _copy(source, target)

    def named(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of one that ended a step, with the layer and the reason on the CPU."""
        is_explained = isinstance(error, ExpError) and not isinstance(error, UserCodeError)
        if is_explained or not isinstance(error, Exception) or isinstance(error, Interrupted) or self._step is None:
            return error
        stage, _, batch_idx, _ = self._step
        cause, frames = (error.cause, error.frames) if isinstance(error, UserCodeError) else (one_line(error), "")
        head = f"batch {batch_idx} of {stage} failed with {cause}"
        named = RunError("\n".join(filter(None, [head, frames, *self._found()])))
        named.__cause__ = error
        return named

    def _found(self) -> Iterator[str]:
        """Run the step on the CPU and describe the result, then keep its batch."""
        assert self._module is not None
        assert self._parts is not None
        assert self._step is not None
        stage, batch, batch_idx, epoch = self._step
        network, objective = self._parts
        modules, called = named_modules(network, objective), list[str]()

        def enter(name: str, *_: object) -> None:
            called.append(name)

        def leave(name: str, *_: object) -> None:
            while called.pop() != name:  # the forward of a module within this one raised, and was caught
                pass

        reseed(seed=self._module.seed, rank=self._module.rank, epoch=epoch, batch=batch_idx, stage=stage)
        place = "between the layers"
        try:
            with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(stage == "train"):
                with watched(modules, enter, leave):
                    loss = self._module.loss_of(batch, network=network, objective=objective)
                place = "in the backward"
                if loss.requires_grad:
                    loss.backward()
            yield PASSED
        except Exception as error:  # any exception is the one to describe
            if called:
                place = f"in `{called[-1] or '(network)'}` ({type(modules[called[-1]]).__name__})"
            yield f"Run again on the CPU, it fails {place}: {shortened(one_line(error), most=300)}"
        rank = f".rank{self._module.rank}" if self._module.rank else ""
        path = self._directory / "failing_step" / f"{stage}-{batch_idx}{rank}.pt"
        try:
            AtomicCheckpointIO().save_checkpoint({"data": batch.data, "batch_idx": batch_idx, "epoch": epoch}, path)
        except (OSError, RunError) as error:
            yield f"Its batch could not be kept in {path}: {error}"
        else:
            yield f"Its batch is in {os.path.relpath(path)}"


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Give a module on the CPU the weights, buffers and modes of another like it."""
    with torch.no_grad():
        for own, other in ((target.parameters(), source.parameters()), (target.buffers(), source.buffers())):
            for one, now in zip(own, other, strict=True):
                one.copy_(now.detach())
    for part, its_source in zip(target.modules(), source.modules(), strict=True):
        part.training = its_source.training
