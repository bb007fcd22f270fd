"""A forward program as a torch.fx graph: one node for each operation on tensors, and for each call of a layer."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

from torch import fx, nn

from exp.models.compiler import MODE


class DependsOnMode(ValueError):
    """A network whose graph in training is another one than in evaluation; torch.fx writes either down, not both."""


def graph_of_function(network: nn.Module, function: FunctionType) -> fx.Graph:
    """The graph of a compiled program of `network`, whose nodes read layers, parameters and `training` from it.

    Loops and constants unroll. Raises: DependsOnMode where the program branches on `training`.
    """
    tracer = _Tracer()
    namespace = {name: _recorded(tracer, name, value) for name, value in function.__globals__.items()}
    forward = FunctionType(function.__code__, namespace, "forward")
    # torch.fx traces the forward of a class, and a program's belongs to its instance.
    kind = type(type(network).__name__, (type(network),), {"forward": forward})
    view = kind.__new__(kind)
    view.__dict__.update(vars(network))
    return tracer.trace(view)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise DependsOnMode("its program branches on `training`")


def _recorded(tracer: fx.Tracer, name: str, value: object) -> object:
    """A function of the program's namespace that becomes a node where it is called with something of the graph."""
    if name == MODE:
        return lambda network: tracer.create_proxy("get_attr", "training", (), {})
    if not callable(value):
        return value
    return _recorder(tracer, value, always=name.startswith("torch."))


def _recorder(tracer: fx.Tracer, function: Callable[..., object], *, always: bool) -> Callable[..., object]:
    # Always, because torch's `arange` and `rand` of sizes alone belong to the run, too.
    def call(*args: object, **kwargs: object) -> object:
        if always or any(isinstance(value, fx.Proxy) for value in args):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call
