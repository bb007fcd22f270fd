"""Logger that writes all scalars of a run to the table metrics.csv.

A resumed run appends to the same table. Lightning's CSVLogger would start a new table.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, RunLogger
from exp.loggers.step_table import StepTable


class CsvLogger(RunLogger):
    """Logger that writes `metrics.csv` to the run directory, with a row per step and a column per tag.

    If the file cannot be written, methods that write it raise OSError.

    Args:
        directory: Run directory. exp sets it.
        flush_seconds: Minimum seconds between two writes. Default: 5.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        super().__init__()
        self.path = Path(directory) / "metrics.csv"
        self.flush_seconds = flush_seconds
        self._table = StepTable(self.path)
        self._last_write = time.time()

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
        """Do nothing, because the run directory also contains config.yaml and provenance.json."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, object] | Namespace, *args: object, **kwargs: object) -> None:
        """Do nothing, because the run directory also contains config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add scalars to the table. Consecutive calls with the same step add to the same row.

        Args:
            metrics: Scalars by tag.
            step: Number of completed optimizer steps. Default: None, the step of the previous call.
        """
        self._table.add(metrics, self._step_of(step))
        if time.time() - self._last_write >= self.flush_seconds:
            self._write(keep=1)

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Do nothing, because a table contains only numbers."""

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Remove the rows from step `step` onward, because a resumed run starts at this step."""
        self._table.purge(step)

    @rank_zero_only
    def save(self) -> None:
        """Write the buffered rows."""
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
