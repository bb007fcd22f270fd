"""The progress of a sweep on the screen: a line of each job that has ended, and below them, on a terminal, the running
ones with what each printed last.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.config.frozen import OUTPUT
from exp.redaction import redacted
from exp.sweeps.job import last_line

if TYPE_CHECKING:
    from rich.table import Table

    from exp.sweeps.results import Row


@dataclass(frozen=True, kw_only=True)
class _Running:
    swept: str
    output: Path
    began: float


class Progress:
    """Shows a sweep. total: the number of its jobs."""

    def __init__(self, *, total: int) -> None:
        self._total, self._done, self._failed = total, 0, 0
        self._running: dict[int, _Running] = {}
        self._live: Any = None
        self._best = ""
        self._said: set[str] = set()

    def begin(self, job: int, *, swept: Mapping[str, str], directory: Path) -> None:
        """A job has started. swept: what tells it from the others. directory: of its run."""
        self._running[job] = _Running(swept=_words(swept), output=directory / OUTPUT, began=time.monotonic())
        self.refresh()

    def end(self, row: Row, *, best: Row | None = None) -> None:
        """A job has ended. best: the best one so far."""
        self._running.pop(row.job, None)
        self._done += 1
        self._failed += row.status == "failed"
        if best is not None:
            self._best = f"best job {best.job}, {best.monitor} {best.value:.6g}"
        self.refresh()
        self._say(line_of(row))

    def say_once(self, line: str) -> None:
        """A line that several jobs have in common."""
        if line not in self._said:
            self._said.add(line)
            self._say(redacted(line))

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def refresh(self) -> None:
        """Draw the running jobs anew, where there is a terminal."""
        if not sys.stdout.isatty() and self._live is None:
            return
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            # No thread of its own: no process that forks has one.
            self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Take the running jobs off the screen; the lines of the others stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        facts = [f"{self._done} of {self._total} done", f"{self._failed} failed" if self._failed else "", self._best]
        title = Text("  ".join(filter(None, facts)))
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("job", "seconds", "swept", "now"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if name == "seconds" else "left")
        for job, one in self._running.items():
            cells = [str(job), f"{time.monotonic() - one.began:.0f}", one.swept, redacted(last_line(one.output))]
            table.add_row(*map(Text, cells))
        return table


def line_of(row: Row) -> str:
    """A job that has ended in one line: its number, status, value, what was swept, how long it took, what ended it."""
    value = f"{row.monitor} {row.value:.6g}" if row.monitor is not None and math.isfinite(row.value) else ""
    facts = [f"job {row.job}", row.status, value, _words(row.swept), f"{row.seconds:.1f} s", row.error]
    return redacted("  ".join(filter(None, facts)))


def _words(swept: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items())
