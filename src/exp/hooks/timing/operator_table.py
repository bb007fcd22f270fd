"""The operators of a profiled window as a Markdown table, the most expensive first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MIB = 2**20


def rows_of(averages: Sequence[Any], *, on_device: bool) -> list[Any]:
    """Of torch.profiler's key_averages the operators, without ranges that somebody named, by their own time.

    on_device: by the device's time, where there is one, and not by the host's.
    """
    operators = [one for one in averages if not one.is_user_annotation]
    return sorted(operators, key=lambda one: _own_time(one, on_device=on_device), reverse=True)


def table(rows: Sequence[Any], *, on_device: bool, with_shapes: bool, with_memory: bool) -> str:
    """rows: as `rows_of` gives them. Times are sums over the window, in milliseconds."""
    total = sum(_own_time(one, on_device=on_device) for one in rows) or 1.0
    names = ["operator", "calls", "share", "own ms", "with those inside ms"]
    names += ["host ms"] if on_device else []
    names += ["own MiB"] if with_memory else []
    names += ["input shapes"] if with_shapes else []
    numbers = len(names) - 1 - with_shapes
    lines = [_line(names), "|---|" + "---:|" * numbers + "---|" * with_shapes]
    for one in rows:
        own = _own_time(one, on_device=on_device)
        inside = one.device_time_total if on_device else one.cpu_time_total
        cells = [f"`{one.key}`", str(one.count), f"{own / total:.1%}", f"{own / 1000:.3f}", f"{inside / 1000:.3f}"]
        cells += [f"{one.self_cpu_time_total / 1000:.3f}"] if on_device else []
        memory = one.self_device_memory_usage if on_device else one.self_cpu_memory_usage
        cells += [f"{memory / MIB:.3f}"] if with_memory else []
        cells += [str(one.input_shapes)] if with_shapes else []
        lines.append(_line(cells))
    return "\n".join(lines)


def _own_time(one: Any, *, on_device: bool) -> float:
    return one.self_device_time_total if on_device else one.self_cpu_time_total


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
