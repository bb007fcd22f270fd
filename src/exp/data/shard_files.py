"""Readers of files of records: CSV, JSON Lines, Parquet, .npz and .tar.

A record is parsed only when a sample is made from it, so that skipping a record is cheap. Before, a Record object
stores the text of its line, or the position of its values in the file. Pickles are never loaded, because loading them
could execute code.
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
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from exp.data.csv_source import rows_of, unread_lines
from exp.data.data_errors import SampleError, file_error, require_equal_lengths, require_extra, sample_error
from exp.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

NPY = ".npy"
JSON = "json"
BLOCK = tarfile.BLOCKSIZE


# The class is not frozen, because creating a frozen object takes as long as reading the record.
@dataclass(slots=True)
class Record:
    """Record of a file. Its values are read when `columns` is called.

    Args:
        file: The file.
        number: The index of the record in the file, counted from 0.
        held: The text of the record, or the position of its values in the file. The type depends on the file format.
        line: The number of the record's last line, counted from 1. Default: 0, for a file without lines.
    """

    file: ShardFile
    number: int
    held: object
    line: int = 0

    def columns(self, wanted: Sequence[str] | None = None) -> dict[str, object]:
        """Return a mapping from columns to the values of the record.

        Args:
            wanted: The columns to return. Columns that the record does not have are left out. Default: all columns.

        Raises:
            SampleError: The values cannot be read.
        """
        return self.file.values(self, wanted)

    def __str__(self) -> str:
        return f"line {self.line} of {self.file.file}" if self.line else f"sample {self.number} of {self.file.file}"


class ShardFile(ABC):
    """Base class of readers of a file of records.

    Args:
        file: The path of the file.

    Attributes:
        names: The names of the columns. None if each record has column names that may differ from other records.
        length: The number of records. None if the whole file must be read to count them.
    """

    names: tuple[str, ...] | None = None
    length: int | None = None

    def __init__(self, file: Path) -> None:
        self.file = file

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield the records of the file in order.

        Raises:
            SampleError: The file is damaged or truncated.
        """

    @abstractmethod
    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        """Return a mapping from columns to the values of a record; see Record.columns."""

    def names_of(self, record: Record) -> tuple[str, ...]:
        """Return the names of the columns of a record."""
        return tuple(self.values(record, None)) if self.names is None else self.names

    def damage_error(self, number: int, reason: object) -> SampleError:
        """Return the error for a file with a record that cannot be read.

        Args:
            number: The index of the first record that cannot be read.
            reason: An exception, or a text that describes the damage.
        """
        line = next(iter(str(reason).splitlines()), type(reason).__name__)
        got = f"{self.file}, which cannot be read at sample {number}: {line}"
        expected = "undamaged files"
        return sample_error("dataset.files", got=got, expected=expected, fix="Replace the file, or leave it out")

    def format_error(self, reason: object, expected: str) -> ConfigError:
        """Return the error for a file that does not have the expected format.

        Args:
            reason: An exception, or a text that describes the problem.
            expected: A description of the format.
        """
        return file_error(self.file, reason, expected, key="dataset.files")


class CsvShard(ShardFile):
    """Reader of a CSV file with a header. The attribute `held` of a Record is the list of texts in its row.

    Args:
        file: The path of the file.
        delimiter: The character between values. Default: a comma.

    Raises:
        ConfigError: The file is empty, or the header cannot be read.
    """

    names: tuple[str, ...]

    def __init__(self, file: Path, *, delimiter: str = ",") -> None:
        super().__init__(file)
        self.delimiter = delimiter
        with file.open(newline="", encoding="utf-8-sig") as text:
            try:
                names = next(rows_of(text, delimiter=self.delimiter), None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.format_error(error, "CSV in UTF-8") from error
        if names is None:
            raise self.format_error("it is empty", "a line with the names of the columns, followed by rows")
        self.names = tuple(name.strip() for name in names)

    def records(self) -> Iterator[Record]:
        numbers = count()
        with self.file.open(newline="", encoding="utf-8-sig") as text:
            rows = rows_of(text, delimiter=self.delimiter)
            try:
                next(rows)
                for row in filter(None, rows):
                    yield Record(self, next(numbers), row, rows.line_num)
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.damage_error(next(numbers) + unread_lines(error), error) from error

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        row = cast(list[str], record.held)
        if len(row) != len(self.names):
            raise self.damage_error(
                record.number, f"{len(row)} values in {record}, but {len(self.names)} names in the first line"
            )
        return _select(dict(zip(self.names, row, strict=True)), wanted)


class JsonLines(ShardFile):
    """Reader of a file with a JSON object on each line. The attribute `held` of a Record is its line as bytes."""

    def records(self) -> Iterator[Record]:
        numbers = count()
        with self.file.open("rb") as lines:
            for line, content in enumerate(lines, 1):
                if content.strip():
                    yield Record(self, next(numbers), content, line)

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        try:
            held = json.loads(cast(bytes, record.held))
        except (ValueError, RecursionError) as error:
            raise self.damage_error(record.number, f"line {record.line}: {error}") from error
        if not isinstance(held, dict):
            raise self.damage_error(
                record.number,
                f"line {record.line} contains a value of the type {type(held).__name__}, not a JSON object",
            )
        return _select(held, wanted)


class ChunkedFile(ShardFile):
    """Base class of readers of files in which chunks of rows are stored together. A row is a record.

    The attribute `held` of a Record is a function that reads a column of its chunk, and the index of the row in the
    chunk. The function is called when a sample is made from the record.

    Args:
        file: The path of the file.
        names: The names of the columns.
        chunks: The number of rows in each chunk.
        errors: The exceptions that `read` raises for a damaged chunk.
    """

    def __init__(
        self, file: Path, *, names: Sequence[str], chunks: Sequence[int], errors: tuple[type[Exception], ...]
    ) -> None:
        super().__init__(file)
        self.names, self.length, self._chunks, self._errors = tuple(names), sum(chunks), tuple(chunks), errors

    def records(self) -> Iterator[Record]:
        numbers = count()
        for chunk, rows in enumerate(self._chunks):
            read = functools.cache(functools.partial(self.read, chunk))
            for row in range(rows):
                yield Record(self, next(numbers), (read, row))

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        read, row = cast(tuple[Callable[[str], "np.ndarray | pyarrow.Array"], int], record.held)
        names = self.names or ()
        try:
            return {
                name: arrow_value(read(name), row) for name in (names if wanted is None else wanted) if name in names
            }
        except self._errors as error:
            raise self.damage_error(record.number, error) from error

    @abstractmethod
    def read(self, chunk: int, name: str) -> np.ndarray | pyarrow.Array:
        """Return the values of a column in a chunk of rows.

        Args:
            chunk: The index of the chunk.
            name: The name of the column.
        """


class ParquetShard(ChunkedFile):
    """Reader of a Parquet file. Its chunks are the row groups of the file.

    Raises:
        ConfigError: The file is not a complete Parquet file, or pyarrow is not installed.
    """

    def __init__(self, file: Path) -> None:
        require_extra("pyarrow", feature="data=stream of Parquet files", extra="parquet", key="dataset.files")
        from pyarrow import ArrowException, parquet

        self.file = file
        errors = (ArrowException, OSError)
        try:
            # An open file is passed. If a path is passed, pyarrow adds a column for each folder in it named key=value.
            with file.open("rb") as raw:
                metadata = parquet.read_metadata(raw)
        except errors as error:
            raise self.format_error(error, "a complete Parquet file") from error
        chunks = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        super().__init__(file, names=metadata.schema.to_arrow_schema().names, chunks=chunks, errors=errors)

    def read(self, chunk: int, name: str) -> np.ndarray | pyarrow.Array:
        from pyarrow import parquet, types

        with self.file.open("rb") as raw:
            column = parquet.ParquetFile(raw).read_row_group(chunk, columns=[name]).column(0).combine_chunks()
        is_number = types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)
        return column.to_numpy(zero_copy_only=False) if is_number and not column.null_count else column


class NpzShard(ChunkedFile):
    """Reader of an .npz file with arrays `[N, ...]` of equal length. The whole file is a single chunk.

    Raises:
        ConfigError: The file is not a complete .npz file, has no arrays, or its arrays differ in length.
    """

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
            raise self.format_error(error, "a complete .npz file of NumPy") from error
        if not shapes:
            raise self.format_error("it has no arrays", "arrays [N, ...]")
        lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
        require_equal_lengths(lengths, file, key="dataset.files")
        super().__init__(file, names=list(shapes), chunks=[next(iter(lengths.values())) or 0], errors=errors)

    def read(self, chunk: int, name: str) -> np.ndarray:
        with self.file.open("rb") as raw, np.load(raw, allow_pickle=False) as archive:
            held: np.ndarray = archive[name]
            return held


class TarShard(ShardFile):
    """Reader of a .tar file in the format of WebDataset.

    Consecutive files form a record if their names are equal up to the first dot. The part of a name after the first dot
    is a column: the files 0001.cls and 0001.png are the columns `cls` and `png` of a record. The column `json.label` is
    the value of the key `label` in the file 0001.json.

    The attribute `held` of a Record contains the open archive, and the position of each file in the archive.

    Raises:
        ConfigError: The end of the file is missing, or the file is compressed.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        with file.open("rb") as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(max(0, size - BLOCK))
            if size < 2 * BLOCK or raw.read(BLOCK).strip(b"\0"):
                # The file is truncated, so that records may be missing.
                raise self.format_error("its end is missing", "a complete .tar file that is not compressed")

    def records(self) -> Iterator[Record]:
        number, key, held = 0, None, dict[str, tuple[int, int]]()
        opened = OpenFile(self.file)
        try:
            for folder, stem, column, place in self._members(opened.raw):
                if (folder, stem) != key and held:
                    yield Record(self, number, (opened, held))
                    number, held = number + 1, {}
                key = (folder, stem)
                if column in held:
                    raise self.damage_error(number, f"{folder}/{stem}.{column} occurs twice")
                held[column] = place
        except (tarfile.TarError, EOFError, OSError) as error:
            raise self.damage_error(number, error) from error
        if held:
            yield Record(self, number, (opened, held))

    def _members(self, raw: BinaryIO) -> Iterator[tuple[str, str, str, tuple[int, int]]]:
        """Yield a tuple for each file in the archive: folder, stem, column and position.

        The stem is the part of the file name before the first dot. The column is the part after the first dot, in lower
        case. The position is the pair (offset, size) of the file's content, in bytes.

        Args:
            raw: The open archive.

        Raises:
            tarfile.ReadError: A member is a link or a device, or the header of a member is damaged.
        """
        with tarfile.open(fileobj=raw, mode="r:") as archive:
            while (member := archive.next()) is not None:
                vars(archive)[
                    "members"
                ].clear()  # tarfile would keep all members in memory. vars() is used because type stubs lack `members`.
                folder, _, name = member.name.rpartition("/")
                if member.isdir() or name.startswith("."):
                    continue
                if not member.isreg():
                    raise tarfile.ReadError(f"{member.name} is a link or a device, not a file")
                stem, _, column = name.partition(".")
                yield folder, stem, column.lower(), (member.offset_data, member.size)
            # tarfile stops at a damaged header without an error, as at the end of the archive.
            raw.seek(archive.offset)
            if raw.read(BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"the content at byte {archive.offset} is not the header of a file")

    def names_of(self, record: Record) -> tuple[str, ...]:
        held = _files_of(record)[1]
        found = self._read(JSON, record) if JSON in held else None
        return (*held, *(f"{JSON}.{name}" for name in (found if isinstance(found, dict) else ())))

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        held = _files_of(record)[1]
        found = {name: self._read(name, record) for name in (held if wanted is None else wanted) if name in held}
        parts = [name for name in wanted or () if name not in held and name.startswith(f"{JSON}.")]
        whole = self._read(JSON, record) if parts and JSON in held else None
        for name in parts:
            part = name.removeprefix(f"{JSON}.")
            found |= {name: whole[part]} if isinstance(whole, dict) and part in whole else {}
        return found

    def _read(self, name: str, record: Record) -> object:
        opened, held = _files_of(record)
        offset, size = held[name]
        # pread does not use the position of the open file, because forked workers share this position.
        content = os.pread(opened.raw.fileno(), size, offset)
        if len(content) < size:
            raise self.damage_error(record.number, f"{name} is truncated")
        kind = name.rpartition(".")[2]
        if kind not in DECODERS:
            expected = f"a file that ends in one of {', '.join(DECODERS)}"
            fix = "Select other columns in data.dataset.inputs"
            raise sample_error("dataset.inputs", got=f"{name} of {record}", expected=expected, fix=fix)
        try:
            return DECODERS[kind](content)
        except (ValueError, EOFError) as error:
            raise self.damage_error(record.number, f"column {name}: {error}") from error


class OpenFile:
    """Open file that is closed when the last Record that refers to it is deleted."""

    def __init__(self, file: Path) -> None:
        self.raw = file.open("rb")

    def __del__(self) -> None:
        self.raw.close()


def _files_of(record: Record) -> tuple[OpenFile, dict[str, tuple[int, int]]]:
    """Return the open archive of a record, and a mapping from columns to pairs (offset, size) in bytes."""
    return cast(tuple[OpenFile, dict[str, tuple[int, int]]], record.held)


def _decode_array(content: bytes) -> object:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


PICTURES = ("png", "jpg", "jpeg", "bmp", "gif", "tif", "tiff", "webp", "ppm", "pgm")
# The function that decodes the content of a file in a .tar, by the extension of its name.
DECODERS: Mapping[str, Callable[[bytes], object]] = {
    **dict.fromkeys(PICTURES, bytes),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    "npy": _decode_array,
    JSON: json.loads,
}


def _npy_shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """Return the shape of an array in an .npz file. Only the header of the array is read.

    Raises:
        ValueError: The array contains Python objects.
    """
    with archive.open(name) as raw:
        version = np.lib.format.read_magic(raw)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(raw)
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects, which may run code when they are read")
    return tuple(shape)


def arrow_value(column: np.ndarray | pyarrow.Array, row: int) -> object:
    """Return the value of a column in a row, as a NumPy or Python object."""
    if isinstance(column, np.ndarray):
        return column[row]
    scalar = column[row]
    values = getattr(scalar, "values", None)
    # Lists of numbers are converted to arrays, because as_py is slower.
    if values is not None and hasattr(values, "to_numpy") and not values.type.num_fields and not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _select(held: Mapping[str, object], wanted: Sequence[str] | None) -> dict[str, object]:
    return dict(held) if wanted is None else {name: held[name] for name in wanted if name in held}
