"""Data set of the rows of a table in a CSV, .parquet, .jsonl or .npz file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated

import numpy as np
from annotated_types import Len

from exp.data.cells import DecimalSign
from exp.data.column_source import open_source
from exp.data.csv_source import Dialect
from exp.data.data_errors import data_error, refuse_unknown_columns
from exp.data.dataset_files import data_file
from exp.data.entries import TARGET
from exp.data.source import NAMELESS, NO_NAME, Columns, Days, Name, Source, Task, refuse_labels
from exp.data.tables import Encoding, Impute, Table, Words

Targets = Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]]
MISSING = "data.dataset.missing_values lists the texts that mean a missing value"
IMPUTE = (
    "Set data.dataset.impute=mean, median or most_frequent to fill in missing values, or leave the column out with "
    "data.dataset.ignore. " + MISSING
)
NO_ANSWER = f"Remove rows without a target from the file. {MISSING}"
NO_NUMBER = (
    "Put the column in data.dataset.categorical or data.dataset.dates, leave it out with data.dataset.ignore=[{}], or "
    "add the text to data.dataset.missing_values. data.dataset.decimal is the decimal sign"
)
NO_DATE = "Set the format, as in data.dataset.dates={{{}: '%d.%m.%Y'}}"


class Csv(Table):
    """Data set of the rows of a table in a file, with one or several targets.

    See Table for the samples. Several numeric target columns form one target, float32 `[K]` for K columns. If targets
    have names, a sample is a mapping that contains each target under its name. Columns without a name are left out,
    such as the index that pandas writes.

    .parquet, .jsonl and .npz files store the type of each column. Integers, floats, decimals and booleans are numbers.
    Dates and times become days since 1970, even if `dates` does not list their column. Nulls and nan are missing
    values.

    Args:
        path: The file, relative to the current folder or to `directory`.
        target: The column to predict, or a list of numeric columns. A mapping defines several targets, such as
            {kind: species, size: [length, width]}: the keys are their names. Columns are given by name. If there is no
            header, they are given by number, counted from 0.
        task: "classification", with any words as labels, or "regression". A mapping sets the task of each named target,
            such as {kind: classification, size: regression}. Default: "classification".
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        delimiter: The character between values of a CSV file. Default: a comma.
        decimal: The decimal sign of numbers that are stored as text. Default: a point.
        header: Whether the first line of a CSV file contains the names of the columns. Default: True.
        categorical: The columns of words. Default: no columns.
        dates: The columns of dates in ISO 8601, or a mapping from columns to date formats, such as
            {when: "%d.%m.%Y"}. A date becomes its number of days since 1970. Default: no columns.
        ignore: The columns to leave out. Default: no columns.
        missing_values: The texts that mean a missing value, in addition to an empty text. Default for a CSV file: NA,
            N/A, NaN, nan, null, NULL and None. Default for the other formats: no texts.
        impute: See Table. Default: None, which makes a missing value an error.
        encoding: See Table.
        standardise: See Table.

    Raises:
        ConfigError: The file or a column does not exist, or a value does not match the type of its column.
    """

    def __init__(
        self,
        *,
        path: str,
        target: Targets,
        task: Task | Mapping[str, Task] = "classification",
        directory: str = "data",
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        categorical: Sequence[Name] = (),
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        ignore: Sequence[Name] = (),
        missing_values: Sequence[str | int | float] | None = None,
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        dialect = Dialect(delimiter=delimiter, decimal=decimal, header=header)
        file = data_file(path, directory=directory)
        self._open = partial(open_source, file, dialect, missing_values=missing_values)
        source = self._open()
        by_name = _by_name(target)
        named = {"categorical": categorical, "dates": dates, "ignore": ignore}
        refuse_unknown_columns(source.file, source.names, {**named, "target": [*chain(*by_name.values())]})
        place = {name: column for column, name in enumerate(source.names)}
        answers = {name: [place[str(one)] for one in columns] for name, columns in by_name.items()}
        tasks = _tasks(task, answers)
        words = [place[str(name)] for name in categorical]
        days = {place[str(name)]: form for name, form in date_forms(dates).items()}
        left_out = {*(place[str(name)] for name in ignore), *chain.from_iterable(answers.values())}
        known = {*words, *days, *left_out}
        nameless = [column for name, column in place.items() if column not in known and NAMELESS.fullmatch(name)]
        features = [column for column in place.values() if column not in {*left_out, *nameless}]
        if not features:
            raise data_error("dataset.ignore", got="every column except the target", expected="an input column")
        figures, words = [one for one in features if one not in words], [one for one in features if one in words]
        numbers = [one for name, columns in answers.items() if tasks[name] == "regression" for one in columns]
        classes = [columns[0] for name, columns in answers.items() if tasks[name] == "classification"]
        found = source.read(
            numbers=[*figures, *numbers],
            days=days,
            words=[*words, *classes],
            fixes=dict.fromkeys(features if impute is None else (), IMPUTE)
            | dict.fromkeys([*numbers, *classes], NO_ANSWER),
            text_fixes=_text_fixes(source, [*figures, *numbers], days),
        )
        super().__init__(
            columns=[source.names[column] for column in figures],
            numbers=found.numbers[:, : len(figures)],
            words={source.names[column]: found.words[column] for column in words},
            targets=dict(_targets(source, found, answers, tasks, first=len(figures))),
            standardise=standardise,
            impute=impute,
            encoding=encoding,
        )
        self.dates = {source.names[one]: days.get(one) for one in figures if one in days or source.is_date(one)}
        self.notes = tuple(
            f"the column {source.names[column] or NO_NAME} of {source.file} is not an input, because pandas gives this "
            "name to an index; rename the column to use it as an input"
            for column in nameless
        )

    def column_texts(self, name: str, *, key: str) -> list[str | None]:
        """Return the texts of a column that is not an input. Missing values are None.

        The file is read again.

        Args:
            name: The name of the column.
            key: The config key that names the column, for the error.

        Raises:
            ConfigError: The column does not exist, or is an input.
        """
        if name in (*self.columns, *self.words):
            fix = f"Add {name} to data.dataset.ignore"
            raise data_error(key, got=f"{name}, which is an input", expected="a column that is not an input", fix=fix)
        source = self._open()
        return source.texts(source.column(name, key=key))


def date_forms(dates: Sequence[Name] | Mapping[str, str | None]) -> dict[str, str | None]:
    """Return a mapping from the columns of dates to their formats. The format None means ISO 8601.

    Args:
        dates: The value of data.dataset.dates.
    """
    return dict(dates) if isinstance(dates, Mapping) else dict.fromkeys(map(str, dates))


def _text_fixes(source: Source, columns: Sequence[int], days: Days) -> dict[int, str]:
    """Return a mapping from column numbers to the fix to report if a text is not a number, or not a date.

    Args:
        source: The table.
        columns: The numbers of the columns.
        days: The date formats of the columns of dates, by column number.
    """
    fixes = {column: NO_DATE if column in days else NO_NUMBER for column in columns}
    return {column: fix.format(source.names[column] or NO_NAME) for column, fix in fixes.items()}


def _by_name(target: Targets) -> dict[str, list[Name]]:
    given = target if isinstance(target, Mapping) else {TARGET: target}
    return {name: [one] if isinstance(one, str | int) else list(one) for name, one in given.items()}


def _tasks(task: Task | Mapping[str, Task], targets: Mapping[str, Sequence[int]]) -> dict[str, Task]:
    """Return a mapping from target names to tasks.

    Args:
        task: The value of data.dataset.task.
        targets: The column numbers of each target, by name.

    Raises:
        ConfigError: The names of tasks and targets differ, a target has no column, a column is in two targets, or a
            classification target has several columns.
    """
    if isinstance(task, Mapping) and task.keys() != targets.keys():
        got = f"tasks for {', '.join(task) or 'no target'}"
        raise data_error("dataset.task", got=got, expected=f"a task for each target, {', '.join(targets)}")
    tasks = dict(task) if isinstance(task, Mapping) else dict.fromkeys(targets, task)
    columns = list(chain.from_iterable(targets.values()))
    if not all(targets.values()) or len({*columns}) < len(columns):
        got = "no column" if not all(targets.values()) else "a column twice"
        raise data_error("dataset.target", got=got, expected="one or several columns to predict, each column once")
    for name, several in targets.items():
        if tasks[name] == "classification" and len(several) > 1:
            got = f"{len(several)} columns in a classification"
            fix = "Name the targets, as in {kind: species, size: width}, or set data.dataset.task=regression"
            raise data_error("dataset.target", got=got, expected="one column of classes", fix=fix)
    return tasks


def _targets(
    source: Source, found: Columns, targets: Mapping[str, Sequence[int]], tasks: Mapping[str, Task], *, first: int
) -> Iterator[tuple[str, np.ndarray | Words]]:
    """Yield the name and the values of each target.

    Args:
        source: The table.
        found: The values of the columns. The last columns of `found.numbers` are the numeric targets.
        targets: The column numbers of each target, by name.
        tasks: The task of each target, by name.
        first: The position in `found.numbers` of the first numeric target.
    """
    for name, columns in targets.items():
        if tasks[name] == "regression":
            yield name, found.numbers[:, first : first + len(columns)]
            first += len(columns)
        else:
            labels = found.words[columns[0]]
            refuse_labels(source, columns[0], labels)
            yield name, labels
