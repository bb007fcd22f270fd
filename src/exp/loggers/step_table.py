"""A table of numbers on disk, a row a step and a column a tag, that a resume goes on with."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exp.errors import RunError
from exp.files import open_atomic
from exp.output import describe_write_error

STEP = "step"


class StepTable:
    """A CSV file with a row a step, and a column a tag in the order in which they came.

    What a step did not measure is empty. A tag that comes for the first time adds a column, for which the file is
    written anew beside itself and put in its place.

    path: of the file, made by the first write. fix: what to do where it cannot be written, behind "or".

    Raises RunError, from whichever call writes: the file cannot be written. What comes after that is dropped.
    """

    def __init__(self, path: Path, *, fix: str) -> None:
        self.path = path
        self._fix = fix
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        # The last row of the file.
        self._last: dict[str, Any] | None = None
        self._failed = False

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by tag, which wait; what comes for one step in a row shares a row."""
        if not self._rows or self._rows[-1][STEP] != step:
            self._rows.append({STEP: step})
        self._rows[-1].update(values)

    def write(self, *, keep: int = 0) -> None:
        """Write what waits. keep: 1 lets the last row wait, for a validation at its step."""
        count = len(self._rows) - keep
        rows, self._rows = self._rows[:count], self._rows[count:]
        if rows:
            self._guarded(lambda: self._append(rows))

    def purge(self, step: int) -> None:
        """Take out the rows from `step` on: a resumed run writes them anew."""
        if self.path.is_file():
            self._guarded(lambda: self._rewrite(lambda row: int(row[STEP]) < step))

    def read(self) -> Iterator[dict[str, str]]:
        """The whole rows of the file: a kill may have left a part of one at the end."""
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(line for line in file if line.endswith("\n"))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except OSError as error:
            self._failed = True
            raise RunError(
                f"the table cannot be written to {describe_write_error(self.path, error)}, or {self._fix}"
            ) from error

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if not self._columns and self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
            for row in self.read():
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
