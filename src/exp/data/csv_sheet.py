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

from exp.data.cells import DecimalSign, Missing, WordCodes, finite_number
from exp.data.columns import NO_DAYS, Sheet, SheetValues, words_in_order
from exp.data.faults import data_fault
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


class CsvSheet(Sheet):
    """The columns of a CSV file.

    NumPy parses the lines, six times as fast as the csv module and Python's float. The csv module reads lines with
    quotes, and lines that NumPy refuses, to find the value that is wrong.
    """

    def __init__(self, *, file: Path, dialect: Dialect, names: Sequence[str], missing: Missing) -> None:
        super().__init__(file=file, names=names, missing=missing, has_header=dialect.header)
        self.dialect = dialect

    def read(
        self, *, numbers: Sequence[int] = (), days: Mapping[int, str | None] = NO_DAYS, words: Sequence[int] = ()
    ) -> SheetValues:
        # A column that is a number and a word, too, such as a class that is also a target of a regression.
        twice = [column for column in words if column in numbers]
        codes = {column: WordCodes(self.missing) for column in words if column not in twice}
        readers: Readers = {column: self.reader(column, days) for column in numbers}
        readers = {**readers, **{column: code.__getitem__ for column, code in codes.items()}}
        # NumPy does not know which numbers stand for a missing one.
        is_plain = not self.missing.numbers and self.missing.decimal == "."
        plain = [column for column in numbers if is_plain and column not in days]
        table, coded = np.empty((0, len(numbers))), np.empty((0, len(codes)), dtype=np.int32)
        unread: dict[int, tuple[int, str]] = {}
        for rows in self._pieces(readers, plain, unread):
            _append(table, rows[:, list(numbers)])
            _append(coded, rows[:, list(codes)])
        found = {
            column: words_in_order(coded[:, place], code.words) for place, (column, code) in enumerate(codes.items())
        }
        return SheetValues(
            numbers=table,
            words={**found, **(self.read(words=twice).words if twice else {})},
            faults={column: self.unread(row, column, text, days) for column, (row, text) in unread.items()},
        )

    def place(self, row: int) -> str:
        return f"line {self._row(row)[0]} of {self.file}"

    def cell(self, row: int, column: int) -> str:
        return self._row(row)[1][column].strip()

    def number_cure(self, column: int, text: str) -> str:
        number = finite_number(text, decimal=",")
        if number is None:
            return super().number_cure(column, text)
        if self.dialect.delimiter != ",":
            return f"'data.dataset.decimal=\",\"' reads a comma as the sign before a fraction: {text} becomes {number}"
        return "Write it in the file with a point before the fraction and nothing between its other digits"

    def cells(self, columns: Sequence[int]) -> list[list[str]]:
        """Return the texts of columns as the file has them.

        Raises: ConfigError for rows of unequal length, and for a file that is no CSV in UTF-8.
        """
        found: list[list[str]] = [[] for _ in columns]
        line = 0
        with self._opened() as text:
            reader = self._rows_in(text)
            try:
                for row in islice(filter(None, reader), self.dialect.header, None):
                    line = reader.line_num
                    if len(row) != len(self.names):
                        raise self._uneven(row, line)
                    for texts, column in zip(found, columns, strict=True):
                        texts.append(row[column])
            except (csv.Error, UnicodeDecodeError) as error:
                raise unreadable(self.file, error, max(line, 1)) from error
        return found

    def _row(self, row: int) -> tuple[int, Sequence[str]]:
        """Return the line on which a row ends, and its values."""
        with self._opened() as text:
            reader = self._rows_in(text)
            found = next(islice(filter(None, reader), row + self.dialect.header, None))
            return reader.line_num, found

    def _opened(self) -> TextIO:
        return self.file.open(newline="", encoding="utf-8-sig")

    def _rows_in(self, lines: Iterable[str]) -> Reader:
        return rows_of(lines, delimiter=self.dialect.delimiter)

    def _uneven(self, row: Sequence[str], line: int) -> ConfigError:
        """Return the error of a row with another number of values than there are columns."""
        cure = f"The delimiter is {self.dialect.delimiter!r}; data.dataset.delimiter sets another"
        return data_fault(
            "dataset.path",
            got=f"{len(row)} values in line {line} of {self.file}",
            expected=f"{len(self.names)}, as in its first line",
            cure=cure if len(row) == 1 else None,
        )

    def _pieces(self, readers: Readers, plain: Sequence[int], unread: dict[int, tuple[int, str]]) -> Iterator[Array]:
        """Yield the rows in pieces, float64 `[n, columns of the file]`.

        Args:
            readers: the function that makes a number of a text, by column. Other columns are 0.
            plain: the columns that NumPy may read itself.
            unread: receives the first row of each column with a text that its reader refuses, and the text.

        Raises:
            ConfigError: for rows of unequal length, and for a file that is no CSV in UTF-8.
        """
        count = 0
        with self._opened() as text:
            try:
                if self.dialect.header:
                    next(filter(None, self._rows_in(text)))
                while lines := text.readlines(CHARACTERS):
                    # NumPy and the csv module find different values in lines with quotes or spaces.
                    is_quoted = self.dialect.delimiter == " " or not lines[0].strip() or '"' in "".join(lines)
                    found = None if is_quoted else self._parsed(lines, readers, plain)
                    if found is None and plain and not is_quoted:
                        plain = ()  # if a number is missing here, others mostly are further on
                        found = self._parsed(lines, readers, plain)
                    if found is None:
                        found = self._by_row(lines, text, readers, unread, first=count)
                    count += len(found)
                    yield found
            except (csv.Error, UnicodeDecodeError):
                self.cells(())  # raises the error with its line
                raise

    def _parsed(self, lines: Sequence[str], readers: Readers, plain: Sequence[int]) -> Array | None:
        """Return the numbers of whole lines; None if NumPy cannot read a line, or a number in `plain` is missing."""
        try:
            found: Array = np.loadtxt(
                lines,
                dtype=np.float64,
                delimiter=self.dialect.delimiter,
                comments=None,
                converters={
                    column: readers.get(column, _zero) for column in range(len(self.names)) if column not in plain
                },
                encoding=None,
                ndmin=2,
            )
        except (ValueError, TypeError, OverflowError):
            return None
        return found if found.shape[1] == len(self.names) and np.isfinite(found[:, [*plain]]).all() else None

    def _by_row(
        self, lines: Sequence[str], after: TextIO, readers: Readers, unread: dict[int, tuple[int, str]], *, first: int
    ) -> Array:
        """Return the numbers of lines as the csv module reads them. The last row may end in a line of `after`.

        first: the number of the first row in the file.
        """
        reader, rows = self._rows_in(chain(lines, after)), list[list[str]]()
        while reader.line_num < len(lines) and (row := next(reader, None)) is not None:
            rows += [row] if row else []
        if any(len(row) != len(self.names) for row in rows):
            self.cells(())  # raises the error with its line
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


def are_numbers(names: Sequence[str]) -> bool:
    """Return whether the names of columns are numbers, some of which may be missing."""
    told = [name for name in names if name not in ("", *MISSING_VALUES)]
    return bool(told) and all(finite_number(name) is not None for name in told)


def unreadable(file: Path, error: Exception, line: int) -> ConfigError:
    """Return the error of a file that is no CSV. line: the last line that could be read."""
    if isinstance(error, UnicodeDecodeError):
        # The error counts from the beginning of a block, and bytes that are no text become U+FFFD.
        line = file.read_bytes().decode(errors="replace").partition("\ufffd")[0].count("\n")
    return data_fault("dataset.path", got=f"{file}, near line {line + 1}: {error}", expected="CSV in UTF-8")


def read_sheet(
    file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES
) -> CsvSheet:
    """Return the columns of a file, of which only the names are read at once. Empty lines are left out.

    dialect: the form of the file; None for commas and a header.
    Raises: ConfigError for names that are there twice, and for a file without rows.
    """
    dialect = dialect or Dialect()
    if dialect.decimal == dialect.delimiter:
        got = f"{dialect.decimal!r}, which is the delimiter, too"
        cure = "If values stand between semicolons, write data.dataset.delimiter=';'"
        raise data_fault("dataset.decimal", got=got, expected="two different signs", cure=cure)
    with file.open(newline="", encoding="utf-8-sig") as text:
        rows = rows_of(text, delimiter=dialect.delimiter)
        try:
            first = next(filter(None, rows), None)
            second = next(filter(None, rows), None) if dialect.header else first
        except (csv.Error, UnicodeDecodeError) as error:
            raise unreadable(file, error, max(0, rows.line_num - 1)) from error
    if first is None or second is None:
        raise data_fault("dataset.path", got=f"{file} without a row", expected="at least one below the header")
    names = [name.strip() for name in first] if dialect.header else list(map(str, range(len(first))))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        header = "Its first line is taken for their names: write them above it" if are_numbers(names) else None
        got = f"{file} with {', '.join(twice)} twice"
        raise data_fault("dataset.path", got=got, expected="a name for each column", cure=header)
    missing = Missing.of(missing_values, decimal=dialect.decimal)
    return CsvSheet(file=file, dialect=dialect, names=names, missing=missing)


def _append(held: Array, rows: Array) -> None:
    """Append rows to an array in place: the system moves its pages, and copies nothing of a large one."""
    count = len(held)
    held.resize((count + len(rows), held.shape[1]), refcheck=False)
    held[count:] = rows


def _zero(text: str) -> float:
    return 0.0
