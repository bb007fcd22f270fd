"""Base class of readers of tables, which convert the columns of a file to numbers, dates and words."""

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
# The name of a column. If the file has no header, it is the number of the column, counted from 0.
Name: TypeAlias = str | int
# The values of a column before their conversion.
Values: TypeAlias = Sequence[object] | np.ndarray
# Days: the date formats of columns of dates, by column number. A format is for strptime. None means ISO 8601.
# Fixes: the fix that an error proposes for an invalid or missing value, by column number.
Days: TypeAlias = Mapping[int, str | None]
Fixes: TypeAlias = Mapping[int, str]
# The index of the first row with an invalid value and the text of the value, by column number.
Unread: TypeAlias = dict[int, tuple[int, str]]
# Functions that convert a text to a number, or a word to its code, by column number.
Readers: TypeAlias = Mapping[int, Callable[[str], float]]
NOTHING: Mapping[int, str] = MappingProxyType({})
# If a target has more different labels than this number, and all are numbers and not all are integers, the task is
# probably a regression.
MANY_LABELS = 20
# Matches the names of columns without a name: the empty text, and the names that pandas writes for an index.
NAMELESS = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
# The name that messages show for an empty name. Users can type it on the command line.
NO_NAME = "''"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of a table after their conversion to numbers and words.

    Args:
        numbers: The K columns of numbers and dates, float64 `[N, K]`. Missing values are nan.
        words: The columns of words, by their number in the file.
    """

    numbers: np.ndarray
    words: Mapping[int, Words]


class Source(ABC):
    """Base class of readers of a table with named columns.

    Args:
        file: The file, for messages.
        names: The names of the columns in the order of the file.
        missing: The texts and numbers that mean a missing value.
    """

    def __init__(self, *, file: Path, names: Sequence[str], missing: Missing) -> None:
        self.file, self.names, self.missing = file, tuple(names), missing

    @abstractmethod
    def place(self, row: int) -> str:
        """Return the position of a row for messages, such as "line 3 of data.csv"."""

    @abstractmethod
    def chunks(self, columns: Sequence[int], readers: Readers) -> Iterator[Sequence[Values] | np.ndarray]:
        """Yield the values of some columns in chunks of consecutive rows.

        Args:
            columns: The numbers of the columns.
            readers: Functions that convert a text to a number, by column number, for columns of dates and words.

        Yields:
            The n rows of a chunk. If the source has converted the values, they are float64 `[n, K]` for K columns.
            Otherwise, they are a list of the values of each column.
        """

    def is_date(self, column: int) -> bool:
        """Return whether a column has a date type in the file. Columns of formats without types are not dates."""
        return False

    def column(self, name: Name, *, key: str) -> int:
        """Return the number of a column in the file, counted from 0.

        Args:
            name: The name of the column.
            key: The config key that contains the name, for the error.

        Raises:
            ConfigError: The file does not have the column.
        """
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
        """Return some columns of the file, converted to numbers and words. Columns are given by number.

        Args:
            numbers: The columns of numbers and of dates. Default: no columns.
            days: The formats of the columns of dates, which must also be in `numbers`. Dates become days since 1970.
            words: The columns of words and of classes. Default: no columns.
            fixes: The columns in which every row must have a value, with the fix that is reported for a missing value.
            text_fixes: The fix that is reported for a text that is not a number or a date, by column.

        Raises:
            ConfigError: A value is missing or invalid. There is one error for each column with such a value.
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
        """Return the texts in a column, given by its number. Missing values are None."""
        return self.read(words=[column]).words[column].texts()

    def value_error(self, row: int, column: int, got: str, expected: str, fix: str | None = None) -> ConfigError:
        """Return the error for a value in the file.

        Args:
            row: The index of the row.
            column: The number of the column.
            got: A description of the value.
            expected: A description of valid values.
            fix: The fix that is reported. Default: no fix.
        """
        name = self.names[column]
        got = f"{got} in {self.place(row)}, column {name or NO_NAME}"
        return data_error("dataset.path", got=got, expected=expected, fix=fix, subject=name)

    def _numbers(self, values: Values, column: int, days: Days, unread: Unread, *, first: int) -> np.ndarray:
        """Return the values in n consecutive rows of a column as numbers, float64 `[n]`.

        Dates become days since 1970. Missing and invalid values are nan.

        Args:
            values: The values.
            column: The number of the column.
            days: The formats of the columns of dates.
            unread: The first invalid value of each column. If `values` has the first one, it is added here.
            first: The index in the file of the first of the n rows.
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
        """Return the function that converts a text in a column to a number, or a date to days since 1970.

        The function returns nan for a missing value. It raises ValueError or OverflowError for an invalid text.

        Args:
            column: The number of the column.
            days: The formats of the columns of dates.
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
    """Return a description of the valid texts in a column of numbers or dates, for messages."""
    if column not in days:
        return "a finite number"
    return "a date in ISO 8601, such as 2024-01-31" if days[column] is None else f"a date like {days[column]}"


def _append(held: np.ndarray, rows: np.ndarray) -> None:
    """Append rows to an array in place. The array is not copied, because it may be large."""
    count = len(held)
    held.resize((count + len(rows), held.shape[1]), refcheck=False)
    held[count:] = rows


def _codes(values: Values, codes: WordCodes) -> np.ndarray:
    # NumPy dates are converted to Python dates, because the text of a Python date is the same as in a CSV file.
    held = values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind == "M" else values
    return np.array([codes[value if isinstance(value, str) else text_of(value) or ""] for value in held], np.float64)


def words_in_order(codes: np.ndarray, words: Sequence[str]) -> Words:
    """Return a column of words with new codes, which number the words in sorted order.

    The order is alphabetical. If all words are numbers, they are sorted by value.

    Args:
        codes: The code of the word in each row, `[N]`. The code -1 means a missing value.
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
    """Raise ConfigError if a target seems to be a regression: it has over 20 labels, which are numbers with fractions.

    Args:
        source: The table.
        column: The number of the target column.
        labels: The labels.
    """
    numbers = [number for name in labels.names if (number := finite_number(name)) is not None]
    is_counted = len(numbers) < len(labels.names) or all(number.is_integer() for number in numbers)
    if len(labels.names) > MANY_LABELS and not is_counted:
        name = source.names[column]
        got = f"classification, although {name} has {len(labels.names)} labels that are numbers with fractions"
        fix = "Set data=csv_regression, which also selects an objective and a metric for a regression"
        raise data_error("dataset.task", got=got, expected=f"regression for the column {name}", fix=fix)


def days_since_1970(text: str, form: str | None) -> float:
    """Return the number of days from 1970-01-01 to a date or time. The time zone is UTC if the text contains none.

    Args:
        text: The date or time.
        form: The format for strptime. None means ISO 8601.

    Raises:
        ValueError: The text is not a date in this format.
    """
    if not text.isascii() and any(sign.isdecimal() and not sign.isascii() for sign in text):
        raise ValueError(text)  # strptime would accept digits of scripts such as Arabic.
    found = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (aware - EPOCH) / timedelta(days=1)
