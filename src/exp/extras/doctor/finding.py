"""A line of a diagnosis: the part, its state, and the finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A finding about a part of the installation or the machine.

    Args:
        state: `error` if exp cannot work. `note` if exp works, but users should know the finding.
        part: The part's name, such as torch, gloo or outputs.
        found: The finding.
        fix: The command or change that fixes it. Each error has one.
    """

    state: Literal["ok", "note", "error"]
    part: str
    found: str
    fix: str = ""

    def text(self) -> str:
        """Return the finding as text, with the fix on a second line."""
        first = f"{self.state:<5}  {self.part:<16}  {self.found}"
        return f"{first}\n{'':<23}  -> {self.fix}" if self.fix else first
