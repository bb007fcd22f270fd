"""Readers of tables with named columns, in the formats .csv, .parquet, .jsonl, .npz and .npy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exp.data.arrays import map_file, read_archive
from exp.data.cells import DecimalSign, Missing
from exp.data.csv_source import MISSING_VALUES, CsvSource, Dialect
from exp.data.data_errors import (
    SampleError,
    data_error,
    file_error,
    require_equal_lengths,
    require_extra,
    require_sample,
)
from exp.data.shard_files import JsonLines
from exp.data.source import Readers, Source, Values

if TYPE_CHECKING:
    import pyarrow

# The file name extensions of formats that store the types of values. Files with other extensions are read as CSV.
TYPED = (".parquet", ".jsonl", ".npz", ".npy")


class ColumnSource(Source):
    """Source of columns that are in memory. The values of a column may have any type.

    Args:
        file: The file from which the columns were read, for error messages.
        columns: The columns by name. All columns have the same length.
        missing_values: The texts that mean a missing value. Default: only an empty text.
        decimal: The decimal sign of numbers that are stored as text. Default: a point.

    Raises:
        ConfigError: A column is an array with more than one axis.
    """

    def __init__(
        self,
        *,
        file: Path,
        columns: Mapping[str, Values],
        missing_values: Sequence[object] = (),
        decimal: DecimalSign = ".",
    ) -> None:
        super().__init__(file=file, names=list(columns), missing=Missing.of(missing_values, decimal=decimal))
        self._values = list(columns.values())
        for name, values in columns.items():
            if isinstance(values, np.ndarray) and values.ndim != 1:
                got = f"{name} of {file} with the shape {list(values.shape)}"
                raise data_error("dataset.path", got=got, expected="an array [N] for each column")

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"

    def is_date(self, column: int) -> bool:
        values = self._values[column]
        return isinstance(values, np.ndarray) and values.dtype.kind == "M"

    def chunks(self, columns: Sequence[int], readers: Readers) -> Iterator[Sequence[Values]]:
        yield [self._values[column] for column in columns]


def open_source(
    file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] | None = None
) -> Source:
    """Return a source of the columns of a file.

    Args:
        file: The file.
        dialect: The delimiter, decimal sign and header of a CSV file. Default: comma, point and a header.
        missing_values: The texts that mean a missing value. Default: MISSING_VALUES for a CSV file. The default for
            other formats is only an empty text, because these formats store missing values as nulls.

    Raises:
        ConfigError: The file does not exist, cannot be read, or has no rows.
    """
    _require_file(file)
    if file.suffix not in TYPED:
        return CsvSource(file, dialect, missing_values=MISSING_VALUES if missing_values is None else missing_values)
    columns = read_columns(file)
    if file.suffix == ".npy":
        rows = np.asarray(columns["input"])
        if rows.ndim > 2:
            got = f"{file} of shape {list(rows.shape)}"
            raise data_error("dataset.path", got=got, expected="an array of rows, [N] or [N, C]")
        columns = {str(place): column for place, column in enumerate(rows.reshape(len(rows), -1).T)}
    decimal = "." if dialect is None else dialect.decimal
    return ColumnSource(file=file, columns=columns, missing_values=missing_values or (), decimal=decimal)


def read_columns(file: Path) -> dict[str, Values]:
    """Return a mapping from the names of the columns in a file to their values. All columns have the same length.

    The array in a .npy file has the name `input`.

    Raises:
        ConfigError: The file does not exist, cannot be read, has an unsupported format, or has no rows.
    """
    _require_file(file)
    columns: dict[str, Values]
    if file.suffix == ".jsonl":
        columns = _records(file)
    elif file.suffix == ".npz":
        columns = dict(read_archive(file))
    elif file.suffix == ".npy":
        columns = {"input": map_file(file)}
    elif file.suffix == ".parquet":
        columns = arrow_columns(read_parquet(file))
    else:
        raise data_error("dataset.path", got=str(file), expected=f"a file that ends in {', '.join(TYPED)}")
    is_one = {name: isinstance(values, np.ndarray) and not values.ndim for name, values in columns.items()}
    lengths = {name: None if is_one[name] else len(values) for name, values in columns.items()}
    require_sample(min((length or 0 for length in lengths.values()), default=0), file)
    require_equal_lengths(lengths, file)
    return columns


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise data_error("dataset.path", got=f"{file}, which does not exist", expected="an existing file")


def _records(file: Path) -> dict[str, Values]:
    """Return the columns of a file with a JSON object on each line.

    The columns are the keys of all objects. If an object does not have a key, its value in that column is None.
    """
    try:
        records = [record.columns() for record in JsonLines(file).records()]
    except SampleError as error:
        raise data_error("dataset.path", got=error.error.got, expected="a JSON object on each line") from error
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def read_parquet(file: Path) -> pyarrow.Table:
    """Return the table of a Parquet file.

    Raises:
        ConfigError: The file is not Parquet, or pyarrow is not installed.
    """
    require_extra("pyarrow", feature=str(file), extra="parquet")
    from pyarrow import ArrowException, parquet

    try:
        # An open file is passed. If a path is passed, pyarrow adds a column for each folder in it named key=value.
        with file.open("rb") as raw:
            table = parquet.read_table(raw)
    except (ArrowException, OSError) as error:
        raise file_error(file, error, "a Parquet file") from error
    return table


def arrow_columns(table: pyarrow.Table) -> dict[str, Values]:
    """Return a mapping from the names of the columns in a table to their values.

    Columns of floats, dates and times are arrays. Columns of integers and booleans are arrays if they have no nulls.
    All other columns are lists.
    """
    from pyarrow import timestamp, types

    found: dict[str, Values] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if types.is_timestamp(kind):
            # Parquet stores times with a time zone in UTC.
            column = column.cast(timestamp("us", tz=kind.tz), safe=False)
        is_whole = types.is_integer(kind) or types.is_boolean(kind)
        is_array = types.is_floating(kind) or types.is_date(kind) or types.is_timestamp(kind)
        as_array = is_array or (is_whole and not column.null_count)
        found[name] = column.to_numpy() if as_array else column.to_pylist()
    return found
