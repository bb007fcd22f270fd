"""What a forward keeps for its backward, in bytes, and which module keeps it.

Relied on, and tested (torch 2.13): a transform of torch.func enters `torch.autograd.graph.disable_saved_tensors_hooks`,
found there at each call, which raises under hooks of anybody's. A compiled network runs as one function, and what it
keeps is its own.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from exp.strategies.whole_state import local

HALVES = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Kept:
    """What one forward keeps.

    size: in bytes. half: those of it in a float of 16 bits.
    by_module: bytes by the innermost module that first kept them; None has what the objective keeps.
    at: the owner of each storage, by its address.
    """

    size: int = 0
    half: int = 0
    by_module: dict[nn.Module | None, int] = field(default_factory=dict)
    at: dict[int, nn.Module | None] = field(default_factory=dict)


class SavedTensors(saved_tensors_hooks):
    """Counts the bytes that the forward inside it saves for the backward, and reports them where it is left.

    What is saved within a transform of torch.func is not counted: it suffers no hooks, and these step aside for it.

    own: what the network holds. It is asked again at the end, for weights in shards are gathered in the forward; those
        that are freed in it have no bytes left by then.
    report: called with what is kept, and whether the forward failed.
    given: by address, the bytes of the batch's tensors that are views of larger storages.
    """

    def __init__(
        self, own: Callable[[], list[Tensor]], given: Mapping[int, int], report: Callable[[Kept, bool], None]
    ) -> None:
        super().__init__(self._pack, _unpack)
        self._own = own
        self._excluded = storages(own())
        self._given = given
        self._report = report
        # Alive until the forward ends, so that no two of them had one address.
        self._saved: list[tuple[torch.UntypedStorage, torch.dtype, nn.Module | None]] = []
        self._disabling = graph.disable_saved_tensors_hooks
        self._is_aside = False

    def __enter__(self) -> None:
        super().__enter__()
        graph.disable_saved_tensors_hooks = self._aside

    @contextmanager
    def _aside(self, error_message: str) -> Iterator[None]:
        """torch's own, in which no hooks work, without the error that these are there."""
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
        self._saved += [(part.untyped_storage(), part.dtype, owner) for part in held(tensor)]
        # The tensor itself would keep its own graph alive through the node that saves it: a leak.
        with OBSERVING:
            return tensor.detach()

    def __exit__(self, *error: object) -> None:
        graph.disable_saved_tensors_hooks = self._disabling
        super().__exit__(*error)
        excluded = self._excluded | storages(self._own())
        saved, self._saved = self._saved, []
        kept = Kept()
        for storage, dtype, module in saved:
            at = address(storage)
            if at in kept.at or at in excluded or not (size := self._given.get(at, storage.nbytes())):
                continue
            kept.at[at] = module
            kept.size += size
            kept.half += size if dtype in HALVES else 0
            kept.by_module[module] = kept.by_module.get(module, 0) + size
        self._report(kept, error[0] is not None)


def kept_by(forward: Callable[[], object], *, network: nn.Module, data: object) -> Kept:
    """What one forward of a network keeps of a batch's data, as the hook `memory` counts it."""
    given: Counter[int] = Counter()
    for tensor in tensors_in(data):
        given[address(tensor.untyped_storage())] += tensor.nbytes
    found: list[Kept] = []

    def keep(kept: Kept, failed: bool) -> None:
        found.append(kept)

    with SavedTensors(lambda: [*network.parameters(), *network.buffers()], given, keep):
        forward()
    return found[0]


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def innermost_call() -> nn.Module | None:
    """Return the module whose `forward` is under way, of several the innermost; None where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if (module := _module_of(frame)) is not None:
            return module
        frame = frame.f_back
    return None


def failing_module(error: BaseException, network: nn.Module) -> str | None:
    """The path of the innermost module in whose `forward` an error was raised; None where in none, as in a backward."""
    paths = {id(module): path for path, module in network.named_modules()}
    found, trace = None, error.__traceback__
    while isinstance(trace, TracebackType):
        found = paths.get(id(_module_of(trace.tb_frame)), found)
        trace = trace.tb_next
    return found


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose `forward` a frame runs; None for any other frame."""
    names = frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 1)] if frame.f_code.co_name == "forward" else ()
    module = frame.f_locals[names[0]] if names and names[0] in frame.f_locals else None
    return module if isinstance(module, nn.Module) else None


def held(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of which one consists in this process: itself, its part, or a sparse one's entries and places.

    Nothing of a tensor that has no storage, such as one inside of torch.func.
    """
    part = local(tensor)
    if part.layout == torch.sparse_coo:
        # Under these names, for `values()` would be a copy of what has not been coalesced.
        return part._indices(), part._values()
    if part.layout != torch.strided:
        return ()
    return (part,)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The size in bytes of each storage of `tensors`, by its address."""
    found = (part.untyped_storage() for tensor in tensors for part in held(tensor))
    return {address(storage): storage.nbytes() for storage in found}


def address(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that are alive: where it lies, and of a fake or meta tensor, which lies
    nowhere, the address of its description."""
    return StorageWeakRef(storage).cdata if storage.device.type == "meta" else storage.data_ptr()
