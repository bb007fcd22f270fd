"""Run a step's forward and backward again, apart from the run, for whoever wants a look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.compilation import is_compiled
from exp.engine.module import TrainingModule
from exp.engine.observer import UNOBSERVED, Turn
from exp.hooks.step import Look, Update, Window
from exp.precision.plugin import RunPrecision
from exp.precision.scaler import can_hold
from exp.shared_types import Batch


def update_of(
    module: TrainingModule,
    optimizer: Optimizer,
    batches: Sequence[tuple[Batch, int]],
    losses: Sequence[Tensor],
    turn: Turn,
) -> Update:
    """Make what a hook is told before this optimizer steps. losses: of the micro-batches."""
    trainer = module.trainer
    precision = trainer.precision_plugin
    own = precision if isinstance(precision, RunPrecision) else None
    return Update(
        window=Window(batches=tuple(batches), epoch=trainer.current_epoch, phase=turn.phase, turn=turn.places),
        optimizer=optimizer,
        losses=tuple(losses),
        scale=own.loss_scale if own is not None and own.is_scaled else None,
        objective=module.objective,
        is_compiled=is_compiled(module.network),
        can_hold=own is not None and can_hold(optimizer),
        hold=_cannot_hold if own is None else partial(own.hold, optimizer),
        again=partial(run_again, module),
        save=_save,
    )


def run_again(module: TrainingModule, window: Window, place: int, look: Look) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of one micro-batch of a window, under a look at what is done.

    Parameters, their gradients and the optimizer are left alone; buffers are not. Every random number is the step's
    own. A compiled network runs uncompiled.

    Returns: the loss, 0-d and detached, and the gradients of the parameters that the step changes and that have one.
    """
    named = module.trained_in(window)
    with torch.enable_grad(), _apart(module):
        with look.forward():
            loss = module.scaled_loss(window, place)
        if not loss.requires_grad:
            return loss, {}
        look.backward(loss)
        # Not loss.backward(): what waits at the parameters, as ddp does, is not told.
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named, found, strict=True)
    return loss.detach(), {name: gradient for name, gradient in pairs if gradient is not None}


@contextmanager
def _apart(module: TrainingModule) -> Iterator[None]:
    """Run without an observer, and the layers one by one, so that hooks at them see it."""
    observer = module.observer
    module.observer = UNOBSERVED
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled(module.network) else nullcontext():
            yield
    finally:
        module.observer = observer


def _cannot_hold(flag: Tensor) -> None:
    raise NotImplementedError("this precision cannot hold an optimizer's step; ask can_hold first")


def _save(path: Path, contents: Mapping[str, Any]) -> None:
    AtomicCheckpointIO().save_checkpoint(dict(contents), path)
