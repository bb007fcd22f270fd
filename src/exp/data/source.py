"""Files with named columns, which are read as numbers, dates and words."""

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

from exp.data.cells import Missing, WordCodes, finite_number, number_in, text_of
from exp.data.data_errors import data_error, name_error
from exp.data.tables import Words
from exp.errors import ConfigError, ErrorDetails, raise_errors

Task = Literal["classification", "regression"]
# A column's name, or its number from 0 if the file has no header.
Name: TypeAlias = str | int
# The values of a column.
Values: TypeAlias = Sequence[object] | np.ndarray
# Days: the format of the dates by column number, for strptime; None for ISO 8601.
# Fixes: the fix that is reported for an invalid or a missing value, by column number.
Days: TypeAlias = Mapping[int, str | None]
Fixes: TypeAlias = Mapping[int, str]
# The first invalid row, and its text, by column number.
Unread: TypeAlias = dict[int, tuple[int, str]]
# The function that converts a text to a number or a word's code, by column number.
Readers: TypeAlias = Mapping[int, Callable[[str], float]]
NOTHING: Mapping[int, str] = MappingProxyType({})
# If there are more labels than this, and they are numbers with fractions, the task is probably a regression.
MANY_LABELS = 20
# The names of columns without a name: an empty name, and the names that pandas writes for row numbers.
NAMELESS = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
# An empty name as users type it on the command line.
NO_NAME = "''"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns that were read from a source.

    Args:
        numbers: The columns of numbers and dates, float64 `[N, K]`; nan for a missing value.
        words: The columns of words, by column number in the file.
    """

    numbers: np.ndarray
    words: Mapping[int, Words]


class Source(ABC):
    """Base class of files with named columns.

    Args:
        file: The file, for messages.
        names: The names of the columns, in order.
        missing: The texts that mean a missing value.
    """

    def __init__(self, *, file: Path, names: Sequence[str], missing: Missing) -> None:
        self.file, self.names, self.missing = file, tuple(names), missing

    @abstractmethod
    def place(self, row: int) -> str:
        """Return the position of a row for messages, such as "line 3 of data.csv"."""

    @abstractmethod
    def chunks(self, columns: Sequence[int], readers: Readers) -> Iterator[Sequence[Values] | np.ndarray]:
        """Yield the values of columns in chunks of rows. A chunk is a list of columns, or float64 `[n, columns]`.

        Args:
            columns: The column numbers.
            readers: The functions that convert texts of dates and words, by column number.
        """

    def is_date(self, column: int) -> bool:
        """Return whether the file stores a column with a date type."""
        return False

    def column(self, name: Name, *, key: str) -> int:
        """Return the index of a column in the file. Raise ConfigError at the config key `key` for an unknown name."""
        if str(name) in self.names:
            return self.names.index(str(name))
        raise name_error(key, str(name), self.names, expected=f"a column of {self.file}")

    def read(
        self,
        *,
        numbers: Sequence[int] = (),
        days: Days = NOTHING,
        words: Sequence[int] = (),
        fixes: Fixes = NOTHING,
        text_fixes: Fixes = NOTHING,
    ) -> Columns:
        """Return columns of the file.

        Args:
            numbers: The columns of numbers and of dates.
            days: The columns of dates among `numbers`, with their formats. Dates become days since 1970.
            words: The columns of words and of classes.
            fixes: The columns in which no value may be missing, with the fix that the error proposes.
            text_fixes: The fixes for texts that are not numbers or dates.

        Raises:
            ConfigError: A value does not match its column. There is one error for each column.
        """
        codes = {column: WordCodes(self.missing) for column in words}
        table, coded = np.empty((0, len(numbers))), np.empty((0, len(codes)), dtype=np.int32)
        unread: Unread = {}
        dates = [column for column in numbers if column in days or self.missing.decimal != "."]
        readers: Readers = {column: self._reader(column, days) for column in dates}
        readers = {**readers, **{column: code.__getitem__ for column, code in codes.items()}}
        for chunk in self.chunks([*numbers, *words], readers):
            if not isinstance(chunk, np.ndarray):
                pairs, first = list(zip([*numbers, *words], chunk, strict=True)), len(table)
                parsed = [
                    self._numbers(values, one, days, unread, first=first) for one, values in pairs[: len(numbers)]
                ]
                parsed += [_codes(values, codes[one]) for one, values in pairs[len(numbers) :]]
                chunk = np.stack(parsed, 1)
            _append(table, chunk[:, : len(numbers)])
            _append(coded, chunk[:, len(numbers) :])
        if self.missing.numbers:
            is_day = np.array([column in days or self.is_date(column) for column in numbers], dtype=bool)
            table[np.isin(table, list(self.missing.numbers)) & ~is_day] = np.nan
        found = {column: words_in_order(coded[:, place], codes[column].words) for place, column in enumerate(words)}
        missing = {column: np.isnan(table[:, place]) for place, column in enumerate(numbers)}
        missing |= {column: found[column].codes < 0 for column in words}
        errors = list[ErrorDetails]()
        for column, is_missing in missing.items():
            if column in unread:
                row, text = unread[column]
                expected = _expected_text(column, days)
                errors += self.value_error(row, column, repr(text), expected, text_fixes.get(column)).errors
            elif column in fixes and is_missing.any():
                rows = np.flatnonzero(is_missing)
                got = f"{len(rows)} missing values, the first" if len(rows) > 1 else "no value"
                errors += self.value_error(int(rows[0]), column, got, "a value in every row", fixes[column]).errors
        raise_errors(errors)
        return Columns(numbers=table, words=found)

    def texts(self, column: int) -> list[str | None]:
        """Return the texts of a column; None for a missing value."""
        return self.read(words=[column]).words[column].texts()

    def value_error(self, row: int, column: int, got: str, expected: str, fix: str | None = None) -> ConfigError:
        """Return the error for a single value of the file."""
        name = self.names[column]
        got = f"{got} in {self.place(row)}, column {name or NO_NAME}"
        return data_error("dataset.path", got=got, expected=expected, fix=fix, subject=name)

    def _numbers(self, values: Values, column: int, days: Days, unread: Unread, *, first: int) -> np.ndarray:
        """Return the numbers of a column, or its dates as days since 1970, float64 `[n]`; nan for a missing value.

        Args:
            values: The values of consecutive rows.
            column: The column number.
            days: See `read`.
            unread: The first invalid value of each column, to which this function adds.
            first: The index of the first of these rows in the file.
        """
        if isinstance(values, np.ndarray) and values.dtype.kind == "M":
            return np.asarray((values - np.datetime64(0, "us")) / np.timedelta64(1, "D"))
        found = np.full(len(values), np.nan)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and column not in days:
            found[:] = values
        else:
            read = self._reader(column, days)
            for row, value in enumerate(values):
                is_number = isinstance(value, int | float | Decimal) and column not in days
                try:
                    found[row] = value if is_number else read(text_of(value) or "")
                except (ValueError, OverflowError):
                    unread.setdefault(column, (first + row, str(value).strip()))
        if (infinite := np.flatnonzero(np.isinf(found))).size:
            unread.setdefault(column, (first + int(infinite[0]), str(found[infinite[0]])))
        return found

    def _reader(self, column: int, days: Days) -> Callable[[str], float]:
        """Return the function that converts a text of a column to a number, or to days since 1970.

        The function returns nan for a missing value. It raises ValueError or OverflowError for an invalid text.
        """
        missing, is_day, form = self.missing, column in days, days.get(column)

        def read(text: str) -> float:
            text = text.strip()
            if text in missing.texts or (is_day and text in missing):
                return math.nan
            value = days_since_1970(text, form) if is_day else number_in(text, decimal=missing.decimal)
            if not math.isfinite(value):
                raise ValueError("not finite")
            return value

        return read


def _expected_text(column: int, days: Days) -> str:
    """Return a description of the valid texts of a column of numbers or dates."""
    if column not in days:
        return "a finite number"
    return "a date in ISO 8601, such as 2024-01-31" if days[column] is None else f"a date like {days[column]}"


def _append(held: np.ndarray, rows: np.ndarray) -> None:
    """Append rows to an array in place, so that a large array is not copied."""
    count = len(held)
    held.resize((count + len(rows), held.shape[1]), refcheck=False)
    held[count:] = rows


def _codes(values: Values, codes: WordCodes) -> np.ndarray:
    # NumPy's dates become Python's dates, because only their texts match those of a CSV file.
    held = values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind == "M" else values
    return np.array([codes[value if isinstance(value, str) else text_of(value) or ""] for value in held], np.float64)


def words_in_order(codes: np.ndarray, words: Sequence[str]) -> Words:
    """Return a column of words with sorted names. If all words are numbers, they are sorted as numbers.

    Args:
        codes: The code of each row's word, `[N]`; -1 for a missing value.
        words: The words in the order of their codes.
    """
    names = sorted(words)
    numbers = [number for name in names if (number := finite_number(name)) is not None]
    if len(numbers) == len(names):
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    order = {name: number for number, name in enumerate(names)}
    places = np.array([*(order[word] for word in words), -1], dtype=codes.dtype)
    return Words(codes=places[codes], names=tuple(names))


def refuse_labels(source: Source, column: int, labels: Words) -> None:
    """Raise ConfigError if there are more than 20 classes, and they are numbers with fractions."""
    numbers = [number for name in labels.names if (number := finite_number(name)) is not None]
    is_counted = len(numbers) < len(labels.names) or all(number.is_integer() for number in numbers)
    if len(labels.names) > MANY_LABELS and not is_counted:
        name = source.names[column]
        got = f"classification, although {name} has {len(labels.names)} labels that are numbers with fractions"
        fix = "Set data=csv_regression, which also selects an objective and a metric for a regression"
        raise data_error("dataset.task", got=got, expected=f"regression for the column {name}", fix=fix)


def days_since_1970(text: str, form: str | None) -> float:
    """Return the number of days from 1970-01-01 to a date. A date without a time zone is in UTC.

    Args:
        text: The date.
        form: The format for strptime; None for ISO 8601.

    Raises:
        ValueError: The text is not a date in this format.
    """
    if not text.isascii() and any(sign.isdecimal() and not sign.isascii() for sign in text):
        raise ValueError(text)  # strptime would accept digits of other scripts
    found = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (aware - EPOCH) / timedelta(days=1)
