"""What a stop says, as text: each rank's finding, the message that all ranks end with, and a replay's table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from exp.hooks.step_file import StepFile
from exp.hooks.step_trace import Extent, Row, Trace

# Of a finding on its way to the other ranks.
BYTES = 8192
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rank's.

    index: the optimizer step. loss: the first of its losses that is not finite; 0.0 where all are. phase: whose step.
    is_bad: whether the step, run again on this rank alone, is not finite; None where it could not be run.
    where: the sentences on the first module. path, command: its file, and how to run it; None without one.
    """

    index: int
    loss: float
    phase: str | None
    is_bad: bool | None
    where: str
    path: str | None
    command: str | None
    problems: Sequence[str]

    def encoded(self) -> Tensor:
        """As bytes, uint8 `[BYTES]`: what ranks gather."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode()
        if len(text) > BYTES:
            short = replace(self, where=self.where[:LONGEST], problems=())
            text = json.dumps(asdict(short), ensure_ascii=False).encode()
        return torch.frombuffer(bytearray(text.ljust(BYTES)[:BYTES]), dtype=torch.uint8)

    @classmethod
    def decoded(cls, row: Tensor) -> Finding:
        return cls(**json.loads(bytes(row.tolist()).decode()))


def finding_of(
    trace: Trace | None,
    *,
    index: int,
    losses: Sequence[float],
    phase: str | None,
    path: str | None,
    command: str | None,
    problems: Sequence[str],
) -> Finding:
    """Of this rank. trace: None where the step could not be run again."""
    return Finding(
        index=index,
        loss=next((loss for loss in losses if not math.isfinite(loss)), 0.0),
        phase=phase,
        is_bad=None if trace is None else trace.is_bad,
        where="" if trace is None else described(trace),
        path=path,
        command=command,
        problems=[problem[:LONGEST] for problem in problems],
    )


def described(trace: Trace) -> str:
    """Where the first number that is not finite comes from, in a few sentences; empty where all are finite."""
    if not trace.is_bad:
        return ""
    sentences = [] if trace.batch and trace.origin is None else [_first(trace)]
    if trace.count > 1 and (trace.origin is not None or trace.batch):
        sentences.append(f"It is micro-batch {trace.place + 1} of {trace.count}.")
    if trace.batch:
        sentences.append(f"The data are not finite: {', '.join(trace.batch)}.")
    if trace.tensors:
        sentences.append(f"Not finite before the step already: {_some(trace.tensors)}.")
    return " ".join(sentences)[: 4 * LONGEST]


def message(findings: Sequence[Finding]) -> str:
    """Of all ranks: the first that is bad is named. The ranks are in their order."""
    count = len(findings)
    # Also where none could be run again, or none is bad by itself.
    rank = next((n for n, one in enumerate(findings) if one.is_bad or not math.isfinite(one.loss)), 0)
    one = findings[rank]
    what = f"the loss is {one.loss:g}" if not math.isfinite(one.loss) else "a gradient is not finite"
    of_phase = "" if one.phase is None else f" in phase {one.phase}"
    on_rank = f" on rank {rank} of {count}" if count > 1 else ""
    lines = [
        f"step {one.index}: {what}{of_phase}{on_rank}; the run ends before the optimizer's step, with the weights as "
        "they were before it."
    ]
    if one.where:
        lines.append(one.where)
    elif any(other.is_bad is False for other in findings):
        ranks = "on each rank alone: it is their mean that is not" if count > 1 else "uncompiled and alone"
        lines.append(f"Run again, the step is finite {ranks}.")
    lines += one.problems
    if one.path is not None:
        others = " (each rank has its own)" if count > 1 else ""
        how = "It has no config, so that exp.replay cannot run it." if one.command is None else "It is run alone by"
        lines.append(f"The step is in {one.path}{others}. {how}" + (f"\n  {one.command}" if one.command else ""))
    return "\n".join(lines)


def _first(trace: Trace) -> str:
    origin = trace.origin
    if origin is not None:
        kind = f" ({origin.kind})" if origin.kind else ""
        name = f"`{origin.name}`{kind}" if origin.name else f"the network itself{kind}"
        if origin.direction == "forward":
            return f"The first is {name}, in the forward: its output has {origin.extent}, and its inputs were finite."
        return (
            f"The first is {name}, in the backward: {origin.operator} gave {origin.extent}, from gradients that were "
            "finite."
        )
    if trace.overflown and not trace.gradients.bad:
        return (
            f"Every gradient is finite, but its norm is not: {_some(trace.overflown)}; the greatest number is "
            f"{trace.gradients.absmax:.3g}."
        )
    if trace.loss - trace.loss != 0.0:
        return "No module gave it: it is in what the step makes of their outputs."
    return "The gradients of each micro-batch are finite; their sum is not."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


HEADER = ("module", "type", "calls", "not finite", "min", "max", "absmax", "not finite", "min", "max", "absmax")
NUMBERS = 4


def report(file: StepFile, trace: Trace, *, path: Path, device: str) -> str:
    """What a replay prints: which step it was, the table, and what is the first that is not finite."""
    where = [f"step {file.step}", f"rank {file.rank} of {file.world_size}" if file.world_size > 1 else ""]
    where += [f"phase {file.window.phase}" if file.window.phase is not None else ""]
    where += [f"micro-batch {trace.place + 1} of {trace.count}", f"on {device}"]
    scaled = "" if file.scale is None else f" with the loss scale {file.scale:g}"
    return "\n".join(
        [
            f"{path}: {', '.join(part for part in where if part)}",
            f"loss {trace.loss:g}{scaled}; gradients: {trace.gradients} not finite",
            "",
            *table(trace),
            "",
            described(trace) if trace.is_bad else "The fault does not show: loss and gradients are finite.",
        ]
    )


def table(trace: Trace) -> list[str]:
    """The lines: the first bad module first, then all in the order in which their forwards ended.

    After the module, its type and its calls come four columns of its outputs, and four of the gradients that its
    operators gave. min, max and absmax are those of finite numbers.
    """
    rows = list(trace.rows.values())
    first = None if trace.origin is None else trace.origin.name
    rows.sort(key=lambda row: row.name != first)
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    named = sum(widths[:3]) + 2 * 3
    own = sum(widths[3 : 3 + NUMBERS]) + 2 * NUMBERS
    return [" " * named + f"{'outputs':<{own}}gradients", *(_line(line, widths) for line in cells)]


def _cells(row: Row) -> tuple[str, ...]:
    return (row.name or "(network)", row.kind, str(row.calls or ""), *_extent(row.outputs), *_extent(row.gradients))


def _extent(extent: Extent) -> tuple[str, ...]:
    if not extent.count:
        return ("",) * NUMBERS
    share = "0" if not extent.bad else f"{100 * extent.share:.3g}%"
    numbers = (f"{one:.3g}" if one == one else "-" for one in (extent.low, extent.high, extent.absmax))
    return (share, *numbers)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
