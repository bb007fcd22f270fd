"""Tables from CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Len

from exp.data.dataset_files import data_file
from exp.data.faults import data_fault, name_cure
from exp.data.tables import Table

# More labels than this that are numbers with a fraction are taken for a regression asked for as a classification.
MANY_LABELS = 20


class Csv(Table):
    """A table of numbers from a CSV file, with one column to predict.

    path: relative to the current folder, or else to directory. target: the column to predict, by its name, or its
        number from 0 where there is no header. task: "classification", whose labels may be any words, or "regression".
    header: the first line names the columns. categorical: columns of words, one feature for each word. ignore: columns
        to leave out. standardise: see Table.

    Raises: ConfigError for a file or a column that is not there, and for a value that is no finite number, with its
        line.
    """

    def __init__(
        self,
        *,
        path: str,
        target: str | int,
        task: Literal["classification", "regression"] = "classification",
        directory: str = "data",
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        header: bool = True,
        categorical: Sequence[str | int] = (),
        ignore: Sequence[str | int] = (),
        standardise: bool = True,
    ) -> None:
        sheet = read_sheet(data_file(path, directory=directory), delimiter=delimiter, header=header)
        wanted = sheet.column(target, key="dataset.target")
        words = [sheet.column(name, key="dataset.categorical") for name in categorical]
        left_out = {wanted, *(sheet.column(name, key="dataset.ignore") for name in ignore)}
        columns: list[str] = []
        features: list[np.ndarray] = []
        for column, name in enumerate(sheet.names):
            if column in left_out:
                continue
            if column in words:
                values = sheet.texts(column)
                for word in sorted(set(values)):
                    columns.append(f"{name}={word}")
                    features.append(np.array([value == word for value in values], dtype=np.float64))
            else:
                columns.append(name)
                features.append(sheet.numbers(column))
        if not features:
            raise data_fault("dataset.ignore", got="every column but the target", expected="at least one feature")
        if task == "regression":
            targets, classes = sheet.numbers(wanted), None
        else:
            targets, classes = sheet.labels(wanted)
        super().__init__(
            features=np.stack(features, axis=1),
            targets=targets,
            columns=tuple(columns),
            classes=classes,
            standardise=standardise,
        )


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The rows of a CSV file as text, and the line on which each ends."""

    file: Path
    names: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def column(self, name: str | int, *, key: str) -> int:
        """The number of a column.

        Raises: ConfigError where there is no such one.
        """
        if str(name) in self.names:
            return self.names.index(str(name))
        raise data_fault(key, got=str(name), expected=f"a column of {self.file}", cure=name_cure(str(name), self.names))

    def texts(self, column: int) -> list[str]:
        """A column of words, none of them empty."""
        values = [row[column].strip() for row in self.rows]
        for value, line in zip(values, self.lines, strict=True):
            if not value:
                raise self._bad(line, column, "an empty value", "a value in every row")
        return values

    def numbers(self, column: int) -> np.ndarray:
        """A column of finite numbers, float64 `[N]`."""
        values = []
        for row, line in zip(self.rows, self.lines, strict=True):
            text = row[column].strip()
            try:
                number = float(text)
            except ValueError:
                name = self.names[column]
                cure = f"Put it in data.dataset.categorical, or leave it out with data.dataset.ignore=[{name}]"
                raise self._bad(line, column, repr(text), "a number", cure if text else None) from None
            if not math.isfinite(number):
                raise self._bad(line, column, text, "a finite number")
            values.append(number)
        return np.array(values)

    def labels(self, column: int) -> tuple[np.ndarray, tuple[str, ...]]:
        """Classes, int64 `[N]`, and their names: in the order of numbers where all are, else of the alphabet."""
        values = self.texts(column)
        names = sorted(set(values))
        numbers = [number for name in names if (number := _number(name)) is not None]
        if len(numbers) == len(names):
            if len(names) > MANY_LABELS and any(not number.is_integer() for number in numbers):
                raise data_fault(
                    "dataset.task",
                    got=f"classification of {len(names)} labels that are numbers with a fraction",
                    expected="regression for the column " + self.names[column],
                    cure="data=csv_regression selects it, with its objective and metrics",
                )
            names = [name for _, name in sorted(zip(numbers, names, strict=True))]
        order = {name: number for number, name in enumerate(names)}
        return np.array([order[value] for value in values], dtype=np.int64), tuple(names)

    def _bad(self, line: int, column: int, got: str, expected: str, cure: str | None = None) -> Exception:
        place = f"line {line} of {self.file}, column {self.names[column]}"
        return data_fault("dataset.path", got=f"{got} in {place}", expected=expected, cure=cure)


def read_sheet(file: Path, *, delimiter: str, header: bool) -> Sheet:
    """The rows of a file. Empty lines are left out.

    Raises: ConfigError for rows of unequal length, names that are there twice, and a file without rows.
    """
    rows, lines = [], []
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        line = lines[-1] + 1 if lines else 1
        raise data_fault("dataset.path", got=f"{file}, near line {line}: {error}", expected="CSV in UTF-8") from error
    names = tuple(name.strip() for name in rows[0]) if header and rows else ()
    first = 1 if header else 0
    if len(rows) <= first:
        raise data_fault("dataset.path", got=f"{file} without a row", expected="at least one below the header")
    names = names or tuple(map(str, range(len(rows[0]))))
    for row, line in zip(rows[first:], lines[first:], strict=True):
        if len(row) != len(names):
            raise data_fault(
                "dataset.path",
                got=f"{len(row)} values in line {line} of {file}",
                expected=f"{len(names)}, as in its first line",
                cure=f"The delimiter is {delimiter!r}; data.dataset.delimiter sets another" if len(row) == 1 else None,
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise data_fault("dataset.path", got=f"{file} with {', '.join(twice)} twice", expected="a name for each column")
    return Sheet(file=file, names=names, rows=rows[first:], lines=lines[first:])


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
