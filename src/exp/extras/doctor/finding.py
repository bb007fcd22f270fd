"""A finding of `python -m exp.doctor`, which is printed as one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A finding about a part of the installation or the machine.

    Args:
        state: `error` if exp cannot work, `note` if exp works but users should read the finding, else `ok`.
        part: Name of the checked part, such as torch, gloo or outputs.
        found: Text of the finding.
        fix: Command or change that fixes the problem. Empty if no action is needed. Each error has a fix.
    """

    state: Literal["ok", "note", "error"]
    part: str
    found: str
    fix: str = ""

    def text(self) -> str:
        """Return the finding as text. A fix is printed on a second line."""
        first = f"{self.state:<5}  {self.part:<16}  {self.found}"
        return f"{first}\n{'':<23}  -> {self.fix}" if self.fix else first
