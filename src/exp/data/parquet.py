"""Tables from Parquet files, read by pyarrow, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from exp.data.columns import Name, SheetTable, Task
from exp.data.dataset_files import data_file
from exp.data.faults import require_extra
from exp.data.record_files import RecordSheet, arrow_columns, read_parquet, sheet_of_columns
from exp.data.tables import Encoding, Impute


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
            read=partial(_sheet, data_file(path, directory=directory), missing_values=missing_values),
            target=target,
            task=task,
            categorical=categorical,
            dates=dates,
            ignore=ignore,
            impute=impute,
            encoding=encoding,
            standardise=standardise,
        )


def _sheet(file: Path, *, missing_values: Sequence[object]) -> RecordSheet:
    return sheet_of_columns(file, arrow_columns(read_parquet(file)), missing_values=missing_values)
