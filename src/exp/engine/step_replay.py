"""Run a step's forward and backward again, apart from the run, with a look at every module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.compilation import is_compiled
from exp.engine.cuda_graphs import GraphedNetwork
from exp.engine.module import TrainingModule
from exp.engine.observer import UNOBSERVED, Turn
from exp.hooks.norms import norms
from exp.hooks.step import Update, Window
from exp.hooks.step_trace import Extent, Trace, Tracer, not_finite
from exp.precision.plugin import RunPrecision
from exp.precision.scaler import can_hold
from exp.types import Batch


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
        is_compiled=is_compiled(module.network) or isinstance(module.run_network, GraphedNetwork),
        can_hold=own is not None and can_hold(optimizer),
        hold=_cannot_hold if own is None else partial(own.hold, optimizer),
        again=partial(trace_again, module),
        save=_save,
    )


def trace_again(module: TrainingModule, window: Window) -> Trace:
    """Run the micro-batches of a window, and trace them up to the first that is not finite.

    Parameters, their gradients and the optimizer are left alone; buffers are not. Every random number is the step's
    own. A compiled network runs uncompiled, and one in CUDA graphs outside them.
    """
    named = module.trained_in(window)
    trace = Trace(count=len(window.batches), tensors=_broken(module))
    sums: dict[str, Tensor] = {}
    for place, (batch, _) in enumerate(window.batches):
        tracer = Tracer(module.network, module.objective)
        loss, gradients = _backward_again(module, window, place, tracer, named)
        if trace.is_bad:
            continue  # the other ranks may have to meet this one in what follows
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        trace.place, trace.batch = place, _broken_entries(batch.data)
        trace.rows, trace.loss = tracer.rows, float(loss)
        trace.gradients = Extent.of(sums.values())
        trace.origin = tracer.origin(is_lost=trace.loss - trace.loss != 0.0)
        if trace.is_bad and batch.world_size == 1:
            return trace
    if not trace.is_bad:
        sizes = dict(zip(sums, norms(list(sums.values())), strict=True))
        trace.overflown = [name for name, size in sizes.items() if not size.isfinite()]
        trace.origin = None
    return trace


def _backward_again(
    module: TrainingModule, window: Window, place: int, tracer: Tracer, named: Mapping[str, nn.Parameter]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch, 0-d and detached, and the gradients of the named parameters that have one."""
    with torch.enable_grad(), _apart(module):
        with tracer.forward():
            loss = module.scaled_loss(window, place)
        if not loss.requires_grad:
            return loss, {}
        tracer.backward(loss)
        # Not loss.backward(): what waits at the parameters, as ddp does, is not told.
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named, found, strict=True)
    return loss.detach(), {name: gradient for name, gradient in pairs if gradient is not None}


@contextmanager
def _apart(module: TrainingModule) -> Iterator[None]:
    """Run without an observer, and the layers one by one, so that the tracer's hooks see them."""
    runner, observer = module.run_network, module.observer
    module.observer = UNOBSERVED
    if isinstance(runner, GraphedNetwork):
        vars(module)["run_network"] = runner.network
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled(module.network) else nullcontext():
            yield
    finally:
        vars(module)["run_network"] = runner
        module.observer = observer


def _broken(module: TrainingModule) -> list[str]:
    network = module.network
    return not_finite({**dict(network.named_parameters()), **dict(network.named_buffers())})


def _broken_entries(data: Any) -> list[str]:
    """Return the names of a batch's entries, or their places, that hold numbers that are none."""
    if isinstance(data, Tensor):
        data = {"input": data}
    elif not isinstance(data, Mapping):
        names = ("input", "target") if len(data) <= 2 else map(str, range(len(data)))
        data = dict(zip(names, data, strict=False))
    return not_finite({name: value for name, value in data.items() if isinstance(value, Tensor)})


def _cannot_hold(flag: Tensor) -> None:
    raise NotImplementedError("this precision cannot hold an optimizer's step; ask can_hold first")


def _save(path: Path, contents: Mapping[str, Any]) -> None:
    AtomicCheckpointIO().save_checkpoint(dict(contents), path)
