"""Columns by name from files of several formats: .csv, .parquet, .jsonl, .npz, .npy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exp.data.arrays import map_file, read_archive
from exp.data.cells import DecimalSign, Missing, WordCodes, text_of
from exp.data.csv_source import MISSING_VALUES, CsvSource, Dialect
from exp.data.data_errors import SampleError, data_error, name_fix, require_extra
from exp.data.shard_files import JsonLines
from exp.data.source import Columns, Days, Source, Unread, words_in_order
from exp.data.tables import Words
from exp.errors import ErrorDetails, raise_errors

if TYPE_CHECKING:
    import pyarrow

# The endings of files whose values have types. Any other file is CSV.
TYPED = (".parquet", ".jsonl", ".npz", ".npy")
Values = Mapping[str, Sequence[Any] | np.ndarray]


class ColumnSource(Source):
    """Columns in memory, with values of any type.

    Args:
        file: the file, for messages.
        columns: the columns by name, of one length.
        missing_values: the texts that stand for a missing value.
        decimal: the sign before the fraction of a number that is a text.

    Raises:
        ConfigError: for a column whose values are arrays.
    """

    def __init__(
        self, *, file: Path, columns: Values, missing_values: Sequence[object] = (), decimal: DecimalSign = "."
    ) -> None:
        super().__init__(file=file, names=list(columns), missing=Missing.of(missing_values, decimal=decimal))
        self._values = list(columns.values())
        for name, values in columns.items():
            if isinstance(values, np.ndarray) and values.ndim != 1:
                got = f"{name} of {file}, {list(values.shape)}"
                raise data_error("dataset.path", got=got, expected="a column of the table, [N]")

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"

    def is_date(self, column: int) -> bool:
        values = self._values[column]
        return isinstance(values, np.ndarray) and values.dtype.kind == "M"

    def _values_of(self, column: int) -> Iterator[object]:
        return iter(self._values[column])

    def _read(self, numbers: Sequence[int], days: Days, words: Sequence[int]) -> tuple[Columns, Unread]:
        table = np.full((len(self._values[0]), len(numbers)), np.nan)
        unread: Unread = {}
        for place, column in enumerate(numbers):
            table[:, place] = self._numbers(column, days, unread)
        return Columns(numbers=table, words={column: self._words(column) for column in words}), unread

    def _words(self, column: int) -> Words:
        values: Any = self._values[column]
        codes = WordCodes(self.missing)
        # Python's dates are texts as a CSV file has them.
        texts = (text_of(value) or "" for value in (values.tolist() if self.is_date(column) else values))
        return words_in_order(np.array([codes[text] for text in texts]), codes.words)

    def _numbers(self, column: int, days: Days, unread: Unread) -> np.ndarray:
        values = self._values[column]
        if self.is_date(column):
            return (np.asarray(values) - np.datetime64(0, "us")) / np.timedelta64(1, "D")
        found = np.full(len(values), np.nan)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and column not in days:
            found[:] = values
        else:
            read = self._reader(column, days)
            for row, value in enumerate(values):
                is_number = isinstance(value, int | float | Decimal) and column not in days
                try:
                    found[row] = float(value) if is_number else read(text_of(value) or "")
                except (ValueError, OverflowError):
                    unread.setdefault(column, (row, str(value)))
        if (infinite := np.flatnonzero(np.isinf(found))).size:
            unread.setdefault(column, (int(infinite[0]), str(found[infinite[0]])))
        found[np.isin(found, list(self.missing.numbers))] = np.nan
        return found


def open_source(
    file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] | None = None
) -> Source:
    """Return the columns of a file.

    Args:
        file: the file.
        dialect: the form of a CSV file; None for the defaults.
        missing_values: the texts that stand for a missing value; None for MISSING_VALUES in a CSV file, and for no text
            in a file whose values have types.

    Raises:
        ConfigError: for a file that cannot be read, or that holds no row.
    """
    _require_file(file)
    if file.suffix not in TYPED:
        return CsvSource(file, dialect, missing_values=MISSING_VALUES if missing_values is None else missing_values)
    columns: Values = read_columns(file)
    if file.suffix == ".npy":
        rows = np.asarray(columns["input"])
        if rows.ndim > 2:
            raise data_error("dataset.path", got=f"{file} of shape {list(rows.shape)}", expected="rows, [N] or [N, C]")
        columns = {str(place): column for place, column in enumerate(rows.reshape(len(rows), -1).T)}
    decimal = "." if dialect is None else dialect.decimal
    return ColumnSource(file=file, columns=columns, missing_values=missing_values or (), decimal=decimal)


def parquet_source(file: Path, *, missing_values: Sequence[object]) -> ColumnSource:
    """Return the columns of a Parquet file of any ending. Raises: ConfigError as read_parquet."""
    return ColumnSource(file=file, columns=arrow_columns(read_parquet(file)), missing_values=missing_values)


def read_columns(file: Path) -> Values:
    """Return the columns of a file by name, each of as many values; an array of a .npy file is `input`.

    Raises: ConfigError for a file that is not there, cannot be read, is of another format, or holds no row.
    """
    _require_file(file)
    if file.suffix not in TYPED:
        raise data_error("dataset.path", got=str(file), expected=f"a file in {', '.join(('.csv', *TYPED))}")
    if file.suffix == ".jsonl":
        columns: Values = _records(file)
    elif file.suffix == ".npz":
        columns = read_archive(file)
    elif file.suffix == ".npy":
        columns = {"input": map_file(file)}
    else:
        columns = arrow_columns(read_parquet(file))
    is_one = {name: isinstance(values, np.ndarray) and not values.ndim for name, values in columns.items()}
    lengths = {name: 0 if is_one[name] else len(values) for name, values in columns.items()}
    if not lengths or 0 in lengths.values():
        raise data_error("dataset.path", got=f"{file} without a sample", expected="at least one")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise data_error("dataset.path", got=f"{file}, where {told}", expected="as many values in each")
    return columns


def raw_columns(file: Path, dialect: Dialect, names: Sequence[str]) -> Values:
    """Return columns of a file by name with the values that the file has, such as the text 007 of a CSV file.

    Raises: ConfigError at `keep` for a column that is not there, and as open_source.
    """
    _require_file(file)
    if file.suffix not in TYPED:
        source = CsvSource(file, dialect)
        texts = zip(*(row for _, row in source.rows()), strict=True)
        columns: Values = dict(zip(source.names, texts, strict=True))
    else:
        columns = read_parquet(file).to_pydict() if file.suffix == ".parquet" else read_columns(file)
    raise_errors(
        ErrorDetails(key="keep", got=name, expected=f"a column of {file}", fix=name_fix(name, list(columns)))
        for name in names
        if name not in columns
    )
    return {name: columns[name] for name in names}


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise data_error("dataset.path", got=f"{file}, which is not there", expected="a file to read")


def _records(file: Path) -> dict[str, list[Any]]:
    """Return the columns of a JSON object on each line; a value that a line lacks is None."""
    try:
        records = [record.columns() for record in JsonLines(file).records()]
    except SampleError as error:
        raise data_error("dataset.path", got=error.error.got, expected="a JSON object on each line") from error
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def read_parquet(file: Path) -> pyarrow.Table:
    """Return the table of a Parquet file.

    Raises: ConfigError for another file, for a file without a row, and if pyarrow is not installed.
    """
    require_extra("pyarrow", feature=str(file), extra="parquet")
    from pyarrow import ArrowException, parquet

    try:
        # The file itself: of a path pyarrow would make a data set, with columns out of the folders' names.
        with file.open("rb") as raw:
            table = parquet.read_table(raw)
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise data_error("dataset.path", got=f"{file} ({reason})", expected="a Parquet file") from error
    if not len(table):
        raise data_error("dataset.path", got=f"{file} without a row", expected="at least one")
    return table


def arrow_columns(table: pyarrow.Table) -> Values:
    """Return the columns of a table: arrays of numbers and dates, lists of other values and of columns with nulls."""
    from pyarrow import timestamp, types

    found: dict[str, Sequence[Any] | np.ndarray] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if types.is_timestamp(kind):
            # Times with a zone are kept in UTC.
            column = column.cast(timestamp("us", tz=kind.tz), safe=False)
        is_whole = types.is_integer(kind) or types.is_boolean(kind)
        is_array = types.is_floating(kind) or types.is_date(kind) or types.is_timestamp(kind)
        as_array = is_array or (is_whole and not column.null_count)
        found[name] = column.to_numpy() if as_array else column.to_pylist()
    return found
