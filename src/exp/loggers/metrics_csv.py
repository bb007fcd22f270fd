"""All numbers of a run in one table, metrics.csv. A resumed run continues it, unlike Lightning's CSVLogger."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, LeftOut, RunLogger
from exp.loggers.step_table import StepTable


class CsvLogger(RunLogger):
    """Writes `metrics.csv` to the run directory, with a row per step and a column per tag.

    Calls that write raise RunError if the file cannot be written. Later values are dropped.

    Args:
        directory: Run directory, set by build.py.
        flush_seconds: Time between two writes, in seconds.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        super().__init__()
        self.path = Path(directory) / "metrics.csv"
        self.flush_seconds = flush_seconds
        self._table = StepTable(self.path, fix="take out csv from the loggers")
        self._last_write = time.time()
        self._left_out = LeftOut(name="csv", kinds=())

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def describe(self, description: Description) -> None:
        """Do nothing: config.yaml and provenance.json are next to the table."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, object] | Namespace, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add numbers by tag. step: Finished optimizer steps. Consecutive calls for one step share a row."""
        self._table.add(metrics, self._step_of(step))
        if time.time() - self._last_write >= self.flush_seconds:
            self._write(keep=1)

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Log once which panels a table cannot hold."""
        self._left_out.select(panels)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Remove the rows from `step` on: a resumed run starts at `step`."""
        self._table.purge(step)

    @rank_zero_only
    def save(self) -> None:
        """Write waiting rows."""
        self._write(keep=0)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()

    @rank_zero_only
    def end(self, status: str) -> None:
        self.save()

    def _write(self, *, keep: int) -> None:
        self._last_write = time.time()
        self._table.write(keep=keep)
