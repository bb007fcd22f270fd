"""The table of the layers of a network: parameters, FLOPs and activations, with repeated blocks merged."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exp.strategies.footprint import OBJECTIVE

if TYPE_CHECKING:
    from exp.plan.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A row of the table: one layer, or several equal layers.

    Attributes:
        path: Path of the layer in the network. Empty for the network itself.
        kind: Class name of the layer.
        output: Shapes and dtypes of the output. B stands for the batch size.
        parameters: Number of parameters of the layer, without the parameters of inner layers.
        flops: FLOPs of forward and backward on one micro-batch of a rank.
        activations: Bytes that the layer keeps for the backward.
        share: Fraction of the FLOPs of the network. If the FLOPs are 0, the fraction of the activations.
        times: Number of equal layers in this row.
    """

    path: str
    kind: str
    output: str
    parameters: int
    flops: float
    activations: int
    share: float = 0.0
    times: int = 1


def layer_rows(estimate: Estimate) -> list[LayerRow]:
    """Return a row for each module that was called or has parameters, and a last row for the objective."""
    figures, network = estimate.figures, estimate.network
    flops: defaultdict[str, float] = defaultdict(float)
    for one in figures.operators:
        flops[one.layer] += one.flops * one.times
    counts: defaultdict[str, int] = defaultdict(int)
    for name, parameter in figures.parameters.items():
        counts[name.rpartition(".")[0]] += parameter.count
    kinds = {path: type(module).__name__ for path, module in network.named_modules()}
    rows = [
        LayerRow(
            path=path,
            kind=kind,
            output=figures.outputs.get(path, ""),
            parameters=counts[path],
            flops=flops[path],
            activations=figures.by_layer.get(path, 0),
        )
        for path, kind in (*kinds.items(), (OBJECTIVE, ""))
        if path in figures.outputs or counts[path] or (path == OBJECTIVE and path in {*flops, *figures.by_layer})
    ]
    whole, kept = sum(flops.values()), figures.activations or 0
    return [replace(row, share=row.flops / whole if whole else row.activations / kept if kept else 0.0) for row in rows]


def merge_repeated(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Merge the rows of three or more equal layers in repeated blocks into one row, such as `blocks.*.query`."""
    groups: defaultdict[tuple[object, ...], list[LayerRow]] = defaultdict(list)
    for row in rows:
        groups[_likeness(row)].append(row)
    found = []
    for row in rows:
        group = groups[_likeness(row)]
        if len(group) < 3:
            found.append(row)
        elif group[0] is row:
            share, pattern = sum(one.share for one in group), to_pattern(row.path)
            found.append(replace(row, path=pattern, times=len(group), share=share))
    return found


def to_pattern(path: str) -> str:
    """Return a module path in which `*` replaces each index, such as `blocks.*` for `blocks.0`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _likeness(row: LayerRow) -> tuple[object, ...]:
    path = to_pattern(row.path)
    # Activations are compared, too, because those of the first and the last block may differ from the other blocks.
    return (path, row.kind, row.output, row.parameters, row.flops, row.activations) if "*" in path else (row.path,)
