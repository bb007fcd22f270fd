"""CSV file with a row per step and a column per tag, which a resumed run continues."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from exp.files import open_atomic

STEP = "step"
Row = dict[str, float | str]


class StepTable:
    """CSV file with a row per step, and a column per tag in the order of the tags' first values.

    Missing values are empty. A new tag adds a column, for which the file is replaced. If the file cannot be written,
    calls that write raise OSError.

    Args:
        path: Path of the file, which the first write creates.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._rows: list[Row] = []
        # Last row in the file.
        self._last: Row | None = None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers by tag without writing them. Consecutive calls with the same step share a row."""
        if not self._rows or self._rows[-1][STEP] != step:
            self._rows.append({STEP: step})
        self._rows[-1].update(values)

    def write(self, *, keep: int = 0) -> None:
        """Write the buffered rows except the last `keep` rows. A validation may still add values to the last row."""
        count = len(self._rows) - keep
        rows, self._rows = self._rows[:count], self._rows[count:]
        if rows:
            self._append(rows)

    def purge(self, step: int) -> None:
        """Remove the rows from step `step` onward, because a resumed run writes them again."""
        if self.path.is_file():
            self._rewrite(lambda row: int(row[STEP]) < step)

    def read(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the file. An incomplete last row, which a killed process may have left, is skipped."""
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
        # If the last row in the file has the same step, for example after a repeated test, the values are added to it.
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
        """Replace the file by the rows for which `is_kept` is true and the rows in `more`, with the current columns."""
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
