"""Read files of records one after another: CSV, lines of JSON, Parquet, .npz and .tar, of which no content is executed.

A record is cheap to pass over: of a line its text is held, of the others where its values are. Values are read, and
parsed, by whoever makes a sample of the record.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from exp.data.csv_sheet import rows_of
from exp.data.faults import SampleError, data_fault, require_extra
from exp.errors import ConfigError, Fault

NPY = ".npy"
JSON = "json"
BLOCK = tarfile.BLOCKSIZE
# By the last ending of a name in a .tar, what its bytes are.
PICTURES = ("png", "jpg", "jpeg", "bmp", "gif", "tif", "tiff", "webp", "ppm", "pgm")
NUMBERS = ("cls", "cls2", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript")
READ = (*PICTURES, *NUMBERS, *TEXTS, "npy", "json")


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
    """The place where a record begins. number: of the record. offset: bytes before it. line: lines before it."""

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
        """The columns that a record has."""
        return tuple(self.values(record, None)) if self.names is None else self.names

    def damaged(self, number: int, reason: object) -> SampleError:
        """The error of a file that cannot be read on. number: of the record at which it ends."""
        told = str(reason).splitlines()
        return SampleError(
            Fault(
                key="data.dataset.files",
                got=f"{self.file}, which cannot be read at sample {number}: {told[0] if told else reason}",
                expected="whole files",
                cure="Replace the file, or leave it out",
            )
        )

    def refused(self, reason: object, expected: str) -> ConfigError:
        """The error of a file that is not what its name says, seen before anything is read of it."""
        told = str(reason).splitlines()
        return data_fault(
            "dataset.files", got=f"{self.file} ({told[0] if told else type(reason).__name__})", expected=expected
        )


class CsvShard(ShardFile):
    """Rows of text below a line of names. A record holds its row, and the line on which it ends."""

    def __init__(self, file: Path, *, delimiter: str) -> None:
        super().__init__(file)
        self.delimiter = delimiter
        with file.open(newline="", encoding="utf-8-sig") as text:
            try:
                names = next(rows_of(text, delimiter=self.delimiter), None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise self.refused(error, "CSV in UTF-8") from error
        if names is None:
            raise data_fault("dataset.files", got=f"{file} without a line", expected="names of columns, and rows")
        self.names = tuple(name.strip() for name in names)

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        number, line = start.number, start.line
        with self.file.open("rb") as raw:
            raw.seek(start.offset)
            rows = rows_of(
                (content.decode("utf-8" if number else "utf-8-sig") for content in raw), delimiter=self.delimiter
            )
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
        assert self.names is not None
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
        except ValueError as error:
            raise self.damaged(record.number, f"line {record.line}: {error}") from error
        if not isinstance(held, dict):
            raise self.damaged(record.number, f"line {record.line} holds a {type(held).__name__}, and no mapping")
        return _chosen(held, wanted)


class ParquetShard(ShardFile):
    """Rows of columns with types. A record holds its row group, which is read whole where a sample of it is made."""

    has_marks = False

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        require_extra("pyarrow", feature="data=stream of Parquet files", extra="parquet", key="dataset.files")
        from pyarrow import ArrowException, parquet

        try:
            # The file itself: of a path pyarrow would make a data set, with columns out of the folders' names.
            with file.open("rb") as raw:
                metadata = parquet.read_metadata(raw)
        except (ArrowException, OSError) as error:
            raise self.refused(error, "a whole Parquet file") from error
        self.names = tuple(metadata.schema.to_arrow_schema().names)
        self.length = metadata.num_rows
        self._groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        number = 0
        for group, rows in enumerate(self._groups):
            chunk = functools.cache(functools.partial(self._read, group))
            for row in range(rows):
                yield Record(self, number, (chunk, row))
                number += 1

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        from pyarrow import ArrowException

        chunk, row = record.held
        try:
            return {name: arrow_value(chunk(name), row) for name in _there(self.names, wanted)}
        except (ArrowException, OSError) as error:
            raise self.damaged(record.number, error) from error

    def _read(self, group: int, name: str) -> Any:
        """A column of a row group: an array of NumPy where it holds numbers alone, else one of Arrow."""
        from pyarrow import parquet, types

        with self.file.open("rb") as raw:
            column = parquet.ParquetFile(raw).read_row_group(group, columns=[name]).column(0).combine_chunks()
        is_number = types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)
        return column.to_numpy(zero_copy_only=False) if is_number and not column.null_count else column


class NpzShard(ShardFile):
    """Arrays `[N, ...]` of one length by name. A record holds the arrays, which are read where a sample is made."""

    has_marks = False

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        try:
            with zipfile.ZipFile(file) as archive:
                shapes = {
                    name.removesuffix(NPY): _npy_shape(archive, name)
                    for name in archive.namelist()
                    if name.endswith(NPY)
                }
        except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise self.refused(error, "a whole .npz of NumPy's") from error
        self.names = tuple(shapes)
        lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there is no array"
            raise data_fault(
                "dataset.files", got=f"{file}, where {told}", expected="as many samples in each array of a file"
            )
        self.length = next(iter(lengths.values()))

    def records(self, start: Mark = BEGINNING) -> Iterator[Record]:
        assert self.length is not None
        chunk = functools.cache(self._read)
        for row in range(self.length):
            yield Record(self, row, chunk)

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        try:
            return {name: record.held(name)[record.number] for name in _there(self.names, wanted)}
        except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise self.damaged(record.number, error) from error

    def _read(self, name: str) -> np.ndarray:
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
            raw.seek(0, os.SEEK_END)
            size = raw.tell()
            raw.seek(max(0, size - BLOCK))
            if size < 2 * BLOCK or raw.read(BLOCK).strip(b"\0"):
                # Without it nobody knows whether something is missing.
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
        """Folder, name, ending, where it begins and how many bytes it has, and where its header does, of each file."""
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
        if JSON not in held:
            return tuple(held)
        found = self.values(record, [JSON])[JSON]
        return (*held, *(f"{JSON}.{name}" for name in (found if isinstance(found, dict) else ())))

    def values(self, record: Record, wanted: Sequence[str] | None) -> dict[str, object]:
        _, held = record.held
        found = {name: self._read(name, record) for name in _there(tuple(held), wanted)}
        for name in wanted or ():
            whole, _, part = name.partition(".")
            if whole == JSON and part and name not in held and JSON in held:
                mapping = self._read(JSON, record)
                found |= {name: mapping[part]} if isinstance(mapping, dict) and part in mapping else {}
        return found

    def _read(self, name: str, record: Record) -> object:
        opened, held = record.held
        offset, size = held[name]
        # Without a position, which the workers of a loader that are forks share with each other.
        content = os.pread(opened.raw.fileno(), size, offset)
        if len(content) < size:
            raise self.damaged(record.number, f"{name} breaks off")
        return self._decoded(name, content, record)

    def _decoded(self, name: str, content: bytes, record: Record) -> object:
        kind = name.rpartition(".")[2]
        if kind in PICTURES:
            return content
        try:
            if kind == "npy":
                return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            if kind == "json":
                return json.loads(content)
            if kind in TEXTS:
                return content.decode()
            if kind in NUMBERS:
                return int(content)
        except (ValueError, EOFError) as error:
            raise self.damaged(record.number, f"its {name}: {error}") from error
        raise SampleError(
            Fault(
                key="data.dataset.inputs",
                got=f"{name} of {record}",
                expected=f"a file that ends in one of {', '.join(READ)}",
                cure="Name those that are read in data.dataset.inputs",
            )
        )


class OpenFile:
    """A file that is open as long as a record refers to it."""

    def __init__(self, file: Path) -> None:
        self.raw = file.open("rb")

    def __del__(self) -> None:
        self.raw.close()


def _npy_shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """The shape of an array of an .npz, without reading it."""
    with archive.open(name) as raw:
        version = np.lib.format.read_magic(raw)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(raw)
    if dtype.hasobject:
        raise ValueError(f"{name} holds objects, which may run code when they are read")
    return tuple(shape)


def arrow_value(column: Any, row: int) -> object:
    """One value of a column, of Arrow's or NumPy's, as NumPy or Python has it."""
    if isinstance(column, np.ndarray):
        return column[row]
    scalar = column[row]
    values = getattr(scalar, "values", None)
    # A list of numbers; lists of lists, texts and mappings go the slower way.
    if values is not None and hasattr(values, "to_numpy") and not values.type.num_fields and not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _there(names: Sequence[str] | None, wanted: Sequence[str] | None) -> list[str]:
    assert names is not None
    return list(names) if wanted is None else [name for name in wanted if name in names]


def _chosen(held: Mapping[str, object], wanted: Sequence[str] | None) -> dict[str, object]:
    return dict(held) if wanted is None else {name: held[name] for name in wanted if name in held}
