"""Tables out of files: which column is a number, a word, a date or a target, whatever format the file has."""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from exp.data.cells import DecimalSign, Missing, WordCodes, finite_number
from exp.data.entries import TARGET
from exp.data.faults import data_fault, fitted_entry, name_cure, refuse_unknown_columns
from exp.data.in_memory import Fitted, Tensors
from exp.data.tables import FITTED, Encoding, Impute, Table, Words
from exp.errors import ConfigError, Fault

Task = Literal["classification", "regression"]
# A column by its name, or by its number from 0 where columns have no names.
Name: TypeAlias = str | int
Value = TypeVar("Value")
Values: TypeAlias = "Iterable[object] | Words"
Column = TypeVar("Column", bound=Values)
# More labels than this that are numbers with a fraction are taken for a regression asked for as a classification.
MANY_LABELS = 20
# The names that pandas gives to a column of row numbers when it reads a CSV file, and when it writes a Parquet file.
NAMELESS = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")
# A name that is empty, as it is typed.
NO_NAME = "''"
IMPUTE = "data.dataset.impute=mean, median or most_frequent fills it by the training part, or leave the column out"
NO_ANSWER = "A row without its answer teaches nothing: leave it out of the file"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Sheet(ABC):
    """The columns of a file.

    file: where it is. names: of the columns, in order. missing: the texts without a value.
    """

    def __init__(self, *, file: Path, names: Sequence[str], missing: Missing) -> None:
        self.file, self.names, self.missing = file, tuple(names), missing

    def column(self, name: Name, *, key: str) -> int:
        """Return the number of a column. Raises: ConfigError if there is none of the name."""
        if str(name) in self.names:
            return self.names.index(str(name))
        raise data_fault(key, got=str(name), expected=f"a column of {self.file}", cure=name_cure(str(name), self.names))

    def load(  # noqa: B027 - most sheets are at hand
        self, *, numbers: Sequence[Sequence[int]], days: Mapping[int, str | None], words: Sequence[int]
    ) -> None:
        """Reads columns together, of a file that is else read once for each.

        numbers: groups of columns of numbers and dates that become one block each. days: the dates among them, and how
        they are written. words: columns of words and of classes.
        """

    @abstractmethod
    def texts(self, column: int) -> list[str | None]:
        """A column of words; None where one is missing."""

    @abstractmethod
    def numbers(self, column: int) -> np.ndarray:
        """A column of numbers, float64 `[N]`; nan where one is missing.

        Raises: ConfigError for what is no finite number.
        """

    def days(self, column: int, form: str | None) -> np.ndarray:
        """A column of dates as days since 1970, float64 `[N]`; nan where one is missing.

        form: as of strptime; None for ISO 8601.
        Raises: ConfigError for what is no such date.
        """

        return self.read(
            column, lambda text: days_since_1970(text, form), lambda row, text: self.no_date(row, column, text, form)
        )

    def holds_dates(self, column: int) -> bool:
        """Return whether the file says that a column holds dates."""
        return False

    def words(self, column: int) -> Words:
        """A column of words, coded."""
        return words_of(self.texts(column), decimal=self.missing.decimal)

    def feature(self, column: int, days: Mapping[int, str | None]) -> np.ndarray:
        """A column of numbers, or where `days` names it of dates, as a table takes it: float64 `[N]`.

        Raises: as numbers and days.
        """
        return self.days(column, days[column]) if column in days else self.numbers(column)

    def read(
        self, column: int, number_of: Callable[[str], float], wrong: Callable[[int, str], ConfigError]
    ) -> np.ndarray:
        """A column of texts as numbers, float64 `[N]`; nan where one is missing.

        wrong: the error of a row whose text is none.
        """
        values = []
        for row, text in enumerate(self.texts(column)):
            try:
                value = math.nan if text is None else number_of(text)
            except (ValueError, OverflowError):
                raise wrong(row, str(text)) from None
            if text is not None and not math.isfinite(value):
                raise self.bad(row, column, text, "a finite number")
            values.append(value)
        return np.array(values)

    @abstractmethod
    def place(self, row: int) -> str:
        """A row in words."""

    def cell(self, row: int, column: int) -> str:
        """Return the text of a value as the file has it; of types other than text nothing."""
        return ""

    def complete(self, column: int, values: Values, *, cure: str) -> None:
        """Raises: ConfigError where one of the values is missing. cure: against it."""
        if isinstance(values, np.ndarray):
            missing = np.flatnonzero(np.isnan(values)).tolist()
        elif isinstance(values, Words):
            missing = np.flatnonzero(values.codes < 0).tolist()
        else:
            missing = [row for row, value in enumerate(values) if value is None or value != value]
        if missing:
            many = f" there and in {len(missing) - 1} more rows," if missing[1:] else ""
            text = self.cell(missing[0], column) if isinstance(values, Words) else ""
            if text:
                cure += f". If {text} is a word, write data.dataset.missing_values=[], or a list without it"
            got = f"{text!r}, which stands for no value," if text else "no value"
            raise self.bad(missing[0], column, f"{got}{many}", "one in every row", cure)

    def bad(self, row: int, column: int, got: str, expected: str, cure: str | None = None) -> ConfigError:
        """The error of one value."""
        place = f"{self.place(row)}, column {self.names[column] or NO_NAME}"
        subject = self.names[column]
        return data_fault("dataset.path", got=f"{got} in {place}", expected=expected, cure=cure, subject=subject)

    def left_out(self, column: int) -> str:
        """Return the note on a column that row_numbers finds."""
        named = f"the column {self.names[column] or NO_NAME} of {self.file}"
        held = "pandas names an index so, and it has a different whole number in each row"
        return f"{named} is left out of the input: {held}; rename it to keep it"

    def no_date(self, row: int, column: int, text: str, form: str | None) -> ConfigError:
        expected = "a date in ISO 8601, such as 2024-01-31" if form is None else f"a date like {form}"
        cure = f"data.dataset.dates: {{{self.names[column]}: '%d.%m.%Y'}} says how dates are written"
        return self.bad(row, column, repr(text), expected, cure)

    def no_number(self, row: int, column: int, text: str) -> ConfigError:
        name = self.names[column] or NO_NAME
        cure = (
            f"Put it in data.dataset.categorical or data.dataset.dates, leave it out with data.dataset.ignore=[{name}],"
            " or name what stands for a missing value in data.dataset.missing_values"
        )
        return self.bad(row, column, repr(text), "a number", cure)


class SheetTable(Table):
    """A table out of the columns of a file; see Csv for what the parameters mean.

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
        targets = {
            name: [sheet.column(one, key="dataset.target") for one in columns]
            for name, columns in _by_name(target).items()
        }
        words = [sheet.column(name, key="dataset.categorical") for name in categorical]
        forms = dates if isinstance(dates, Mapping) else dict.fromkeys(dates)
        days = {sheet.column(name, key="dataset.dates"): form for name, form in forms.items()}
        left_out = {sheet.column(name, key="dataset.ignore") for name in ignore}
        left_out.update(column for columns in targets.values() for column in columns)
        index = row_numbers(sheet, named={*words, *days, *left_out})
        features = [column for column in range(len(sheet.names)) if column not in {*left_out, *index}]
        if not features:
            raise data_fault("dataset.ignore", got="every column but the target", expected="at least one feature")
        faults: list[Fault] = []

        def whole(column: int, values: Column) -> Column:
            if impute is None:
                sheet.complete(column, values, cure=IMPUTE)
            return values

        figures = [column for column in features if column not in words]
        words = [column for column in features if column in words]
        tasks = _tasks(task, targets)
        regressions = [columns for name, columns in targets.items() if tasks[name] == "regression"]
        classes = [columns[0] for name, columns in targets.items() if tasks[name] != "regression" and columns]
        sheet.load(numbers=[figures, *regressions], days=days, words=[*words, *classes])
        numbers = _each(sheet, figures, lambda one: whole(one, sheet.feature(one, days)), faults)
        texts = _each(sheet, words, lambda one: whole(one, sheet.words(one)), faults)
        wanted = dict(_targets(sheet, targets, tasks, faults))
        if faults:
            raise ConfigError(faults)
        super().__init__(
            numbers=numbers,
            words=texts,
            targets=wanted,
            standardise=standardise,
            impute=impute,
            encoding=encoding,
        )
        of_dates = [column for column in figures if column in days or sheet.holds_dates(column)]
        self.dates = {sheet.names[column]: days.get(column) for column in of_dates}
        self.notes = tuple(sheet.left_out(column) for column in index)
        self._index = tuple(sheet.names[column] for column in index)
        if index:
            self._raw["row_numbers"] = torch.from_numpy(np.stack([sheet.numbers(column) for column in index], 1))

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
            name: one for names, entry in entries if names for name, one in zip(names, self._raw[entry].T, strict=True)
        }
        names = [name for name in order if name in columns]
        part = copy.copy(self)
        part.columns = (*names, *(name for name in self.columns if name not in order))
        part.entries = {**self._raw, "numbers": torch.stack([columns[name] for name in part.columns], 1)}
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
        column = sheet.column(name, key=key)
        sheet.load(numbers=[], days={}, words=[column])
        return sheet.texts(column)


def words_of(values: Sequence[str | None], *, decimal: DecimalSign) -> Words:
    """Return a column of words: in the order of numbers if all of them are numbers, else of the alphabet."""
    codes = WordCodes(Missing.of((), decimal=decimal))
    numbered = np.array([codes[value or ""] for value in values], dtype=np.int64)
    return words_in_order(numbered, codes.words)


def words_in_order(codes: np.ndarray, words: Sequence[str]) -> Words:
    """A column of words that are numbered in any order, `[N]`, -1 for a missing one, as `words_of` has them."""
    names = sorted(words)
    numbers = [number for name in names if (number := finite_number(name)) is not None]
    if len(numbers) == len(names):
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    order = {name: number for number, name in enumerate(names)}
    places = np.array([*(order[word] for word in words), -1], dtype=codes.dtype)
    return Words(codes=places[codes], names=tuple(names))


def labels_in(sheet: Sheet, column: int) -> Words:
    """A column of classes.

    Raises: ConfigError where one is missing, and for numbers that look like a regression's.
    """
    labels = sheet.words(column)
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
    return labels


def days_since_1970(text: str, form: str | None) -> float:
    """A date in ISO 8601, or in a form as of strptime. One without a zone is in UTC.

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
            numbers = np.asarray(sheet.numbers(column))
        except ConfigError:
            continue  # words, or a fault that reading the other columns reports, too
        if (numbers == np.round(numbers)).all() and len(np.unique(numbers)) == len(numbers):
            found.append(column)
    return found


def _each(sheet: Sheet, columns: Sequence[int], read: Callable[[int], Value], faults: list[Fault]) -> dict[str, Value]:
    """Columns by name; the faults of those that cannot be read are kept."""
    found = {}
    for column in columns:
        try:
            found[sheet.names[column]] = read(column)
        except ConfigError as error:
            faults += error.faults
    return found


def _by_name(target: Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]]) -> dict[str, list[Name]]:
    given = target if isinstance(target, Mapping) else {TARGET: target}
    return {name: [one] if isinstance(one, str | int) else list(one) for name, one in given.items()}


def _tasks(task: Task | Mapping[str, Task], targets: Mapping[str, Sequence[int]]) -> dict[str, Task]:
    """The task of each target.

    Raises: ConfigError where a target has none, or one that is not there has.
    """
    if not isinstance(task, Mapping):
        return dict.fromkeys(targets, task)
    if task.keys() != targets.keys():
        got = ", ".join(task) or "nothing"
        raise data_fault("dataset.task", got=got, expected=f"a task for each target, {', '.join(targets)}")
    return dict(task)


def _targets(
    sheet: Sheet, targets: Mapping[str, Sequence[int]], tasks: Mapping[str, Task], faults: list[Fault]
) -> Iterator[tuple[str, np.ndarray | Words]]:
    for name, columns in targets.items():
        if not columns:
            faults += data_fault("dataset.target", got="no column", expected="one to predict, or several").faults
        elif tasks[name] == "regression":
            read = _each(sheet, columns, lambda one: sheet.feature(one, {}), faults)
            faults += _incomplete(sheet, read)
            if len(read) == len(columns):
                yield name, np.stack(list(read.values()), 1)
        elif len(columns) > 1:
            got = f"{len(columns)} columns in a classification"
            cured = "Give each a name, {kind: species, size: width}, or write data.dataset.task=regression"
            faults += data_fault("dataset.target", got=got, expected="one column of classes", cure=cured).faults
        else:
            try:
                yield name, labels_in(sheet, columns[0])
            except ConfigError as error:
                faults += error.faults


def _incomplete(sheet: Sheet, columns: Mapping[str, np.ndarray]) -> Iterator[Fault]:
    for name, values in columns.items():
        try:
            sheet.complete(sheet.names.index(name), values, cure=NO_ANSWER)
        except ConfigError as error:
            yield from error.faults
