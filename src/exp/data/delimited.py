"""Tables from CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import numpy as np
from annotated_types import Len

from exp.data.cells import DecimalSign, Missing, WordCodes, finite_number, number_in
from exp.data.columns import Name, Sheet, SheetTable, Task, days_since_1970, words_in_order
from exp.data.dataset_files import data_file
from exp.data.faults import data_fault
from exp.data.tables import Encoding, Impute, Words
from exp.errors import ConfigError

if TYPE_CHECKING:
    from _csv import Reader

# Characters of the lines that are parsed together.
CHARACTERS = 2**20
MISSING_VALUES = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The form of a CSV file: the sign between values, the sign before fractions, and a first line of names."""

    delimiter: str = ","
    decimal: DecimalSign = "."
    header: bool = True


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


class CsvSheet(Sheet):
    """The columns of a CSV file, read in one pass over it for all that are asked for together, a megabyte at a time."""

    def __init__(self, *, file: Path, dialect: Dialect, missing: Missing) -> None:
        super().__init__(file=file, names=(), missing=missing)
        self.dialect = dialect
        self._rows = 0
        self._numbers: dict[tuple[int, str | bool | None], np.ndarray | ConfigError] = {}
        self._words: dict[int, Words] = {}

    def __len__(self) -> int:
        """The rows, once a column was read."""
        return self._rows

    def load(self, *, numbers: Sequence[Sequence[int]], days: Mapping[int, str | None], words: Sequence[int]) -> None:
        figures = set(chain.from_iterable(numbers))
        # What is both, such as a class that is also a number to predict, is read again when its words are asked for.
        words = [column for column in words if column not in figures]
        readers: dict[int, Callable[[str], float]] = {}
        for column in figures:
            readers[column] = self._reader(days.get(column), is_day=column in days)
        codes = {column: WordCodes(self.missing) for column in words}
        readers |= {column: code.__getitem__ for column, code in codes.items()}
        parser = Parser(sheet=self, readers=readers, plain=[one for one in readers if one not in {*days, *codes}])
        blocks = [Block(columns=group) for group in numbers]
        coded = Block(columns=list(codes), dtype=np.int32)
        self._rows = 0
        for rows, share in parser.pieces():
            self._rows += len(rows)
            for block in (*blocks, coded):
                block.append(rows, share)
        for block in blocks:
            whole = block.done()
            for place, column in enumerate(block.columns):
                fault = self._fault(parser, column, days)
                self._numbers[column, days.get(column, False)] = whole[:, place] if fault is None else fault
        self._words |= {
            column: words_in_order(coded.held[: self._rows, place], code.words)
            for place, (column, code) in enumerate(codes.items())
        }

    def texts(self, column: int) -> list[str | None]:
        words = self.words(column)
        names = (*words.names, None)
        return [names[code] for code in words.codes.tolist()]

    def words(self, column: int) -> Words:
        if column not in self._words:
            self.load(numbers=(), days={}, words=[column])
        return self._words[column]

    def numbers(self, column: int) -> np.ndarray:
        return np.asarray(self._read(column, {}))

    def days(self, column: int, form: str | None) -> np.ndarray:
        return np.asarray(self._read(column, {column: form}))

    def feature(self, column: int, days: Mapping[int, str | None]) -> np.ndarray:
        return self._read(column, days)

    def place(self, row: int) -> str:
        return f"line {self._row(row)[0]} of {self.file}"

    def cell(self, row: int, column: int) -> str:
        return self._row(row)[1][column].strip()

    def rows_in(self, lines: Iterator[str] | TextIO) -> Reader:
        """What the csv module makes of lines."""
        return rows_of(lines, delimiter=self.dialect.delimiter)

    def uneven(self, row: Sequence[str], line: int) -> ConfigError:
        """The error of a row with another number of values than there are columns. line: on which it ends."""
        told = f"The delimiter is {self.dialect.delimiter!r}; data.dataset.delimiter sets another"
        return data_fault(
            "dataset.path",
            got=f"{len(row)} values in line {line} of {self.file}",
            expected=f"{len(self.names)}, as in its first line",
            cure=told if len(row) == 1 else None,
        )

    def unreadable(self, error: Exception, line: int) -> ConfigError:
        """The error of what is no CSV. line: the last one that was read."""
        return data_fault("dataset.path", got=f"{self.file}, near line {line + 1}: {error}", expected="CSV in UTF-8")

    def _read(self, column: int, days: Mapping[int, str | None]) -> np.ndarray:
        key = (column, days.get(column, False))
        if key not in self._numbers:
            self.load(numbers=[[column]], days={one: form for one, form in days.items() if one == column}, words=())
        found = self._numbers[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    def cells(self, columns: Sequence[int]) -> list[list[str]]:
        """Return the texts of columns as the file has them.

        Raises: ConfigError for rows of unequal length, and for a file that is no CSV.
        """
        found: list[list[str]] = [[] for _ in columns]
        with self.file.open(newline="", encoding="utf-8-sig") as text:
            reader = self.rows_in(text)
            try:
                for row in islice(filter(None, reader), self.dialect.header, None):
                    if len(row) != len(self.names):
                        raise self.uneven(row, reader.line_num)
                    for texts, column in zip(found, columns, strict=True):
                        texts.append(row[column])
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.unreadable(error, reader.line_num) from error
        return found

    def _row(self, row: int) -> tuple[int, Sequence[str]]:
        """Return the line on which a row ends, and its values."""
        with self.file.open(newline="", encoding="utf-8-sig") as text:
            reader = self.rows_in(text)
            found = next(islice(filter(None, reader), row + self.dialect.header, None))
            return reader.line_num, found

    def _reader(self, form: str | None, *, is_day: bool) -> Callable[[str], float]:
        missing, decimal = self.missing, self.dialect.decimal

        def read(text: str) -> float:
            text = text.strip()
            if text in missing.texts or (is_day and text in missing):
                return math.nan
            value = days_since_1970(text, form) if is_day else number_in(text, decimal=decimal)
            if not math.isfinite(value):
                raise ValueError("not finite")
            return value if is_day or value not in missing.numbers else math.nan

        return read

    def no_number(self, row: int, column: int, text: str) -> ConfigError:
        number = finite_number(text, decimal=",")
        if number is None:
            return super().no_number(row, column, text)
        cure = "Write it in the file with a point before the fraction and nothing between its other digits"
        if self.dialect.delimiter != ",":
            cure = f"'data.dataset.decimal=\",\"' reads a comma as the sign before a fraction: {text} becomes {number}"
        return self.bad(row, column, repr(text), "a number", cure)

    def _fault(self, parser: Parser, column: int, days: Mapping[int, str | None]) -> ConfigError | None:
        if column not in parser.unread:
            return None
        row, text = parser.unread[column]
        if column in days:
            return self.no_date(row, column, text, days[column])
        try:
            number_in(text, decimal=self.dialect.decimal)
        except ValueError:
            return self.no_number(row, column, text)
        return self.bad(row, column, text, "a finite number")


class Parser:
    """Turns the lines of a file into numbers, float64 `[n, columns of the file]`, piece by piece.

    NumPy parses what it can, six times as fast as the csv module and Python's float. Where that fails, the same lines
    are read with a function for each value, and where that fails, too, or a text stands in quotes, by the csv module,
    which finds the value that is wrong.

    readers: what makes a number of a text, by column; other columns are not looked at. plain: those of them that NumPy
    may read itself.
    unread: an attribute, of each column that holds what its reader does not take, the first such row, and the text.
    """

    def __init__(self, *, sheet: CsvSheet, readers: Mapping[int, Callable[[str], float]], plain: Sequence[int]) -> None:
        self.sheet, self.readers = sheet, readers
        self.unread: dict[int, tuple[int, str]] = {}
        self._by_function: dict[int | str, Callable[[str], float]] = {
            column: readers.get(column, _nothing) for column in range(len(sheet.names))
        }
        self._by_numpy = {column: read for column, read in self._by_function.items() if column not in plain}
        # A number that stands for a missing one is none, which NumPy cannot know.
        self._is_plain = bool(plain) and not sheet.missing.numbers and sheet.dialect.decimal == "."
        self._rows = 0

    def pieces(self) -> Iterator[tuple[np.ndarray, float]]:
        """The pieces in their order, and with each about which share of the file it is.

        Raises: ConfigError for rows of unequal length, and for what is no CSV in UTF-8.
        """
        size = self.sheet.file.stat().st_size
        line = 0
        with self.sheet.file.open(newline="", encoding="utf-8-sig") as text:
            if self.sheet.dialect.header:
                header = self.sheet.rows_in(text)
                next(filter(None, header))
                line = header.line_num
            while lines := self._lines(text, line):
                found = None if '"' in "".join(lines) else self._parsed(lines)
                taken = len(lines)
                if found is None:
                    found, taken = self._by_row(lines, text, line)
                line += taken
                self._rows += len(found)
                if len(found):
                    yield found, min(1.0, sum(map(len, lines)) / size)

    def _lines(self, text: TextIO, line: int) -> list[str]:
        try:
            return text.readlines(CHARACTERS)
        except UnicodeDecodeError as error:
            raise self.sheet.unreadable(error, self._decoded(line)) from error

    def _decoded(self, line: int) -> int:
        """The last line that is UTF-8, of those behind one that is."""
        with self.sheet.file.open("rb") as lines:
            for number, content in enumerate(lines, 1):
                try:
                    content.decode()
                except UnicodeDecodeError:
                    return max(line, number - 1)
        return line

    def _parsed(self, lines: Sequence[str]) -> np.ndarray | None:
        """The numbers of whole lines; None where one of them cannot be read so."""
        if self._is_plain:
            found = self._loaded(lines, self._by_numpy)
            if found is not None and np.isfinite(found).all():
                return found
            self._is_plain = False  # mostly, where one value is missing, others are
        return self._loaded(lines, self._by_function)

    def _loaded(
        self, lines: Sequence[str], converters: Mapping[int | str, Callable[[str], float]]
    ) -> np.ndarray | None:
        # Between spaces NumPy and the csv module do not find the same values.
        if not lines[0].strip() or self.sheet.dialect.delimiter == " ":
            return None
        try:
            found: np.ndarray = np.loadtxt(
                lines,
                dtype=np.float64,
                delimiter=self.sheet.dialect.delimiter,
                comments=None,
                converters={**converters},
                encoding=None,
                ndmin=2,
            )
        except (ValueError, TypeError, OverflowError):
            return None
        return found if found.shape[1] == len(self.sheet.names) else None

    def _by_row(self, lines: Sequence[str], behind: TextIO, line: int) -> tuple[np.ndarray, int]:
        """The numbers of lines, and how many lines that were: the last row may go on behind them."""
        rows = self.sheet.rows_in(chain(lines, behind))
        found: list[list[float]] = []
        last = line
        try:
            while rows.line_num < len(lines) and (row := next(rows, None)) is not None:
                if not row:
                    continue
                last = line + rows.line_num
                if len(row) != len(self.sheet.names):
                    raise self.sheet.uneven(row, last)
                found.append([self._value(column, text, len(found)) for column, text in enumerate(row)])
        except (csv.Error, UnicodeDecodeError) as error:
            raise self.sheet.unreadable(error, last) from error
        return np.array(found, dtype=np.float64).reshape(len(found), len(self.sheet.names)), rows.line_num

    def _value(self, column: int, text: str, row: int) -> float:
        try:
            return self._by_function[column](text)
        except (ValueError, OverflowError):
            self.unread.setdefault(column, (self._rows + row, text.strip()))
            return math.nan


class Block:
    """Some columns that are read together, `[N, K]`, in memory that grows. columns: of the file."""

    def __init__(self, *, columns: Sequence[int], dtype: type[np.generic] = np.float64) -> None:
        self.columns = list(columns)
        first = self.columns[0] if self.columns else 0
        run = slice(first, first + len(self.columns))
        # What lies side by side is taken without a copy.
        self._places = run if self.columns == list(range(first, run.stop)) else self.columns
        self._length = 0
        self.held = np.empty((0, len(columns)), dtype=dtype)

    def append(self, rows: np.ndarray, share: float) -> None:
        """Takes over its columns of more rows. share: of the file, which says how many there may be in all."""
        taken = rows[:, self._places]
        stop = self._length + len(rows)
        if stop > len(self.held):
            # Asked for at once, by what the first rows say, so that nothing is copied; untouched it takes no memory.
            wanted = int(max(stop * 1.25, 1.05 * len(rows) / share if not self._length else 0))
            grown = np.empty((wanted, len(self.columns)), dtype=self.held.dtype)
            grown[: self._length] = self.held[: self._length]
            self.held = grown
        self.held[self._length : stop] = taken
        self._length = stop

    def done(self) -> np.ndarray:
        """All of them."""
        self.held = self.held[: self._length]
        return self.held


def rows_of(lines: Iterable[str], *, delimiter: str) -> Reader:
    """What the csv module makes of lines, of every CSV file that is read here."""
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


def are_numbers(names: Sequence[str]) -> bool:
    """Whether what is read as a header is a row of numbers, some of which may be missing."""
    told = [name for name in names if name not in ("", *MISSING_VALUES)]
    return bool(told) and all(finite_number(name) is not None for name in told)


def _nothing(text: str) -> float:
    return 0.0


def read_sheet(
    file: Path,
    dialect: Dialect | None = None,
    *,
    missing_values: Sequence[object] = MISSING_VALUES,
) -> CsvSheet:
    """The columns of a file, of which its names are read at once. Empty lines are left out.

    dialect: how the file is written; None for commas and a header.
    Raises: ConfigError for names that are there twice, and a file without rows; where a column is read, for rows of
        unequal length.
    """
    dialect = dialect or Dialect()
    if dialect.decimal == dialect.delimiter:
        got = f"{dialect.decimal!r}, which is the delimiter, too"
        told = "If values stand between semicolons, write data.dataset.delimiter=';'"
        raise data_fault("dataset.decimal", got=got, expected="two different signs", cure=told)
    sheet = CsvSheet(file=file, dialect=dialect, missing=Missing.of(missing_values, decimal=dialect.decimal))
    with file.open(newline="", encoding="utf-8-sig") as text:
        rows = sheet.rows_in(text)
        try:
            first = next(filter(None, rows), None)
            second = next(filter(None, rows), None) if dialect.header else first
        except (csv.Error, UnicodeDecodeError) as error:
            raise sheet.unreadable(error, max(0, rows.line_num - 1)) from error
    if first is None or second is None:
        raise data_fault("dataset.path", got=f"{file} without a row", expected="at least one below the header")
    sheet.names = tuple(name.strip() for name in first) if dialect.header else tuple(map(str, range(len(first))))
    twice = sorted({name for name in sheet.names if sheet.names.count(name) > 1})
    if twice:
        cure = "Its first line is taken for their names: write them above it" if are_numbers(sheet.names) else None
        got = f"{file} with {', '.join(twice)} twice"
        raise data_fault("dataset.path", got=got, expected="a name for each column", cure=cure)
    return sheet
