"""The hook `nan_guard`: ends the run before an optimizer step with a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS

from exp.engine.module import TrainingModule
from exp.errors import ErrorDetails, NonFiniteError
from exp.extras.debugging.step_trace import Trace, trace_of
from exp.hooks.hook import Hook
from exp.hooks.norms import norms
from exp.hooks.step import Step, Update

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class NanGuard(Hook):
    """Hook that ends the run before an optimizer step if the loss or a gradient is not finite.

    The weights keep their values from before the step. The error names the first module with a value that is not
    finite. A gradient counts as not finite if its 2-norm is not finite.

    Under fp16 with a loss scaler, gradients that are not finite are normal, and the optimizer skips the step. In that
    case the run ends only if the loss is not finite or the loss scale is below 1.

    The hook makes each step wait for the device.
    """

    needs = frozenset({"whole_parameters", "own_backward", "one_thread"})

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Tensor] = {}

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield the errors of the base class, and an error for each unsupported optimizer.

        An optimizer is not supported if it may run the network several times per step.
        """
        yield from super().errors(planned)
        # Optimizers of phases are not checked, because they get no closure and cannot run the network.
        for kind in planned.optimizers if not planned.settings.phases else ():
            if kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS):
                continue
            yield self.error(
                key="optimizer._target_",
                got=f"{planned.settings.optimizer['_target_']} with hooks.{self.name}",
                expected="an optimizer of torch.optim except LBFGS: other optimizers may compute gradients several "
                "times per step, and only the first gradients are checked",
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
        if not is_bad:
            return
        with torch.no_grad():
            for name, buffer in before.items():
                step.network.get_buffer(name).copy_(buffer)
        loss = next((loss for loss in map(float, update.losses) if not math.isfinite(loss)), 0.0)
        own = Finding(loss=loss, trace=_trace(update))
        found = [own] * step.world_size
        if step.world_size > 1:
            dist.all_gather_object(found, own)
        raise NonFiniteError(message(step.index, update.window.phase, found))


def _is_bad(update: Update) -> bool:
    """Return whether the run must end because the loss or a gradient is not finite. The call waits for the device."""
    if not all(math.isfinite(loss) for loss in map(float, update.losses)):
        return True
    if update.scale is not None and float(update.scale) >= 1.0:
        return False
    parameters = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    sizes = norms([one.grad for one in parameters if one.grad is not None and one.grad.numel()])
    return bool(sizes) and not bool(torch.stack(sizes).isfinite().all())


def _trace(update: Update) -> Trace:
    try:
        assert isinstance(update.module, TrainingModule)  # the config check allows no other module
        return trace_of(update.module, update.window)
    except Exception as error:  # out of memory, or a network that cannot run twice: the run must end in any case
        where = f"The step could not be run again to find the module: {type(error).__name__}: {error}."
        return Trace(is_bad=False, where=where)


class Finding(NamedTuple):
    """Result of the check on one rank.

    Args:
        loss: The first loss that is not finite. 0.0: all losses are finite.
        trace: The result of running the step again on this rank alone.
    """

    loss: float
    trace: Trace

    @property
    def is_bad(self) -> bool:
        return not math.isfinite(self.loss) or self.trace.is_bad


def message(index: int, phase: str | None, findings: Sequence[Finding]) -> str:
    """Return the error message, which names the first rank with a value that is not finite.

    Args:
        index: Number of the optimizer step.
        phase: Name of the phase. None: the run has no phases.
        findings: Findings of all ranks, by rank.
    """
    count = len(findings)
    rank = next((n for n, one in enumerate(findings) if one.is_bad), 0)
    one = findings[rank]
    what = f"the loss is {one.loss:g}" if not math.isfinite(one.loss) else "a gradient is not finite"
    of_phase = "" if phase is None else f" in phase {phase}"
    on_rank = f" on rank {rank} of {count}" if count > 1 else ""
    alone = " on each rank, but their mean over ranks is not" if count > 1 else ", without compilation"
    return (
        f"step {index}: {what}{of_phase}{on_rank}; the run ends before the optimizer's step, and the weights are "
        f"unchanged.\n{one.trace.where or f'In a second run of the step, all values are finite{alone}.'}"
    )
