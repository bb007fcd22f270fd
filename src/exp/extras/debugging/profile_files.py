"""What a profiled window leaves: files below the run directory, and panels.

The trace, a table of the operators, and what the window allocated and freed in order: as rows, and as a picture.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageDraw
from torch.profiler import profile

from exp.files import write_whole
from exp.hooks.figures import AMBER, GREEN, GREY, INK, MARGIN, SKY, TEXT_SIZE, Font, blank, heights, legend
from exp.hooks.panels import Image, Panel, Text, png

MIB = 2**20
# Of a chrome trace: device types as torch numbers them.
_CPU, _CUDA = 0, 1
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 300, 78, 34, 30
_COLOURS = {"forward": SKY, "backward": AMBER, "optimizer": GREEN, "": GREY}


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
            write_whole(directory / f"memory.rank{self.rank}.csv", _csv_of(changes))
            if changes:
                drawn = _picture(changes)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One allocation, or with fewer than 0 bytes one that was freed.

    microseconds: since the window began. device: cpu, cuda:0. allocated: bytes behind it; on a CPU, where torch does
    not know what was there before, above the window's beginning. part: forward, backward, optimizer, or empty.
    """

    microseconds: float
    device: str
    bytes: int
    allocated: int
    part: str


def changes_in(trace: Mapping[str, Any]) -> list[Change]:
    """The changes of a chrome trace with `profile_memory`, as torch 2.13 writes it, by time.

    Parts are the ranges `forward` and `backward` of the trace, and torch's own around an optimizer's step. Where one
    begins or ends there is a change of 0 bytes.
    """
    events = [event for event in trace["traceEvents"] if "ts" in event]
    start = min((event["ts"] for event in events), default=0.0)
    # By time; where times are equal a part ends before another begins, and what it allocates comes behind both.
    moments = [(event["ts"], 2, event["args"]) for event in events if event.get("name") == "[memory]"]
    for event in events:
        part = _part_of(event["name"]) if event.get("cat") == "user_annotation" and "dur" in event else ""
        if part:
            moments += [(event["ts"], 1, part), (event["ts"] + event["dur"], 0, "")]
    moments.sort(key=lambda moment: moment[:2])
    found: list[Change] = []
    allocated: dict[str, int] = {}
    part = ""
    for at, _, what in moments:
        if isinstance(what, str):
            part = what
            changed = dict.fromkeys(allocated, 0)
        else:
            device = _device_of(what)
            on_host = device == "cpu"
            allocated[device] = allocated.get(device, 0) + what["Bytes"] if on_host else what["Total Allocated"]
            changed = {device: what["Bytes"]}
        found += [
            Change(microseconds=at - start, device=device, bytes=size, allocated=allocated[device], part=part)
            for device, size in changed.items()
        ]
    return found


def _device_of(moment: Mapping[str, Any]) -> str:
    kind = moment["Device Type"]
    return "cpu" if kind == _CPU else f"{'cuda' if kind == _CUDA else 'device'}:{moment['Device Id']}"


def _part_of(name: str) -> str:
    if name in ("forward", "backward"):
        return name
    return "optimizer" if name.startswith("Optimizer.step#") else ""


def _csv_of(changes: Sequence[Change]) -> str:
    """As CSV."""
    lines = ["microseconds,device,bytes,allocated,part"]
    lines += [f"{one.microseconds:.3f},{one.device},{one.bytes},{one.allocated},{one.part}" for one in changes]
    return "\n".join(lines) + "\n"


def _picture(changes: Sequence[Change]) -> np.ndarray:
    """The bytes that are allocated over time, coloured by part; a strip for each device. uint8 `[H, W, 3]`."""
    devices = list(dict.fromkeys(one.device for one in changes))
    end = max(one.microseconds for one in changes)
    sheet, pen, font = blank(_WIDTH, _HEIGHT * len(devices))
    for number, device in enumerate(devices):
        of_device = [one for one in changes if one.device == device]
        _strip(pen, font, of_device, end=end, top=number * _HEIGHT)
    return np.array(sheet)


def _strip(pen: ImageDraw.ImageDraw, font: Font, changes: Sequence[Change], *, end: float, top: int) -> None:
    low = min(0, min(one.allocated for one in changes))
    high = max(low + 1, max(one.allocated for one in changes))
    floor, height, width = top + _HEIGHT - _BOTTOM, _HEIGHT - _TOP - _BOTTOM, _WIDTH - _LEFT - 12

    def x(microseconds: float) -> int:
        return _LEFT + round(width * microseconds / max(end, 1e-9))

    def y(allocated: float) -> int:
        return floor - round(height * (allocated - low) / (high - low))

    marks = [(y(allocated), f"{allocated / MIB:.4g}") for allocated in (low, (low + high) / 2, high)]
    heights(pen, font, marks, left=_LEFT, right=_LEFT + width)
    ends = [one.microseconds for one in changes[1:]] + [end]
    for one, until in zip(changes, ends, strict=True):
        colour = _COLOURS[one.part]
        pen.rectangle((x(one.microseconds), min(y(one.allocated), y(0)), x(until), max(y(one.allocated), y(0))), colour)
    pen.line((_LEFT, floor, _LEFT, top + _TOP), fill=INK)
    pen.line((_LEFT, y(0), _LEFT + width, y(0)), fill=INK)
    device = changes[0].device
    title = f"{device}: allocated, MiB{' above the beginning of the window' if device == 'cpu' else ''}"
    pen.text((_LEFT, top + MARGIN), title, fill=INK, font=font)
    named = {part or "between": colour for part, colour in _COLOURS.items()}
    legend(pen, font, named, left=_WIDTH // 2, floor=top + MARGIN + TEXT_SIZE)
    pen.text((_LEFT, floor + MARGIN), "0", fill=INK, font=font)
    pen.text((_LEFT + width, floor + MARGIN), f"{end / 1000:.4g} ms", fill=INK, font=font, anchor="ra")
