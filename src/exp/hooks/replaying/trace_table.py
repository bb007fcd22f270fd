"""What a trace found as text: a table, module by module, and what a replay says around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exp.hooks.replaying.extent import Extent
from exp.hooks.replaying.findings import described
from exp.hooks.replaying.step_file import StepFile
from exp.hooks.replaying.tracing import Row, Trace

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
