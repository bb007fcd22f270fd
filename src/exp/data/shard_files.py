"""Files of records: CSV, lines of JSON, Parquet, .npz and .tar, of which no content is executed.

A record is cheap to pass over: a line holds its text, other records the place of their values. The maker of a sample
reads and parses the values.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from exp.data.csv_source import rows_of
from exp.data.data_errors import SampleError, data_error, require_extra
from exp.errors import ConfigError, ErrorDetails

NPY = ".npy"
JSON = "json"
BLOCK = tarfile.BLOCKSIZE


# Not frozen, which takes as long as reading the record.
@dataclass(slots=True)
class Record:
    """One record of a file, of which no value is read yet.

    Args:
        file: the file.
        number: of the record in the file, from 0.
        held: where the file finds the values.
        end: the byte after the record, for files that can be read from a mark.
        line: the line on which the record ends, in files of lines.
    """

    file: ShardFile
    number: int
    held: Any
    end: int = 0
    line: int = 0

    def columns(self, wanted: Sequence[str] | None = None) -> dict[str, object]:
        """Return the values by column: those that are wanted and there, or all.

        Raises: SampleError for values that cannot be read.
        """
        return self.file.values(self, wanted)

    def __str__(self) -> str:
        return f"line {self.line} of {self.file.file}" if self.line else f"sample {self.number} of {self.file.file}"


@dataclass(frozen=True, slots=True)
class Mark:
    """The place where a record begins.

    Args:
        number: of the record.
        offset: bytes before it.
        line: lines before it.
    """

    number: int = 0
    offset: int = 0
    line: int = 0


BEGINNING = Mark()


class ShardFile(ABC):
    """A file of records.

    names: an attribute, the columns; None if only a record says them. length: an attribute, the number of records; None
    if the file does not say it. has_marks: an attribute, whether the file can be read from a record in the middle.
    """

    names: tuple[str, ...] | None = None
    length: int | None = None
    has_marks = True

    def __init__(self, file: Path) -> None:
        self.file = file

    @abstractmethod
    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        """Yield the records in order, from a mark on.

        Raises: SampleError if the file breaks off.
        """

    @abstractmethod
    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        """See Record.columns."""

    def names_of(self, record: Record) -> tuple[str, ...]:
        """Return the columns that a record has."""
        return tuple(self.values(record, None)) if self.names is None else self.names

    def damaged(self, number: int, reason: object) -> SampleError:
        """Return the error of a file that cannot be read on. number: of the record at which it ends."""
        got = f"{self.file}, which cannot be read at sample {number}: {_first_line(reason)}"
        fix = "Replace the file, or leave it out"
        return SampleError(ErrorDetails(key="data.dataset.files", got=got, expected="whole files", fix=fix))

    def refused(self, reason: object, expected: str) -> ConfigError:
        """Return the error of a file of another format, seen before a record is read."""
        return data_error("dataset.files", got=f"{self.file} ({_first_line(reason)})", expected=expected)


class CsvShard(ShardFile):
    """Rows of text below a line of names. A record holds its row, and the line on which it ends."""

    names: tuple[str, ...]

    def __init__(self, file: Path, *, delimiter: str = ",") -> None:
        super().__init__(file)
        self.delimiter = delimiter
        with file.open(newline="", encoding="utf-8-sig") as text:
            try:
                names = next(rows_of(text, delimiter=self.delimiter), None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.refused(error, "CSV in UTF-8") from error
        if names is None:
            raise self.refused("without a line", "names of columns, and rows")
        self.names = tuple(name.strip() for name in names)

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        number, line = start.number, start.line
        with self.file.open("rb") as raw:
            raw.seek(start.offset)
            texts = (content.decode("utf-8" if number else "utf-8-sig") for content in raw)
            rows = rows_of(texts, delimiter=self.delimiter)
            try:
                if not start.offset:
                    next(rows, None)
                for row in rows:
                    if row:
                        yield Record(self, number, row, raw.tell(), line + rows.line_num)
                        number += 1
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.damaged(number, error) from error

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        row = record.held
        if len(row) != len(self.names):
            raise self.damaged(record.number, f"{len(row)} values in {record}, and {len(self.names)} in its first line")
        return _chosen(dict(zip(self.names, row, strict=True)), wanted)


class JsonLines(ShardFile):
    """A mapping in JSON on each line. A record holds its line."""

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        number, end = start.number, start.offset
        with self.file.open("rb") as lines:
            lines.seek(end)
            for line, content in enumerate(lines, start.line + 1):
                end += len(content)
                if content.strip():
                    yield Record(self, number, content, end, line)
                    number += 1

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        try:
            held = json.loads(record.held)
        except (ValueError, RecursionError) as error:
            raise self.damaged(record.number, f"line {record.line}: {error}") from error
        if not isinstance(held, dict):
            raise self.damaged(record.number, f"line {record.line} holds a {type(held).__name__}, and no mapping")
        return _chosen(held, wanted)


class ChunkedFile(ShardFile):
    """A file whose rows are read in larger pieces. A record holds its piece, which is read when a sample is made.

    Args:
        file: the file.
        names: the columns.
        pieces: the rows of each piece.
        errors: the exceptions of a damaged piece.
    """

    has_marks = False

    def __init__(
        self, file: Path, *, names: Sequence[str], pieces: Sequence[int], errors: tuple[type[Exception], ...]
    ) -> None:
        super().__init__(file)
        self.names, self.length, self._pieces, self._errors = tuple(names), sum(pieces), tuple(pieces), errors

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        numbers = count()
        for piece, rows in enumerate(self._pieces):
            read = functools.cache(functools.partial(self.read, piece))
            for row in range(rows):
                yield Record(self, next(numbers), (read, row))

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        read, row = record.held
        names = self.names or ()
        try:
            return {
                name: arrow_value(read(name), row) for name in (names if wanted is None else wanted) if name in names
            }
        except self._errors as error:
            raise self.damaged(record.number, error) from error

    @abstractmethod
    def read(self, piece: int, name: str) -> Any:
        """Return a column of a piece, of NumPy or Arrow."""


class ParquetShard(ChunkedFile):
    """Rows of columns with types. A piece is a row group."""

    def __init__(self, file: Path) -> None:
        require_extra("pyarrow", feature="data=stream of Parquet files", extra="parquet", key="dataset.files")
        from pyarrow import ArrowException, parquet

        self.file = file
        errors = (ArrowException, OSError)
        try:
            # The file itself: of a path pyarrow would make a data set, with columns out of the folders' names.
            with file.open("rb") as raw:
                metadata = parquet.read_metadata(raw)
        except errors as error:
            raise self.refused(error, "a whole Parquet file") from error
        pieces = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        super().__init__(file, names=metadata.schema.to_arrow_schema().names, pieces=pieces, errors=errors)

    def read(self, piece: int, name: str) -> Any:
        from pyarrow import parquet, types

        with self.file.open("rb") as raw:
            column = parquet.ParquetFile(raw).read_row_group(piece, columns=[name]).column(0).combine_chunks()
        is_number = types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)
        return column.to_numpy(zero_copy_only=False) if is_number and not column.null_count else column


class NpzShard(ChunkedFile):
    """Arrays `[N, ...]` of one length by name. The only piece holds all rows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        errors = (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile)
        try:
            with zipfile.ZipFile(file) as archive:
                shapes = {
                    name.removesuffix(NPY): _npy_shape(archive, name)
                    for name in archive.namelist()
                    if name.endswith(NPY)
                }
        except errors as error:
            raise self.refused(error, "a whole .npz of NumPy's") from error
        lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
        length = next(iter(lengths.values()), None)
        if length is None or len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {one}" for name, one in lengths.items()) or "there is no array"
            raise self.refused(told, "as many samples in each array of a file")
        super().__init__(file, names=list(shapes), pieces=[length], errors=errors)

    def read(self, piece: int, name: str) -> np.ndarray:
        with self.file.open("rb") as raw, np.load(raw, allow_pickle=False) as archive:
            held: np.ndarray = archive[name]
            return held


class TarShard(ShardFile):
    """Files in a .tar, of which those that follow each other with one name up to its first dot are a record.

    The column of each is the rest of its name: `cls` and `png` of 0001.cls and 0001.png, as WebDataset has them;
    `json.label` is an entry of 0001.json. A record holds where they begin, and the open archive.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        with file.open("rb") as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(max(0, size - BLOCK))
            if size < 2 * BLOCK or raw.read(BLOCK).strip(b"\0"):
                # A file without an end may have lost records.
                raise self.refused("it has no end, which is a block of zeros", "a whole .tar that is not compressed")

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        number, key, held = start.number, None, dict[str, tuple[int, int]]()
        opened = OpenFile(self.file)
        opened.raw.seek(start.offset)
        try:
            for folder, stem, column, place, offset in self._members(opened.raw):
                if (folder, stem) != key and held:
                    yield Record(self, number, (opened, held), offset)
                    number, held = number + 1, {}
                key = (folder, stem)
                if column in held:
                    raise self.damaged(number, f"{folder}/{stem}.{column} is there twice")
                held[column] = place
        except (tarfile.TarError, EOFError, OSError) as error:
            raise self.damaged(number, error) from error
        if held:
            yield Record(self, number, (opened, held))

    def _members(self, raw: BinaryIO) -> Iterator[tuple[str, str, str, tuple[int, int], int]]:
        """Yield folder, name, ending, the offset and the size of the content, and the header's offset of each file."""
        with tarfile.open(fileobj=raw, mode="r:") as archive:
            while (member := archive.next()) is not None:
                vars(archive)["members"].clear()  # it would keep them all; types do not know of them
                folder, _, name = member.name.rpartition("/")
                if member.isdir() or name.startswith("."):
                    continue
                if not member.isreg():
                    raise tarfile.ReadError(f"{member.name} is a link or a device, and no file")
                stem, _, column = name.partition(".")
                yield folder, stem, column.lower(), (member.offset_data, member.size), member.offset
            # For tarfile a damaged header in the middle is the end.
            raw.seek(archive.offset)
            if raw.read(BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"what follows at byte {archive.offset} is no file of a .tar")

    def names_of(self, record: Record) -> tuple[str, ...]:
        _, held = record.held
        found = self._read(JSON, record) if JSON in held else None
        return (*held, *(f"{JSON}.{name}" for name in (found if isinstance(found, dict) else ())))

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        _, held = record.held
        found = {name: self._read(name, record) for name in (held if wanted is None else wanted) if name in held}
        parts = [name for name in wanted or () if name not in held and name.startswith(f"{JSON}.")]
        whole = self._read(JSON, record) if parts and JSON in held else None
        for name in parts:
            part = name.removeprefix(f"{JSON}.")
            found |= {name: whole[part]} if isinstance(whole, dict) and part in whole else {}
        return found

    def _read(self, name: str, record: Record) -> object:
        opened, held = record.held
        offset, size = held[name]
        # Without a position, which the workers of a loader that are forks share with each other.
        content = os.pread(opened.raw.fileno(), size, offset)
        if len(content) < size:
            raise self.damaged(record.number, f"{name} breaks off")
        kind = name.rpartition(".")[2]
        if kind not in DECODERS:
            expected, fix = f"a file that ends in one of {', '.join(DECODERS)}", "Name others in data.dataset.inputs"
            raise SampleError(
                ErrorDetails(key="data.dataset.inputs", got=f"{name} of {record}", expected=expected, fix=fix)
            )
        try:
            return DECODERS[kind](content)
        except (ValueError, EOFError) as error:
            raise self.damaged(record.number, f"its {name}: {error}") from error


class OpenFile:
    """A file that is open as long as a record refers to it."""

    def __init__(self, file: Path) -> None:
        self.raw = file.open("rb")

    def __del__(self) -> None:
        self.raw.close()


def _decoded_array(content: bytes) -> object:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


PICTURES = ("png", "jpg", "jpeg", "bmp", "gif", "tif", "tiff", "webp", "ppm", "pgm")
# By the last ending of a name in a .tar, the function that reads its bytes.
DECODERS: Mapping[str, Callable[[bytes], object]] = {
    **dict.fromkeys(PICTURES, bytes),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    "npy": _decoded_array,
    JSON: json.loads,
}


def _npy_shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """Return the shape of an array of an .npz, without reading it."""
    with archive.open(name) as raw:
        version = np.lib.format.read_magic(raw)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(raw)
    if dtype.hasobject:
        raise ValueError(f"{name} holds objects, which may run code when they are read")
    return tuple(shape)


def arrow_value(column: Any, row: int) -> object:
    """Return one value of a column of Arrow or NumPy, as NumPy or Python has it."""
    if isinstance(column, np.ndarray):
        return column[row]
    scalar = column[row]
    values = getattr(scalar, "values", None)
    # A list of numbers; lists of lists, texts and mappings go the slower way.
    if values is not None and hasattr(values, "to_numpy") and not values.type.num_fields and not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _chosen(held: Mapping[str, object], wanted: Sequence[str] | None) -> dict[str, object]:
    return dict(held) if wanted is None else {name: held[name] for name in wanted if name in held}


def _first_line(reason: object) -> str:
    return next(iter(str(reason).splitlines()), type(reason).__name__)
