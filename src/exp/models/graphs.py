"""A network as one torch.fx graph, a node for each operation and each call of a layer, and what each node gives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from exp.models.compiler import GIVEN, MODE

# In the place of a tensor of which nothing else is known.
TENSOR = torch.empty(0, device="meta")


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
    kind: type[nn.Module] = type(type(network).__name__, (type(network),), {"forward": forward})
    view: nn.Module = object.__new__(kind)
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
    return _recorder(tracer, value, always=name.startswith(("torch.", f"{GIVEN}.")))


def _recorder(tracer: fx.Tracer, function: Callable[..., object], *, always: bool) -> Callable[..., object]:
    # Always, because torch's `arange` and `rand` of sizes alone belong to the run, too.
    def call(*args: object, **kwargs: object) -> object:
        if always or any(isinstance(value, fx.Proxy) for value in args):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


def graph_of(network: nn.Module) -> fx.Graph:
    """The graph that torch.fx makes of a module that is no container of exp's; its leaves are torch's layers.

    torch.fx follows `self.training` while it traces, and writes down what it was: so a functional dropout would stay
    on in evaluation. A leaf keeps its flag.

    Raises: ValueError with torch's reason where a module cannot be traced; DependsOnMode.
    """
    modes = {module: module.training for module in network.modules()}
    try:
        evaluated, constants = _traced(network, training=False)
        # Their constants, so that those of the next trace have the same names.
        for name in constants:
            delattr(network, name)
        trained, others = _traced(network, training=True)
    finally:
        for module, training in modes.items():
            module.training = training
    same = str(evaluated) == str(trained) and constants.keys() == others.keys()
    if not (same and all(_equal(constants[name], others[name]) for name in constants)):
        raise DependsOnMode("its operations in training are not those in evaluation")
    return trained


def _traced(network: nn.Module, *, training: bool) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph in one mode, and the tensors that torch.fx set as attributes of the network for it."""
    # Not by `train`, which a user's network may give a meaning of its own.
    for module in network.modules():
        module.training = training
    before = set(vars(network))
    try:
        graph = fx.symbolic_trace(network).graph
    except Exception as error:  # a user's own forward may raise anything
        raise ValueError(
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        ) from error
    return graph, {name: value for name, value in vars(network).items() if name not in before}


def _equal(one: Any, other: Any) -> bool:
    """Whether two constants are the same; without numbers, on the meta device, as far as shapes say."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and (one.is_meta or other.is_meta or torch.equal(one, other))


def values_of(network: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[str, object]:
    """What each node of the graph gives, by its name, with tensors on the meta device: no memory, no numbers.

    Empty where one forward on that device cannot be done (an operator needs numbers).

    inputs: stand-ins for the network's inputs, of any device.
    """
    forward = _Kept(fx.GraphModule(on_meta(network), graph))
    try:
        with torch.no_grad():
            forward.run(*(tensor.to("meta") for tensor in inputs))
    except Exception as error:  # the shape check has told what is wrong, or why nothing can be said
        logging.getLogger(__name__).debug("the values of the network are taken for tensors: %s", error)
        return {}
    return forward.found


def on_meta(network: nn.Module) -> nn.Module:
    """A copy of a network without memory: its parameters and buffers are on the meta device."""
    tensors = [*network.parameters(), *network.buffers()]
    memo: dict[int, Any] = {id(tensor): _meta(tensor) for tensor in tensors}
    return copy.deepcopy(network, memo)


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Kept(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, object] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.found[node.name] = super().run_node(node)
        return self.found[node.name]
