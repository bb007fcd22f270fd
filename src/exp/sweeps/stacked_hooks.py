"""The hooks gradients, memory and throughput for the members of a stack.

Each member has a separate copy of the hook `gradients`. The other hooks run once, for the first member. All members log
their values: the memory of one member, but the resident memory and the times of the whole stack.

Forward and backward run as one vmap call, so they share one time tag.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.gradients import Gradients
from exp.hooks.hook import Boundary, Hook
from exp.hooks.memory import Memory
from exp.hooks.panels import Panel
from exp.hooks.step import Step
from exp.nested import map_tensors
from exp.shared_types import Batch

# Values that the hooks return for one member, by tag.
Found = dict[str, Tensor | float | Panel]


class StackedHooks:
    """The hooks of M members, called in the order in which a single run calls its hooks.

    Args:
        hooks: Hooks by name, not yet attached to a network.
        members: For each member: its network, its optimizer, and whether its gradients are clipped.
        forward: Runs the forward pass and the objective on the network of one member.
        total_steps: Number of optimizer steps of the whole run.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        members: Sequence[tuple[nn.Module, Optimizer, bool]],
        *,
        forward: Callable[[nn.Module, Batch], object],
        total_steps: int,
    ) -> None:
        self._members, self._forward = members, forward
        # A copy of one member's network with its own storages. The hook `memory` measures this copy.
        self._sample = copy.deepcopy(members[0][0])
        for parameter in self._sample.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        # For each hook, its copies: M copies of `gradients`, and one copy of any other hook.
        self._hooks: list[list[Hook]] = []
        for name, hook in hooks.items():
            hook.fit_periods(total_steps)
            copies: list[Hook] = [hook]
            if isinstance(hook, Gradients):
                copies = [copy.deepcopy(hook) for _ in members]
            for one, (network, _, _) in zip(copies, members, strict=False):
                one.attach(network, name=name)
            self._hooks.append(copies)
        self._due: list[list[Hook]] = []
        network, optimizer, _ = members[0]
        device = torch.device("cpu")
        self._step = Step(index=0, network=network, optimizers=[optimizer], batch_size=0, device=device)

    def detach(self) -> None:
        for copies in self._hooks:
            for hook in copies:
                hook.detach()

    def pause(self) -> None:
        """Stop the clocks of the hooks after a step."""
        for copies in self._hooks:
            copies[0].pause()

    def start_batch(self, batch: Batch, *, index: int, epoch: int, batch_idx: int, seconds_waited: float) -> None:
        """Begin optimizer step `index` and select the hooks that are due.

        The hooks see the data of the first member.

        Args:
            batch: Batch of the first member.
            index: Number of the optimizer step, counted from 1.
            epoch: Epoch of the batch, counted from 0.
            batch_idx: Index of the batch in its epoch.
            seconds_waited: Time in seconds that the training has waited for data so far.
        """
        self._due = [copies for copies in self._hooks if copies[0].due(index)]
        step = self._step
        step.index, step.epoch, step.batch_idx = index, epoch, batch_idx
        step.batch_size, step.data = batch.global_size, batch.data
        step.samples_seen, step.seconds_waited = step.samples_seen + batch.global_size, seconds_waited
        for hook, *_ in self._due:
            if isinstance(hook, Memory) and (context := hook.around_forward(self._step_of(0, hook))) is not None:
                with context:
                    self._forward(step.network, batch)
        self._pass("batch")

    def need_gradients(self) -> bool:
        """Return whether a hook reads the gradients of single parameters in this step."""
        index = self._step.index
        return any(isinstance(hook, Gradients) and not _is_norms_alone(hook, index) for hook, *_ in self._due)

    def after_backward(self, gradients: Mapping[str, Tensor]) -> list[Found]:
        """Return the values that the hooks compute from unclipped gradients, for each member.

        Args:
            gradients: Gradient of each parameter `[M, ...]`, by parameter name.
        """
        self._pass("backward")
        found: list[Found] = [{} for _ in self._members]
        for copies in self._due:
            first, index = copies[0], self._step.index
            if _is_norms_alone(first, index):
                for values, norms in zip(found, _norms(first, gradients), strict=True):
                    values |= first.name_norms(norms, index)
            else:
                self._call(copies, "after_backward", found)
        return found

    def after_clipping(self, found: list[Found]) -> None:
        """Add the values that the hooks compute from clipped gradients to `found`."""
        for copies in self._due:
            self._call(copies, "after_clipping", found)

    def after_step(self, found: list[Found]) -> None:
        """Add the values that the hooks compute from updated parameters to `found`."""
        self._pass("optimizer")
        for copies in self._due:
            self._call(copies, "after_step", found)

    def _pass(self, boundary: Boundary) -> None:
        for hook, *_ in self._due:
            if hook.overrides("passed"):
                hook.passed(boundary, self._step)

    def _call(self, copies: Sequence[Hook], method: str, found: list[Found]) -> None:
        if not copies[0].overrides(method) or method in copies[0].idle_at(self._step.index):
            return
        for place, hook in enumerate(copies):
            given = getattr(hook, method)(self._step_of(place, hook)) or {}
            for values in found if len(copies) == 1 else [found[place]]:
                values |= given

    def _step_of(self, place: int, hook: Hook) -> Step:
        step = self._step
        network, optimizer, step.clips = self._members[place]
        # The hook `memory` counts whole storages, and a member only has rows of the storages of the stack.
        step.network, step.optimizers = network, [optimizer]
        if isinstance(hook, Memory):
            step.network, step.optimizers = self._sample, [_with_own_state(optimizer)]
        return step


def _with_own_state(optimizer: Optimizer) -> Optimizer:
    found = copy.copy(optimizer)
    found.state = map_tensors(optimizer.state, Tensor.clone)
    return found


def _is_norms_alone(hook: Hook, index: int) -> TypeGuard[Gradients]:
    """Return whether a hook logs only norms of unclipped gradients at this step."""
    return isinstance(hook, Gradients) and hook.norms_alone(index)


def _norms(hook: Gradients, gradients: Mapping[str, Tensor]) -> list[list[float]]:
    """Return the gradient norm of each parameter, for each member.

    One call per parameter computes the norms of all members.
    """
    rows = [gradients[name].flatten(1) for name in hook.names]
    found = [torch.linalg.vector_norm(one, dim=1, dtype=at_least_float32(one.dtype)) for one in rows]
    return torch.stack(found, dim=1).tolist() if found else [[] for _ in next(iter(gradients.values()))]
