"""The hook `nan_guard`: stops before an optimizer takes a loss or a gradient that is not finite."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS

from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.module import TrainingModule
from exp.errors import ErrorDetails, NonFiniteError, RunError
from exp.extras.debugging.step_trace import Trace, trace_of
from exp.hooks.hook import Hook
from exp.hooks.norms import norms
from exp.hooks.step import Step, Update

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class NanGuard(Hook):
    """Ends the run before a step whose loss or gradient is not finite, with the weights from before the step.

    The error names the first module that gave such a number. nan_guard/step-<n>.pt in the run directory has the batches
    of the step, and the weights from before it. A gradient is not finite if its 2-norm is not finite.

    Under the loss scale of fp16 a gradient that is not finite is routine, and its step is skipped. The run ends if the
    loss is not finite, or if the scale has fallen below 1.

    Each step waits for the device.
    """

    needs = frozenset({"whole_parameters", "own_backward", "one_thread"})

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Tensor] = {}

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Report optimizers that may run the network several times a step."""
        yield from super().errors(planned)
        # Optimizers of phases get no closure.
        for kind in planned.optimizers if not planned.settings.phases else ():
            if kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS):
                continue
            yield self.error(
                key="optimizer._target_",
                got=f"{planned.settings.optimizer['_target_']}, with hooks.{self.name}",
                expected="one of torch.optim but LBFGS: another may make the gradients of a step several times, "
                "and steps by the last of them, whereas the first is looked at",
                fix=f"Choose another optimizer, or {self.leave_out}",
            )

    def teardown(self) -> None:
        self._before = {}

    def around_forward(self, step: Step) -> None:
        if not self._before:
            self._before = {name: buffer.detach().clone() for name, buffer in step.network.named_buffers()}

    def before_update(self, step: Step, update: Update) -> None:
        before, self._before = self._before, {}
        is_bad = _is_bad(update)
        if step.world_size > 1:
            is_bad = bool(step.gather(torch.tensor(float(is_bad), device=step.device)).any())
        if is_bad:
            with torch.no_grad():
                for name, buffer in before.items():
                    step.network.get_buffer(name).copy_(buffer)
            self._stop(step, update)

    def _stop(self, step: Step, update: Update) -> None:
        path, unwritten = self._write(step, update)
        trace, untraced = _traced(step, update)
        own = Finding(
            loss=next((loss for loss in map(float, update.losses) if not math.isfinite(loss)), 0.0),
            trace=trace,
            path=None if path is None else os.path.relpath(path),
            problems=[*unwritten, *untraced],
        )
        found = [own] * step.world_size
        if step.world_size > 1:
            dist.all_gather_object(found, own)
        raise NonFiniteError(message(step.index, update.window.phase, found))

    def _write(self, step: Step, update: Update) -> tuple[Path | None, list[str]]:
        """Write the step, and return the path of the file, or None and the reason."""
        if self.directory is None:
            return None, ["The run has no directory, so the step was not kept."]
        window = update.window
        ending = f".rank{step.rank}" if step.world_size > 1 else ""
        path = self.directory / self.name / f"step-{step.index}{ending}.pt"
        contents = {
            "step": step.index,
            "epoch": window.epoch,
            "phase": window.phase,
            "seed": step.seed,
            "rank": step.rank,
            "scale": None if update.scale is None else float(update.scale),
            "batches": [{"data": _copied(batch.data), "batch_idx": batch_idx} for batch, batch_idx in window.batches],
            "network": _copied({**dict(step.network.named_parameters()), **dict(step.network.named_buffers())}),
        }
        try:
            AtomicCheckpointIO().save_checkpoint(contents, path)
        except (OSError, RunError) as error:
            return None, [f"The step could not be kept in {path}: {error}."]
        return path, []


def _is_bad(update: Update) -> bool:
    """Return whether the step must not be taken. Waits for the device."""
    if not all(math.isfinite(loss) for loss in map(float, update.losses)):
        return True
    if update.scale is not None and float(update.scale) >= 1.0:
        return False
    parameters = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    sizes = norms([one.grad for one in parameters if one.grad is not None and one.grad.numel()])
    return bool(sizes) and not bool(torch.stack(sizes).isfinite().all())


def _traced(step: Step, update: Update) -> tuple[Trace | None, list[str]]:
    try:
        assert isinstance(update.module, TrainingModule)  # the check allows no other module
        return trace_of(update.module, update.window), []
    except Exception as error:  # out of memory, or a network that cannot run twice: the run must stop in any case
        return None, [f"The step could not be run again to find the module: {type(error).__name__}: {error}."]


def _copied(data: object) -> Any:
    """Return the entries with copies on the host, because files hold whole storages."""
    if isinstance(data, Tensor):
        return data.detach().cpu().clone()
    if isinstance(data, Mapping):
        return {name: _copied(value) for name, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list | tuple) else data


class Finding(NamedTuple):
    """The finding of one rank.

    Args:
        loss: The first loss that is not finite; 0.0 if all are finite.
        trace: The step, run again on this rank alone. None if it could not be run.
        path: File with the step's batches, or None.
        problems: Reasons why a file or a trace is missing, in sentences.
    """

    loss: float
    trace: Trace | None
    path: str | None
    problems: Sequence[str]

    @property
    def is_bad(self) -> bool:
        return not math.isfinite(self.loss) or (self.trace is not None and self.trace.is_bad)


def message(index: int, phase: str | None, findings: Sequence[Finding]) -> str:
    """Return the error of an optimizer step from the findings of all ranks. It names the first bad rank."""
    count = len(findings)
    rank = next((n for n, one in enumerate(findings) if one.is_bad), 0)
    one = findings[rank]
    what = f"the loss is {one.loss:g}" if not math.isfinite(one.loss) else "a gradient is not finite"
    of_phase = "" if phase is None else f" in phase {phase}"
    on_rank = f" on rank {rank} of {count}" if count > 1 else ""
    lines = [
        f"step {index}: {what}{of_phase}{on_rank}; the run ends before the optimizer's step, with the weights as they "
        "were before it."
    ]
    if one.trace is not None:
        alone = "on each rank alone: their mean is not" if count > 1 else "uncompiled and alone"
        lines.append(one.trace.where or f"Run again, the step is finite {alone}.")
    lines += one.problems
    if one.path is not None:
        others = " (each rank has its own)" if count > 1 else ""
        lines.append(f"Its batches are in {one.path}{others}.")
    return "\n".join(lines)
