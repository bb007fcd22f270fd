"""Stand-ins for what a forward program finds when it runs: its layers, and the values that only a run knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from exp.models.constants import element
from exp.models.syntax import nearest_or
from exp.models.vocabulary import PARAMETER_ATTRIBUTES

COMPUTABLE = "what a forward program can compute before the run"

_SEQUENCES = (nn.ModuleList, nn.ParameterList, nn.Sequential)
_MAPPINGS = (nn.ModuleDict, nn.ParameterDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)


class Refusal(ValueError):
    """A fault of a program at the place that is being run."""

    def __init__(self, message: str, expected: str = COMPUTABLE) -> None:
        super().__init__(message)
        self.expected = expected


class Unknown:
    """A value that only a run knows: a tensor, a size of one, or whatever a layer gives."""

    def __bool__(self) -> bool:
        raise Refusal(
            "a condition that is known only while the network runs",
            "a constant, or where(condition, a, b) on tensors",
        )


UNKNOWN = Unknown()


class Limits:
    """What finfo and iinfo give: numbers by name, and nothing that an operation takes."""

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

    @property
    def is_callable(self) -> bool:
        return not isinstance(self.module, _NOT_CALLABLE)

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    def child(self, name: str, held: object) -> object:
        """The stand-in of something that the layer holds."""
        return stand_in(f"{self.path}.{name}", held)

    @cached_property  # a program of a line for each of a thousand layers asks as often
    def elements(self) -> Sequence[object]:
        """What a loop over it runs through: the layers of a list, the keys of a dict. Raises: Refusal."""
        if isinstance(self.module, _MAPPINGS):
            return list(self.module.keys())
        if isinstance(self.module, nn.ParameterList):
            return [self.child(str(index), held) for index, held in enumerate(self.module)]
        if isinstance(self.module, _SEQUENCES):
            return [self.child(name, held) for name, held in self.module._modules.items()]
        raise Refusal(f"`{self.path}` is a {self.kind}, not a list of layers")

    @cached_property
    def entries(self) -> Mapping[str, object]:
        """The layers of a ModuleDict or ParameterDict by name. Raises: Refusal."""
        if not isinstance(self.module, _MAPPINGS):
            raise Refusal(f"`{self.path}` is a {self.kind}, not a dict of layers")
        return {name: self.child(name, held) for name, held in self.module.items()}

    def item(self, index: object) -> object:
        """`linears[0]`, `linears[1:]`, `heads["main"]`. Raises: Refusal."""
        if not isinstance(self.module, _MAPPINGS):
            return element(f"`{self.path}`", self.elements, index)
        entries = self.entries
        if not isinstance(index, str) or index not in entries:
            expected = nearest_or(str(index), entries, otherwise=f"one of {', '.join(entries)}")
            raise Refusal(f"`{self.path}` has no {index!r}; it has {expected}")
        return entries[index]

    def attribute(self, name: str) -> object:
        """A sublayer, parameter or buffer, and nothing else that the object may hold. Raises: Refusal."""
        if not name.startswith("_"):
            tables: tuple[Mapping[str, object], ...]
            tables = (self.module._modules, self.module._parameters, self.module._buffers)
            for table in tables:
                if name in table:
                    return self.child(name, table[name])
            # A parametrised weight is a property of the layer's class, so the tables do not have it.
            if name in PARAMETER_ATTRIBUTES and isinstance(getattr(self.module, name, None), Tensor):
                return UNKNOWN
        raise Refusal(f"`{self.path}` ({self.kind}) has no layer or parameter `{name}`")


def stand_in(path: str, held: object) -> object:
    """What stands for a layer, a parameter or an empty place of the network while a program is tried."""
    if isinstance(held, nn.Module):
        return Layer(path, held)
    return None if held is None else UNKNOWN
