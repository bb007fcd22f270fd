"""What a profiled window allocated and freed, in order: as rows, as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ImageDraw

from exp.hooks.figures import AMBER, GREEN, GREY, INK, MARGIN, SKY, TEXT_SIZE, Font, blank, heights, legend

MIB = 2**20
# Of a chrome trace: device types as torch numbers them.
_CPU, _CUDA = 0, 1
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 300, 78, 34, 30
_COLOURS = {"forward": SKY, "backward": AMBER, "optimizer": GREEN, "": GREY}


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


def csv_of(changes: Sequence[Change]) -> str:
    """As CSV."""
    lines = ["microseconds,device,bytes,allocated,part"]
    lines += [f"{one.microseconds:.3f},{one.device},{one.bytes},{one.allocated},{one.part}" for one in changes]
    return "\n".join(lines) + "\n"


def picture(changes: Sequence[Change]) -> np.ndarray:
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
