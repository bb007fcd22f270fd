"""Tables from CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

from annotated_types import Len

from exp.data.cells import DecimalSign
from exp.data.columns import Name, SheetTable, Task
from exp.data.csv_sheet import MISSING_VALUES, Dialect, read_sheet
from exp.data.dataset_files import data_file
from exp.data.tables import Encoding, Impute


class Csv(SheetTable):
    """A table from a CSV file, with a column to predict, or several.

    A sample is what Table says. With several numbers to predict they are one target, float32 `[K]`; targets by name
    become entries of these names, and a mapping.

    path: relative to the current folder, or else to directory. delimiter: between values. decimal: before the fraction
        of a number. header: the first line names the columns.
    target: the column to predict, by its name, or its number from 0 where there is no header; a list of columns of
        numbers; or a mapping of names to either, such as {kind: species, size: [length, width]}.
    task: "classification", whose labels may be any words, or "regression"; with targets by name one for all, or one
        each, {kind: classification, size: regression}.
    categorical: columns of words. dates: columns of dates in ISO 8601, or {when: "%d.%m.%Y"}: a number of days each.
    ignore: columns to leave out.
    missing_values: texts that stand for a missing value, besides an empty one. impute: what to take for one, see Table;
        None refuses them.
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
        decimal: DecimalSign = ".",
        header: bool = True,
        categorical: Sequence[Name] = (),
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        ignore: Sequence[Name] = (),
        missing_values: Sequence[str | int | float] = MISSING_VALUES,
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        dialect = Dialect(delimiter=delimiter, decimal=decimal, header=header)
        file = data_file(path, directory=directory)
        super().__init__(
            read=partial(read_sheet, file, dialect, missing_values=missing_values),
            target=target,
            task=task,
            categorical=categorical,
            dates=dates,
            ignore=ignore,
            impute=impute,
            encoding=encoding,
            standardise=standardise,
        )
