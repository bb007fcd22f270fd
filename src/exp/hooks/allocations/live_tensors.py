"""Which tensors are alive in this process, what they are of the network, and whose."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from exp.hooks.allocations.saved_tensors import Kept, held
from exp.nested import tensors_in
from exp.types import dtype_name

Kind = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "batch", "other"]
# The columns of a table by module.
PARTS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class Live:
    """A storage that is alive, by the tensor that uses it.

    module: the path of its owner in the network, empty for the network itself; None where it has none.
    name: of a parameter or buffer, in full; of an entry of the optimizer's state behind the parameter's.
    size: of the storage, in bytes.
    """

    kind: Kind
    size: int
    module: str | None = None
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Owners:
    """What is known of a run's tensors, by the addresses of their storages.

    kept: the activations of the last forward that was measured.
    """

    def __init__(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, data: Any, kept: Kept
    ) -> None:
        self._known: dict[int, Live] = {}
        parameters = dict(network.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        paths = {id(module): path for path, module in network.named_modules()}
        for name, parameter in parameters.items():
            self._add(parameter, "parameters", _owner(name), name)
            if parameter.grad is not None:
                self._add(parameter.grad, "gradients", _owner(name), name)
        for name, buffer in network.named_buffers():
            self._add(buffer, "buffers", _owner(name), name)
        for parameter, key, tensor in _states(optimizers):
            name = names.get(id(parameter), "")
            self._add(tensor, "optimizer", _owner(name), f"{name} {key}".strip())
        for tensor in tensors_in(data):
            self._add(tensor, "batch", None, "")
        self._kept = {at: paths.get(id(module)) for at, module in kept.at.items()}

    def _add(self, tensor: Tensor, kind: Kind, module: str | None, name: str) -> None:
        for part in held(tensor):
            # Not as a view that happens to be alive, too, such as a weight transposed.
            self._known.setdefault(part.untyped_storage().data_ptr(), _live(part, kind, module, name))

    def live(self) -> list[Live]:
        """What the garbage collector knows of, each storage once, the largest first.

        It knows tensors that Python has seen: those that only a graph holds are missing, but in a measured step.
        """
        found: dict[int, Live] = {}
        for tensor in _tensors():
            at = tensor.untyped_storage().data_ptr()
            if at in found or not tensor.untyped_storage().nbytes():
                continue
            if at in self._known:
                found[at] = self._known[at]
            elif at in self._kept:
                found[at] = _live(tensor, "activations", self._kept[at])
            else:
                found[at] = _live(tensor, "other")
        return sorted(found.values(), key=lambda one: -one.size)


def by_module(tensors: Iterable[Live]) -> dict[str, dict[Kind, int]]:
    """Bytes of the four parts, by the path of the module that has them; the module with most first."""
    rows: dict[str, dict[Kind, int]] = {}
    for one in tensors:
        if one.kind in PARTS and one.module is not None:
            row = rows.setdefault(one.module, dict.fromkeys(PARTS, 0))
            row[one.kind] += one.size
    return dict(sorted(rows.items(), key=lambda item: -sum(item[1].values())))


def _live(tensor: Tensor, kind: Kind, module: str | None = None, name: str = "") -> Live:
    return Live(
        kind=kind,
        size=tensor.untyped_storage().nbytes(),
        module=module,
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


def _tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        # By its type, because to ask a stranger's class may run its code.
        # Those of torch itself that have no storage, fake and functional ones of a compiler, say another device.
        kind = type(thing)
        is_real = issubclass(kind, Tensor) and not kind.__module__.startswith("torch._subclasses")
        if is_real and thing.device.type != "meta":
            yield from held(thing)


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[Any, str, Tensor]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            entries: Mapping[str, Any] = state if isinstance(state, Mapping) else {"": state}
            for key, value in entries.items():
                for tensor in tensors_in(value):
                    yield parameter, key, tensor


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
