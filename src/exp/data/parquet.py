"""Tables from Parquet files. Reading requires pyarrow, from the extra `parquet`."""

from __future__ import annotations

from exp.data.column_source import parquet_source
from exp.data.delimited import Csv


class Parquet(Csv):
    """A table from a Parquet file; see Csv. The name of the file may have any ending."""

    reader = staticmethod(parquet_source)
