"""What a program's name of a layer stands for while it is traced: a module or a parameter, and where it lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exp.models.constants import part
from exp.models.program_error import nearest_or
from exp.models.vocabulary import PARAMETER_ATTRIBUTES

_SEQUENCES = (nn.ModuleList, nn.ParameterList, nn.Sequential)
_MAPPINGS = (nn.ModuleDict, nn.ParameterDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)


@dataclass(frozen=True, eq=False)
class Reference:
    """A layer or parameter of the network. `target` is its path in the state dict, `linears.0`."""

    target: str
    held: nn.Module | Tensor

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.held, Tensor)

    @property
    def is_callable(self) -> bool:
        return isinstance(self.held, nn.Module) and not isinstance(self.held, _NOT_CALLABLE)

    @property
    def kind(self) -> str:
        return type(self.held).__name__

    def child(self, name: str, held: Any) -> Reference | None:
        return None if held is None else Reference(f"{self.target}.{name}", held)

    def elements(self) -> list[Any]:
        """What a loop over it runs through: the layers of a list, the keys of a dict. Raises ValueError."""
        if isinstance(self.held, _MAPPINGS):
            return list(self.held.keys())
        if isinstance(self.held, _SEQUENCES):
            keys = list(self.held._modules) if not isinstance(self.held, nn.ParameterList) else None
            return [self.child(keys[i] if keys else str(i), held) for i, held in enumerate(self.held)]
        raise ValueError(f"`{self.target}` is a {self.kind}, not a list of layers")

    def entries(self) -> dict[str, Any]:
        """The layers of a ModuleDict or ParameterDict by name. Raises ValueError."""
        if not isinstance(self.held, _MAPPINGS):
            raise ValueError(f"`{self.target}` is a {self.kind}, not a dict of layers")
        return {name: self.child(name, held) for name, held in self.held.items()}

    def item(self, index: Any) -> Any:
        """`linears[0]`, `linears[1:]`, `heads["main"]`. Raises ValueError."""
        if isinstance(self.held, _MAPPINGS):
            entries = self.entries()
            if not isinstance(index, str) or index not in entries:
                expected = nearest_or(str(index), entries, otherwise=f"one of {', '.join(entries)}")
                raise ValueError(f"`{self.target}` has no {index!r}; it has {expected}")
            return entries[index]
        return part(f"`{self.target}`", self.elements(), index)

    def attribute(self, name: str) -> Any:
        """A sublayer, parameter or buffer, and nothing else that the object may hold. Raises ValueError."""
        if isinstance(self.held, nn.Module) and not name.startswith("_"):
            for table in (self.held._modules, self.held._parameters, self.held._buffers):
                if name in table:
                    return self.child(name, table[name])
            # A parametrised weight is a property of the layer's class, so the tables do not have it.
            if name in PARAMETER_ATTRIBUTES and isinstance(getattr(self.held, name, None), Tensor):
                return self.child(name, getattr(self.held, name))
        raise ValueError(f"`{self.target}` ({self.kind}) has no layer or parameter `{name}`")
