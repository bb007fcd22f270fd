"""Base class of hooks that change the gradient at modules and leave the values of the forward unchanged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from exp.errors import ConfigError, ErrorDetails, RunError
from exp.hooks.hook import Hook
from exp.models.matching import find_modules
from exp.nested import map_tensors, tensors_in

if TYPE_CHECKING:
    from exp.models.forward_trace import Call
    from exp.strategies.strategy import Blueprint

At = Literal["input", "output"]
_METHOD_AT = {"input": "forward_pre", "output": "forward"}


class GradientTransform(Hook, ABC):
    """Base class of hooks that apply `change` to the positional inputs or the outputs of modules.

    The hook has no effect if gradients are disabled, as in an evaluation.

    Args:
        modules: Name patterns of modules; see Hook. If `nests` is False, a matching module must not contain another
            matching module, because the gradient would change twice.
        at: "input": modules before the matching module in the forward get the changed gradient, and the matching module
            gets the original gradient. "output": the matching module and modules before it get the changed gradient.
    """

    transforms = True
    nests: bool = False

    def __init__(self, *, modules: Sequence[str], at: At) -> None:
        super().__init__(modules=modules)
        self.at = at

    @abstractmethod
    def change(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same values. The backward pass through the returned tensor changes the gradient."""

    def overrides(self, method: str) -> bool:
        if method in _METHOD_AT.values():
            return method == _METHOD_AT[self.at]
        return super().overrides(method)

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> object:
        return self._change(name, inputs)

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
        return self._change(name, output)

    def _change(self, name: str, values: object) -> object:
        if not torch.is_grad_enabled():
            return None
        if not any(tensor.is_floating_point() for tensor in tensors_in(values)):
            raise RunError(f"hooks.{self.name}: the {self.at} of {name or 'the network'} has no floating-point tensor")
        return map_tensors(values, lambda tensor: self.change(tensor) if tensor.requires_grad else tensor)

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield the errors of the base class, of nested modules, and of modules through which no gradient flows."""
        yield from super().errors(planned)
        try:
            chosen = find_modules(planned.network, self.modules, key="")
        except ConfigError:  # super().errors has yielded this error
            return
        nested = [
            (outer, name)
            for name in chosen
            for outer in chosen
            if outer != name and (not outer or name.startswith(f"{outer}."))
        ]
        if nested and not self.nests:
            outer, name = nested[0]
            yield self.error(
                "modules",
                got=f"{outer or 'the network'} and {name}, which is part of it",
                expected="modules that do not contain each other: the gradient would be changed twice",
                fix=f"Name one of the two: hooks.{self.name}.modules=[{name}]",
            )
        # The trace lacks gradients with respect to the inputs of the network, which some terms of the objective
        # compute.
        for name, calls in planned.calls.items() if not planned.needs else ():
            if name in chosen and not self._has_gradient(calls[-1]):
                reason = f"no gradient flows back through the {self.at} of {name or 'the network'}"
                yield self.error("modules", got=name, expected=f"another module, or another `at`: {reason}")

    def _has_gradient(self, call: Call) -> bool:
        values = call.inputs if self.at == "input" else call.output
        return any(tensor.is_floating_point() and tensor.requires_grad for tensor in tensors_in(values))
