"""Every number of a run in one table, metrics.csv, that a resume goes on with. Lightning's CSVLogger begins it anew."""

from __future__ import annotations

import csv
import io
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.errors import RunError
from exp.files import replacing
from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, LeftOut, RunLogger
from exp.output import unwritable

STEP = "step"


class CsvLogger(RunLogger):
    """Writes `metrics.csv` into the run directory: a row a step, a column a tag, in the order in which they came.

    What a step did not measure is empty. A tag that comes for the first time adds a column, for which the file is
    written anew beside itself and put in its place. Rows wait until `flush_seconds` have passed.

    directory: the run directory; build.py gives it.

    Raises RunError, from whichever call writes: the file cannot be written. What comes after that is dropped.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        super().__init__()
        self.path = Path(directory) / "metrics.csv"
        self.flush_seconds = flush_seconds
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        # The last row of the file.
        self._last: dict[str, Any] | None = None
        self._last_write = time.time()
        self._left_out = LeftOut(name="csv", kinds=())
        self._failed = False

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
        if step is None:
            raise ValueError("log_metrics needs the optimizer step: it is the first column")
        if not self._rows or self._rows[-1][STEP] != step:
            self._rows.append({STEP: step})
        self._rows[-1].update(metrics)
        if time.time() - self._last_write >= self.flush_seconds:
            self._write(keep=1)

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Says once what a table cannot hold."""
        self._left_out.shown(panels)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Takes out the rows from `step` on: a resumed run, `step` its first, writes them anew."""
        if self.path.is_file():
            self._guarded(lambda: self._rewrite(lambda row: int(row[STEP]) < step))

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
        """keep: 1 lets the last row wait, for a validation at its step."""
        count = len(self._rows) - keep
        rows, self._rows = self._rows[:count], self._rows[count:]
        self._last_write = time.time()
        if rows:
            self._guarded(lambda: self._append(rows))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except OSError as error:
            self._failed = True
            raise RunError(
                f"the table cannot be written to {unwritable(self.path, error)}, or take out csv from the loggers"
            ) from error

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if not self._columns and self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
            for row in self._read():
                self._last = dict(row)
        step, last = rows[0][STEP], self._last or {STEP: -1}
        # What comes behind a write, and a test that is made again: a step has one row.
        is_split = int(last[STEP]) == step
        if is_split:
            rows = [{**{tag: value for tag, value in last.items() if value != ""}, **rows[0]}, *rows[1:]]
        columns = dict.fromkeys(self._columns or [STEP])
        for row in rows:
            columns.update(dict.fromkeys(row))
        if is_split or list(columns) != self._columns:
            self._columns = list(columns)
            # The row that is taken away comes back in the same replacement: a kill between the two would lose it.
            self._rewrite(lambda row: not is_split or int(row[STEP]) != step, more=rows)
            return
        self._last = rows[-1]
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text.getvalue())

    def _rewrite(self, is_kept: Callable[[dict[str, str]], bool], more: Sequence[dict[str, Any]] = ()) -> None:
        """The rows that are kept, and more, below the columns of now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._read()
        first = next(rows, None)
        self._columns = self._columns or list(first or [STEP])
        with replacing(self.path) as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            for row in [first, *rows]:
                if row is not None and is_kept(row):
                    writer.writerow(row)
                    self._last = dict(row)
            writer.writerows(more)
            file.detach()
        if more:
            self._last = more[-1]

    def _read(self) -> Iterator[dict[str, str]]:
        """The whole rows of the file: a kill may have left a part of one at the end."""
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(line for line in file if line.endswith("\n"))
