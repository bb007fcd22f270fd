"""A source of columns by name: a file whose columns are read as numbers, dates and words."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np

from exp.data.cells import Missing, finite_number, number_in, text_of
from exp.data.data_errors import data_error, name_fix
from exp.data.tables import Words
from exp.errors import ConfigError, ErrorDetails, raise_errors

Task = Literal["classification", "regression"]
# A column by its name, or by its number from 0 in a file without names.
Name: TypeAlias = str | int
# By the number of a column: the format of its dates as of strptime, None for ISO 8601; or the fix of a missing value.
Days: TypeAlias = Mapping[int, str | None]
Fixes: TypeAlias = Mapping[int, str]
# For each column with an error, the first row with one and its text.
Unread: TypeAlias = dict[int, tuple[int, str]]
NOTHING: Mapping[int, str] = MappingProxyType({})
# More labels than this with fractions are numbers to predict.
MANY_LABELS = 20
# The names of a column without one: an empty name, and those that pandas gives to row numbers in CSV and in Parquet.
NAMELESS = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
# An empty name, as users type it.
NO_NAME = "''"
NO_ANSWER = "A row without its answer teaches nothing: leave it out of the file"
NO_NUMBER = (
    "Put the column in data.dataset.categorical or data.dataset.dates, leave it out with data.dataset.ignore=[{}], or "
    "name the text in data.dataset.missing_values; data.dataset.decimal is the sign before a fraction"
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of a source that were read together.

    Args:
        numbers: numbers and days, float64 `[N, K]`; nan for a missing one.
        words: columns of words by their number in the file.
    """

    numbers: np.ndarray
    words: Mapping[int, Words]


class Source(ABC):
    """A file with columns by name.

    Args:
        file: the file, for messages.
        names: the names of the columns, in order.
        missing: the texts that stand for a missing value.
    """

    def __init__(self, *, file: Path, names: Sequence[str], missing: Missing) -> None:
        self.file, self.names, self.missing = file, tuple(names), missing

    @abstractmethod
    def place(self, row: int) -> str:
        """Return the name of a row for messages."""

    @abstractmethod
    def _read(self, numbers: Sequence[int], days: Days, words: Sequence[int]) -> tuple[Columns, Unread]:
        """Return the columns, nan for an error, and the first error of each column."""

    @abstractmethod
    def _values_of(self, column: int) -> Iterator[object]:
        """Yield the values of a column as the file has them, texts or typed values."""

    def has_numbers(self, column: int) -> bool:
        """Return whether `read` takes a column without `days`. The first value that is not missing decides."""
        read = self._reader(column, NOTHING)
        for value in () if self.is_date(column) else self._values_of(column):
            if isinstance(value, int | float | Decimal | np.number | np.bool_):
                return True
            try:
                if not math.isnan(read(text_of(value) or "")):
                    return True
            except (ValueError, OverflowError):
                return False
        return True

    def is_date(self, column: int) -> bool:
        """Return whether the file stores a column as dates."""
        return False

    def column(self, name: Name, *, key: str) -> int:
        """Return the number of a column. Raises: ConfigError at `key` for an unknown name."""
        if str(name) in self.names:
            return self.names.index(str(name))
        raise data_error(key, got=str(name), expected=f"a column of {self.file}", fix=name_fix(str(name), self.names))

    def read(
        self, *, numbers: Sequence[int] = (), days: Days = NOTHING, words: Sequence[int] = (), fixes: Fixes = NOTHING
    ) -> Columns:
        """Return columns of the file.

        Args:
            numbers: columns of numbers and of dates.
            days: the dates among `numbers`, which become days since 1970, with their formats.
            words: columns of words and of classes.
            fixes: the columns in which no value may be missing, with the fix of a missing value.

        Raises:
            ConfigError: for the first error of each column.
        """
        found, unread = self._read(numbers, days, words)
        errors = list[ErrorDetails]()
        missing = {column: np.isnan(found.numbers[:, place]) for place, column in enumerate(numbers)}
        missing |= {column: found.words[column].codes < 0 for column in words}
        for column, is_missing in missing.items():
            if column in unread:
                errors += self._unread(*unread[column], column, days).errors
            elif column in fixes and is_missing.any():
                rows = np.flatnonzero(is_missing)
                got = f"no value there and in {len(rows) - 1} more rows," if len(rows) > 1 else "no value"
                fix = f"{fixes[column]}. data.dataset.missing_values lists the texts that stand for none"
                errors += self.bad(int(rows[0]), column, got, "one in every row", fix).errors
        raise_errors(errors)
        return found

    def texts(self, column: int) -> list[str | None]:
        """Return the words of a column; None for a missing one."""
        return self.read(words=[column]).words[column].texts()

    def bad(self, row: int, column: int, got: str, expected: str, fix: str | None = None) -> ConfigError:
        """Return the error of one value."""
        name = self.names[column]
        got = f"{got} in {self.place(row)}, column {name or NO_NAME}"
        return data_error("dataset.path", got=got, expected=expected, fix=fix, subject=name)

    def _reader(self, column: int, days: Days) -> Callable[[str], float]:
        """Return the function that reads a number, or a day, from a text.

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

    def _unread(self, row: int, text: str, column: int, days: Days) -> ConfigError:
        """Return the error of a text that the reader of its column refuses."""
        name = self.names[column] or NO_NAME
        if column not in days:
            return self.bad(row, column, repr(text), "a finite number", NO_NUMBER.format(name))
        expected = "a date in ISO 8601, such as 2024-01-31" if days[column] is None else f"a date like {days[column]}"
        return self.bad(row, column, repr(text), expected, f"data.dataset.dates={{{name}: '%d.%m.%Y'}} states a format")


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


def refuse_labels(source: Source, column: int, labels: Words) -> None:
    """Raise ConfigError for many classes that are numbers with a fraction."""
    numbers = [number for name in labels.names if (number := finite_number(name)) is not None]
    is_counted = len(numbers) < len(labels.names) or all(number.is_integer() for number in numbers)
    if len(labels.names) > MANY_LABELS and not is_counted:
        raise data_error(
            "dataset.task",
            got=f"classification of {len(labels.names)} labels that are numbers with a fraction",
            expected="regression for the column " + source.names[column],
            fix="data=csv_regression selects it, with its objective and metrics",
        )


def days_since_1970(text: str, form: str | None) -> float:
    """Return the days of a date in ISO 8601, or in a format as of strptime. A date without a zone is in UTC.

    Raises: ValueError.
    """
    if not text.isascii() and any(sign.isdecimal() and not sign.isascii() for sign in text):
        raise ValueError(text)  # strptime would read them
    found = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (aware - EPOCH) / timedelta(days=1)
