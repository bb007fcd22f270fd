"""Columns by name out of files of several formats: .csv, .parquet, .jsonl, .npz, .npy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exp.data.arrays import read_archive
from exp.data.cells import DecimalSign, Missing, WordCodes, text_of
from exp.data.columns import NO_DAYS, Sheet, SheetValues, words_in_order
from exp.data.csv_sheet import MISSING_VALUES, Dialect, read_sheet
from exp.data.faults import data_fault, name_cure, require_extra
from exp.data.tables import Words
from exp.errors import ConfigError, Fault

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".csv", ".parquet", ".jsonl", ".npz", ".npy")
Columns = Mapping[str, Sequence[Any] | np.ndarray]


class RecordSheet(Sheet):
    """Columns that are at hand, with values of any type. columns: by name, of one length."""

    def __init__(self, *, file: Path, columns: Columns, missing: Missing) -> None:
        super().__init__(file=file, names=list(columns), missing=missing)
        self._values = list(columns.values())

    def read(
        self, *, numbers: Sequence[int] = (), days: Mapping[int, str | None] = NO_DAYS, words: Sequence[int] = ()
    ) -> SheetValues:
        table = np.full((len(self._values[0]), len(numbers)), np.nan)
        faults: dict[int, ConfigError] = {}
        for place, column in enumerate(numbers):
            try:
                table[:, place] = self._numbers(column, days)
            except ConfigError as error:
                faults[column] = error
        return SheetValues(numbers=table, words={column: self._words(column) for column in words}, faults=faults)

    def holds_dates(self, column: int) -> bool:
        values = self._values[column]
        return isinstance(values, np.ndarray) and values.dtype.kind == "M"

    def place(self, row: int) -> str:
        return f"row {row} of {self.file}"

    def cell(self, row: int, column: int) -> str:
        return text_of(self._values[column][row], decimal=self.missing.decimal) or ""

    def _words(self, column: int) -> Words:
        values: Any = self._values[column]
        if self.holds_dates(column):
            values = values.tolist()  # Python's dates, as a CSV file has them
        codes = WordCodes(self.missing)
        numbered = np.array([codes[text_of(value, decimal=self.missing.decimal) or ""] for value in values])
        return words_in_order(numbered, codes.words)

    def _numbers(self, column: int, days: Mapping[int, str | None]) -> np.ndarray:
        values = self._values[column]
        if self.holds_dates(column):
            return (np.asarray(values) - np.datetime64(0, "us")) / np.timedelta64(1, "D")
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and column not in days:
            found = values.astype(np.float64)
        else:
            read = self.reader(column, days)
            found = np.array([self._number(row, column, read, days) for row in range(len(values))])
        if (infinite := np.flatnonzero(np.isinf(found))).size:
            raise self.bad(int(infinite[0]), column, str(found[infinite[0]]), "a finite number")
        found[np.isin(found, list(self.missing.numbers))] = np.nan
        return found

    def _number(self, row: int, column: int, read: Callable[[str], float], days: Mapping[int, str | None]) -> float:
        value = self._values[column][row]
        try:
            if isinstance(value, int | float | Decimal) and column not in days:
                return float(value)
            return read(text_of(value, decimal=self.missing.decimal) or "")
        except (ValueError, OverflowError):
            raise self.unread(row, column, str(value), days) from None


def sheet_of(file: Path, dialect: Dialect | None = None, *, missing_values: Sequence[object] = MISSING_VALUES) -> Sheet:
    """Return the columns of a file as a table. dialect: of a .csv file.

    Raises: ConfigError for a file that cannot be read, or that holds no row.
    """
    _require_format(file)
    if file.suffix == ".csv":
        return read_sheet(file, dialect, missing_values=missing_values)
    columns = read_columns(file, takes_lists=False)
    decimal = "." if dialect is None else dialect.decimal
    return sheet_of_columns(file, columns, missing_values=missing_values, decimal=decimal)


def sheet_of_columns(
    file: Path, columns: Columns, *, missing_values: Sequence[object] = MISSING_VALUES, decimal: DecimalSign = "."
) -> RecordSheet:
    """Return columns as a table. file: of the columns, for messages. decimal: of numbers that are texts.

    Raises: ConfigError for a column whose values are arrays.
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
    elif file.suffix == ".parquet":
        columns = arrow_columns(read_parquet(file))
    else:
        sheet = read_sheet(file)
        words = sheet.read(words=range(len(sheet.names))).words
        columns = {name: words[place].texts() for place, name in enumerate(sheet.names)}
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
        table = read_parquet(file)
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
        raise data_fault("dataset.path", got=f"{file} ({reason})", expected="a Parquet file") from error
    if not len(table):
        raise data_fault("dataset.path", got=f"{file} without a row", expected="at least one")
    return table


def arrow_columns(table: pyarrow.Table) -> Columns:
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
