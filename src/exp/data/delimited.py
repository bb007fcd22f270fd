"""Tables from CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Len

from exp.data.columns import Name, Sheet, SheetTable, Task
from exp.data.dataset_files import data_file
from exp.data.faults import data_fault
from exp.data.tables import Encoding, Impute

MISSING_VALUES = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")


class Csv(SheetTable):
    """A table from a CSV file, with a column to predict, or several.

    A sample is what Table says. With several numbers to predict they are one target, float32 `[K]`; targets by name
    become entries of these names, and a mapping.

    path: relative to the current folder, or else to directory. delimiter: between values. header: the first line names
        the columns.
    target: the column to predict, by its name, or its number from 0 where there is no header; a list of columns of
        numbers; or a mapping of names to either, such as {kind: species, size: [length, width]}.
    task: "classification", whose labels may be any words, or "regression"; with targets by name one for all, or one
        each, {kind: classification, size: regression}.
    categorical: columns of words. dates: columns of dates in ISO 8601, or {when: "%d.%m.%Y"}: a number of days each.
    ignore: columns to leave out.
    missing_values: texts that stand for a missing value. impute: what to take for one, see Table; None refuses them.
    encoding: of words, "one_hot" or "index"; see Table. standardise: see Table.

    Raises: ConfigError for a file or a column that is not there, and with its line for a value that is none of what its
        column holds.
    """

    def __init__(
        self,
        *,
        path: str,
        target: Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]],
        task: Task | Mapping[str, Task] = "classification",
        directory: str = "data",
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        header: bool = True,
        categorical: Sequence[Name] = (),
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        ignore: Sequence[Name] = (),
        missing_values: Sequence[str] = MISSING_VALUES,
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        file = data_file(path, directory=directory)
        super().__init__(
            sheet=read_sheet(file, delimiter=delimiter, header=header, missing_values=missing_values),
            target=target,
            task=task,
            categorical=categorical,
            dates=dates,
            ignore=ignore,
            impute=impute,
            encoding=encoding,
            standardise=standardise,
        )


class CsvSheet(Sheet):
    """The rows of a CSV file as text, and the line on which each ends."""

    def __init__(
        self,
        *,
        file: Path,
        names: Sequence[str],
        rows: Sequence[Sequence[str]],
        lines: Sequence[int],
        missing_values: Sequence[str],
    ) -> None:
        super().__init__(file=file, names=names)
        self.rows, self.lines, self.missing_values = rows, lines, frozenset(missing_values)

    def texts(self, column: int) -> list[str | None]:
        texts = [row[column].strip() for row in self.rows]
        return [None if text in self.missing_values else text for text in texts]

    def numbers(self, column: int) -> np.ndarray:
        return self.read(column, float, lambda row, text: self.no_number(row, column, text))

    def place(self, row: int) -> str:
        return f"line {self.lines[row]} of {self.file}"


def are_numbers(names: Sequence[str]) -> bool:
    """Whether what is read as a header is a row of numbers, some of which may be missing."""

    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return True

    told = [name for name in names if name not in MISSING_VALUES]
    return bool(told) and all(map(is_number, told))


def read_sheet(file: Path, *, delimiter: str, header: bool, missing_values: Sequence[str] = MISSING_VALUES) -> CsvSheet:
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
        cure = "Its first line is taken for their names: write them above it" if are_numbers(names) else None
        got = f"{file} with {', '.join(twice)} twice"
        raise data_fault("dataset.path", got=got, expected="a name for each column", cure=cure)
    return CsvSheet(file=file, names=names, rows=rows[first:], lines=lines[first:], missing_values=missing_values)
