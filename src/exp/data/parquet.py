"""Tables from Parquet files, which the extra pyarrow reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from exp.data.column_source import parquet_source
from exp.data.csv_source import Dialect
from exp.data.data_errors import require_extra
from exp.data.dataset_files import data_file
from exp.data.delimited import Csv
from exp.data.source import Source


class Parquet(Csv):
    """A table from a Parquet file; see Csv."""

    def opener(
        self, path: str, directory: str, dialect: Dialect, missing_values: Sequence[object] | None
    ) -> Callable[[], Source]:
        """Return the function that reads the file. Raise ConfigError without the file or without pyarrow."""
        require_extra("pyarrow", feature="data=parquet", extra="parquet")
        return partial(parquet_source, data_file(path, directory=directory), missing_values=missing_values or ())
