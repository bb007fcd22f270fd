"""The columns of a CSV file, read in one pass."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

import numpy as np

from exp.data.cells import DecimalSign, Missing, WordCodes
from exp.data.data_errors import data_error
from exp.data.source import Columns, Days, Source, Unread, words_in_order
from exp.errors import ConfigError

if TYPE_CHECKING:
    from _csv import Reader

Array: TypeAlias = np.ndarray
# The function that makes a number of a text, by column.
Readers: TypeAlias = Mapping[int, Callable[[str], float]]

# Characters of the lines that are parsed together.
CHARACTERS = 2**20
MISSING_VALUES = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The form of a CSV file.

    Args:
        delimiter: the sign between values.
        decimal: the sign before the fraction of a number.
        header: whether the first line names the columns.
    """

    delimiter: str = ","
    decimal: DecimalSign = "."
    header: bool = True


class CsvSource(Source):
    """The columns of a CSV file, of which only the names are read at once. Empty lines are left out.

    NumPy parses the lines, six times as fast as the csv module and Python's float. The csv module reads lines with
    quotes, and lines that NumPy refuses.

    Args:
        file: the file.
        dialect: the form of the file; None for commas and a header.
        missing_values: the texts that stand for a missing value.

    Raises:
        ConfigError: for two columns of one name, and for a file without rows.
    """

    def __init__(
        self, file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES
    ) -> None:
        dialect = dialect or Dialect()
        self.file, self.dialect = file, dialect
        if dialect.decimal == dialect.delimiter:
            got = f"{dialect.decimal!r}, which is the delimiter, too"
            fix = "If values stand between semicolons, write data.dataset.delimiter=';'"
            raise data_error("dataset.decimal", got=got, expected="two different signs", fix=fix)
        first = next(self._all_rows(), None)
        if first is None:
            raise data_error("dataset.path", got=f"{file} without a row", expected="at least one below the header")
        names = [name.strip() for name in first[1]] if dialect.header else list(map(str, range(len(first[1]))))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            got = f"{file} with {', '.join(twice)} twice"
            raise data_error("dataset.path", got=got, expected="a first line with a different name for each column")
        missing = Missing.of(missing_values, decimal=dialect.decimal)
        super().__init__(file=file, names=names, missing=missing)
        if next(self.rows(), None) is None:
            raise data_error("dataset.path", got=f"{file} without a row", expected="at least one below the header")

    def place(self, row: int) -> str:
        line, _ = next(islice(self.rows(), row, None))
        return f"line {line} of {self.file}"

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line on which each row ends, and its texts.

        Raises: ConfigError for rows of unequal length, and for a file that is no CSV in UTF-8.
        """
        for line, row in islice(self._all_rows(), self.dialect.header, None):
            if len(row) != len(self.names):
                sign = self.dialect.delimiter
                raise data_error(
                    "dataset.path",
                    got=f"{len(row)} values in line {line} of {self.file}",
                    expected=f"{len(self.names)}, as in its first line",
                    fix=f"The delimiter is {sign!r}; data.dataset.delimiter sets another" if len(row) == 1 else None,
                )
            yield line, row

    def _values_of(self, column: int) -> Iterator[object]:
        return (row[column] for _, row in self.rows())

    def _all_rows(self) -> Iterator[tuple[int, list[str]]]:
        line = 0
        with self._opened() as text:
            reader = rows_of(text, delimiter=self.dialect.delimiter)
            try:
                for row in filter(None, reader):
                    line = reader.line_num
                    yield line, row
            except (csv.Error, UnicodeDecodeError) as error:
                raise unreadable(self.file, error, line) from error

    def _opened(self) -> TextIO:
        return self.file.open(newline="", encoding="utf-8-sig")

    def _read(self, numbers: Sequence[int], days: Days, words: Sequence[int]) -> tuple[Columns, Unread]:
        codes = {column: WordCodes(self.missing) for column in words}
        readers: Readers = {
            **{column: self._reader(column, days) for column in numbers},
            **{column: code.__getitem__ for column, code in codes.items()},
        }
        # NumPy does not know which numbers stand for a missing one.
        is_plain = not self.missing.numbers and self.missing.decimal == "."
        plain = [column for column in numbers if is_plain and column not in days]
        table, coded = np.empty((0, len(numbers))), np.empty((0, len(codes)), dtype=np.int32)
        unread: Unread = {}
        with self._opened() as text:
            try:
                if self.dialect.header:
                    next(filter(None, rows_of(text, delimiter=self.dialect.delimiter)))
                while lines := text.readlines(CHARACTERS):
                    rows = self._parsed(lines, readers, plain)
                    if rows is None:
                        rows = self._by_row(lines, text, readers, unread, first=len(table))
                    _append(table, rows[:, list(numbers)])
                    _append(coded, rows[:, list(codes)])
            except (csv.Error, UnicodeDecodeError):
                self._refuse_rows()
                raise
        found = {
            column: words_in_order(coded[:, place], code.words) for place, (column, code) in enumerate(codes.items())
        }
        return Columns(numbers=table, words=found), unread

    def _refuse_rows(self) -> None:
        """Raise the error of the first row that is none, with its line."""
        for _ in self.rows():
            pass

    def _parsed(self, lines: Sequence[str], readers: Readers, plain: Sequence[int]) -> Array | None:
        """Return the numbers of whole lines, float64 `[n, columns of the file]`, as NumPy reads them.

        Returns None for lines that NumPy cannot read, or reads otherwise than the csv module, and if a number in
        `plain` is missing.
        """
        if self.dialect.delimiter == " " or not lines[0].strip() or '"' in "".join(lines):
            return None
        others = [column for column in range(len(self.names)) if column not in plain]
        try:
            found: Array = np.loadtxt(
                lines,
                dtype=np.float64,
                delimiter=self.dialect.delimiter,
                comments=None,
                converters={column: readers.get(column, _zero) for column in others},
                encoding=None,
                ndmin=2,
            )
        except (ValueError, TypeError, OverflowError):
            return None
        return found if found.shape[1] == len(self.names) and np.isfinite(found[:, [*plain]]).all() else None

    def _by_row(self, lines: Sequence[str], after: TextIO, readers: Readers, unread: Unread, *, first: int) -> Array:
        """Return the numbers of lines as the csv module reads them. The last row may end in a line of `after`.

        first: the number of the first row in the file. unread: receives the first error of each column.
        """
        reader, rows = rows_of(chain(lines, after), delimiter=self.dialect.delimiter), list[list[str]]()
        while reader.line_num < len(lines) and (row := next(reader, None)) is not None:
            rows += [row] if row else []
        if any(len(row) != len(self.names) for row in rows):
            self._refuse_rows()
        found = np.zeros((len(rows), len(self.names)))
        for column, read in readers.items():
            for place, row in enumerate(rows):
                try:
                    found[place, column] = read(row[column])
                except (ValueError, OverflowError):
                    found[place, column] = math.nan
                    unread.setdefault(column, (first + place, row[column].strip()))
        return found


def rows_of(lines: Iterable[str], *, delimiter: str) -> Reader:
    """Return the csv module's reader of lines, the same for every CSV file."""
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


def unreadable(file: Path, error: Exception, line: int) -> ConfigError:
    """Return the error of a file that is no CSV. line: the last line that could be read."""
    if isinstance(error, UnicodeDecodeError):
        # The error counts from the beginning of a block, and bytes that are no text become U+FFFD.
        line = file.read_bytes().decode(errors="replace").partition("\ufffd")[0].count("\n")
    return data_error("dataset.path", got=f"{file}, near line {line + 1}: {error}", expected="CSV in UTF-8")


def _append(held: Array, rows: Array) -> None:
    """Append rows to an array in place: the system moves its pages, and copies nothing of a large one."""
    count = len(held)
    held.resize((count + len(rows), held.shape[1]), refcheck=False)
    held[count:] = rows


def _zero(text: str) -> float:
    return 0.0
