"""Tables from Parquet files, read by pyarrow, which is an extra."""

from __future__ import annotations

from exp.data.delimited import Csv


class Parquet(Csv):
    """A table from a Parquet file, see Csv."""
