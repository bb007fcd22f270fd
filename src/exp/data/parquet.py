"""Tables from Parquet files, which the extra pyarrow reads."""

from __future__ import annotations

from exp.data.column_source import parquet_source
from exp.data.delimited import Csv


class Parquet(Csv):
    """A table from a Parquet file with any ending; see Csv."""

    reader = staticmethod(parquet_source)
