"""What a profiled window leaves: files below the run directory, and panels."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from exp.files import write_whole
from exp.hooks.figures.memory_timeline import changes_in, picture, png
from exp.hooks.figures.memory_timeline import table as changes_table
from exp.hooks.timing.operator_table import rows_of, table
from exp.hooks.values import Image, Panel, Text


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
            write_whole(directory / f"memory.rank{self.rank}.csv", changes_table(changes))
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
