"""Columns of a file as numbers, words and dates, and tables that are made of them."""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from exp.data.cells import Missing, finite_number, number_in
from exp.data.entries import TARGET
from exp.data.faults import data_fault, fitted_entry, name_cure, refuse_unknown_columns
from exp.data.in_memory import Fitted, Tensors
from exp.data.tables import FITTED, Encoding, Impute, Table, Words
from exp.errors import ConfigError, Fault

Task = Literal["classification", "regression"]
# A column by its name, or by its number from 0 where columns have no names.
Name: TypeAlias = str | int
# More labels than this that are numbers with a fraction are taken for a regression asked for as a classification.
MANY_LABELS = 20
# The names that pandas gives to a column of row numbers when it reads a CSV file, and when it writes a Parquet file.
NAMELESS = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")
# A name that is empty, as it is typed.
NO_NAME = "''"
NO_DAYS: Mapping[int, str | None] = MappingProxyType({})
IMPUTE = "data.dataset.impute=mean, median or most_frequent fills it by the training part, or leave the column out"
NO_ANSWER = "A row without its answer teaches nothing: leave it out of the file"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class SheetValues:
    """Columns of a sheet that were read together.

    Args:
        numbers: numbers and days, float64 `[N, K]`; nan where one is missing or is an error.
        words: columns of words by their number in the file.
        faults: the first error of each column that has one.
    """

    numbers: np.ndarray
    words: Mapping[int, Words]
    faults: Mapping[int, ConfigError]


class Sheet(ABC):
    """The columns of a file.

    Args:
        file: the file, for messages.
        names: the names of the columns, in order.
        missing: the texts that stand for a missing value.
        has_header: whether the first line of the file holds the names.
    """

    def __init__(self, *, file: Path, names: Sequence[str], missing: Missing, has_header: bool = False) -> None:
        self.file, self.names, self.missing, self.has_header = file, tuple(names), missing, has_header

    def column(self, name: Name, *, key: str) -> int:
        """Return the number of a column. Raises: ConfigError if there is none of the name."""
        if str(name) in self.names:
            return self.names.index(str(name))
        raise data_fault(key, got=str(name), expected=f"a column of {self.file}", cure=name_cure(str(name), self.names))

    @abstractmethod
    def read(
        self, *, numbers: Sequence[int] = (), days: Mapping[int, str | None] = NO_DAYS, words: Sequence[int] = ()
    ) -> SheetValues:
        """Return columns of the file.

        Args:
            numbers: columns of numbers and of dates.
            days: the dates among `numbers` that become days since 1970, with their form as of strptime; None for
                ISO 8601.
            words: columns of words and of classes.
        """

    def numbers(self, column: int, days: Mapping[int, str | None] = NO_DAYS) -> np.ndarray:
        """Return a column of numbers, or of days if `days` has it: float64 `[N]`, nan for a missing one.

        Raises: ConfigError for a value that is no finite number, or no date.
        """
        found = self.read(numbers=[column], days=days)
        if column in found.faults:
            raise found.faults[column]
        return found.numbers[:, 0]

    def words(self, column: int) -> Words:
        """Return a column of words."""
        return self.read(words=[column]).words[column]

    def texts(self, column: int) -> list[str | None]:
        """Return the words of a column, None for a missing one."""
        return self.words(column).texts()

    def holds_dates(self, column: int) -> bool:
        """Return whether the file says that a column holds dates."""
        return False

    @abstractmethod
    def place(self, row: int) -> str:
        """Return the name of a row for messages."""

    def cell(self, row: int, column: int) -> str:
        """Return the text of a value as the file has it."""
        return ""

    def reader(self, column: int, days: Mapping[int, str | None]) -> Callable[[str], float]:
        """Return the function that reads a number, or a day if `days` has the column, from a text.

        The function returns nan for a missing value and raises ValueError or OverflowError for any other text.
        """
        missing, is_day, form = self.missing, column in days, days.get(column)

        def read(text: str) -> float:
            text = text.strip()
            if text in missing.texts or (is_day and text in missing):
                return math.nan
            value = days_since_1970(text, form) if is_day else number_in(text, decimal=missing.decimal)
            if not math.isfinite(value):
                raise ValueError("not finite")
            return value if is_day or value not in missing.numbers else math.nan

        return read

    def unread(self, row: int, column: int, text: str, days: Mapping[int, str | None]) -> ConfigError:
        """Return the error of a text that `reader` refuses."""
        if column in days:
            form = days[column]
            expected = "a date in ISO 8601, such as 2024-01-31" if form is None else f"a date like {form}"
            cure = f"data.dataset.dates: {{{self.names[column]}: '%d.%m.%Y'}} says how dates are written"
            return self.bad(row, column, repr(text), expected, cure)
        try:
            number_in(text, decimal=self.missing.decimal)
        except ValueError:
            return self.bad(row, column, repr(text), "a number", self.number_cure(column, text))
        return self.bad(row, column, text, "a finite number")

    def number_cure(self, column: int, text: str) -> str:
        """Return the fix of a text in a column of numbers."""
        return (
            "Put it in data.dataset.categorical or data.dataset.dates, leave it out with "
            f"data.dataset.ignore=[{self.names[column] or NO_NAME}], or name what stands for a missing value in "
            "data.dataset.missing_values"
        )

    def complete(self, column: int, values: np.ndarray | Words, *, cure: str) -> None:
        """Raise ConfigError if one of the values is missing. cure: the fix."""
        is_missing = values.codes < 0 if isinstance(values, Words) else np.isnan(values)
        missing = np.flatnonzero(is_missing).tolist()
        if missing:
            many = f" there and in {len(missing) - 1} more rows," if missing[1:] else ""
            text = self.cell(missing[0], column) if isinstance(values, Words) else ""
            if text:
                cure += f". If {text} is a word, write data.dataset.missing_values=[], or a list without it"
            got = f"{text!r}, which stands for no value," if text else "no value"
            raise self.bad(missing[0], column, f"{got}{many}", "one in every row", cure)

    def faults(
        self, found: SheetValues, column: int, values: np.ndarray | Words, *, cure: str | None
    ) -> Sequence[Fault]:
        """Return the errors of a column. cure: the fix of a missing value; None if values may be missing."""
        try:
            if column in found.faults:
                raise found.faults[column]
            if cure is not None:
                self.complete(column, values, cure=cure)
        except ConfigError as error:
            return error.faults
        return ()

    def bad(self, row: int, column: int, got: str, expected: str, cure: str | None = None) -> ConfigError:
        """Return the error of one value."""
        place = f"{self.place(row)}, column {self.names[column] or NO_NAME}"
        subject = self.names[column]
        return data_fault("dataset.path", got=f"{got} in {place}", expected=expected, cure=cure, subject=subject)

    def left_out(self, column: int) -> str:
        """Return the note on a column that row_numbers finds."""
        named = f"the column {self.names[column] or NO_NAME} of {self.file}"
        held = "pandas names an index so, and it has a different whole number in each row"
        return f"{named} is left out of the input: {held}; rename it to keep it"


class SheetTable(Table):
    """A table of the columns of a file; see Csv for the parameters.

    A column without a name that has another whole number in each row, such as the index of pandas, is left out.

    read: reads the file.
    """

    def __init__(
        self,
        *,
        read: Callable[[], Sheet],
        target: Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]],
        task: Task | Mapping[str, Task],
        categorical: Sequence[Name],
        dates: Sequence[Name] | Mapping[str, str | None],
        ignore: Sequence[Name],
        impute: Impute | None,
        encoding: Encoding,
        standardise: bool,
    ) -> None:
        self._read, sheet = read, read()
        asked: dict[str, Iterable[Name]] = {"categorical": categorical, "dates": dates, "ignore": ignore}
        asked["target"] = chain.from_iterable(_by_name(target).values())
        refuse_unknown_columns(sheet.file, sheet.names, asked)
        place = {name: column for column, name in enumerate(sheet.names)}
        targets = {name: [place[str(one)] for one in columns] for name, columns in _by_name(target).items()}
        named = [place[str(name)] for name in categorical]
        forms = dates if isinstance(dates, Mapping) else dict.fromkeys(dates)
        days = {place[str(name)]: form for name, form in forms.items()}
        left_out = {*(place[str(name)] for name in ignore), *chain.from_iterable(targets.values())}
        index = row_numbers(sheet, named={*named, *days, *left_out})
        features = [column for column in range(len(sheet.names)) if column not in {*left_out, *index}]
        if not features:
            raise data_fault("dataset.ignore", got="every column but the target", expected="at least one feature")
        figures = [column for column in features if column not in named]
        words = [column for column in features if column in named]
        tasks = _tasks(task, targets)
        regressions = [one for name, columns in targets.items() if tasks[name] == "regression" for one in columns]
        classes = [columns[0] for name, columns in targets.items() if tasks[name] != "regression" and columns]
        found = sheet.read(numbers=[*figures, *regressions], days=days, words=[*words, *classes])
        cure = IMPUTE if impute is None else None
        faults = list(feature_faults(sheet, found, figures, words, cure=cure))
        answers = dict(_targets(sheet, found, targets, tasks, faults, first=len(figures)))
        if faults:
            raise ConfigError(faults)
        super().__init__(
            columns=[sheet.names[column] for column in figures],
            numbers=found.numbers[:, : len(figures)],
            words={sheet.names[column]: found.words[column] for column in words},
            targets=answers,
            standardise=standardise,
            impute=impute,
            encoding=encoding,
        )
        of_dates = [column for column in figures if column in days or sheet.holds_dates(column)]
        self.dates = {sheet.names[column]: days.get(column) for column in of_dates}
        self.notes = tuple(sheet.left_out(column) for column in index)
        self._index = tuple(sheet.names[column] for column in index)
        if index:
            self.shared["row_numbers"] = torch.from_numpy(sheet.read(numbers=index).numbers)

    def prepare(self, fitted: Fitted) -> Tensors:
        """Encode the rows as Table does. Columns of row numbers stay if training had them."""
        return Table.prepare(self._as_trained(fitted), fitted)

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return rows as Table does. Columns of row numbers stay if training had them."""
        part = self.select(indices)._as_trained(fitted)
        return Table.in_own_units(part, torch.arange(len(indices)), fitted)

    def notes_in(self, fitted: Fitted, *, stage: str) -> list[str]:
        """Return notes on the file and on these rows, one line each. stage: the rows in words."""
        return Table.notes_in(self._as_trained(fitted), fitted, stage=stage)

    def _as_trained(self, fitted: Fitted) -> SheetTable:
        """Return these rows with the columns of row numbers that training had, as runs of earlier versions did."""
        order: list[str] = fitted_entry(fitted, FITTED, part=self)["numbers"]
        if not {*self._index} & {*order}:
            return self
        entries = [(self.columns, "numbers"), (self._index, "row_numbers")]
        columns = {
            name: one
            for names, entry in entries
            if names
            for name, one in zip(names, self.shared[entry].T, strict=True)
        }
        names = [name for name in order if name in columns]
        part = copy.copy(self)
        part.columns = (*names, *(name for name in self.columns if name not in order))
        part.shared = {**self.shared, "numbers": torch.stack([columns[name] for name in part.columns], 1)}
        part.notes = tuple(note for name, note in zip(self._index, self.notes, strict=True) if name not in order)
        part._index = ()
        return part

    def column_texts(self, name: str, *, key: str) -> list[str | None]:
        """Return a column that is no input, read from the file again; None where a value is missing.

        Raises: ConfigError at `key` for a column that is not there, or that is an input.
        """
        if name in (*self.columns, *self.words):
            cure = f"Write data.dataset.ignore=[{name}], next to the columns that it has"
            raise data_fault(key, got=f"{name}, which is an input", expected="a column that is none", cure=cure)
        sheet = self._read()
        return sheet.texts(sheet.column(name, key=key))


def words_in_order(codes: np.ndarray, words: Sequence[str]) -> Words:
    """Return a column of words in the order of numbers if all of them are numbers, else of the alphabet.

    Args:
        codes: the number of each row's word, `[N]`; -1 for a missing one.
        words: the words by number.
    """
    names = sorted(words)
    numbers = [number for name in names if (number := finite_number(name)) is not None]
    if len(numbers) == len(names):
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    order = {name: number for number, name in enumerate(names)}
    places = np.array([*(order[word] for word in words), -1], dtype=codes.dtype)
    return Words(codes=places[codes], names=tuple(names))


def refuse_labels(sheet: Sheet, column: int, labels: Words) -> None:
    """Raise ConfigError for a missing class, and for many classes that are numbers with a fraction."""
    sheet.complete(column, labels, cure=NO_ANSWER)
    numbers = [number for name in labels.names if (number := finite_number(name)) is not None]
    is_counted = len(numbers) < len(labels.names) or all(number.is_integer() for number in numbers)
    if len(labels.names) > MANY_LABELS and not is_counted:
        raise data_fault(
            "dataset.task",
            got=f"classification of {len(labels.names)} labels that are numbers with a fraction",
            expected="regression for the column " + sheet.names[column],
            cure="data=csv_regression selects it, with its objective and metrics",
        )


def days_since_1970(text: str, form: str | None) -> float:
    """Return the days of a date in ISO 8601, or in a form as of strptime. A date without a zone is in UTC.

    Raises: ValueError.
    """
    if not text.isascii() and any(sign.isdecimal() and not sign.isascii() for sign in text):
        raise ValueError(text)  # strptime would read them
    found = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (aware - EPOCH) / timedelta(days=1)


def row_numbers(sheet: Sheet, *, named: Collection[int]) -> list[int]:
    """Return the columns without a name that hold whole numbers, each once. named: columns that the config names."""
    found = []
    for column, name in enumerate(sheet.names):
        if column in named or not (NAMELESS.fullmatch(name) or (column == 0 and not name)):
            continue
        try:
            numbers = sheet.numbers(column)
        except ConfigError:
            continue  # words, or an error that reading the other columns reports, too
        if (numbers == np.round(numbers)).all() and len(np.unique(numbers)) == len(numbers):
            found.append(column)
    return found


def _by_name(target: Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]]) -> dict[str, list[Name]]:
    given = target if isinstance(target, Mapping) else {TARGET: target}
    return {name: [one] if isinstance(one, str | int) else list(one) for name, one in given.items()}


def _tasks(task: Task | Mapping[str, Task], targets: Mapping[str, Sequence[int]]) -> dict[str, Task]:
    """Return the task of each target.

    Raises: ConfigError if a target has none, or if a name that is no target has one.
    """
    if not isinstance(task, Mapping):
        return dict.fromkeys(targets, task)
    if task.keys() != targets.keys():
        got = ", ".join(task) or "nothing"
        raise data_fault("dataset.task", got=got, expected=f"a task for each target, {', '.join(targets)}")
    return dict(task)


def feature_faults(
    sheet: Sheet, found: SheetValues, figures: Sequence[int], words: Sequence[int], *, cure: str | None
) -> Iterator[Fault]:
    """Yield the errors of the inputs. cure: see Sheet.faults."""
    for place, column in enumerate(figures):
        yield from sheet.faults(found, column, found.numbers[:, place], cure=cure)
    for column in words:
        yield from sheet.faults(found, column, found.words[column], cure=cure)


def _targets(
    sheet: Sheet,
    found: SheetValues,
    targets: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Task],
    faults: list[Fault],
    *,
    first: int,
) -> Iterator[tuple[str, np.ndarray | Words]]:
    """Yield the values of each target, and append the errors to faults. first: the first number to predict."""
    for name, columns in targets.items():
        if not columns:
            faults += data_fault("dataset.target", got="no column", expected="one to predict, or several").faults
        elif tasks[name] == "regression":
            values, first = found.numbers[:, first : first + len(columns)], first + len(columns)
            for place, column in enumerate(columns):
                faults += sheet.faults(found, column, values[:, place], cure=NO_ANSWER)
            yield name, values
        elif len(columns) > 1:
            got = f"{len(columns)} columns in a classification"
            cured = "Give each a name, {kind: species, size: width}, or write data.dataset.task=regression"
            faults += data_fault("dataset.target", got=got, expected="one column of classes", cure=cured).faults
        else:
            labels = found.words[columns[0]]
            try:
                refuse_labels(sheet, columns[0], labels)
            except ConfigError as error:
                faults += error.faults
            yield name, labels
