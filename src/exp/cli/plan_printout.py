"""Text of an estimate of exp.plan for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exp.errors import shorten
from exp.plan.layer_table import layer_rows, merge_repeated
from exp.plan.rank_memory import PlaceMemory

if TYPE_CHECKING:
    from exp.plan.estimate import Estimate
    from exp.plan.fastest import Findings

COLUMNS = ("layer", "", "output", "parameters", "FLOPs", "activations", "share")
MOST_OUTPUT = 44
UNKNOWN = "not known"
# The largest number of columns in the table of memory.
SHOWN = 4


def text(estimate: Estimate, *, limit: int | None, largest: int | None, summary: str) -> str:
    """Return an estimate as text.

    Args:
        estimate: Estimate of layers, memory and time.
        limit: Memory of a device in bytes; None if the memory is unknown.
        largest: Largest data.batch_size that fits into the memory. None: it is unknown, or no batch fits.
        summary: First line of the text.
    """
    parts = [
        summary,
        "\n".join(align(_layers(estimate), left=3)),
        "\n".join([*align(_memory(estimate), left=1), *_rest(estimate)]),
        "\n".join(_fit(estimate, limit=limit, largest=largest)),
        "\n".join(_time(estimate)),
        "\n".join(f"note: {note}" for note in estimate.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def ways(found: Findings) -> str:
    """Return the table of configurations that a search found. The fastest configuration is first."""
    rows = [["a step takes", "at most", "bound by", "overrides"]]
    for one in found.fitting:
        rows.append([seconds(one.seconds), size(one.total), one.bound, " ".join(one.overrides)])
    rest = f"{found.too_large} other configurations do not fit, and {found.refused} have errors"
    return "\n".join([*align(rows, left=4), rest])


def _layers(estimate: Estimate) -> list[list[str]]:
    rows = [[*COLUMNS]]
    for row in merge_repeated(layer_rows(estimate)):
        times = f" x{row.times}" if row.times > 1 else ""
        rows.append([
            f"{row.path or '(network)'}{times}",
            row.kind,
            shorten(row.output, most=MOST_OUTPUT),
            f"{row.parameters:,}" if row.parameters else "-",
            count(row.flops) if row.flops else "-",
            size(row.activations) if row.activations else "-",
            f"{row.share:.1%}",
        ])  # fmt: skip
    return rows


def _memory(estimate: Estimate) -> list[list[str]]:
    places = estimate.places[:SHOWN]
    rows = [["memory", *map(_place, places)]]
    for part in ("parameters", "gradients", "optimizer", "activations"):
        rows.append([part, *(_part(place, part) for place in places)])
    for name in dict.fromkeys(name for place in places for name in place.others):
        rows.append([name, *(size(place.others.get(name, 0)) for place in places)])
    return [*rows, ["at most", *(size(place.total) for place in places)]]


def _part(place: PlaceMemory, part: str) -> str:
    found = place.parts[part]
    text = UNKNOWN if found is None else size(found)
    return f"{text} (host)" if part in place.on_host else text


def _place(place: PlaceMemory) -> str:
    ranks = list(place.ranks)
    is_row = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 1
    name = f"ranks {ranks[0]} to {ranks[-1]}" if is_row else f"rank {', '.join(map(str, ranks))}"
    return name if place.device is None else f"{name}, device {place.device}"


def _rest(estimate: Estimate) -> list[str]:
    more = len(estimate.places) - SHOWN
    return [f"and {more} more with less memory"] if more > 0 else []


def _fit(estimate: Estimate, *, limit: int | None, largest: int | None) -> Iterator[str]:
    if limit is None:
        return
    if estimate.total > limit:
        yield f"does not fit: {size(estimate.total)} of {size(limit)}; search=true finds configurations that fit"
    else:
        yield f"fits: {size(estimate.total)} of {size(limit)}"
    if largest is not None:
        yield f"the largest data.batch_size that fits: {largest:,}"
    elif estimate.figures.activations is not None:
        yield "even one sample per rank does not fit"


def _time(estimate: Estimate) -> Iterator[str]:
    time = estimate.time
    if time is not None:
        device = time.device
        yield f"a step takes {seconds(time.seconds)} or more on {device.name}: bound by {time.bound}"
        rows = [
            ["  arithmetic", seconds(time.compute), f"{count(time.flops)} FLOPs a rank"],
            ["  memory", seconds(time.memory), f"{size(int(device.bandwidth))} a second"],
            ["  calls", seconds(time.overhead), "operators so small that calling them takes longer"],
        ]
        if estimate.footprint.transfers:
            rows.append(["  communication", seconds(time.communication), f"{size(int(device.link))} a second"])
        yield from align(rows, left=3)
    for one in estimate.footprint.transfers:
        yield f"each rank sends {size(int(one.sent))} a step: {one.what} over {one.over}"


def align(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as lines with aligned columns.

    Args:
        rows: Cells of each row.
        left: Number of columns that are aligned to the left. The other columns are aligned to the right.
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def size(count: int) -> str:
    """Return a number of bytes as text with a unit, such as 1.50 GiB."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((f"{count / factor:,.2f} {unit}" for unit, factor in units if count >= factor), f"{count} B")


def count(number: float) -> str:
    """Return a number as text with a unit prefix, such as 1.2 T."""
    units = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    return next((f"{number / factor:.3g} {unit}" for unit, factor in units if number >= factor), f"{number:.3g}")


def seconds(time: float) -> str:
    """Return a time in seconds as text with a unit, such as 1.2 ms."""
    unit, factor = ("s", 1.0) if time >= 1 else ("ms", 1e-3) if time >= 1e-3 else ("us", 1e-6)
    return f"{time / factor:.3g} {unit}"
