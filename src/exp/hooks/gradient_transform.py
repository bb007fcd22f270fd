"""What changes the gradient that flows back at a module, and leaves the forward as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from exp.errors import ConfigError, Fault, RunError
from exp.hooks.hook import Hook
from exp.models.inference import example_inputs
from exp.models.matching import matching
from exp.nested import mapped, tensors_in
from exp.types import DataSpec

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

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

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """Beside what every hook says: modules inside each other, and those at which no gradient flows."""
        faults = list(super().faults(planned))
        try:
            chosen = matching(planned.network, self.modules, key="")
        except ConfigError:
            return faults
        if not self.nests:
            faults += self._nested(chosen)
        # A term that differentiates with respect to the input lets gradients flow where there are none without it.
        if self.at in _METHOD_AT and not planned.needs:
            faults += self._idle(planned, chosen)
        return faults

    def _nested(self, chosen: dict[str, nn.Module]) -> list[Fault]:
        for name in chosen:
            outer = next((one for one in chosen if one != name and (not one or name.startswith(f"{one}."))), None)
            if outer is not None:
                return [
                    Fault(
                        key=f"hooks.{self.name}.modules",
                        got=f"{outer or 'the network'} and {name}, which lies in it",
                        expected="modules that lie beside each other: the gradient would be changed twice",
                        cure=f"Name one of the two: hooks.{self.name}.modules=[{name}]",
                    )
                ]
        return []

    def _idle(self, planned: Planned, chosen: dict[str, nn.Module]) -> list[Fault]:
        """One forward without numbers shows at which modules there is nothing to change."""
        seen: dict[str, str | None] = {}

        def look(name: str, values: object) -> None:
            tensors = [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]
            said = None if any(tensor.requires_grad for tensor in tensors) else self._without_gradient(name)
            seen[name] = said if tensors else self._without(name)

        handles = []
        for name, module in chosen.items():
            if self.at == "input":
                handles.append(module.register_forward_pre_hook(lambda _, inputs, name=name: look(name, inputs)))
            else:
                handles.append(module.register_forward_hook(lambda _, __, output, name=name: look(name, output)))
        try:
            with torch.enable_grad():
                planned.network(*example_inputs(DataSpec.of(planned.config["data"]), device="meta"))
        except Exception:  # the shape check has told what is wrong, or why nothing can be said
            return []
        finally:
            for handle in handles:
                handle.remove()
        return [
            Fault(key=f"hooks.{self.name}.modules", got=name, expected=f"another module, or another `at`: {said}")
            for name, said in seen.items()
            if said is not None
        ]

    def _without(self, name: str) -> str:
        what = "is given by position" if self.at == "input" else "returns"
        return f"{name or 'the network'} has no floating tensor among what it {what}, and so no gradient"

    def _without_gradient(self, name: str) -> str:
        return f"no gradient flows back through the {self.at} of {name or 'the network'}, for nothing before it learns"
