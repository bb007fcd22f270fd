"""The progress of a sweep on the screen: a line for each job that has ended, and a table of running jobs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.config.frozen import OUTPUT
from exp.redaction import redact
from exp.sweeps.job import last_line

if TYPE_CHECKING:
    from rich.table import Table

    from exp.sweeps.results import Row


class Progress:
    """Shows a sweep. total: Number of its jobs."""

    def __init__(self, *, total: int) -> None:
        self._total, self._done, self._failed, self._best = total, 0, 0, ""
        # The swept values of each running job, its output file, and when it began.
        self._running: dict[int, tuple[str, Path, float]] = {}
        self._live: Any = None
        self._said: set[str] = set()

    def begin(self, job: int, *, swept: Mapping[str, str], directory: Path) -> None:
        """Show a job that has started. directory: Its run directory."""
        self._running[job] = (_words(swept), directory / OUTPUT, time.monotonic())
        self.refresh()

    def end(self, row: Row, *, best: Row | None = None) -> None:
        """Show a job that has ended. best: The best job so far."""
        self._running.pop(row.job, None)
        self._done += 1
        self._failed += row.status == "failed"
        if best is not None:
            self._best = f"best job {best.job}, {best.monitor} {best.value:.6g}"
        self.refresh()
        value = f"{row.monitor} {row.value:.6g}" if row.monitor is not None and math.isfinite(row.value) else ""
        facts = [f"job {row.job}", row.status, value, _words(row.swept), f"{row.seconds:.1f} s", row.error]
        self._say("  ".join(filter(None, facts)))

    def say_once(self, line: str) -> None:
        """Print a line that several jobs have in common."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(redact(line), markup=False, highlight=False, soft_wrap=True)
        else:
            print(redact(line), flush=True)

    def refresh(self) -> None:
        """Draw the running jobs if there is a terminal."""
        if self._live is None and sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            # Without a thread, because this process forks.
            self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Remove the running jobs from the screen. The lines of the others stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        facts = [f"{self._done} of {self._total} done", f"{self._failed} failed" if self._failed else "", self._best]
        table = Table(title=Text("  ".join(filter(None, facts))), title_justify="left", box=None, pad_edge=False)
        for name in ("job", "seconds", "swept", "now"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for job, (swept, output, began) in self._running.items():
            cells = (str(job), f"{time.monotonic() - began:.0f}", swept, redact(last_line(output)))
            table.add_row(*map(Text, cells))
        return table


def _words(swept: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items())
