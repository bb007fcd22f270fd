"""Reader of the columns of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from exp.data.cells import DecimalSign, Missing
from exp.data.data_errors import data_error, require_sample
from exp.data.source import Readers, Source, Values

if TYPE_CHECKING:
    from _csv import Reader

# The number of characters that are read and parsed at once.
CHARACTERS = 2**20
MISSING_VALUES = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Format of a CSV file.

    Args:
        delimiter: The character between values. Default: a comma.
        decimal: The decimal sign of numbers. Default: a point.
        header: Whether the first line contains the names of the columns. Default: True.
    """

    delimiter: str = ","
    decimal: DecimalSign = "."
    header: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Dialect:
        """Return the format that a data set's options in the config describe.

        Args:
            options: The options by name. Missing options have their default. Options that do not describe the format
                are ignored.
        """
        return cls(**{one.name: options[one.name] for one in fields(cls) if one.name in options})


class CsvSource(Source):
    """Source of the columns of a CSV file. Empty lines are skipped.

    Every call of a method reads the file again. NumPy parses the lines, because it is eight times as fast as the csv
    module with Python's float. The csv module parses lines with quotation marks, and lines that NumPy cannot parse.

    Args:
        file: The file.
        dialect: The delimiter, decimal sign and header. Default: comma, point and a header.
        missing_values: The texts that mean a missing value, in addition to an empty text. Default: MISSING_VALUES.

    Raises:
        ConfigError: Two columns have the same name, the file has no rows, or the decimal sign is also the delimiter.
    """

    def __init__(
        self, file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES
    ) -> None:
        dialect = dialect or Dialect()
        self.file, self.dialect = file, dialect
        if dialect.decimal == dialect.delimiter:
            got = f"{dialect.decimal!r}, which is also the delimiter"
            fix = "If semicolons separate the values, write data.dataset.delimiter=';'"
            raise data_error("dataset.decimal", got=got, expected="a sign that differs from the delimiter", fix=fix)
        first = [row for _, row in islice(self._all_rows(), 1 + dialect.header)]
        require_sample(len(first) - dialect.header, file)
        names = [name.strip() for name in first[0]] if dialect.header else list(map(str, range(len(first[0]))))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            got = f"{file} with several columns named {', '.join(twice)}"
            raise data_error("dataset.path", got=got, expected="a first line with a different name for each column")
        super().__init__(file=file, names=names, missing=Missing.of(missing_values, decimal=dialect.decimal))

    def place(self, row: int) -> str:
        line, _ = next(islice(self.rows(), row, None))
        return f"line {line} of {self.file}"

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each row as a pair: the number of the row's last line, counted from 1, and the texts of the row.

        A row has several lines if a text in quotation marks contains a line break.

        Raises:
            ConfigError: A row differs from the first line in the number of values, or the file is not CSV in UTF-8.
        """
        for line, row in islice(self._all_rows(), self.dialect.header, None):
            if len(row) != len(self.names):
                sign = self.dialect.delimiter
                got = f"{len(row)} values in line {line} of {self.file}"
                fix = (
                    f"The delimiter is {sign!r}. Set data.dataset.delimiter if the file has another delimiter"
                    if len(row) == 1
                    else None
                )
                expected = f"{len(self.names)} values, as in the first line"
                raise data_error("dataset.path", got=got, expected=expected, fix=fix)
            yield line, row

    def chunks(self, columns: Sequence[int], readers: Readers) -> Iterator[Sequence[Values] | np.ndarray]:
        with self._open() as text:
            try:
                if self.dialect.header:
                    next(filter(None, rows_of(text, delimiter=self.dialect.delimiter)))
                while lines := text.readlines(CHARACTERS):
                    found = self._parse(lines, readers, [column for column in columns if column not in readers])
                    yield self._split(lines, text, columns) if found is None else found[:, list(columns)]
            except (csv.Error, ValueError):
                for _ in self.rows():
                    pass  # self.rows() raises ConfigError with the line number of the first invalid row.
                raise

    def _parse(self, lines: Sequence[str], readers: Readers, plain: Sequence[int]) -> np.ndarray | None:
        """Return the numbers in some lines of the file as parsed by NumPy, float64 `[rows, columns of the file]`.

        Return None if NumPy cannot parse the lines, or would parse them differently than the csv module. Return None
        also if a number in the columns `plain` is not finite.

        Args:
            lines: The lines.
            readers: Functions that convert a text to a number, by column number.
            plain: The numbers of the columns that contain plain numbers. All columns that are in neither `readers` nor
                `plain` are filled with 0.
        """
        if self.dialect.delimiter == " " or not lines[0].strip() or '"' in "".join(lines):
            return None
        others = [column for column in range(len(self.names)) if column not in plain]
        converters: dict[int | str, Callable[[str], float]] = {column: readers.get(column, _zero) for column in others}
        sign = self.dialect.delimiter
        try:
            found: np.ndarray = np.loadtxt(
                lines, np.float64, delimiter=sign, comments=None, converters=converters, encoding=None, ndmin=2
            )
        except (ValueError, TypeError, OverflowError):
            return None
        return found if found.shape[1] == len(self.names) and np.isfinite(found[:, [*plain]]).all() else None

    def _split(self, lines: Sequence[str], after: TextIO, columns: Sequence[int]) -> Sequence[Values]:
        """Return the texts in some lines of the file as parsed by the csv module, one list for each column.

        Args:
            lines: The lines.
            after: The open file at the line after `lines`. More lines are read if the last row continues there.
            columns: The numbers of the columns to return.

        Raises:
            ValueError: A row differs from the first line of the file in the number of values.
        """
        reader, rows = rows_of(chain(lines, after), delimiter=self.dialect.delimiter), list[list[str]]()
        while reader.line_num < len(lines) and (row := next(reader, None)) is not None:
            rows += [row] if row else []
        if any(len(row) != len(self.names) for row in rows):
            raise ValueError("rows of another length")
        return [[row[column] for row in rows] for column in columns]

    def _open(self) -> TextIO:
        return self.file.open(newline="", encoding="utf-8-sig")

    def _all_rows(self) -> Iterator[tuple[int, list[str]]]:
        line = 0
        with self._open() as text:
            reader = rows_of(text, delimiter=self.dialect.delimiter)
            try:
                for row in filter(None, reader):
                    line = reader.line_num
                    yield line, row
            except (csv.Error, UnicodeDecodeError) as error:
                got = f"{self.file}, which cannot be read after line {line + unread_lines(error)}: {error}"
                raise data_error("dataset.path", got=got, expected="CSV in UTF-8") from error


def rows_of(lines: Iterable[str], *, delimiter: str) -> Reader:
    """Return a csv.reader with exp's settings: errors for invalid quoting, and spaces after a delimiter skipped."""
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


def unread_lines(error: Exception) -> int:
    """Return the number of lines between the last line that the reader returned and the invalid byte of the file.

    Python decodes a block of several lines before it returns the first line of the block. An invalid byte may
    therefore be several lines after the last line that was returned.

    Args:
        error: The error of the reader. Errors other than UnicodeDecodeError return 0.
    """
    return error.object[: error.start].count(b"\n") if isinstance(error, UnicodeDecodeError) else 0


def _zero(text: str) -> float:
    return 0.0
