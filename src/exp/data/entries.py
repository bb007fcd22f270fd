"""The entries of a sample or a batch by name: what a network may be given, and the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exp.data.faults import data_fault
from exp.nested import mapped

TARGET = "target"
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """The form in which batches reach the network: their entries by name, float64 as float32.

    Args:
        names: the names of the inputs, see by_name.
        keeps_doubles: whether float64 and complex128 stay.
    """

    names: tuple[str, ...] = ()
    keeps_doubles: bool = False

    def __call__(self, data: object) -> object:
        """Raises: ConfigError where there are more or fewer values than names."""
        named = by_name(data, self.names)
        return named if self.keeps_doubles else mapped(named, _single)

    def rounded(self, data: object) -> list[str]:
        """The entries of a batch, as it is read, that become float32."""
        named = by_name(data, self.names)
        entries = named.items() if isinstance(named, Mapping) else zip(("input", TARGET), _values(named), strict=False)
        doubles = [name for name, value in entries if isinstance(value, Tensor) and value.dtype in SINGLE]
        return [] if self.keeps_doubles else doubles


def by_name(data: object, names: Sequence[str] = ()) -> object:
    """A sample or batch as a mapping, where it has inputs by name; else as it is: (input, target), or an input alone.

    (image, table, target), ((image, table), target) and ({image: .., table: ..}, target) become mappings alike.

    names: of the inputs, data.inputs, in the order of a tuple; without them only mappings have names.
    Raises: ConfigError where there are more or fewer values than names.
    """
    if isinstance(data, Mapping):
        return data
    values = _values(data)
    if len(values) == 2:
        first, target = values
        if isinstance(first, Mapping):
            return {**first, TARGET: target}
        if names and isinstance(first, tuple | list):
            values = [*first, target]
    if not names:
        return data
    if len(values) not in (len(names), len(names) + 1):
        raise data_fault(
            "inputs",
            got=f"{', '.join(names)}, and samples of {len(values)} values",
            expected="a name for each value but the target, which is the last, or for each",
        )
    return dict(zip((*names, TARGET), values, strict=False))


def _values(data: object) -> list[object]:
    return list(data) if isinstance(data, tuple | list) else [data]


def _single(tensor: Tensor) -> Tensor:
    return tensor.to(SINGLE[tensor.dtype]) if tensor.dtype in SINGLE else tensor


def target_in(data: object) -> object:
    """The target of a sample or batch; None where it has none."""
    if isinstance(data, Mapping):
        return data.get(TARGET)
    return data[1] if isinstance(data, tuple | list) and len(data) > 1 else None


def inputs_in(data: object) -> dict[str, Tensor]:
    """The tensors of a batch by name but the target; that of a pair, or alone, is `input`.

    Raises: ConfigError where there is none.
    """
    if isinstance(data, Mapping):
        entries = {name: value for name, value in data.items() if name != TARGET}
    elif isinstance(data, tuple | list):
        entries = {"input": data[0]} if len(data) <= 2 else {}
    else:
        entries = {"input": data}
    found = {name: value for name, value in entries.items() if isinstance(value, Tensor) and value.dim()}
    if found:
        return found
    if isinstance(data, tuple | list) and len(data) > 2:
        raise data_fault(
            "inputs",
            got=f"null, and samples of {len(data)} values",
            expected="the names of all of them but the target, which is the last",
            cure="For example data.inputs: {image: {shape: [3, 32, 32], dtype: float32}, table: {...}}",
        )
    kinds = [f"{name} is {type(value).__name__}" for name, value in entries.items()]
    raise data_fault(
        "transforms",
        got=f"samples whose {' and '.join(kinds)}" if kinds else "samples of a target alone",
        expected="a tensor, an array or a number",
        cure="Turn it into one in data.transforms or in the data set",
    )
