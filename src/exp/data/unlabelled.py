"""Samples without answers from files, for the predictions of a trained network, prepared as its training data were.

A data set names in `unlabelled` the class here that reads files of its kind. UnlabelledArrays reads the others' files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.cells import DecimalSign, finite_number
from exp.data.column_source import ColumnSource, open_source, read_columns
from exp.data.csv_source import CsvSource, Dialect
from exp.data.data_errors import SampleError, data_error, fitted_entry, refuse_unknown_columns
from exp.data.delimited import date_forms
from exp.data.fields import Fields, Inputs, Names, NumberDtype, listed, record_error
from exp.data.images import ENDINGS, LOOKED_AT, pictures_below
from exp.data.in_memory import Fitted, Tensors
from exp.data.pictures import UNREADABLE, Mode, PictureForm, broken
from exp.data.shard_files import Record
from exp.data.shards import open_shard
from exp.data.source import Name, Source
from exp.data.tables import FITTED, Encoding, Impute, Table
from exp.data.windows import FITTED as WINDOWS
from exp.data.windows import series_of
from exp.errors import ConfigError
from exp.nested import tensors_in
from exp.shared_types import Stage

INPUT = "input"
HELD = f"a finite number that float32 holds, {torch.finfo(torch.float32).max:.3g} at most"


class Unlabelled(Dataset[object]):
    """A file whose samples are encoded by the figures of training."""

    def fit(self) -> Fitted:
        """Raise ConfigError: a checkpoint has the figures."""
        raise data_error("test", got="rows without answers, and no checkpoint", expected="the checkpoint of a run")


class UnlabelledTable(Unlabelled):
    """The rows of a table, encoded as those of training. Columns that training did not have are not read.

    Args:
        path: of a .csv, .parquet, .jsonl or .npz file, of columns by name. See Csv for the others.

    table: an attribute, the rows after they are prepared.

    Raises:
        ConfigError: for a file that cannot be read.
    """

    table: Table

    def __init__(
        self,
        *,
        path: str,
        delimiter: str = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        missing_values: Sequence[str | int | float] | None = None,
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        dialect = Dialect(delimiter=delimiter, decimal=decimal, header=header)
        self.source = open_source(Path(path), dialect, missing_values=missing_values)
        self.options: dict[str, Any] = {
            "dates": dates,
            "impute": impute,
            "encoding": encoding,
            "standardise": standardise,
        }

    def prepare(self, fitted: Fitted) -> Tensors:
        """Encode the rows by the figures of training. Raises: ConfigError as trained_table."""
        self.table = trained_table(self.source, fitted_entry(fitted, FITTED, part=self), **self.options)
        return self.table.prepare(fitted)

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> list[str]:
        """Return how many rows have words that training does not know, a line a column."""
        return self.table.notes_in(fitted, stage="the input")


def trained_table(
    source: Source,
    told: Mapping[str, Any],
    *,
    dates: Sequence[Name] | Mapping[str, str | None] = (),
    impute: Impute | None = None,
    encoding: Encoding = "one_hot",
    standardise: bool = True,
) -> Table:
    """Return the columns of a source that training had, as a table without targets.

    Args:
        source: the columns of a file.
        told: the figures of training, see Table.fit.
        dates: columns of dates, in addition to those of training, as of Csv.
        impute: as of Csv.
        encoding: as of Csv.
        standardise: as of Csv.

    Raises:
        ConfigError: for a column of training that is not there, and for a value that does not fit its column.
    """
    numbers, words = list(told["numbers"]), list(told.get("words", ()))
    refuse_unknown_columns(source.file, source.names, {"path": [*numbers, *words]})
    place = {name: source.names.index(name) for name in (*numbers, *words)}
    forms = {**told.get("dates", {}), **date_forms(dates)}
    fix = "Training filled none in (data.dataset.impute=null): fill it in, too"
    found = source.read(
        numbers=[place[name] for name in numbers],
        days={place[name]: form for name, form in forms.items() if name in place},
        words=[place[name] for name in words],
        fixes=dict.fromkeys(place.values() if impute is None else (), fix),
    )
    table = Table(
        columns=numbers,
        numbers=found.numbers,
        words={name: found.words[place[name]] for name in words},
        targets={},
        standardise=standardise,
        impute=impute,
        encoding=encoding,
    )
    if numbers:
        # Encoded in double: a number beyond float32 may be standardised to one that is not.
        encoded = table.encoded({FITTED: told})[INPUT][:, : len(numbers)]
        refuse_overflow(encoded, source, numbers, found.numbers)
    return table


class UnlabelledSeries(Unlabelled):
    """All windows of a time series, input float32 `[T, C]`, standardised as in training; the last ends with the file.

    Args:
        path: of a .csv, .parquet, .jsonl, .npz or .npy file of rows in the order of time. See Windows for the others.

    Raises:
        ConfigError: for a file that cannot be read.
    """

    def __init__(
        self,
        *,
        path: str,
        length: int = 24,
        stride: int = 1,
        columns: Sequence[Name] | None = None,
        delimiter: str = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        standardise: bool = True,
    ) -> None:
        self.source = open_source(Path(path), Dialect(delimiter=delimiter, decimal=decimal, header=header))
        self.length, self.stride, self.columns, self.standardise = length, stride, columns, standardise

    def prepare(self, fitted: Fitted) -> Tensors:
        """Raises: ConfigError for a column of training that is not there, and for fewer rows than a window has."""
        told, source = fitted_entry(fitted, WINDOWS, part=self), self.source
        order: list[str] = told["columns"]
        names = order if self.columns is None else list(map(str, self.columns))
        refuse_unknown_columns(source.file, source.names, {"path": names})
        values = series_of(source, names)
        rows, places = torch.from_numpy(values), [order.index(name) for name in names]
        if self.standardise:
            rows = (rows - told["means"][places]) / told["deviations"][places]
        refuse_overflow(rows, source, names, values)
        if len(rows) < self.length:
            got = f"{source.file} with {len(rows)} rows"
            raise data_error("dataset.path", got=got, expected=f"a window of {self.length} at least")
        windows = rows.unfold(0, self.length, self.stride)
        return Tensors(entries={INPUT: windows.movedim(-1, 1).float().contiguous()})


class UnlabelledImages(Dataset[Tensor]):
    """Pictures float32 `[C, H, W]`, brought to the form of those of training.

    Args:
        path: a picture; a folder, of which all pictures at any depth are taken, by name; or a CSV file with a column of
            paths, which start at its own folder.
        picture: the column of paths. See Images for the others.

    Raises:
        ConfigError: without a picture, and for one of the first that cannot be opened.
    """

    def __init__(
        self,
        *,
        path: str,
        picture: Name = "path",
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        background: str = "white",
    ) -> None:
        self.form = PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std, background=background)
        self.files = pictures_at(Path(path), picture=picture)
        for file in self.files[:: -(-len(self.files) // LOOKED_AT)]:
            try:
                with Image.open(file):
                    pass
            except UNREADABLE as error:
                raise ConfigError([broken(str(file), error)]) from error

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.form.read(self.files[index], named=str(self.files[index]))


class UnlabelledRecords(Dataset[object]):
    """Samples from records, by the columns that training read.

    Args:
        path: of a file of records, see Shards.
        target: columns of the answers, which are not read. See Shards for the others.

    Raises:
        ConfigError: for a file or a column that is not there, and for a first record that makes no sample.
    """

    def __init__(
        self,
        *,
        path: str,
        inputs: Inputs | None = None,
        target: Names | None = None,
        dtypes: Mapping[str, NumberDtype] | None = None,
        delimiter: str = ",",
        scale: float = 1.0,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        background: str = "white",
    ) -> None:
        self.file = open_shard(Path(path), delimiter=delimiter)
        picture = PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std, background=background)
        fields = Fields(inputs=inputs, target=None, dtypes=dtypes, scale=scale, picture=picture)
        answers = () if target is None else listed(target)
        try:
            if not self._records:
                raise data_error("dataset.path", got=f"{path} without a sample", expected="at least one")
            first = self._records[0]
            names = [name for name in self.file.names_of(first) if name not in answers]
            if inputs is None:
                _refuse_first_sample(self.file.file, names)
            columns = first.columns(fields.wanted(names, where=path))
            self.fields = fields.settled(columns, where=str(first))
        except SampleError as error:
            raise ConfigError([error.error]) from error

    @cached_property
    def _records(self) -> list[Record]:
        return list(self.file.records())

    def __getstate__(self) -> dict[str, object]:
        # A worker opens the file itself.
        return {name: value for name, value in vars(self).items() if name != "_records"}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> object:
        record = self._records[index]
        sample = self.fields.sample(record.columns(self.fields.columns), where=str(record))
        if not all(value.isfinite().all() for value in tensors_in(sample)):
            raise record_error("path", f"a number in {record} that is not finite in float32", HELD)
        return sample


class UnlabelledArrays(Tensors):
    """Arrays `[N, ...]` by the name of the input, as the run's data set gives them, before transforms.

    Floating numbers and bytes become float32, or the dtype of the network's input; other whole numbers int64.

    Args:
        path: of an .npz or .npy file of arrays; of a .jsonl file of records, lists under the names of the inputs; or of
            a .csv or .parquet file, whose columns of numbers are the values of one input, one after the other.
        inputs: of the network, {input: {shape: [1, 8, 8], dtype: float32}}.
        is_final: whether samples have the shape of the network's input; otherwise transforms make it.
        scale: factor on floating inputs and bytes.

    Raises:
        ConfigError: for a file that cannot be read, and for arrays of other names or shapes.
    """

    def __init__(
        self, *, path: str, inputs: Mapping[str, Mapping[str, Any]], is_final: bool = True, scale: float = 1.0
    ) -> None:
        file, only = Path(path), next(iter(inputs)) if len(inputs) == 1 else None
        columns = {} if only and file.suffix == ".csv" else dict(read_columns(file))
        if only and file.suffix == ".csv":
            columns = {only: _rows(open_source(file), shape=inputs[only]["shape"])}
        elif only and file.suffix == ".parquet" and len(columns) > 1:
            columns = {only: _rows(ColumnSource(file=file, columns=columns), shape=inputs[only]["shape"])}
        elif only and len(columns) == 1:
            columns = {only: next(iter(columns.values()))}
        if missing := [name for name in inputs if name not in columns]:
            raise data_error(
                "dataset.path",
                got=f"{path} with {', '.join(columns)}, and no {', '.join(missing)}",
                expected=f"an array [N, ...] for each input of the network: {', '.join(inputs)}",
            )
        entries = {
            name: _tensor(columns[name], spec, named=f"{name} of {path}", is_final=is_final, scale=scale)
            for name, spec in inputs.items()
        }
        super().__init__(entries=entries)


def refuse_overflow(encoded: Tensor, source: Source, names: Sequence[str], values: np.ndarray) -> None:
    """Raise ConfigError for the first value `[N, C]` of named columns that float32 does not hold when it is encoded."""
    wrong = (~encoded.float().isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise source.bad(row, source.names.index(names[column]), f"{values[row, column]:g}", HELD)


def pictures_at(place: Path, *, picture: Name = "path") -> list[Path]:
    """Return the pictures of UnlabelledImages in their order. Raises: ConfigError without a picture."""
    if place.suffix.lower() == ".csv":
        source = CsvSource(place)
        return [place.parent / str(text) for text in source.texts(source.column(picture, key="dataset.path"))]
    below = pictures_below(place) if place.is_dir() else ()
    found = [place] if place.is_file() else sorted(map(Path, below))
    if not found:
        raise data_error("dataset.path", got=f"{place} without a picture", expected=f"one in {', '.join(ENDINGS)}")
    return found


def _rows(source: Source, *, shape: Sequence[int | None]) -> np.ndarray:
    """Return the columns of numbers as float64 `[N, F]`, the values of one input of a shape."""
    size = math.prod(length for length in shape if length is not None)
    _refuse_first_sample(source.file, source.names)
    if len(source.names) != size:
        expected = f"{size} of numbers, the values of an input {list(shape)} one after the other"
        raise data_error("dataset.path", got=f"{source.file} with {len(source.names)} columns", expected=expected)
    return series_of(source, source.names)


def _refuse_first_sample(file: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for a .csv file without a header, whose first sample would be the names of the columns."""
    are_numbers = file.suffix == ".csv" and all(finite_number(name) is not None for name in names)
    if are_numbers and list(names) != [str(number) for number in range(len(names))]:
        fix = "Write the names of the columns above it"
        raise data_error("dataset.path", got=f"{file}, whose first line holds numbers", expected="a header", fix=fix)


def _tensor(values: Any, spec: Mapping[str, Any], *, named: str, is_final: bool, scale: float) -> Tensor:
    try:
        array = np.asarray(values)
    except ValueError as error:
        got = f"{named}, lists of different lengths"
        raise data_error("dataset.path", got=got, expected="samples of one shape, [N, ...]") from error
    if array.dtype.kind not in "fiub":
        raise data_error("dataset.path", got=f"{named}, which is no array of numbers", expected="numbers [N, ...]")
    is_scaled = array.dtype.kind == "f" or array.dtype == np.uint8
    dtype = getattr(torch, spec["dtype"]) if is_final else torch.float32 if is_scaled else torch.int64
    if is_final:
        array = _shaped(array, tuple(spec["shape"]), named=named)
    given = torch.from_numpy(np.array(array.astype(np.int64) if array.dtype.kind == "u" else array, order="C"))
    tensor = given.to(dtype)
    tensor = tensor * scale if is_scaled and scale != 1.0 else tensor
    wrong = ~tensor.isfinite()
    if not dtype.is_floating_point and dtype != torch.bool:
        wrong |= tensor != given
    if wrong.any():
        sample, *entry = wrong.nonzero()[0].tolist()
        got = f"{given[(sample, *entry)]:g} in sample {sample}{f', entry {entry}' if entry else ''} of {named}"
        expected = HELD if dtype == torch.float32 else f"a number that {spec['dtype']} holds"
        raise data_error("dataset.path", got=got, expected=expected)
    return tensor


def _shaped(array: np.ndarray, shape: tuple[int | None, ...], *, named: str) -> np.ndarray:
    """Return samples of the shape; rows of numbers are brought to it."""
    known = [size for size in shape if size is not None]
    if len(known) == len(shape) and array.ndim == 2 and array.shape[1:] != shape and array.shape[1] == math.prod(known):
        return array.reshape(len(array), *known)
    fits = len(array.shape[1:]) == len(shape) and all(
        size in (None, length) for size, length in zip(shape, array.shape[1:], strict=True)
    )
    if not fits:
        raise data_error("dataset.path", got=f"{named}, {list(array.shape)}", expected=f"[N, *{list(shape)}]")
    return array
