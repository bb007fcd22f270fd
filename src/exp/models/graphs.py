"""A network as one torch.fx graph of its layers, and what kind of value each step of it gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from exp.models.containers import ProgramModel
from exp.models.program_graph import DependsOnMode

# Where a structure holds a tensor.
TENSOR = "tensor"

Kind = Any


def graph_of(network: nn.Module) -> fx.Graph:
    """The graph that a container's program is, or that torch.fx makes of any other module; its leaves are layers.

    torch.fx follows `self.training` while it traces, and writes down what it was: so a functional dropout would stay
    on in evaluation. A leaf keeps its flag.

    Raises: ValueError with torch's reason where a module cannot be traced; DependsOnMode.
    """
    if isinstance(network, ProgramModel):
        return network.graph_module().graph
    modes = {module: module.training for module in network.modules()}
    try:
        evaluated, constants = _traced(network, training=False)
        # The constants of this trace, so that those of the next one have the same names.
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


def kinds_of(network: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[str, Kind]:
    """What each node of the graph gives, by its name: TENSOR, a structure with TENSOR in it, or a plain value.

    One forward on the meta device: no memory, no numbers. Empty where that cannot be done (an operator needs numbers).

    inputs: stand-ins for the network's inputs, of any device.
    """
    kinds = _Kinds(fx.GraphModule(on_meta(network), graph))
    try:
        with torch.no_grad():
            kinds.run(*(tensor.to("meta") for tensor in inputs))
    except Exception:  # the shape check has told what is wrong, or why nothing can be said
        return {}
    return kinds.found


def on_meta(network: nn.Module) -> nn.Module:
    """A copy of a network without memory: its parameters and buffers are on the meta device."""
    tensors = [*network.parameters(), *network.buffers()]
    memo: dict[int, Any] = {id(tensor): _meta(tensor) for tensor in tensors}
    return copy.deepcopy(network, memo)


def flatten(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flatten(item)]
    return []


def kind_of(value: Any) -> Kind:
    """The structure of a value, with TENSOR where it holds one."""
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, dict):
        return {key: kind_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [kind_of(item) for item in value])
    return ("plain", value)


def unflatten(kind: Kind, tensors: list[Tensor]) -> Any:
    """The value of a kind; takes its tensors from the front of the list."""
    if kind is TENSOR:
        return tensors.pop(0)
    if isinstance(kind, dict):
        return {key: unflatten(item, tensors) for key, item in kind.items()}
    if type(kind) is tuple and len(kind) == 2 and kind[0] == "plain":
        return kind[1]
    return _like(kind, [unflatten(item, tensors) for item in kind])


def holds_tensor(kind: Kind) -> bool:
    """Whether a value of this kind has a tensor in it."""
    if kind is TENSOR:
        return True
    if isinstance(kind, dict):
        return any(map(holds_tensor, kind.values()))
    if type(kind) is tuple and len(kind) == 2 and kind[0] == "plain":
        return False
    return isinstance(kind, list | tuple) and any(map(holds_tensor, kind))


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return list(items) if isinstance(value, list) else tuple(items)


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Kinds(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Kind] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        self.found[node.name] = kind_of(value)
        return value
