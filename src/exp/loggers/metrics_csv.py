"""Every number of a run in one table, metrics.csv, that a resume goes on with. Lightning's CSVLogger begins it anew."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, LeftOut, RunLogger
from exp.loggers.step_table import StepTable


class CsvLogger(RunLogger):
    """Writes `metrics.csv` into the run directory: a row a step, a column a tag, in the order in which they came.

    Rows wait until `flush_seconds` have passed.

    directory: the run directory; build.py gives it.

    Raises RunError, from whichever call writes: the file cannot be written. What comes after that is dropped.
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
        """Nothing: config.yaml and provenance.json stand beside the table."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing, as in `describe`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers by tag. step: the optimizer steps done; what is logged for one step in a row shares a row."""
        self._table.add(metrics, self._step_of(step))
        if time.time() - self._last_write >= self.flush_seconds:
            self._write(keep=1)

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Says once what a table cannot hold."""
        self._left_out.shown(panels)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Takes out the rows from `step` on: a resumed run, `step` its first, writes them anew."""
        self._table.purge(step)

    @rank_zero_only
    def save(self) -> None:
        """Writes what waits."""
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
