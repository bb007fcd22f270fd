"""The layers of a network with what each of them takes, and repeated blocks told once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from exp.plan.fake_step import StepFigures
from exp.strategies.footprint import OBJECTIVE

if TYPE_CHECKING:
    from exp.plan.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer. path: in the network, whose own is ''. kind: its class. output: shapes and dtypes, B for the batch.

    parameters: numbers of its own, those of layers in it not counted. flops: of a rank's micro-batch, forward and
    backward; recomputed: those of them for activations that are computed again. activations: bytes that it keeps.
    share: of the FLOPs; of the activations where nothing multiplies. times: how many layers alike it stands for.
    """

    path: str
    kind: str
    output: str
    parameters: int
    flops: float
    recomputed: float
    activations: int
    share: float = 0.0
    times: int = 1


def layer_rows(estimate: Estimate) -> list[LayerRow]:
    """Of each module that was called or has parameters of its own, in the network's order; the objective's last."""
    figures, network = estimate.figures, estimate.network
    flops: defaultdict[str, float] = defaultdict(float)
    again: defaultdict[str, float] = defaultdict(float)
    for one in figures.operators:
        flops[one.layer] += one.flops * one.times
        again[one.layer] += one.flops * one.times if one.part == "recomputed" else 0
    rows = [
        LayerRow(
            path=path,
            kind=type(module).__name__,
            output=figures.outputs.get(path, ""),
            parameters=own,
            flops=flops[path],
            recomputed=again[path],
            activations=figures.by_layer.get(path, 0),
        )
        for path, module, own in _modules(network, figures)
        if path in figures.outputs or own
    ]
    rest = LayerRow(
        path=OBJECTIVE,
        kind="",
        output="",
        parameters=0,
        flops=flops[OBJECTIVE],
        recomputed=again[OBJECTIVE],
        activations=figures.by_layer.get(OBJECTIVE, 0),
    )
    rows += [rest] if rest.flops or rest.activations else []
    whole, kept = sum(flops.values()), figures.activations or 0
    return [replace(row, share=row.flops / whole if whole else row.activations / kept if kept else 0.0) for row in rows]


def _modules(network: nn.Module, figures: StepFigures) -> list[tuple[str, nn.Module, int]]:
    counts: defaultdict[str, int] = defaultdict(int)
    for name, one in figures.parameters.items():
        counts[name.rpartition(".")[0]] += one.count
    return [(path, module, counts[path]) for path, module in network.named_modules()]


def merge_repeated(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """The same rows, layers alike of three and more repeated blocks as one: `blocks.*.query`, so many times."""
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
    """A path with its places in lists as stars."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _likeness(row: LayerRow) -> tuple[object, ...]:
    path = to_pattern(row.path)
    # The recomputed part and activations of first and last blocks may differ by a tensor or two: then they stand alone.
    return (path, row.kind, row.output, row.parameters, row.flops, row.activations) if "*" in path else (row.path,)
