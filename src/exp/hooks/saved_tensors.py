"""Size of the tensors that a forward saves for its backward, by module.

Tested properties of torch 2.13: a transform of torch.func enters `torch.autograd.graph.disable_saved_tensors_hooks`,
which raises an error if hooks for saved tensors are active. A compiled network runs as one function, and saves only the
tensors that its compiled backward needs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from exp.hooks.hook import OBSERVING
from exp.nested import tensors_in
from exp.strategies.whole_state import local_part


@dataclass(slots=True)
class Kept:
    """Tensors that one forward saves for the backward.

    Args:
        size: Total size in bytes.
        by_module: Bytes by module. A storage belongs to the innermost module that was running when it was first saved.
            The key None is the objective.
        at: Module of each storage, by address of the storage.
    """

    size: int = 0
    by_module: dict[nn.Module | None, int] = field(default_factory=dict)
    at: dict[int, nn.Module | None] = field(default_factory=dict)


class SavedTensors(saved_tensors_hooks):
    """Context that counts the bytes that a forward saves for the backward. The forward runs inside the context.

    Tensors that a transform of torch.func saves are not counted, because such a transform does not support hooks.

    Args:
        network: The network. Its parameters and buffers are not counted. They are listed again at the end, because a
            forward may gather sharded weights.
        data: Batch of the forward. A tensor of the batch counts with the bytes of its entries, even if it is a view of
            a larger storage.
        report: Function that is called at the end. Its arguments are the result, and True if the forward failed.
    """

    def __init__(self, network: nn.Module, data: object, report: Callable[[Kept, bool], None]) -> None:
        super().__init__(self._pack, _unpack)
        self._network, self._report = network, report
        self._excluded = self._own()
        self._given: Counter[int] = Counter()
        for tensor in tensors_in(data):
            self._given[address(tensor.untyped_storage())] += tensor.nbytes
        # References keep the storages alive until the forward ends, so that no address is used twice.
        self._saved: list[tuple[torch.UntypedStorage, nn.Module | None]] = []
        self._disabling = graph.disable_saved_tensors_hooks
        self._is_aside = False

    def _own(self) -> dict[int, int]:
        return storages([*self._network.parameters(), *self._network.buffers()])

    def __enter__(self) -> None:
        super().__enter__()
        graph.disable_saved_tensors_hooks = self._aside

    @contextmanager
    def _aside(self, error_message: str) -> Iterator[None]:
        """Disable hooks for saved tensors, like torch.autograd.graph.disable_saved_tensors_hooks.

        torch's function raises an error if such hooks are active. This method first deactivates the hooks of this
        object.
        """
        is_outermost, self._is_aside = not self._is_aside, True
        if is_outermost:
            super().__exit__()
        try:
            with self._disabling(error_message):
                yield
        finally:
            if is_outermost:
                super().__enter__()
                self._is_aside = False

    def _pack(self, tensor: Tensor) -> Tensor:
        owner = innermost_call()
        self._saved += [(part.untyped_storage(), owner) for part in dense_tensors(tensor)]
        # The tensor is detached, because a saved tensor with its graph would keep the graph alive (a memory leak).
        with OBSERVING:
            return tensor.detach()

    def __exit__(self, *error: object) -> None:
        graph.disable_saved_tensors_hooks = self._disabling
        super().__exit__(*error)
        excluded = self._excluded | self._own()
        saved, self._saved = self._saved, []
        kept = Kept()
        for storage, module in saved:
            at = address(storage)
            size = self._given[at] or storage.nbytes()
            if at in kept.at or at in excluded or not size:
                continue
            kept.at[at] = module
            kept.size += size
            kept.by_module[module] = kept.by_module.get(module, 0) + size
        self._report(kept, error[0] is not None)


def kept_by(forward: Callable[[], object], *, network: nn.Module, data: object) -> Kept:
    """Return the tensors that one forward saves for the backward. The hook `memory` counts the same tensors.

    Args:
        forward: Function that runs the forward.
        network: The network.
        data: Batch of the forward.
    """
    found: list[Kept] = []
    with SavedTensors(network, data, lambda kept, failed: found.append(kept)):
        forward()
    return found[0]


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def innermost_call() -> nn.Module | None:
    """Return the innermost module that is running its `forward`. Return None outside of a forward."""
    frame = inspect.currentframe()
    while frame is not None:
        if (module := _module_of(frame)) is not None:
            return module
        frame = frame.f_back
    return None


def failing_module(error: BaseException, network: nn.Module) -> str | None:
    """Return the path of the innermost module in which `forward` raised an error.

    Return None if no forward raised it.
    """
    paths = {id(module): path for path, module in network.named_modules()}
    found, trace = None, error.__traceback__
    while isinstance(trace, TracebackType):
        found = paths.get(id(_module_of(trace.tb_frame)), found)
        trace = trace.tb_next
    return found


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module that runs its `forward` in a frame. Return None for other frames."""
    names = frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 1)] if frame.f_code.co_name == "forward" else ()
    module = frame.f_locals[names[0]] if names and names[0] in frame.f_locals else None
    return module if isinstance(module, nn.Module) else None


def dense_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that store a tensor in this process.

    These are the local shard of a DTensor, the indices and values of a sparse tensor, or else the tensor. A tensor
    without a storage, such as a tensor inside torch.func, has no dense tensors.
    """
    part = local_part(tensor)
    if part.layout == torch.sparse_coo:
        part = part.detach().coalesce()
        return part.indices(), part.values()
    if part.layout != torch.strided:
        return ()
    return (part,)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage of the tensors, by address. A shared storage is listed once."""
    # The list keeps all storages alive, so that the address of a temporary copy is not used again.
    found = [part.untyped_storage() for tensor in tensors for part in dense_tensors(tensor)]
    return {address(storage): storage.nbytes() for storage in found}


def address(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage among all storages in use.

    A storage on the meta device has no memory. Its number is the address of its Python description.
    """
    return StorageWeakRef(storage).cdata if storage.device.type == "meta" else storage.data_ptr()
