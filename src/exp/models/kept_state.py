"""Detection of state that a forward pass changes, such as call counters, caches and parameters.

By default, new numbers in buffers are ignored.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from io import BytesIO
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

logger = logging.getLogger(__name__)

# Packages that store no state in the attributes of their classes.
LIBRARIES = ("torch", "builtins")


class KeptState:
    """A snapshot of the attributes of a network's modules and of their classes, at any depth.

    A tensor counts as unchanged if it is the same object with the same memory and version.

    Args:
        network: The network.
        with_buffers: Whether a new version of a buffer counts as a change. torch increases the version in most changes
            of the numbers. Default: false.
    """

    def __init__(self, network: nn.Module, *, with_buffers: bool = False) -> None:
        self._network, self._with_buffers = network, with_buffers
        self._modules = set(network.modules())
        self._buffers = set() if with_buffers else {id(buffer) for buffer in network.buffers()}
        self._alive: list[object] = []  # keeps the objects in memory, so that their ids are not reused
        self._prints = dict(self._named_values())

    def changes(self) -> list[str]:
        """Return the dotted names of the attributes that have changed since the snapshot."""
        now = KeptState(self._network, with_buffers=self._with_buffers)._prints
        return [name for name in {**self._prints, **now} if self._prints.get(name) != now.get(name)]

    def identity(self, value: object) -> object:
        """Return a value that identifies a tensor or a module of the network. Return None for any other object."""
        if isinstance(value, nn.Module) and value in self._modules:
            return id(value)
        if not isinstance(value, Tensor):
            return None
        storage = StorageWeakRef(value.untyped_storage())
        self._alive += [value, storage]
        return id(value), storage.cdata, None if id(value) in self._buffers else value._version

    def _named_values(self) -> Iterator[tuple[str, bytes]]:
        for path, module in self._network.named_modules():
            kinds = [kind for kind in reversed(type(module).__mro__) if kind.__module__.split(".")[0] not in LIBRARIES]
            held = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
            held |= vars(module)
            held |= held.pop("_parameters") | held.pop("_buffers")
            for name, value in held.items():
                file = BytesIO()
                _Pickler(file, self).dump(value)
                yield f"{path}.{name}" if path else name, file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles objects only to compare them. If an object cannot be pickled, its id and its attributes are written."""

    def __init__(self, file: BytesIO, state: KeptState) -> None:
        super().__init__(file)
        self._state = state

    def persistent_id(self, value: object) -> object:
        return self._state.identity(value)

    def reducer_override(self, value: object) -> Any:
        if value is _object:
            return NotImplemented
        if isinstance(value, type | BuiltinFunctionType):
            return _object, (id(value),)
        if isinstance(value, FunctionType):
            return _object, (id(value),), [_content(cell) for cell in value.__closure__ or ()]
        try:
            value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except Exception as error:  # a user's object may raise anything
            logger.debug("%s is compared by its attributes, because pickle refuses it: %s", type(value), error)
            return _object, (id(value),), getattr(value, "__dict__", None)
        return NotImplemented


def _object(identity: int) -> object: ...


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
