"""One line of a diagnosis: what was looked at, what was found, and the cure where it is a fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A note is worth knowing and breaks nothing.
State = Literal["ok", "note", "fault"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of one part of the installation or the machine.

    part: such as torch, gloo or disk. state: `fault` where something that exp needs does not work.
    cure: what to type or to change; of a fault always.
    """

    part: str
    state: State
    found: str
    cure: str | None = None

    def lines(self, width: int) -> list[str]:
        """As the doctor prints it. width: of the column of parts."""
        first = f"{self.state:<5}  {self.part:<{width}}  {self.found}"
        return [first] if self.cure is None else [first, f"{'':<5}  {'':<{width}}  -> {self.cure}"]


def ok(part: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding(part=part, state="ok", found=found)


def note(part: str, found: str, cure: str | None = None) -> Finding:
    """A finding that breaks nothing."""
    return Finding(part=part, state="note", found=found, cure=cure)


def fault(part: str, found: str, cure: str) -> Finding:
    """A finding that something does not work."""
    return Finding(part=part, state="fault", found=found, cure=cure)
