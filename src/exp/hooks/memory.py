"""The hook `memory`: what the memory of a step is used for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from exp.hooks.hook import Hook, Step
from exp.nested import tensors_in
from exp.strategies.parts import local

MIB = 2**20


class Memory(Hook):
    """Logs four parts of this process's memory, measured at their step, and what the device and the host say.

    `memory/parameters_mib`, `memory/gradients_mib` (when the backward is done) and `memory/optimizer_mib` (when the
    step is) are exact to the byte: each storage counts once, however many tensors share it. `memory/activations_mib` is
    what the forward keeps for the backward, parameters and buffers excluded; the largest micro-batch's where gradients
    are accumulated. On CUDA `memory/allocated_mib`, `memory/reserved_mib` and `memory/peak_mib` (since the start) are
    the allocator's; `memory/host_rss_mib` is the process's resident set.

    It is measured on few steps because the forward of such a step costs up to a quarter more on a tiny network.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self._activations = 0
        self._process = psutil.Process()

    def around_forward(self, step: Step) -> AbstractContextManager[Any]:
        network = step.network
        # Batches of data in memory are views of one storage: each counts for its own part of it.
        given: Counter[int] = Counter()
        for tensor in tensors_in(step.data):
            given[tensor.untyped_storage().data_ptr()] += tensor.nbytes
        return _SavedTensors(lambda: [*network.parameters(), *network.buffers()], given, self._keep_largest)

    def after_backward(self, step: Step) -> dict[str, float]:
        gradients = [parameter.grad for parameter in step.network.parameters() if parameter.grad is not None]
        return {"memory/gradients_mib": mebibytes(gradients)}

    def after_step(self, step: Step) -> dict[str, float]:
        values = {
            "memory/parameters_mib": mebibytes(step.network.parameters()),
            "memory/optimizer_mib": mebibytes(tensors_in([optimizer.state for optimizer in step.optimizers])),
            "memory/activations_mib": self._activations / MIB,
            "memory/host_rss_mib": self._process.memory_info().rss / MIB,
        }
        self._activations = 0
        if step.device.type == "cuda":
            values["memory/allocated_mib"] = torch.cuda.memory_allocated(step.device) / MIB
            values["memory/reserved_mib"] = torch.cuda.memory_reserved(step.device) / MIB
            values["memory/peak_mib"] = torch.cuda.max_memory_allocated(step.device) / MIB
        return values

    def _keep_largest(self, size: int) -> None:
        self._activations = max(self._activations, size)


class _SavedTensors(saved_tensors_hooks):
    """Counts the bytes that the forward inside it saves for the backward, and reports them where it is left.

    own: what the network holds. It is asked again at the end, for weights in shards are gathered in the forward; those
        that are freed in it have no bytes left by then.
    """

    def __init__(self, own: Callable[[], list[Tensor]], given: Mapping[int, int], report: Any) -> None:
        super().__init__(self._pack, _unpack)
        self._own = own
        self._excluded = storages(own())
        self._given = given
        self._report = report
        # Alive until the forward ends, so that no two of them had one address.
        self._saved: list[torch.UntypedStorage] = []

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.append(local(tensor).untyped_storage())
        # The tensor itself would keep its own graph alive through the node that saves it: a leak.
        return tensor.detach()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        excluded = self._excluded | storages(self._own())
        saved = {storage.data_ptr(): storage.nbytes() for storage in self._saved if storage.nbytes()}
        self._saved = []
        self._report(sum(self._given.get(at, size) for at, size in saved.items() if at not in excluded))


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def mebibytes(tensors: Iterable[Tensor]) -> float:
    """The size in MiB of the storages of `tensors`, each counted once."""
    return sum(storages(tensors).values()) / MIB


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The size in bytes of each storage of `tensors`, by its address."""
    found = (local(tensor).untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}
