"""Which layers of a network make which of its consecutive parts: named in the config, or balanced by their size.

    layers: [[stem, "stage.*"], [down, "stage2.*", norm, head]]        patterns a part, in the order in which they run
    layers: null                                                       as equal as whole layers allow, by bytes

A layer is what the network's graph calls: of a container its layers, of a repeat each of them (`stage.0`). What has
no parameters goes with the layer before it. parts.py cuts the graph; here is only who belongs where.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, fx, nn

from exp.errors import ConfigError, Fault

KEY = "strategy.layers"

Patterns = Sequence[Sequence[str]]


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

    Raises: ConfigError with every fault, at the key `strategy.layers`.
    """
    units = units_of(network, graph)
    faults: list[Fault] = []
    if layers is None:
        found = _balanced(units, count, faults)
    else:
        found = _named(units, layers, faults)
        if len(layers) != count:
            got = f"{len(layers)} part{'s' if len(layers) != 1 else ''}"
            faults.append(Fault(key=KEY, got=got, expected=f"{count}, a list of layers for each"))
        faults += [] if faults else _order_faults(units, found)
        faults += [] if faults else _tied_faults(units, found)
    if faults:
        raise ConfigError(faults)
    return found


def _named(units: Sequence[Unit], layers: Patterns, faults: list[Fault]) -> dict[str, int]:
    there = _listed([unit.name for unit in units])
    found: dict[str, int] = {}
    for part, patterns in enumerate(layers):
        for pattern in patterns:
            matches = [unit.name for unit in units if _matches(unit.name, pattern)]
            if not matches:
                expected = f"a pattern of layers; there are {there}"
                faults.append(Fault(key=f"{KEY}.{part}", got=repr(pattern), expected=expected))
            for name in matches:
                if found.setdefault(name, part) != part:
                    got = f"{name} in part {found[name]} and in part {part}"
                    faults.append(Fault(key=f"{KEY}.{part}", got=got, expected="each layer in one part"))
    missing = [unit.name for unit in units if unit.tensors and unit.name not in found]
    if missing:
        got = f"no part for {_listed(missing)}"
        faults.append(Fault(key=KEY, got=got, expected="every layer with parameters in one of the parts"))
    part = 0
    for unit in units:
        # What has no parameters and no name goes with the layer before it.
        part = found.setdefault(unit.name, part)
    return found


def _order_faults(units: Sequence[Unit], found: Mapping[str, int]) -> list[Fault]:
    faults = []
    for before, unit in itertools.pairwise(units):
        if found[before.name] > found[unit.name]:
            got = f"{unit.name} in part {found[unit.name]}, behind {before.name} in part {found[before.name]}"
            order = _listed([one.name for one in units])
            faults.append(Fault(key=KEY, got=got, expected=f"parts in the order in which the layers run: {order}"))
    for unit in units:
        later = [other.name for other in units if found[other.name] > found[unit.name] and other.first < unit.last]
        if later:
            got = f"{unit.name} runs in part {found[unit.name]}, and again behind {later[0]}"
            expected = f"a layer that runs several times in one part with what runs between, {_listed(later)}"
            faults.append(Fault(key=KEY, got=got, expected=expected))
    return faults


def _tied_faults(units: Sequence[Unit], found: Mapping[str, int]) -> list[Fault]:
    owners: dict[int, tuple[str, str]] = {}
    faults = []
    for unit in units:
        for name, tensor in unit.tensors.items():
            other, owner = owners.setdefault(id(tensor), (name, unit.name))
            if found[owner] != found[unit.name]:
                got = f"{name} in part {found[unit.name]} is the same parameter as {other} in part {found[owner]}"
                faults.append(Fault(key=KEY, got=got, expected="parameters that are tied in one part"))
    return faults


def _balanced(units: Sequence[Unit], count: int, faults: list[Fault]) -> dict[str, int]:
    """The consecutive parts whose largest has the fewest bytes."""
    blocks = _blocks(units)
    sizes = [sum(unit.bytes for unit in block) for block in blocks]
    weighty = sum(size > 0 for size in sizes)
    if weighty < count:
        names = _listed([unit.name for unit in units if unit.bytes])
        expected = f"at most {weighty}: the layers with parameters that can be parted are {names}"
        faults.append(Fault(key=KEY, got=f"{count} parts", expected=expected, cure="Cuts go between whole layers"))
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
