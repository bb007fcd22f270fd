"""The hooks gradients, memory and throughput of the members of a stack.

Each member has its own gradients hook. If the hook gives only norms, one call computes the norms of all members. The
memory of parameters, gradients and activations is that of one member. The resident set and the times are those of the
whole stack. Forward and backward are one call and have one tag, as in a pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import psutil
import torch
from torch import Tensor

from exp.engine.forward import Forward
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.gradients import Gradients
from exp.hooks.hook import Hook, has_come
from exp.hooks.memory import MIB, Memory
from exp.hooks.memory_peaks import HOST
from exp.hooks.saved_tensors import kept_by
from exp.hooks.step import Step
from exp.hooks.throughput import Throughput
from exp.nested import tensors_in
from exp.shared_types import Batch
from exp.sweeps.member import Member

CPU = torch.device("cpu")
Found = list[dict[str, Any]]


class StackedHooks:
    """The hooks of M members, called in the order in which a single run calls them.

    Args:
        hooks: Hooks by name, not attached.
        members: Members with their optimizers.
        run: Result of `forward_by_name` for the network of the first member.
        autocast: Returns the context of a forward.
        total_steps: Optimizer steps of the whole run.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        members: Sequence[Member],
        *,
        run: Forward,
        autocast: Callable[[], AbstractContextManager[object]],
        total_steps: int,
    ) -> None:
        self._members, self._run, self._autocast = list(members), run, autocast
        self._gradients: list[list[Gradients]] = []
        self._throughput: list[Throughput] = []
        self._memory: list[Memory] = []
        for name, hook in hooks.items():
            hook.fit_periods(total_steps)
            if isinstance(hook, Gradients):
                each = [copy.deepcopy(hook) for _ in members]
                for one, member in zip(each, members, strict=True):
                    one.attach(member.network, name=name)
                self._gradients.append(each)
            elif isinstance(hook, Throughput):
                hook.attach(members[0].network, name=name)
                self._throughput.append(hook)
            else:
                self._memory.append(cast(Memory, hook))
        self._activations: dict[int, int] = {}
        self._peaks: dict[str, float] = {}
        self._process = psutil.Process()
        self._index = self._size = self._samples = 0
        self._step: Step | None = None
        self._window: list[Batch] = []
        self.seconds_waited = 0.0

    def keep(self, places: Sequence[int]) -> None:
        """Keep the members at these places."""
        for place in {*range(len(self._members))} - {*places}:
            for each in self._gradients:
                each[place].detach()
        self._members = [self._members[place] for place in places]
        self._gradients = [[each[place] for place in places] for each in self._gradients]

    def detach(self) -> None:
        for hook in [*(one for each in self._gradients for one in each), *self._throughput]:
            hook.detach()

    def pause(self) -> None:
        """Stop the clocks after a step."""
        for hook in self._throughput:
            hook.pause()

    # --- a step ---

    def start_batch(self, batch: Batch, *, index: int, epoch: int, batch_idx: int) -> None:
        """Take a micro-batch of optimizer step `index`, with the data of one member."""
        if index != self._index:
            self._index, self._size, self._window = index, 0, []
            self._step = None
        self._size += batch.global_size
        self._samples += batch.global_size
        self._window.append(batch)
        self._position = epoch, batch_idx
        if self._step is not None:
            self._bring_up(self._step)
        if self._is_detailed:
            HOST.restart()

    def after_backward(self) -> None:
        """Note the end of a backward."""
        for hook in self._throughput:
            if hook.due(self._index):
                hook.passed("backward", self._step_of(0))
        if self._is_detailed:
            self._note_peak("forward_backward")

    def need_gradients(self) -> bool:
        """Return whether a hook reads the gradients of the parameters in this step."""
        index = self._index
        return any(
            each[0].due(index) and (self._clips_any or not each[0].norms_alone(index)) for each in self._gradients
        )

    def before_update(self, gradients: Mapping[str, Tensor]) -> Found:
        """Return the values of the hooks for unclipped gradients, per member. gradients: `[M, ...]` by parameter."""
        index = self._index
        found: Found = [{} for _ in self._members]
        for each in self._gradients:
            if not each[0].due(index):
                continue
            if each[0].norms_alone(index):
                for values, norms_of_one in zip(found, _norms(each, gradients, index), strict=True):
                    values |= norms_of_one
                continue
            for place, hook in enumerate(each):
                found[place] |= hook.after_backward(self._step_of(place)) or {}
        if self._is_measured:
            size = sum(one.nbytes for one in self._members[0].parameters)
            for values in found:
                values["memory/gradients_mib"] = size / MIB
        return found

    def after_clipping(self, found: Found) -> None:
        """Add the values of the hooks for clipped gradients."""
        for each in self._gradients if self._clips_any else ():
            if each[0].due(self._index):
                for place, hook in enumerate(each):
                    found[place] |= hook.after_clipping(self._step_of(place)) or {}

    def after_step(self, found: Found) -> None:
        """Add the values of the hooks for updated parameters."""
        index = self._index
        for hook in self._throughput:
            if hook.due(index):
                hook.passed("optimizer", self._step_of(0))
        for each in self._gradients:
            if each[0].due(index) and not each[0].norms_alone(index):
                for place, one in enumerate(each):
                    found[place] |= one.after_step(self._step_of(place)) or {}
        if self._is_measured:
            if self._is_detailed:
                self._note_peak("step")
            shared = self._memory_parts()
            for values in found:
                values |= shared
        for hook in self._throughput:
            if hook.due(index):
                given = hook.after_step(self._step_of(0)) or {}
                for values in found:
                    values |= given
        self._window = []

    @property
    def _clips_any(self) -> bool:
        return any(member.clip_value for member in self._members)

    # --- memory ---

    @property
    def _is_measured(self) -> bool:
        return any(has_come(hook.every_n_steps, self._index) for hook in self._memory)

    @property
    def _is_detailed(self) -> bool:
        return any(hook.details and has_come(hook.every_n_steps, self._index) for hook in self._memory)

    def _note_peak(self, phase: str) -> None:
        if HOST.can_restart:
            tag = f"memory/host_peak_{phase}_mib"
            self._peaks[tag] = max(self._peaks.get(tag, 0.0), HOST.restart() / MIB)

    def _memory_parts(self) -> dict[str, float]:
        """Return the memory of one member, and of the process."""
        first = self._members[0]
        peaks, self._peaks = self._peaks, {}
        return {
            "memory/parameters_mib": sum(one.nbytes for one in first.network.parameters()) / MIB,
            "memory/optimizer_mib": sum(one.nbytes for one in tensors_in([first.optimizer.state])) / MIB,
            "memory/activations_mib": max(self._kept(batch) for batch in self._window) / MIB,
            **({"memory/host_rss_mib": self._process.memory_info().rss / MIB} if self._is_detailed else {}),
            **peaks,
        }

    def _kept(self, batch: Batch) -> int:
        """Return the bytes that the forward of the first member keeps for its backward. Run once per batch size."""
        if batch.size not in self._activations:
            network, objective = self._members[0].network, self._members[0].objective
            buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
            is_training = network.training
            network.train()
            with self._autocast():
                kept = kept_by(
                    lambda: objective(self._run(network, batch.data), batch), network=network, data=batch.data
                )
            network.train(is_training)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            self._activations[batch.size] = kept.size
        return self._activations[batch.size]

    # --- what a hook sees ---

    def _step_of(self, place: int) -> Step:
        step = self._step
        if step is None:
            step = self._step = Step(
                index=self._index,
                network=self._members[0].network,
                optimizers=[],
                batch_size=0,
                device=CPU,
                accumulated=1,
            )
            self._bring_up(step)
        member = self._members[place]
        step.network, step.optimizers, step.clips = member.network, [member.optimizer], bool(member.clip_value)
        return step

    def _bring_up(self, step: Step) -> None:
        step.epoch, step.batch_idx = self._position
        step.batch_size, step.samples_seen = self._size, self._samples
        step.seconds_waited = self.seconds_waited
        step.data = self._window[-1].data


def _norms(each: Sequence[Gradients], gradients: Mapping[str, Tensor], index: int) -> Found:
    """Return the norms of each member, with one call per parameter."""
    rows = [gradients[name].flatten(1) for name in each[0].names]
    found = [torch.linalg.vector_norm(one, dim=1, dtype=at_least_float32(one.dtype)) for one in rows]
    numbers = torch.stack(found, dim=1).tolist() if found else [[]] * len(each)
    return [dict(hook.named(of_one, index)) for hook, of_one in zip(each, numbers, strict=True)]
