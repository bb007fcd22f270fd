"""Tables from Parquet files, read by pyarrow, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exp.data.cells import DecimalSign, Missing, text_of
from exp.data.columns import Name, Sheet, SheetTable, Task
from exp.data.dataset_files import data_file
from exp.data.faults import data_fault, require_extra
from exp.data.tables import Encoding, Impute

if TYPE_CHECKING:
    import pyarrow

MICROSECONDS_A_DAY = 24 * 3600 * 10**6


class Parquet(SheetTable):
    """A table from a Parquet file, with a column to predict, or several: Csv for a file whose columns have types.

    Whole numbers, floating ones, decimals and booleans are numbers; dates and times are days since 1970, whether named
    in `dates` or not. Nulls and nan are missing.

    path, target, task, categorical, dates, ignore, missing_values, impute, encoding, standardise: see Csv.

    Raises: ConfigError for a file or a column that is not there, and with its row for a value that is none of what its
        column holds; where pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        path: str,
        target: Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]],
        task: Task | Mapping[str, Task] = "classification",
        directory: str = "data",
        categorical: Sequence[Name] = (),
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        ignore: Sequence[Name] = (),
        missing_values: Sequence[str | int | float] = (),
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        require_extra("pyarrow", feature="data=parquet", extra="parquet")
        super().__init__(
            read=partial(read_parquet, data_file(path, directory=directory), missing_values=missing_values),
            target=target,
            task=task,
            categorical=categorical,
            dates=dates,
            ignore=ignore,
            impute=impute,
            encoding=encoding,
            standardise=standardise,
        )


class ParquetSheet(Sheet):
    """The columns of a Parquet file."""

    def __init__(self, *, file: Path, table: pyarrow.Table, missing: Missing) -> None:
        super().__init__(file=file, names=table.column_names, missing=missing)
        self.table = table

    def texts(self, column: int) -> list[str | None]:
        from pyarrow import types

        held = self.table.column(column)
        # As NumPy's scalars, float32 numbers have the digits that a CSV file has.
        values = held.to_numpy() if types.is_floating(held.type) else held.to_pylist()
        texts = (text_of(value, decimal=self.missing.decimal) for value in values)
        return [None if text is None or text in self.missing else text for text in texts]

    def numbers(self, column: int) -> np.ndarray:
        from pyarrow import float64, types

        kind = self.table.column(column).type
        if self.holds_dates(column):
            return self.days(column, None)
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        if not is_number and not types.is_boolean(kind):
            texts = self.texts(column)
            row = next((row for row, text in enumerate(texts) if text is not None), 0)
            raise self.no_number(row, column, str(texts[row]))
        values = self.table.column(column).cast(float64(), safe=False).to_numpy()
        if (infinite := np.flatnonzero(np.isinf(values))).size:
            raise self.bad(int(infinite[0]), column, str(values[infinite[0]]), "a finite number")
        found = np.array(values, dtype=np.float64)
        found[np.isin(found, list(self.missing.numbers))] = np.nan
        return found

    def holds_dates(self, column: int) -> bool:
        from pyarrow import types

        return bool(types.is_temporal(self.table.column(column).type))

    def days(self, column: int, form: str | None) -> np.ndarray:
        from pyarrow import float64, int64, timestamp, types

        held = self.table.column(column)
        if types.is_date(held.type) or types.is_timestamp(held.type):
            zone = held.type.tz if types.is_timestamp(held.type) else None
            # Those with a zone are kept in UTC.
            counts = held.cast(timestamp("us", tz=zone), safe=False).cast(int64()).cast(float64(), safe=False)
            return np.asarray(counts.to_numpy(), dtype=np.float64) / MICROSECONDS_A_DAY
        return super().days(column, form)

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"

    def cell(self, row: int, column: int) -> str:
        return text_of(self.table.column(column)[row].as_py(), decimal=self.missing.decimal) or ""


def read_parquet(file: Path, *, missing_values: Sequence[object] = (), decimal: DecimalSign = ".") -> ParquetSheet:
    """Return the columns of a file. decimal: the sign before the fractions of numbers that are texts.

    Raises: ConfigError where it is no Parquet file, or has no row.
    """
    from pyarrow import ArrowException, parquet

    try:
        # The file itself: of a path pyarrow would make a data set, with columns out of the folders' names.
        with file.open("rb") as raw:
            table = parquet.read_table(raw)
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise data_fault("dataset.path", got=f"{file} ({reason})", expected="a Parquet file") from error
    if not len(table):
        raise data_fault("dataset.path", got=f"{file} without a row", expected="at least one")
    return ParquetSheet(file=file, table=table, missing=Missing.of(missing_values, decimal=decimal))
