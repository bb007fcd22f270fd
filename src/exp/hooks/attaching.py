"""A hook at the modules of a network: torch's own hooks, registered and removed.

An observer's are there in due steps only. Those of the forward go when the forward ends, because activation
checkpointing runs it again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.hooks.observing import OBSERVING
from exp.nested import tensors_in

if TYPE_CHECKING:
    from exp.hooks.hook import Hook

IN_FORWARD = ("forward_pre", "forward", "tensor_gradient")
IN_BACKWARD = ("full_backward", "post_accumulate_grad")
# In a step; a state dict's are always there.
AT_MODULES = (*IN_FORWARD, *IN_BACKWARD)


class Attached:
    """One hook at its modules, by name. A transform, and what watches state dicts, is there from the start.

    network: for the names of parameters.
    """

    def __init__(self, hook: Hook, modules: Mapping[str, nn.Module], *, network: nn.Module) -> None:
        self._hook, self._modules = hook, modules
        taken = {id(one) for module in modules.values() for one in module.parameters()}
        self._parameters = {name: one for name, one in network.named_parameters() if id(one) in taken}
        self._always: list[Any] = []
        self._forward: list[Any] = []
        self._backward: list[Any] = []
        if hook.overrides("state_dict_save") or hook.overrides("state_dict_load"):
            self._always += self._state_dict_handles()
        if hook.transforms:
            self._always += [*self._forward_handles(), *self._backward_handles()]

    @contextmanager
    def engaged(self) -> Iterator[None]:
        if self._hook.transforms or not self._hook.is_at_modules:
            yield
            return
        self.disengage()
        self._backward = self._backward_handles()
        self._forward = self._forward_handles()
        try:
            yield
        finally:
            _remove(self._forward)

    def disengage(self) -> None:
        _remove(self._forward)
        _remove(self._backward)

    def remove(self) -> None:
        self.disengage()
        _remove(self._always)

    def _forward_handles(self) -> list[Any]:
        hook, handles = self._hook, []
        for name, module in self._modules.items():
            if hook.overrides("forward_pre"):
                handles.append(module.register_forward_pre_hook(self._forward_pre(name)))
            if hook.overrides("forward"):
                handles.append(module.register_forward_hook(self._after_forward(name)))
            if hook.overrides("tensor_gradient"):
                handles.append(module.register_forward_hook(self._on_outputs(name)))
        return handles

    def _backward_handles(self) -> list[Any]:
        hook, handles = self._hook, []
        if hook.overrides("full_backward"):
            for name, module in self._modules.items():
                handles.append(module.register_full_backward_hook(self._full_backward(name)))
        if hook.overrides("post_accumulate_grad"):
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))
        return handles

    def _forward_pre(self, name: str) -> Callable[..., Any]:
        call = self._called("forward_pre")
        return lambda module, inputs: call(name, module, inputs)

    def _after_forward(self, name: str) -> Callable[..., Any]:
        call = self._called("forward")
        return lambda module, inputs, output: call(name, module, inputs, output)

    def _full_backward(self, name: str) -> Callable[..., Any]:
        call = self._called("full_backward")
        return lambda module, grad_inputs, grad_outputs: call(name, module, grad_inputs, grad_outputs)

    def _accumulated(self, name: str) -> Callable[[nn.Parameter], None]:
        def accumulated(parameter: nn.Parameter) -> None:
            self._hook.post_accumulate_grad(name, parameter)

        return accumulated

    def _on_outputs(self, name: str) -> Callable[..., None]:
        call = self._called("tensor_gradient")

        def on_outputs(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: call(name, gradient))

        return on_outputs

    def _called(self, method: str) -> Callable[..., Any]:
        """The hook's own method; an observer's without a graph, and held to returning None."""
        hook, own = self._hook, getattr(self._hook, method)
        if hook.transforms:
            return own

        def observing(*arguments: Any) -> None:
            seen = list(tensors_in(arguments))
            before = [tensor._version for tensor in seen]
            with torch.no_grad(), OBSERVING:
                returned = own(*arguments)
            if [tensor._version for tensor in seen] != before:
                raise RunError(
                    f"hooks.{hook.name}: {type(hook).__name__}.{method} changed a tensor in place; an observing hook "
                    "leaves what it sees as it is. Work on a copy"
                )
            if returned is not None:
                raise RunError(
                    f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(returned).__name__}; an "
                    "observing hook returns None there. Write `transforms = True` in its class where it is to change "
                    "what it sees"
                )

        return observing

    def _state_dict_handles(self) -> list[Any]:
        hook, handles = self._hook, []
        for name, module in self._modules.items():
            if hook.overrides("state_dict_save"):
                handles.append(module.register_state_dict_post_hook(self._on_save(name)))
            if hook.overrides("state_dict_load"):
                handles.append(module.register_load_state_dict_pre_hook(self._on_load(name)))
        return handles

    def _on_save(self, name: str) -> Callable[..., None]:
        call = self._called("state_dict_save")

        def on_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            _put_back(state, prefix, call(name, module, _own(state, prefix)))

        return on_save

    def _on_load(self, name: str) -> Callable[..., None]:
        call = self._called("state_dict_load")

        def on_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            _put_back(state, prefix, call(name, module, _own(state, prefix)))

        return on_load


def _own(state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _put_back(state: dict[str, Any], prefix: str, changed: Mapping[str, Any] | None) -> None:
    if changed is not None:
        state.update({prefix + key: value for key, value in changed.items()})


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
