"""Division of a network into consecutive parts. Each part is a function that calls layers of the network.

    layers: [[stem, "stage.*"], [down, "stage2.*", norm, head]]        patterns of each part, in the order of the parts
    layers: null                                                       parts balanced by bytes, between whole layers

Layers are the modules that the network's graph calls: each layer of a container, and each copy of a repeat (`stage.0`).
A layer without parameters is in the part of the layer before it.

The layers stay in the network, under their names in the state dict. A part receives the values of earlier parts that it
needs. Examples are the input of a residual connection, or the tuple of a recurrent layer. Values without tensors (a
shape, a number) are computed again in each part that needs them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn

from exp.errors import ErrorDetails, config_error, raise_errors
from exp.models.graphs import TENSOR, DependsOnMode, graph_of, values_of
from exp.nested import tensors_in
from exp.spelling import among

KEY = "strategy.layers"

Patterns = Sequence[Sequence[str]]
STRATEGY_KEY = "strategy.name"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a network.

    Args:
        layers: The layers that this part calls, in order.
        tensors: The names of the parameters and buffers in this part.
        inputs: The names of the network's inputs that this part reads.
        takes: The names of values of earlier parts that this part reads.
        gives: The names of values of this part that later parts read. Empty for the last part.
        run: The function (network, *inputs, *takes) that runs the part. It returns the tuple of the values in `gives`.
            In the last part, it returns the network's output.
    """

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    inputs: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A network divided into parts.

    Args:
        parts: The parts, in order.
        inputs: The default value of each input of the network, by name. `inspect.Parameter.empty`: the input has no
            default.
        values: The values that are passed between parts, by name, as tensors on the meta device.
    """

    parts: tuple[Part, ...]
    inputs: Mapping[str, object]
    values: Mapping[str, object]

    def values_after(self, part: int) -> tuple[str, ...]:
        """Return the names of values to pass on after a part, in order.

        Parts up to this part compute these values, and later parts read them.
        """
        later = {name for other in self.parts[part + 1 :] for name in other.takes}
        return tuple(name for other in self.parts[: part + 1] for name in other.gives if name in later)

    def bind(self, arguments: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
        """Return the values of the network's inputs by name for one call.

        Args:
            arguments: The positional arguments of the call.
            named: The keyword arguments of the call.

        Raises:
            TypeError: An input is missing, or the call has too many arguments.
        """
        bound = {**dict(zip(self.inputs, arguments, strict=False)), **named}
        missing = [name for name in self.inputs if name not in bound and self.inputs[name] is inspect.Parameter.empty]
        if missing or len(arguments) > len(self.inputs):
            got = f"{len(arguments)} positional arguments and the keyword arguments {sorted(named)}"
            raise TypeError(f"the network has the inputs {', '.join(self.inputs)}; got {got}")
        return {name: bound.get(name, default) for name, default in self.inputs.items()}


def split(network: nn.Module, *, count: int, layers: Patterns | None, inputs: Sequence[Tensor]) -> Split:
    """Return a network divided into `count` consecutive parts.

    Args:
        network: The network.
        count: The number of parts.
        layers: The name patterns of each part. None balances the parts by bytes.
        inputs: Placeholders for the network's inputs. A forward pass of the placeholders shows which values are
            tensors.

    Raises:
        ConfigError: The patterns are invalid, or the network cannot be divided. The message has the reason.
    """
    try:
        graph = graph_of(network)
    except DependsOnMode as error:
        got = f"a strategy that splits {type(network).__name__}, but {error}"
        expected = "a network with the same operations in training and in evaluation, except inside its layers"
        fix = "Use the layer torch.nn.Dropout instead of the function dropout, and do not read `training` in forward"
        raise config_error(STRATEGY_KEY, got=got, expected=expected, fix=fix) from error
    except ValueError as error:
        got = f"a strategy that splits {type(network).__name__}, which torch.fx cannot trace ({error})"
        expected = "a network that torch.fx can trace, such as model=sequential or an nn.Sequential"
        raise config_error(STRATEGY_KEY, got=got, expected=expected) from error
    found = assign(network, graph, count=count, layers=layers)
    cutter = _Cutter(network, graph, found, count, values_of(network, graph, inputs))
    parts = tuple(cutter.part(index) for index in range(count))
    carried = {name for part in parts for name in part.gives}
    return Split(parts=parts, inputs=cutter.inputs, values={name: cutter.value(name) for name in carried})


class _Cutter:
    """Assigns every node of a network's graph to a part, and builds a graph for each part."""

    def __init__(
        self, network: nn.Module, graph: fx.Graph, found: Mapping[str, int], count: int, values: Mapping[str, object]
    ) -> None:
        self.network, self.graph, self.found, self.count, self.values = network, graph, found, count, values
        held = dict(network.named_parameters(remove_duplicate=False))
        self.held = held | dict(network.named_buffers(remove_duplicate=False))
        self.called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        self.inputs = {str(node.target): _default(node) for node in graph.nodes if node.op == "placeholder"}
        self.of: dict[fx.Node, int] = {}
        self._place()
        self.needed = [self._needed_nodes(part) for part in range(count)]

    def value(self, name: str) -> object:
        return self.values.get(name, TENSOR)

    def _place(self) -> None:
        now = 0
        for node in self.graph.nodes:
            unit = unit_name(node, self.called, self.held)
            if node.op == "call_module":
                now = max(now, self.found[str(node.target)])
            if node.op == "output":
                now = self.count - 1
            # An element of a tuple is read in the part that makes the tuple, so that only this element is passed on.
            is_part = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
            source = node.args[0] if is_part and isinstance(node.args[0], fx.Node) else None
            if unit is not None:
                self.of[node] = self.found[unit]
            elif source is not None and source in self.of and not isinstance(self.value(source.name), Tensor):
                self.of[node] = self.of[source]
            else:
                self.of[node] = max([now, *(self.of[used] for used in node.all_input_nodes if used in self.of)])

    def _is_free(self, node: fx.Node) -> bool:
        """Return whether every part may compute the value of a node again instead of receiving it.

        This is true for inputs of the network, and for values without a tensor.
        """
        if node.op == "placeholder" or (node.op == "get_attr" and str(node.target) not in self.held):
            return True
        return node.op in ("call_function", "call_method") and not any(True for _ in tensors_in(self.value(node.name)))

    def _needed_nodes(self, part: int) -> list[fx.Node]:
        """Return the nodes in the graph of a part, in the order of the network's graph.

        The nodes include the values that the part receives from earlier parts.
        """
        wanted = {node for node in self.graph.nodes if self.of[node] == part and not self._is_free(node)}
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if self._is_carried(node, part):
                continue  # the part receives the node's value, so that it does not need the node's arguments
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
        later = {node for part in range(index + 1, self.count) for node in self.needed[part] if self.of[node] == index}
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
            run=_compile(graph),
        )

    def _owner(self, name: str) -> int:
        owners = [unit for unit in self.found if name == unit or name.startswith(f"{unit}.")]
        # Tensors that no layer uses are in the first part.
        return self.found[max(owners, key=len)] if owners else 0


def _compile(graph: fx.Graph) -> Callable[..., object]:
    """Return a function that runs a graph.

    At each call, the function reads the layers from the network. Layers that were replaced after compiling are used.
    """
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)  # text that torch.fx writes from the graph
    forward: Callable[..., object] = namespace["forward"]
    return forward


def _default(node: fx.Node) -> object:
    return node.args[0] if node.args else inspect.Parameter.empty


# -- the layers of each part --


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A layer, or a parameter that the forward reads directly. A unit is never divided between parts.

    Args:
        name: The name.
        first: The position in the graph of the unit's first use.
        last: The position in the graph of the unit's last call.
        tensors: The unit's parameters and buffers, by their names in the network.
    """

    name: str
    first: int
    last: int
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def units_of(network: nn.Module, graph: fx.Graph) -> list[Unit]:
    """Return the layers and parameters that a graph uses, in the order of their first use."""
    held = dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    uses: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        name = unit_name(node, called, held)
        # All calls of a layer must be in the same part. A parameter may be used in several parts, because the first
        # part passes it on.
        if name is not None and (node.op == "call_module" or name not in uses):
            uses.setdefault(name, []).append(place)
    return [
        Unit(
            name=name,
            first=places[0],
            last=places[-1],
            tensors={key: held[key] for key in held if key == name or key.startswith(f"{name}.")},
        )
        for name, places in uses.items()
    ]


def unit_name(node: fx.Node, called: set[str], held: Mapping[str, Tensor]) -> str | None:
    """Return the name of the unit that a node uses. Return None for an operation and for the flag `training`."""
    if node.op == "call_module":
        return str(node.target)
    if node.op != "get_attr":
        return None
    target = str(node.target)
    owners = [name for name in called if target.startswith(f"{name}.")]
    return max(owners, key=len) if owners else (target if target in held else None)


def assign(network: nn.Module, graph: fx.Graph, *, count: int, layers: Patterns | None) -> dict[str, int]:
    """Return the index of the part of each unit, from 0 to count - 1, by name of the unit.

    Args:
        network: The network.
        graph: The graph of the network.
        count: The number of parts.
        layers: The name patterns of each part. A pattern also matches every layer inside a matched layer. None balances
            the parts by bytes.

    Raises:
        ConfigError: The patterns are invalid. The keys of the errors begin with `strategy.layers`.
    """
    units = units_of(network, graph)
    if layers is None:
        return _balance(units, count)
    found: dict[str, int] = {}
    errors = list(_name_errors(units, layers, found))
    if len(layers) != count:
        got = f"{len(layers)} list{'s' if len(layers) != 1 else ''} of layers"
        errors.append(ErrorDetails(KEY, got, f"{count} lists, one for each part of the network"))
    part = 0
    for unit in units:
        # A unit without parameters that no pattern matches is in the part of the unit before it.
        part = found.setdefault(unit.name, part)
    raise_errors(errors or _order_errors(units, found))
    return found


def _name_errors(units: Sequence[Unit], layers: Patterns, found: dict[str, int]) -> Iterator[ErrorDetails]:
    """Match layers to patterns, and yield the errors of the patterns.

    A pattern without a match, a layer in two lists, and a layer with parameters in no list are errors.

    Args:
        units: The layers that can be assigned to a part of the network.
        layers: A list of patterns for each part.
        found: Receives the number of the part, counted from 0, by name of the layer.
    """
    known = among([unit.name for unit in units], count=20)
    for part, patterns in enumerate(layers):
        for pattern in patterns:
            matches = [unit.name for unit in units if _matches(unit.name, pattern)]
            if not matches:
                yield ErrorDetails(f"{KEY}.{part}", repr(pattern), f"a pattern that matches one of the layers {known}")
            for name in matches:
                if found.setdefault(name, part) != part:
                    got = f"the layer {name} in list {found[name]} and in list {part}"
                    yield ErrorDetails(f"{KEY}.{part}", got, "each layer in one list")
    missing = [unit.name for unit in units if unit.tensors and unit.name not in found]
    if missing:
        got = f"no list with {among(missing, count=20)}"
        yield ErrorDetails(KEY, got, "every layer with parameters in one of the lists")


def _order_errors(units: Sequence[Unit], found: Mapping[str, int]) -> Iterator[ErrorDetails]:
    order = among([one.name for one in units], count=20)
    for before, unit in itertools.pairwise(units):
        if found[before.name] > found[unit.name]:
            got = f"{unit.name} in list {found[unit.name]}, and the earlier {before.name} in list {found[before.name]}"
            yield ErrorDetails(KEY, got, f"lists in the order in which the layers run: {order}")
    for block in _blocks(units):
        parts = sorted({found[unit.name] for unit in block})
        if len(parts) > 1:
            names = among([unit.name for unit in block], count=20)
            expected = "one list for these layers, because a layer runs several times or layers share a parameter"
            yield ErrorDetails(KEY, f"{names} in lists {', '.join(map(str, parts))}", expected)


def _balance(units: Sequence[Unit], count: int) -> dict[str, int]:
    """Return the index of the part of each unit, by name. The largest part in bytes is as small as possible."""
    blocks = _blocks(units)
    sizes = [sum(unit.bytes for unit in block) for block in blocks]
    most = sum(size > 0 for size in sizes)
    if most < count:
        names = among([unit.name for unit in units if unit.bytes], count=20)
        expected = f"at most {most} parts: the layers with parameters that can be separated are {names}"
        raise config_error(KEY, got=f"{count} parts", expected=expected, fix="Parts consist of whole layers")
    starts = _cuts(sizes, count)
    return {
        unit.name: max(part for part, start in enumerate(starts) if start <= place)
        for place, block in enumerate(blocks)
        for unit in block
    }


def _blocks(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return groups of units that must be in the same part.

    A group contains all units between two calls of a layer, or between two layers with tied parameters.
    """
    reach = [unit.last for unit in units]
    holders: dict[int, int] = {}
    for place, unit in enumerate(units):
        for tensor in unit.tensors.values():
            first = holders.setdefault(id(tensor), place)
            reach[first] = max(reach[first], unit.first)
    blocks: list[list[Unit]] = []
    end = -1
    for place, unit in enumerate(units):
        if unit.first > end:
            blocks.append([])
        blocks[-1].append(unit)
        end = max(end, reach[place])
    return blocks


def _cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return the index of the first block of each part.

    The largest part is as small as possible, and no part is empty. This is the linear partition problem, solved by
    dynamic programming (Skiena, The Algorithm Design Manual, 10.7).

    Args:
        sizes: Size of each block in bytes.
        count: Number of parts.
    """
    total = [0, *itertools.accumulate(sizes)]

    @functools.cache
    def best(end: int, parts: int) -> tuple[float, list[int]]:
        """Divide the blocks before `end` into `parts` parts.

        Returns:
            The size of the largest part, and the index of the first block of each part.
        """
        if parts == 1:
            return total[end] or float("inf"), [0]
        choices = [(max(best(start, parts - 1)[0], total[end] - total[start]), -start)
                   for start in range(1, end) if total[end] > total[start]]  # fmt: skip
        # If several choices are equally good, the latest start is used. Layers without parameters are then in the part
        # of the layer before them.
        largest, start = min(choices, default=(float("inf"), 0))
        return largest, [*best(-start, parts - 1)[1], -start] if choices else []

    return best(len(sizes), count)[1]


def _matches(name: str, pattern: str) -> bool:
    ends = [place for place, letter in enumerate(name) if letter == "."]
    return any(fnmatchcase(name[:end], pattern) for end in (*ends, len(name)))
