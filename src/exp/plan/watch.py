"""Which layer a forward is in, and what each one took and gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from exp.models.config_keys import path_of


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: what it took and, once it returned, what it gave."""

    module: nn.Module
    inputs: tuple[Any, ...]
    output: Any = None


class Watch:
    """Follows every module's calls while it is entered as a context.

    calls: those that returned, in that order.
    inside: the innermost call that has not returned, which after an exception is the one that failed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.calls: list[Call] = []
        self._stack: list[Call] = []

    @property
    def inside(self) -> Call | None:
        return self._stack[-1] if self._stack else None

    @property
    def root(self) -> nn.Module | None:
        return self._stack[0].module if self._stack else None

    def path_of(self, network: nn.Module, module: nn.Module) -> str:
        """The path of the innermost module of the network on the way to `module`, which may be made on the fly."""
        held = set(network.modules())
        known = [call.module for call in self._stack if call.module in held]
        return path_of(network, module if module in held else known[-1] if known else network)

    def __enter__(self) -> Watch:
        self._handles = [
            register_module_forward_pre_hook(lambda module, inputs: self._stack.append(Call(module, inputs))),
            register_module_forward_hook(self._returned),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _returned(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # A module that caught an exception of an inner one leaves the inner call on the stack.
        while self._stack and self._stack.pop().module is not module:
            pass
        self.calls.append(Call(module, inputs, output))
