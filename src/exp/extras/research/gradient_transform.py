"""What changes the gradient that flows back at a module, and leaves the forward as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from exp.errors import ConfigError, Fault, RunError
from exp.hooks.hook import Hook
from exp.models.matching import matching
from exp.nested import mapped, tensors_in

if TYPE_CHECKING:
    from exp.models.forward_trace import Call
    from exp.strategies.strategy import Blueprint

At = Literal["input", "output"]
_METHOD_AT = {"input": "forward_pre", "output": "forward"}


class GradientTransform(Hook, ABC):
    """Passes tensors at a module through `change`: those that it is given, by position, or those that it returns.

    Where no gradient is kept, in evaluation above all, nothing is done.

    modules: as Hook takes them, but none inside another: the gradient would be changed twice.
    at: input, so that what lies before the module gets the changed gradient, and the module itself the true one; or
        output, so that the module gets the changed one, too.
    """

    transforms = True
    # Whether a module and one inside it may both be meant.
    nests: bool = False

    def __init__(self, *, modules: Sequence[str], at: str) -> None:
        super().__init__(modules=modules)
        self.at = at

    @abstractmethod
    def change(self, tensor: Tensor) -> Tensor:
        """A tensor with the same numbers, and another gradient."""

    def overrides(self, method: str) -> bool:
        if method in _METHOD_AT.values():
            return method == _METHOD_AT.get(self.at)
        return super().overrides(method)

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> object:
        return self._changed(name, inputs)

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
        return self._changed(name, output)

    def _changed(self, name: str, values: object) -> Any | None:
        if not torch.is_grad_enabled():
            return None
        if not any(tensor.is_floating_point() for tensor in tensors_in(values)):
            raise RunError(f"hooks.{self.name}: {self._without(name)}")
        return mapped(values, lambda tensor: self.change(tensor) if tensor.requires_grad else tensor)

    # --- before the run ---

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        """Beside what every hook says: modules inside each other, and those at which no gradient flows."""
        yield from super().faults(planned)
        try:
            chosen = matching(planned.network, self.modules, key="")
        except ConfigError:  # told above
            return
        if not self.nests:
            yield from self._nested(chosen)
        # A term that differentiates with respect to the input lets gradients flow where there are none without it.
        if self.at in _METHOD_AT and not planned.needs:
            for name, calls in planned.calls.items():
                if name in chosen and (said := self._idle(name, calls[-1])) is not None:
                    expected = f"another module, or another `at`: {said}"
                    yield self.fault("modules", got=name, expected=expected)

    def _nested(self, chosen: Mapping[str, nn.Module]) -> Iterator[Fault]:
        for name in chosen:
            outer = next((one for one in chosen if one != name and (not one or name.startswith(f"{one}."))), None)
            if outer is not None:
                yield self.fault(
                    "modules",
                    got=f"{outer or 'the network'} and {name}, which lies in it",
                    expected="modules that lie beside each other: the gradient would be changed twice",
                    cure=f"Name one of the two: hooks.{self.name}.modules=[{name}]",
                )
                return

    def _idle(self, name: str, call: Call) -> str | None:
        """Why there is nothing to change at a module; None where there is."""
        values = call.inputs if self.at == "input" else call.output
        tensors = [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]
        if not tensors:
            return self._without(name)
        if any(tensor.requires_grad for tensor in tensors):
            return None
        return f"no gradient flows back through the {self.at} of {name or 'the network'}, for nothing before it learns"

    def _without(self, name: str) -> str:
        what = "is given by position" if self.at == "input" else "returns"
        return f"{name or 'the network'} has no floating tensor among what it {what}, and so no gradient"
