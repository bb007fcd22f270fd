"""What a profiled window leaves: files below the run directory, and panels."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from exp.files import write_whole
from exp.hooks.panels import Image, Panel, Text, png
from exp.hooks.timing.memory_timeline import changes_in, csv_of, picture


@dataclass(frozen=True, kw_only=True)
class RecordedWindow:
    """A window that is over.

    what: it in words. rank: its global rank. rows: of the table in the panel.
    """

    profiler: profile
    what: str
    rank: int
    on_device: bool
    with_shapes: bool
    with_memory: bool
    rows: int

    def write(self, directory: Path) -> dict[str, Panel]:
        """Writes every file, each whole or not at all, and gives the panels.

        Raises: OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        trace = self._trace(directory)
        write_whole(directory / f"trace.rank{self.rank}.json.gz", gzip.compress(trace, compresslevel=6))
        panels: dict[str, Panel] = {"profile/operators": Text(self._operators(directory))}
        if self.with_memory:
            changes = changes_in(json.loads(trace))
            write_whole(directory / f"memory.rank{self.rank}.csv", csv_of(changes))
            if changes:
                drawn = picture(changes)
                write_whole(directory / f"memory.rank{self.rank}.png", png(drawn))
                panels["profile/memory"] = Image(torch.from_numpy(drawn).permute(2, 0, 1)[None].contiguous())
        return panels

    def _trace(self, directory: Path) -> bytes:
        # torch writes it itself, and to a file only.
        temporary = directory / f".trace.rank{self.rank}.{os.getpid()}.json"
        try:
            self.profiler.export_chrome_trace(str(temporary))
            return temporary.read_bytes()
        finally:
            temporary.unlink(missing_ok=True)

    def _operators(self, directory: Path) -> str:
        """Writes the whole table. Returns its top."""
        averages: Any = self.profiler.key_averages(group_by_input_shape=self.with_shapes)
        rows = rows_of(averages, on_device=self.on_device)
        options = {"on_device": self.on_device, "with_shapes": self.with_shapes, "with_memory": self.with_memory}
        whose = "the device's" if self.on_device else "the host's"
        title = f"Operators of {self.what}, all steps together; times are {whose}"
        whole = f"{title}:\n\n{table(rows, **options)}\n"
        write_whole(directory / f"operators.rank{self.rank}.md", whole)
        left = len(rows) - self.rows
        more = f"\n\n{left} more are in operators.rank{self.rank}.md." if left > 0 else ""
        return f"{title}:\n\n{table(rows[: self.rows], **options)}{more}"


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
    return float(one.self_device_time_total if on_device else one.self_cpu_time_total)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
