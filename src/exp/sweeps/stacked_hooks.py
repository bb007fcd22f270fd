"""The hooks gradients, memory and throughput for the members of a stack.

The hook `gradients` logs the gradient norms of each member. It does not log heat maps, histograms and update ratios.

The hooks `memory` and `throughput` run once, on a copy of the first member's network, and all members log their values.
Values of memory are those of one member. Resident memory and times are those of the whole stack.

Forward and backward run in one vmap call, so one tag contains the time of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.gradients import Gradients
from exp.hooks.hook import Boundary, Hook, is_due_at
from exp.hooks.memory import Memory
from exp.hooks.panels import Panel
from exp.hooks.step import Step
from exp.nested import map_tensors
from exp.shared_types import Batch

# Numbers that are logged for one member, by tag.
Numbers = dict[str, float]


class StackedHooks:
    """The hooks of a stack. The order of the calls is the same as in a single run.

    Args:
        hooks: Hooks by name, not yet attached to a network.
        network: Network of the first member.
        optimizer: Optimizer of the first member.
        forward: Function that runs the forward and the objective on a network.
        total_steps: Number of optimizer steps of the whole run.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        network: nn.Module,
        optimizer: Optimizer,
        *,
        forward: Callable[[nn.Module, Batch], object],
        total_steps: int,
    ) -> None:
        self._optimizer, self._forward = optimizer, forward
        # The network is copied, because the hook `memory` counts whole storages. The parameters of a member are only
        # rows of the stack's storages.
        sample = copy.deepcopy(network)
        for parameter in sample.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for name, hook in hooks.items():
            hook.fit_periods(total_steps)
            hook.attach(sample, name=name)
        self._gradients = [hook for hook in hooks.values() if isinstance(hook, Gradients)]
        self._others = [hook for hook in hooks.values() if not isinstance(hook, Gradients)]
        self._due: list[Hook] = []
        device = torch.device("cpu")
        self._step = Step(index=0, network=sample, optimizers=[optimizer], batch_size=0, device=device)

    def detach(self) -> None:
        for hook in (*self._gradients, *self._others):
            hook.detach()

    def pause(self) -> None:
        """Stop the clocks of the hooks after a step."""
        for hook in self._others:
            hook.pause()

    def start_batch(self, batch: Batch, *, index: int, epoch: int, batch_idx: int, seconds_waited: float) -> None:
        """Begin optimizer step `index` and select the hooks that are due.

        Args:
            batch: Batch of the first member.
            index: Number of the optimizer step, counted from 1.
            epoch: Epoch of the batch, counted from 0.
            batch_idx: Index of the batch in its epoch.
            seconds_waited: Time in seconds that the training has waited for data so far.
        """
        self._due = [hook for hook in self._others if hook.due(index)]
        step = self._step
        step.index, step.epoch, step.batch_idx = index, epoch, batch_idx
        step.batch_size, step.data = batch.global_size, batch.data
        step.samples_seen, step.seconds_waited = step.samples_seen + batch.global_size, seconds_waited
        for hook in self._due:
            if (context := hook.around_forward(step)) is not None:
                with context:
                    self._forward(step.network, batch)
        self._pass("batch")

    def after_backward(self, gradients: Mapping[str, Tensor], *, members: int) -> list[Numbers]:
        """Return the values that the hooks compute from unclipped gradients: one dict for each member.

        Args:
            gradients: Gradient of each parameter `[M, ...]`, by parameter name.
            members: Number of members.
        """
        self._pass("backward")
        shared: Numbers = {}
        for hook in self._due:
            shared |= _numbers(hook.after_backward(self._step))
        found = [dict(shared) for _ in range(members)]
        for gradient_hook in self._gradients:
            if gradient_hook.names and is_due_at(gradient_hook.every_n_steps, self._step.index):
                for values, norms in zip(found, _norms(gradient_hook, gradients), strict=True):
                    values |= gradient_hook.name_norms(norms)
        return found

    def after_step(self) -> Numbers:
        """Return the values that the hooks compute from updated parameters. All members log these values."""
        self._pass("optimizer")
        found: Numbers = {}
        for hook in self._due:
            if isinstance(hook, Memory):
                self._step.optimizers = [_with_own_state(self._optimizer)]
            found |= _numbers(hook.after_step(self._step))
        return found

    def _pass(self, boundary: Boundary) -> None:
        for hook in self._due:
            hook.passed(boundary, self._step)


def _numbers(values: Mapping[str, Tensor | float | Panel] | None) -> Numbers:
    """Return the numbers among the values of a hook. Heat maps and other panels are not logged in a stack."""
    return {tag: float(value) for tag, value in (values or {}).items() if not isinstance(value, Panel)}


def _with_own_state(optimizer: Optimizer) -> Optimizer:
    found = copy.copy(optimizer)
    found.state = map_tensors(optimizer.state, Tensor.clone)
    return found


def _norms(hook: Gradients, gradients: Mapping[str, Tensor]) -> list[list[float]]:
    """Return a list for each member with the gradient norm of each parameter.

    One call per parameter computes the norms of all members.
    """
    rows = [gradients[name].flatten(1) for name in hook.names]
    found = [torch.linalg.vector_norm(one, dim=1, dtype=at_least_float32(one.dtype)) for one in rows]
    return torch.stack(found, dim=1).tolist()
