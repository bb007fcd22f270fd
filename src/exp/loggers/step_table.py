"""CSV file with a row per step and a column per tag. A resumed run appends to the file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from exp.files import open_atomic

STEP = "step"
Row = dict[str, float | str]


class StepTable:
    """CSV file with a row per step and a column per tag.

    Columns are in the order in which tags first have a value. A cell without a value is empty. If a new tag adds a
    column, the whole file is replaced. If the file cannot be written, methods that write it raise OSError.

    Args:
        path: Path of the file. The first write creates the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._rows: list[Row] = []
        # Last row in the file.
        self._last: Row | None = None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers to the buffer, without writing them. Consecutive calls with the same step add to the same row.

        Args:
            values: Numbers by tag.
            step: Number of completed optimizer steps.
        """
        if not self._rows or self._rows[-1][STEP] != step:
            self._rows.append({STEP: step})
        self._rows[-1].update(values)

    def write(self, *, keep: int = 0) -> None:
        """Write the buffered rows.

        Args:
            keep: Number of last rows that stay in the buffer, because a validation may still add values to them.
                Default: 0.
        """
        count = len(self._rows) - keep
        rows, self._rows = self._rows[:count], self._rows[count:]
        if rows:
            self._append(rows)

    def purge(self, step: int) -> None:
        """Remove the rows from step `step` onward, because a resumed run writes them again."""
        if self.path.is_file():
            self._rewrite(lambda row: int(row[STEP]) < step)

    def read(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the file as dicts from tag to text.

        A killed process may have left an incomplete last row. This row is skipped.
        """
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(line for line in file if line.endswith("\n"))

    def _append(self, rows: list[Row]) -> None:
        if not self._columns and self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
            for held in self.read():
                self._last = {**held}
        step, last = rows[0][STEP], self._last or {STEP: -1}
        # If the last row in the file has the same step, for example after a repeated test, this row gets the new
        # values.
        is_split = int(last[STEP]) == step
        if is_split:
            rows = [{**{tag: value for tag, value in last.items() if value != ""}, **rows[0]}, *rows[1:]]
        columns = dict.fromkeys([*(self._columns or [STEP]), *(tag for row in rows for tag in row)])
        if is_split or list(columns) != self._columns:
            self._columns = list(columns)
            # The row is replaced in one operation, so that a kill cannot lose it.
            self._rewrite(lambda row: not is_split or int(row[STEP]) != step, more=rows)
            return
        self._last = rows[-1]
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text.getvalue())

    def _rewrite(self, is_kept: Callable[[dict[str, str]], bool], more: Sequence[Row] = ()) -> None:
        """Replace the file atomically. The new file has the current columns.

        Args:
            is_kept: Function that returns whether a row of the old file is kept.
            more: Rows to write after the kept rows.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.read()
        first = next(rows, None)
        self._columns = self._columns or list(first or [STEP])
        with open_atomic(self.path) as raw:
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
