"""The columns of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.data.cells import DecimalSign, Missing
from exp.data.data_errors import data_error, require_sample
from exp.data.source import Source

if TYPE_CHECKING:
    from _csv import Reader

# Rows that are parsed together: enough that the calls for each column cost little.
ROWS = 2**14
MISSING_VALUES = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The form of a CSV file.

    Args:
        delimiter: The sign between values.
        decimal: The decimal sign of a number.
        header: Whether the first line names the columns.
    """

    delimiter: str = ","
    decimal: DecimalSign = "."
    header: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Dialect:
        """Return the form that the options of a data set state."""
        return cls(**{one.name: options[one.name] for one in fields(cls) if one.name in options})


class CsvSource(Source):
    """The columns of a CSV file, which is read again for each request. Empty lines are left out.

    Args:
        file: The file.
        dialect: The form of the file; None for commas and a header.
        missing_values: The texts that mean a missing value.

    Raises:
        ConfigError: Two columns have one name, or the file has no rows.
    """

    def __init__(
        self, file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES
    ) -> None:
        dialect = dialect or Dialect()
        self.file, self.dialect = file, dialect
        if dialect.decimal == dialect.delimiter:
            got = f"{dialect.decimal!r}, which is the delimiter, too"
            fix = "If semicolons separate the values, write data.dataset.delimiter=';'"
            raise data_error("dataset.decimal", got=got, expected="two different signs", fix=fix)
        first = [row for _, row in islice(self._all_rows(), 1 + dialect.header)]
        require_sample(len(first) - dialect.header, file)
        names = [name.strip() for name in first[0]] if dialect.header else list(map(str, range(len(first[0]))))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            got = f"{file} with {', '.join(twice)} twice"
            raise data_error("dataset.path", got=got, expected="a first line with a different name for each column")
        super().__init__(file=file, names=names, missing=Missing.of(missing_values, decimal=dialect.decimal))

    def place(self, row: int) -> str:
        line, _ = next(islice(self.rows(), row, None))
        return f"line {line} of {self.file}"

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line on which each row ends, and the texts of the row.

        Raises:
            ConfigError: Rows differ in length, or the file is not CSV in UTF-8.
        """
        for line, row in islice(self._all_rows(), self.dialect.header, None):
            if len(row) != len(self.names):
                sign = self.dialect.delimiter
                got = f"{len(row)} values in line {line} of {self.file}"
                fix = f"The delimiter is {sign!r}; data.dataset.delimiter sets another" if len(row) == 1 else None
                raise data_error("dataset.path", got=got, expected=f"{len(self.names)}, as in its first line", fix=fix)
            yield line, row

    def chunks(self, columns: Sequence[int]) -> Iterator[Sequence[Sequence[str]]]:
        rows = (row for _, row in self.rows())
        while chunk := list(islice(rows, ROWS)):
            yield [[row[column] for row in chunk] for column in columns]

    def _all_rows(self) -> Iterator[tuple[int, list[str]]]:
        line = 0
        with self.file.open(newline="", encoding="utf-8-sig") as text:
            reader = rows_of(text, delimiter=self.dialect.delimiter)
            try:
                for row in filter(None, reader):
                    line = reader.line_num
                    yield line, row
            except (csv.Error, UnicodeDecodeError) as error:
                got = f"{self.file}, after line {line}: {error}"
                raise data_error("dataset.path", got=got, expected="CSV in UTF-8") from error


def rows_of(lines: Iterable[str], *, delimiter: str) -> Reader:
    """Return the csv module's reader of lines, the same for every CSV file."""
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
