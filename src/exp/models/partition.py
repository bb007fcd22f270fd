"""A network cut into consecutive parts, each a function of its own that runs with the network's layers.

    layers: [[stem, "stage.*"], [down, "stage2.*", norm, head]]        patterns a part, in the order in which they run
    layers: null                                                       as equal as whole layers allow, by bytes

A layer is what the network's graph calls: of a container its layers, of a repeat each of them (`stage.0`). What has
no parameters goes with the layer before it.

The layers stay where they are in the network, under the names that the state dict knows. A value that a later part
needs is carried: a residual, several values, the tuple of a recurrent layer. What holds no tensor (a shape, a number)
is computed again where it is needed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn

from exp.errors import ErrorDetails, config_error, raise_errors
from exp.models.containers import ProgramModel
from exp.models.graphs import TENSOR, DependsOnMode, graph_of, values_of
from exp.nested import tensors_in
from exp.spelling import among

KEY = "strategy.layers"

Patterns = Sequence[Sequence[str]]
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
    values: what is carried, by name, with meta tensors in the place of those of a run.
    """

    parts: tuple[Part, ...]
    inputs: Mapping[str, object]
    values: Mapping[str, object]

    def carried(self, part: int) -> tuple[str, ...]:
        """What has to be there behind a part: values of it and of earlier ones that later ones read, in order."""
        later = {name for other in self.parts[part + 1 :] for name in other.takes}
        return tuple(name for other in self.parts[: part + 1] for name in other.gives if name in later)

    def bind(self, arguments: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
        """The network's inputs by name, as a call of it gives them. Raises: TypeError."""
        only = arguments[0] if len(arguments) == 1 else None
        if isinstance(only, Mapping) and len(self.inputs) > 1 and not named:
            arguments, named = (), only
        bound = {**dict(zip(self.inputs, arguments, strict=False)), **named}
        missing = [name for name in self.inputs if name not in bound and self.inputs[name] is inspect.Parameter.empty]
        if missing or len(arguments) > len(self.inputs):
            raise TypeError(f"the network takes {', '.join(self.inputs)}; got {len(arguments)} and {sorted(named)}")
        return {name: bound.get(name, default) for name, default in self.inputs.items()}


def split(network: nn.Module, *, count: int, layers: Patterns | None, inputs: Sequence[Tensor]) -> Split:
    """Cuts a network into `count` consecutive parts.

    layers: name patterns of each part; None balances them by bytes.
    inputs: stand-ins for the network's inputs, to see which of its values are tensors.

    Raises: ConfigError with the errors of the layers, or the reason why this network cannot be cut.
    """
    try:
        graph = network.graph_module().graph if isinstance(network, ProgramModel) else graph_of(network)
    except DependsOnMode as error:
        got = f"{type(network).__name__}, where {error}: a part would compute in evaluation what it does in training"
        expected = "a network whose forward does not ask self.training; its layers may"
        fix = "Use torch.nn.Dropout as a layer, not the function, or a forward program that does not ask `training`"
        raise config_error(MODULE_KEY, got=got, expected=expected, fix=fix) from error
    except ValueError as error:
        got = f"{type(network).__name__}, which torch.fx cannot trace ({error})"
        expected = "a network whose layers run in one straight line: model=sequential and the like, or an nn.Sequential"
        raise config_error(MODULE_KEY, got=got, expected=expected) from error
    found = assign(network, graph, count=count, layers=layers)
    cutter = _Cutter(network, graph, found, count, values_of(network, graph, inputs))
    parts = tuple(cutter.part(index) for index in range(count))
    carried = {name for part in parts for name in part.gives}
    return Split(parts=parts, inputs=cutter.inputs, values={name: cutter.value(name) for name in carried})


class _Cutter:
    """Places every node of a graph in a part, and writes the graph of each."""

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
        self.needed = [self._needed(part) for part in range(count)]

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
            # A part of a tuple is taken out of it where it is made, so that the rest need not travel.
            is_part = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
            source = node.args[0] if is_part and isinstance(node.args[0], fx.Node) else None
            if unit is not None:
                self.of[node] = self.found[unit]
            elif source is not None and source in self.of and not isinstance(self.value(source.name), Tensor):
                self.of[node] = self.of[source]
            else:
                self.of[node] = max([now, *(self.of[used] for used in node.all_input_nodes if used in self.of)])

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a part may have a copy of the node: an input of the network, or a value without a tensor."""
        if node.op == "placeholder" or (node.op == "get_attr" and str(node.target) not in self.held):
            return True
        return node.op in ("call_function", "call_method") and not any(True for _ in tensors_in(self.value(node.name)))

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


def _compiled(graph: fx.Graph) -> Callable[..., object]:
    """The function that a graph is. It looks layers up in the network, so that one that is replaced later runs."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)  # text that torch.fx writes from the graph
    forward: Callable[..., object] = namespace["forward"]
    return forward


def _default(node: fx.Node) -> object:
    return node.args[0] if node.args else inspect.Parameter.empty


# -- which layers make which part --


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A layer, or a parameter that the network's program names: what goes to one part as a whole.

    first, last: places in the graph of its first use and its last call.
    tensors: parameters and buffers by their full names.
    """

    name: str
    first: int
    last: int
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def units_of(network: nn.Module, graph: fx.Graph) -> list[Unit]:
    """The layers and parameters that a graph uses, in the order of their first use."""
    held = dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    uses: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        name = unit_name(node, called, held)
        # A parameter that is read again, or by a later part, is carried there: only a layer's calls hold it back.
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
    """The unit that a node is a use of; None for an operation and for the flag `training`."""
    if node.op == "call_module":
        return str(node.target)
    if node.op != "get_attr":
        return None
    target = str(node.target)
    owners = [name for name in called if target.startswith(f"{name}.")]
    return max(owners, key=len) if owners else (target if target in held else None)


def assign(network: nn.Module, graph: fx.Graph, *, count: int, layers: Patterns | None) -> dict[str, int]:
    """Unit name to part, 0 to count - 1.

    layers: name patterns of each part; a pattern takes what is below the name, too. None balances by bytes.

    Raises: ConfigError with every error, at the key `strategy.layers`.
    """
    units = units_of(network, graph)
    errors: list[ErrorDetails] = []
    if layers is None:
        found = _balanced(units, count, errors)
    else:
        found = _named(units, layers, errors)
        if len(layers) != count:
            got = f"{len(layers)} part{'s' if len(layers) != 1 else ''}"
            errors.append(ErrorDetails(key=KEY, got=got, expected=f"{count}, a list of layers for each"))
        errors += [] if errors else _order_errors(units, found)
        errors += [] if errors else _tied_errors(units, found)
    raise_errors(errors)
    return found


def _named(units: Sequence[Unit], layers: Patterns, errors: list[ErrorDetails]) -> dict[str, int]:
    there = among([unit.name for unit in units], count=20)
    found: dict[str, int] = {}
    for part, patterns in enumerate(layers):
        for pattern in patterns:
            matches = [unit.name for unit in units if _matches(unit.name, pattern)]
            if not matches:
                expected = f"a pattern of layers; there are {there}"
                errors.append(ErrorDetails(key=f"{KEY}.{part}", got=repr(pattern), expected=expected))
            for name in matches:
                if found.setdefault(name, part) != part:
                    got = f"{name} in part {found[name]} and in part {part}"
                    errors.append(ErrorDetails(key=f"{KEY}.{part}", got=got, expected="each layer in one part"))
    missing = [unit.name for unit in units if unit.tensors and unit.name not in found]
    if missing:
        got = f"no part for {among(missing, count=20)}"
        errors.append(ErrorDetails(key=KEY, got=got, expected="every layer with parameters in one of the parts"))
    part = 0
    for unit in units:
        # What has no parameters and no name goes with the layer before it.
        part = found.setdefault(unit.name, part)
    return found


def _order_errors(units: Sequence[Unit], found: Mapping[str, int]) -> list[ErrorDetails]:
    errors = []
    for before, unit in itertools.pairwise(units):
        if found[before.name] > found[unit.name]:
            got = f"{unit.name} in part {found[unit.name]}, behind {before.name} in part {found[before.name]}"
            order = among([one.name for one in units], count=20)
            errors.append(
                ErrorDetails(key=KEY, got=got, expected=f"parts in the order in which the layers run: {order}")
            )
    for unit in units:
        later = [other.name for other in units if found[other.name] > found[unit.name] and other.first < unit.last]
        if later:
            got = f"{unit.name} runs in part {found[unit.name]}, and again behind {later[0]}"
            expected = f"a layer that runs several times in one part with what runs between, {among(later, count=20)}"
            errors.append(ErrorDetails(key=KEY, got=got, expected=expected))
    return errors


def _tied_errors(units: Sequence[Unit], found: Mapping[str, int]) -> list[ErrorDetails]:
    owners: dict[int, tuple[str, str]] = {}
    errors = []
    for unit in units:
        for name, tensor in unit.tensors.items():
            other, owner = owners.setdefault(id(tensor), (name, unit.name))
            if found[owner] != found[unit.name]:
                got = f"{name} in part {found[unit.name]} is the same parameter as {other} in part {found[owner]}"
                errors.append(ErrorDetails(key=KEY, got=got, expected="parameters that are tied in one part"))
    return errors


def _balanced(units: Sequence[Unit], count: int, errors: list[ErrorDetails]) -> dict[str, int]:
    """The consecutive parts whose largest has the fewest bytes."""
    blocks = _blocks(units)
    sizes = [sum(unit.bytes for unit in block) for block in blocks]
    weighty = sum(size > 0 for size in sizes)
    if weighty < count:
        names = among([unit.name for unit in units if unit.bytes], count=20)
        expected = f"at most {weighty}: the layers with parameters that can be parted are {names}"
        errors.append(
            ErrorDetails(key=KEY, got=f"{count} parts", expected=expected, fix="Cuts go between whole layers")
        )
        return {}
    starts = _cuts(sizes, count)
    return {
        unit.name: max(part for part, start in enumerate(starts) if start <= place)
        for place, block in enumerate(blocks)
        for unit in block
    }


def _blocks(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units that must stay together: a layer that runs twice with what runs between, and tied parameters."""
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
    """Where each part starts, so that the largest is as small as can be and each holds something.

    The linear partition problem by dynamic programming (Skiena, The Algorithm Design Manual, 10.7).
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    # best[n]: of the first n blocks in the parts so far, the largest part and where the last one starts.
    best: list[list[tuple[int, int] | None]] = [[(total[n], 0) if total[n] else None for n in range(len(sizes) + 1)]]
    for _ in range(1, count):
        row: list[tuple[int, int] | None] = []
        for n in range(len(sizes) + 1):
            choices = []
            for start in range(n):
                before = best[-1][start]
                if before is not None and total[n] > total[start]:
                    choices.append((max(before[0], total[n] - total[start]), start))
            # Of equal ones the latest start: what has no parameters stays with the layer before it.
            row.append(min(choices, key=lambda choice: (choice[0], -choice[1])) if choices else None)
        best.append(row)
    starts, end = [], len(sizes)
    for row in reversed(best):
        found = row[end]
        assert found is not None
        starts.append(found[1])
        end = found[1]
    return starts[::-1]


def _matches(name: str, pattern: str) -> bool:
    ends = [place for place, letter in enumerate(name) if letter == "."]
    return any(fnmatchcase(name[:end], pattern) for end in (*ends, len(name)))
