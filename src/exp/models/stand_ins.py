"""Stand-ins for what a forward program works on: its layers, and the values that only a run knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from exp.models.syntax import nearest_or
from exp.models.vocabulary import PARAMETER_ATTRIBUTES

COMPUTABLE = "what a forward program can compute before the run"

_SEQUENCES = (nn.ModuleList, nn.ParameterList, nn.Sequential)
_MAPPINGS = (nn.ModuleDict, nn.ParameterDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)


class Refusal(ValueError):
    """An error of a program at the place that is being run."""

    def __init__(self, message: str, expected: str = COMPUTABLE) -> None:
        super().__init__(message)
        self.expected = expected


class Unknown:
    """A value that only a run knows: a tensor, a size of one, or the output of a layer."""

    def __bool__(self) -> bool:
        message = "a condition that is known only while the network runs"
        raise Refusal(message, "a constant, or where(condition, a, b) on tensors")

    def __iter__(self) -> Iterator[object]:
        message = "a loop over a tensor, whose length is known only while the network runs"
        raise Refusal(message, "names, `a, b = x.chunk(2, 1)`, or an operation on the whole")


UNKNOWN = Unknown()


class Limits:
    """The result of finfo and iinfo: numbers by name, which no operation takes as a whole."""

    def __bool__(self) -> bool:
        raise Refusal("a condition on the limits of a dtype", "a constant")


LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Function:
    """A listed function: its name in the program, and the module that it is taken from."""

    name: str
    home: str

    def __bool__(self) -> bool:
        raise Refusal(f"a condition on `{self.name}`", "a constant")


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the network. `path` is its name in the state dict, `linears.0`."""

    path: str
    module: nn.Module

    def __bool__(self) -> bool:
        raise Refusal(f"a condition on `{self.path}`, a layer", "a constant")

    def __len__(self) -> int:
        return len(self.entries if isinstance(self.module, _MAPPINGS) else self.elements)

    def __iter__(self) -> Iterator[object]:
        """Iterate as the layer does: over the layers of a list, or the keys of a dict."""
        return iter(self.entries if isinstance(self.module, _MAPPINGS) else self.elements)

    def __getitem__(self, index: object) -> object:
        """Return the stand-in of `linears[0]`, `linears[1:]` or `heads["main"]`."""
        if isinstance(self.module, _MAPPINGS):
            if isinstance(index, str) and index in self.entries:
                return self.entries[index]
            expected = nearest_or(str(index), self.entries, otherwise=f"one of {', '.join(self.entries)}")
            raise Refusal(f"`{self.path}` has no {index!r}; it has {expected}")
        if not isinstance(index, int | slice):
            raise Refusal(f"`{self.path}` is indexed by something that is not an integer")
        try:
            return self.elements[index]
        except IndexError:
            raise Refusal(f"`{self.path}` has {len(self.elements)} elements, and no number {index}") from None

    @property
    def is_callable(self) -> bool:
        return not isinstance(self.module, _NOT_CALLABLE)

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @cached_property  # a program with a line for each of a thousand layers asks as often
    def elements(self) -> list[object]:
        """The stand-ins of the layers or parameters of a list."""
        if not isinstance(self.module, _SEQUENCES):
            raise Refusal(f"`{self.path}` is a {self.kind}, not a list of layers")
        return [stand_in(f"{self.path}.{index}", one) for index, one in enumerate(self.module)]

    @cached_property
    def entries(self) -> dict[str, object]:
        """The stand-ins of the layers or parameters of a dict, by name."""
        if not isinstance(self.module, _MAPPINGS):
            raise Refusal(f"`{self.path}` is a {self.kind}, not a dict of layers")
        return {name: stand_in(f"{self.path}.{name}", one) for name, one in self.module.items()}

    def attribute(self, name: str) -> object:
        """Return the stand-in of a sublayer or tensor; raise Refusal for any other attribute."""
        held = getattr(self.module, name, self)
        if isinstance(held, nn.Module | Tensor) or (held is None and name in PARAMETER_ATTRIBUTES):
            return stand_in(f"{self.path}.{name}", held)
        raise Refusal(f"`{self.path}` ({self.kind}) has no layer or parameter `{name}`")


def stand_in(path: str, held: object) -> object:
    """Return the stand-in of a layer, a parameter or an empty place of the network."""
    if isinstance(held, nn.Module):
        return Layer(path, held)
    return None if held is None else UNKNOWN
