"""A network cut into consecutive parts, each a function of its own that runs with the network's layers.

The layers stay where they are in the network, under the names that the state dict knows. A value that a later part
needs is carried: a residual, several values, the tuple of a recurrent layer. What holds no tensor (a shape, a number)
is computed again where it is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from exp.errors import ConfigError, Fault
from exp.models.graphs import TENSOR, Kind, graph_of, holds_tensor, kinds_of
from exp.models.program_graph import DependsOnMode
from exp.models.split import Patterns, assign, unit_name

MODULE_KEY = "strategy.name"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the parts.

    layers: what it calls, in order. tensors: names of the parameters and buffers that are its own.
    inputs: names of the network's inputs that it reads. takes: values of earlier parts that it reads.
    gives: values that later parts read; the last part gives the network's output instead.
    run: function(network, *inputs, *takes) that gives a tuple of them, or the output.
    """

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    inputs: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A network in parts.

    inputs: names of the network's inputs with their defaults, `inspect.Parameter.empty` where there is none.
    kinds: of the values that are carried.
    """

    parts: tuple[Part, ...]
    inputs: Mapping[str, Any]
    kinds: Mapping[str, Kind]

    def carried(self, part: int) -> tuple[str, ...]:
        """What has to be there behind a part: values of it and of earlier ones that later ones read, in order."""
        later = {name for other in self.parts[part + 1 :] for name in other.takes}
        return tuple(name for other in self.parts[: part + 1] for name in other.gives if name in later)

    def bind(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The network's inputs by name, as a call of it gives them. Raises: TypeError."""
        if len(arguments) == 1 and isinstance(arguments[0], Mapping) and len(self.inputs) > 1 and not named:
            arguments, named = (), arguments[0]
        bound = {**dict(zip(self.inputs, arguments, strict=False)), **named}
        missing = [name for name in self.inputs if name not in bound and self.inputs[name] is inspect.Parameter.empty]
        if missing or len(arguments) > len(self.inputs):
            raise TypeError(f"the network takes {', '.join(self.inputs)}; got {len(arguments)} and {sorted(named)}")
        return {name: bound.get(name, default) for name, default in self.inputs.items()}


def split(network: nn.Module, *, count: int, layers: Patterns | None, inputs: Sequence[Tensor]) -> Split:
    """Cuts a network into `count` consecutive parts.

    layers: name patterns of each part; None balances them by bytes (split.py).
    inputs: stand-ins for the network's inputs, to see which of its values are tensors.

    Raises: ConfigError with the faults of the layers, or the reason why this network cannot be cut.
    """
    try:
        graph = graph_of(network)
    except DependsOnMode as error:
        got = f"{type(network).__name__}, where {error}: a part would compute in evaluation what it does in training"
        expected = "a network whose forward does not ask self.training; its layers may"
        cure = "Use torch.nn.Dropout as a layer, not the function, or a container with a forward program"
        raise ConfigError([Fault(key=MODULE_KEY, got=got, expected=expected, cure=cure)]) from error
    except ValueError as error:
        got = f"{type(network).__name__}, which torch.fx cannot trace ({error})"
        expected = "a network whose layers run in one straight line: model=sequential and the like, or an nn.Sequential"
        raise ConfigError([Fault(key=MODULE_KEY, got=got, expected=expected)]) from error
    found = assign(network, graph, count=count, layers=layers)
    cutter = _Cutter(network, graph, found, count, kinds_of(network, graph, inputs))
    parts = tuple(cutter.part(index) for index in range(count))
    carried = {name for part in parts for name in part.gives}
    return Split(parts=parts, inputs=cutter.inputs, kinds={name: cutter.kind(name) for name in carried})


class _Cutter:
    """Places every node of a graph in a part, and writes the graph of each."""

    def __init__(
        self, network: nn.Module, graph: fx.Graph, found: Mapping[str, int], count: int, kinds: Mapping[str, Kind]
    ) -> None:
        self.network, self.graph, self.found, self.count, self.kinds = network, graph, found, count, kinds
        held = dict(network.named_parameters(remove_duplicate=False))
        self.held = held | dict(network.named_buffers(remove_duplicate=False))
        self.called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        self.inputs = {str(node.target): _default(node) for node in graph.nodes if node.op == "placeholder"}
        self.of: dict[fx.Node, int] = {}
        self._place()
        self.needed = [self._needed(part) for part in range(count)]

    def kind(self, name: str) -> Kind:
        return self.kinds.get(name, TENSOR)

    def _place(self) -> None:
        now = 0
        for node in self.graph.nodes:
            unit = unit_name(node, self.called, self.held)
            if node.op == "call_module":
                now = max(now, self.found[unit])
            if node.op == "output":
                now = self.count - 1
            # A part of a tuple is taken out of it where it is made, so that the rest need not travel.
            is_part = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
            source = node.args[0] if is_part and isinstance(node.args[0], fx.Node) else None
            if unit is not None:
                self.of[node] = self.found[unit]
            elif source is not None and source in self.of and self.kind(source.name) is not TENSOR:
                self.of[node] = self.of[source]
            else:
                self.of[node] = max([now, *(self.of[used] for used in node.all_input_nodes if used in self.of)])

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a part may have a copy of the node: an input of the network, or a value without a tensor."""
        if node.op == "placeholder" or (node.op == "get_attr" and str(node.target) not in self.held):
            return True
        return node.op in ("call_function", "call_method") and not holds_tensor(self.kind(node.name))

    def _needed(self, part: int) -> list[fx.Node]:
        """The nodes of one part's graph, copies and carried values included, in the order of the whole."""
        wanted = {node for node in self.graph.nodes if self.of[node] == part and not self._is_free(node)}
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if self.of[node] != part and not self._is_free(node):
                continue  # carried: what it is made of is not needed here
            for used in node.all_input_nodes:
                if used not in wanted:
                    wanted.add(used)
                    stack.append(used)
        return [node for node in self.graph.nodes if node in wanted]

    def _is_carried(self, node: fx.Node, part: int) -> bool:
        return self.of[node] != part and not self._is_free(node)

    def part(self, index: int) -> Part:
        nodes = self.needed[index]
        inputs = [node for node in nodes if node.op == "placeholder"]
        takes = [node for node in nodes if self._is_carried(node, index)]
        later = {
            node for other in range(index + 1, self.count) for node in self.needed[other] if self.of[node] == index
        }
        gives = [node for node in nodes if node in later and not self._is_free(node)]
        graph, copies = fx.Graph(), {}
        for node in inputs:
            copies[node] = graph.placeholder(str(node.target))
        for node in takes:
            copies[node] = graph.placeholder(node.name)
        for node in nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if index < self.count - 1:
            graph.output(tuple(copies[node] for node in gives))
        return Part(
            layers=tuple(name for name, part in self.found.items() if part == index),
            tensors=tuple(name for name in self.held if self._owner(name) == index),
            inputs=tuple(str(node.target) for node in inputs),
            takes=tuple(node.name for node in takes),
            gives=tuple(node.name for node in gives),
            run=_compiled(graph),
        )

    def _owner(self, name: str) -> int:
        owners = [unit for unit in self.found if name == unit or name.startswith(f"{unit}.")]
        # What nothing uses is kept by the first part.
        return self.found[max(owners, key=len)] if owners else 0


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The function that a graph is. It looks layers up in the network, so that one that is replaced later runs."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)  # text that torch.fx writes from the graph
    return namespace["forward"]


def _default(node: fx.Node) -> Any:
    return node.args[0] if node.args else inspect.Parameter.empty
