"""Columns by name out of files of several formats: .csv, .parquet, .jsonl, .npz, .npy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exp.data.arrays import read_archive
from exp.data.columns import Sheet
from exp.data.delimited import MISSING_VALUES, read_sheet
from exp.data.faults import data_fault, require_extra

FORMATS = (".csv", ".parquet", ".jsonl", ".npz", ".npy")
Columns = Mapping[str, Sequence[Any] | np.ndarray]


class RecordSheet(Sheet):
    """A table whose columns are at hand, with values of any type. columns: by name, of one length."""

    def __init__(self, *, file: Path, columns: Columns, missing_values: Sequence[str]) -> None:
        super().__init__(file=file, names=list(columns))
        self.columns, self.missing_values = list(columns.values()), frozenset(missing_values)

    def texts(self, column: int) -> list[str | None]:
        texts = [_text(value) for value in self.columns[column]]
        return [None if text in self.missing_values else text for text in texts]

    def numbers(self, column: int) -> np.ndarray:
        return self.read(column, float, lambda row, text: self.no_number(row, column, text))

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"


def sheet_of(
    file: Path, *, delimiter: str = ",", header: bool = True, missing_values: Sequence[str] = MISSING_VALUES
) -> Sheet:
    """The columns of a file as a table. delimiter, header: of a .csv file.

    Raises: ConfigError for a file that cannot be read, or holds no row.
    """
    _require_format(file)
    if file.suffix == ".csv":
        return read_sheet(file, delimiter=delimiter, header=header, missing_values=missing_values)
    if file.suffix == ".parquet":
        require_extra("pyarrow", feature=str(file), extra="parquet")
        from exp.data.parquet import read_parquet

        return read_parquet(file, missing_values=missing_values)
    return sheet_of_columns(file, read_columns(file, takes_lists=False), missing_values=missing_values)


def sheet_of_columns(file: Path, columns: Columns, *, missing_values: Sequence[str] = MISSING_VALUES) -> RecordSheet:
    """Columns that are at hand as a table. file: that they are of, for messages.

    Raises: ConfigError for one whose values are arrays.
    """
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.ndim != 1:
            raise data_fault(
                "dataset.path", got=f"{name} of {file}, {list(values.shape)}", expected="a column of the table, [N]"
            )
    return RecordSheet(file=file, columns=columns, missing_values=missing_values)


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
    lengths = {name: len(values) if np.ndim(values) else 0 for name, values in columns.items()}
    if not lengths or 0 in lengths.values():
        raise data_fault("dataset.path", got=f"{file} without a sample", expected="at least one")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise data_fault("dataset.path", got=f"{file}, where {told}", expected="as many values in each")
    return columns


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


def _text(value: object) -> str | None:
    """A value as a CSV file would have it, so that 3 and 3.0 are one word."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()
