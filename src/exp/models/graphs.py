"""Networks as torch.fx graphs. A graph has one node per operation and per call of a layer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from exp.models.compiler import GIVEN, MODE
from exp.models.containers import ProgramModel

# A placeholder for a tensor of unknown shape.
TENSOR = torch.empty(0, device="meta")


class DependsOnMode(ValueError):
    """The network has different graphs in training and in evaluation, but torch.fx can record only one graph."""


def _graph_of_program(network: ProgramModel) -> fx.Graph:
    """Return the graph of a forward program. The graph contains unrolled loops and the values of constants.

    The nodes read layers, parameters and the flag `training` from the network.
    """
    function: FunctionType = vars(network)["forward"].__func__
    tracer = _Tracer()
    namespace = {name: _recorder(tracer, name, value) for name, value in function.__globals__.items()}
    forward = FunctionType(function.__code__, namespace, "forward")
    # torch.fx traces the forward method of the class, but a program is an attribute of the instance.
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


def _recorder(tracer: fx.Tracer, name: str, value: object) -> object:
    """Return a function that adds a node to the graph when it is called with values of the graph.

    Args:
        tracer: The tracer that adds the nodes.
        name: Name of the function in the program's namespace.
        value: The function. A value that is not callable is returned unchanged.
    """
    if name == MODE:
        return lambda network: tracer.create_proxy("get_attr", "training", (), {})
    if not callable(value):
        return value
    # Functions of torch are always recorded, even without a value of the graph as an argument. `arange(5)` and
    # `rand(5)` must run again in each step.
    always = name.startswith(("torch.", f"{GIVEN}."))

    def call(*args: object, **kwargs: object) -> object:
        if always or any(isinstance(argument, fx.Proxy) for argument in args):
            return tracer.create_proxy("call_function", value, args, kwargs)
        return value(*args, **kwargs)

    return call


def graph_of(network: nn.Module) -> fx.Graph:
    """Return the torch.fx graph of a network.

    In a container of exp, the nodes call the layers of the container. In other modules, they call layers of torch.

    A module that is not a container is traced twice, in training mode and in evaluation mode. The reason is that
    torch.fx records the value of `self.training` during the trace. Functional dropout would otherwise be active in
    evaluation. Layers read their own flag when they run.

    Raises:
        ValueError: torch.fx cannot trace the module. The message contains torch's reason.
        DependsOnMode: The graphs in training and in evaluation differ.
    """
    if isinstance(network, ProgramModel):
        return _graph_of_program(network)
    modes = {module: module.training for module in network.modules()}
    try:
        evaluated, constants = _trace(network, training=False)
        # The constants are removed, so that the next trace gives its constants the same names.
        for name in constants:
            delattr(network, name)
        trained, others = _trace(network, training=True)
    finally:
        for module, training in modes.items():
            module.training = training
    same = str(evaluated) == str(trained) and constants.keys() == others.keys()
    if not (same and all(_equal(constants[name], others[name]) for name in constants)):
        raise DependsOnMode("its operations in training and in evaluation differ")
    return trained


def _trace(network: nn.Module, *, training: bool) -> tuple[fx.Graph, dict[str, object]]:
    """Trace a network in one mode.

    Returns:
        The graph, and the constants that torch.fx added as attributes of the network, by name.
    """
    # The flag is set directly, because a user's network may override `train`.
    for module in network.modules():
        module.training = training
    before = set(vars(network))
    try:
        graph = fx.symbolic_trace(network).graph
    except Exception as error:  # a user's forward may raise anything
        first = str(error).strip().splitlines()[:1]
        raise ValueError(": ".join([type(error).__name__, *first])) from error
    return graph, {name: value for name, value in vars(network).items() if name not in before}


def _equal(one: object, other: object) -> bool:
    """Return whether two constants are equal. On the meta device, only shapes and dtypes are compared."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and (one.is_meta or other.is_meta or torch.equal(one, other))


def values_of(network: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[str, object]:
    """Run a graph on the meta device and return the values of its nodes by name.

    The result is empty if the forward pass fails on the meta device because an operator needs real numbers.

    Args:
        network: The network.
        graph: The graph of the network.
        inputs: Placeholders for the network's inputs, on any device.
    """
    forward = _Kept(fx.GraphModule(on_meta(network), graph))
    try:
        with torch.no_grad():
            forward.run(*(tensor.to("meta") for tensor in inputs))
    except Exception as error:  # the shape check has already reported this error
        logging.getLogger(__name__).debug("all values of the network are assumed to be tensors: %s", error)
        return {}
    return forward.found


def on_meta(network: nn.Module) -> nn.Module:
    """Return a copy of a network with parameters and buffers on the meta device. The copied tensors need no memory."""
    tensors = [*network.parameters(), *network.buffers()]
    memo: dict[int, Any] = {id(tensor): _to_meta(tensor) for tensor in tensors}
    return copy.deepcopy(network, memo)


def _to_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Kept(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, object] = {}

    def run_node(self, node: fx.Node) -> object:
        self.found[node.name] = super().run_node(node)
        return self.found[node.name]
