"""Columns by name out of files of several formats: .csv, .parquet, .jsonl, .npz, .npy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from exp.data.arrays import read_archive
from exp.data.cells import DecimalSign, Missing, number_in, text_of
from exp.data.columns import Sheet
from exp.data.delimited import MISSING_VALUES, Dialect, read_sheet
from exp.data.faults import data_fault, name_cure, require_extra
from exp.errors import ConfigError, Fault

FORMATS = (".csv", ".parquet", ".jsonl", ".npz", ".npy")
Columns = Mapping[str, Sequence[Any] | np.ndarray]


class RecordSheet(Sheet):
    """Table whose columns are at hand, with values of any type. columns: by name, of one length."""

    def __init__(self, *, file: Path, columns: Columns, missing: Missing) -> None:
        super().__init__(file=file, names=list(columns), missing=missing)
        self._values = list(columns.values())

    def texts(self, column: int) -> list[str | None]:
        texts = [text_of(value, decimal=self.missing.decimal) for value in self._values[column]]
        return [None if text is None or text in self.missing else text for text in texts]

    def numbers(self, column: int) -> np.ndarray:
        read = partial(number_in, decimal=self.missing.decimal)
        return self.read(column, read, lambda row, text: self.no_number(row, column, text))

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"

    def cell(self, row: int, column: int) -> str:
        return text_of(self._values[column][row], decimal=self.missing.decimal) or ""


def sheet_of(file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES) -> Sheet:
    """The columns of a file as a table. dialect: of a .csv file.

    Raises: ConfigError for a file that cannot be read, or holds no row.
    """
    _require_format(file)
    decimal = "." if dialect is None else dialect.decimal
    if file.suffix == ".csv":
        return read_sheet(file, dialect, missing_values=missing_values)
    if file.suffix == ".parquet":
        require_extra("pyarrow", feature=str(file), extra="parquet")
        from exp.data.parquet import read_parquet

        return read_parquet(file, missing_values=missing_values, decimal=decimal)
    columns = read_columns(file, takes_lists=False)
    return sheet_of_columns(file, columns, missing_values=missing_values, decimal=decimal)


def sheet_of_columns(
    file: Path, columns: Columns, *, missing_values: Sequence[object] = MISSING_VALUES, decimal: DecimalSign = "."
) -> RecordSheet:
    """Columns that are at hand as a table. file: that they are of, for messages. decimal: of numbers that are texts.

    Raises: ConfigError for one whose values are arrays.
    """
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.ndim != 1:
            raise data_fault(
                "dataset.path", got=f"{name} of {file}, {list(values.shape)}", expected="a column of the table, [N]"
            )
    return RecordSheet(file=file, columns=columns, missing=Missing.of(missing_values, decimal=decimal))


def read_columns(file: Path, *, takes_lists: bool = True) -> Columns:
    """The columns of a file by name, each of as many values.

    takes_lists: whether every line of a .jsonl file may be a list, the value of the column `input`.

    Raises: ConfigError for a file that is not there, cannot be read, is of another format, or holds no row.
    """
    _require_format(file)
    if file.suffix == ".jsonl":
        columns: Columns = _of_records(file, takes_lists=takes_lists)
    elif file.suffix == ".npz":
        columns = read_archive(file)
    elif file.suffix == ".npy":
        columns = {"input": _array(file)}
    else:
        sheet = sheet_of(file)
        sheet.load(numbers=(), days={}, words=range(len(sheet.names)))
        columns = {name: sheet.texts(place) for place, name in enumerate(sheet.names)}
    # NumPy refuses to tell the dimensions of a list whose parts differ in length.
    is_one = {name: isinstance(values, np.ndarray) and not values.ndim for name, values in columns.items()}
    lengths = {name: 0 if is_one[name] else len(values) for name, values in columns.items()}
    if not lengths or 0 in lengths.values():
        raise data_fault("dataset.path", got=f"{file} without a sample", expected="at least one")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise data_fault("dataset.path", got=f"{file}, where {told}", expected="as many values in each")
    return columns


def raw_columns(file: Path, dialect: Dialect, names: Sequence[str]) -> Columns:
    """Return columns of a file by name with the values that the file has, such as the text 007 of a CSV file.

    Raises: ConfigError at `keep` for a column that is not there, and as read_columns.
    """
    _require_format(file)
    if file.suffix == ".csv":
        sheet = read_sheet(file, dialect)
        _require_names(names, sheet.names, file=file)
        return dict(zip(names, sheet.cells([sheet.names.index(name) for name in names]), strict=True))
    if file.suffix == ".parquet":
        require_extra("pyarrow", feature=str(file), extra="parquet")
        from exp.data.parquet import read_parquet

        table = read_parquet(file).table
        _require_names(names, table.column_names, file=file)
        kept: Columns = table.select(list(names)).to_pydict()
        return kept
    columns = read_columns(file)
    _require_names(names, list(columns), file=file)
    return {name: columns[name] for name in names}


def _require_names(names: Sequence[str], there: Sequence[str], *, file: Path) -> None:
    """Raise ConfigError for names of `keep` that are no columns of the file."""
    unknown, expected = [name for name in names if name not in there], f"a column of {file}"
    if unknown:
        raise ConfigError(
            [Fault(key="keep", got=name, expected=expected, cure=name_cure(name, there)) for name in unknown]
        )


def _require_format(file: Path) -> None:
    if file.suffix not in FORMATS:
        raise data_fault("dataset.path", got=str(file), expected=f"a file in {', '.join(FORMATS)}")
    if not file.is_file():
        raise data_fault("dataset.path", got=f"{file}, which is not there", expected="a file to read")


def _array(file: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise data_fault("dataset.path", got=f"{file} ({error})", expected="an array of numbers in .npy") from error


def _of_records(file: Path, *, takes_lists: bool) -> dict[str, list[Any]]:
    """A JSON object a line; a value that one line lacks is None there. Where all lines are lists, each is its `input`.

    takes_lists: whether lines may be lists.
    """
    records: list[dict[str, Any]] = []
    number = 0
    kind: type = dict
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                value = json.loads(line)
                if not records and takes_lists and isinstance(value, list):
                    kind = list
                if not isinstance(value, kind):
                    expected = "an object of values by name" if kind is dict else "a list, as the lines before"
                    got = f"line {number} of {file} is {_kind(value)}"
                    raise data_fault("dataset.path", got=got, expected=expected)
                records.append(value if isinstance(value, dict) else {"input": value})
    except (json.JSONDecodeError, RecursionError) as error:
        got = f"line {number} of {file}: {error}"
        raise data_fault("dataset.path", got=got, expected="a JSON object a line, in UTF-8") from error
    except UnicodeDecodeError as error:
        got = f"{file}, behind line {number}: {error}"
        raise data_fault("dataset.path", got=got, expected="a JSON object a line, in UTF-8") from error
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
