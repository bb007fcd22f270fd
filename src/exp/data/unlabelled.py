"""Samples without answers, out of files: what a trained network is to predict, prepared as its training data were.

A data set says in `unlabelled`, by the name of a class here, how files of its kind are read for that; of others the
numbers are taken as the data set gives them (UnlabelledArrays).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.cells import DecimalSign
from exp.data.columns import Name, Sheet, feature_faults
from exp.data.csv_sheet import MISSING_VALUES, Dialect, are_numbers, read_sheet
from exp.data.faults import SampleError, data_fault, fitted_entry
from exp.data.fields import Fields, Inputs, NumberDtype, listed, record_error
from exp.data.images import ENDINGS, LOOKED_AT, pictures_below
from exp.data.in_memory import Fitted, Tensors
from exp.data.pictures import UNREADABLE, Mode, PictureForm, broken
from exp.data.record_files import read_columns, sheet_of, sheet_of_columns
from exp.data.tables import FITTED, Encoding, Impute, Table
from exp.data.windows import FITTED as WINDOWS
from exp.errors import ConfigError, Fault, shortened
from exp.shared_types import Stage

INPUT = "input"


class UnlabelledTable(Dataset[object]):
    """The rows of a table, encoded as those of training. Columns that training did not have are not read.

    path: of a .csv, .parquet, .jsonl or .npz file, of columns by name. delimiter, decimal, header, missing_values,
    dates, impute, encoding, standardise: as of Csv.
    table: an attribute, the rows once they are prepared.

    Raises: ConfigError for a file that cannot be read.
    """

    table: Table

    def __init__(
        self,
        *,
        path: str,
        delimiter: str = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        missing_values: Sequence[str | int | float] = MISSING_VALUES,
        dates: Sequence[Name] | Mapping[str, str | None] = (),
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
        standardise: bool = True,
    ) -> None:
        dialect = Dialect(delimiter=delimiter, decimal=decimal, header=header)
        self.sheet = sheet_of(Path(path), dialect, missing_values=missing_values)
        self.options: dict[str, Any] = {
            "dates": dates,
            "impute": impute,
            "encoding": encoding,
            "standardise": standardise,
        }

    def fit(self) -> Fitted:
        """Raises: ConfigError: only a training part tells anything."""
        raise _no_training()

    def prepare(self, fitted: Fitted) -> Tensors:
        """Encode the rows by what the training part told. Raises: ConfigError as trained_columns."""
        self.table = trained_columns(self.sheet, fitted_entry(fitted, FITTED, part=self), **self.options)
        return self.table.prepare(fitted)

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> list[str]:
        """Return how many rows have words that training does not know, a line a column."""
        return self.table.notes_in(fitted, stage="the input")


def trained_columns(
    sheet: Sheet,
    told: Mapping[str, Any],
    *,
    dates: Sequence[Name] | Mapping[str, str | None] = (),
    impute: Impute | None = None,
    encoding: Encoding = "one_hot",
    standardise: bool = True,
) -> Table:
    """Return the columns of a sheet that training had, as a table without targets.

    Args:
        sheet: the columns of a file.
        told: what the training part told, see Table.fit.
        dates: columns of dates, besides those of training, as of Csv.
        impute: as of Csv.
        encoding: as of Csv.
        standardise: as of Csv.

    Raises:
        ConfigError: for a column of training that is not there, and for a value that is none of what its column held.
    """
    numbers, words = list(told["numbers"]), list(told.get("words", ()))
    if sheet.has_header:
        refuse_numbers_as_names(sheet.file, sheet.names, known=[*numbers, *words])
    forms = {**told.get("dates", {}), **(dates if isinstance(dates, Mapping) else dict.fromkeys(map(str, dates)))}
    faults, places = list[Fault](), dict[str, int]()
    for name in (*numbers, *words):
        try:
            places[name] = sheet.column(name, key="dataset.path")
        except ConfigError as error:
            faults += error.faults
    figures, others = ([places[name] for name in names if name in places] for names in (numbers, words))
    days = {places[name]: form for name, form in forms.items() if name in places}
    found = sheet.read(numbers=figures, days=days, words=others)
    cure = "Training filled none in (data.dataset.impute=null): fill it in, too" if impute is None else None
    faults += feature_faults(sheet, found, figures, others, cure=cure)
    if faults:
        raise ConfigError(faults)
    table = Table(
        columns=numbers,
        numbers=found.numbers,
        words={name: found.words[places[name]] for name in words},
        targets={},
        standardise=standardise,
        impute=impute,
        encoding=encoding,
    )
    # In double, because a number beyond float32 may be standardised to one that is not. Numbers come before words.
    encoded = table.encoded({FITTED: told}).get(INPUT)
    place = None if encoded is None else first_beyond(encoded.numpy(), torch.float32)
    if place is not None:
        row, column = place[0], figures[place[1]]
        raise sheet.bad(row, column, f"{found.numbers[row, place[1]]:g}", held(torch.float32))
    return table


class UnlabelledSeries(Dataset[object]):
    """All windows of a time series, input float32 `[T, C]`, standardised as in training; the last ends with the file.

    path: of a .csv, .parquet, .jsonl, .npz or .npy file of rows in the order of time. columns, time, length, stride,
    delimiter, decimal, header, standardise: as of Windows.

    Raises: ConfigError for a file that cannot be read.
    """

    def __init__(
        self,
        *,
        path: str,
        length: int = 24,
        stride: int = 1,
        columns: Sequence[Name] | None = None,
        time: Name | None = None,
        delimiter: str = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        standardise: bool = True,
    ) -> None:
        self.path, self.length, self.stride, self.standardise = path, length, stride, standardise
        if Path(path).suffix == ".npy":
            rows = np.asarray(read_columns(Path(path))[INPUT], np.float64)
            rows = rows[:, None] if rows.ndim == 1 else rows
            self.sheet: Sheet = sheet_of_columns(Path(path), {str(place): one for place, one in enumerate(rows.T)})
        else:
            self.sheet = sheet_of(Path(path), Dialect(delimiter=delimiter, decimal=decimal, header=header))
        self.names = [name for name in self.sheet.names if name != str(time)]
        self.names = self.names if columns is None else list(map(str, columns))

    def fit(self) -> Fitted:
        """Raises: ConfigError: only a training part tells anything."""
        raise _no_training()

    def prepare(self, fitted: Fitted) -> Tensors:
        """Raises: ConfigError for a column of training that is not there, and for fewer rows than a window has."""
        told, sheet = fitted_entry(fitted, WINDOWS, part=self), self.sheet
        order: list[str] = told["columns"]
        if sheet.has_header:
            refuse_numbers_as_names(sheet.file, sheet.names, known=order)
        columns = [sheet.column(name, key="dataset.path") for name in self.names if name in order]
        found = sheet.read(numbers=columns)
        rows = found.numbers.copy()
        for place, column in enumerate(columns):
            values = found.numbers[:, place]
            if faults := sheet.faults(found, column, values, cure="Fill it in"):
                raise ConfigError(faults)
            if self.standardise:
                trained = order.index(sheet.names[column])
                rows[:, place] = (values - float(told["means"][trained])) / float(told["deviations"][trained])
            beyond = first_beyond(rows[:, place], torch.float32)
            if beyond is not None:
                raise sheet.bad(beyond[0], column, f"{values[beyond[0]]:g}", held(torch.float32))
        if len(rows) < self.length:
            raise data_fault(
                "dataset.path", got=f"{self.path} with {len(rows)} rows", expected=f"a window of {self.length} at least"
            )
        windows = torch.from_numpy(rows).unfold(0, self.length, self.stride)
        return Tensors(entries={INPUT: windows.movedim(-1, 1).float().contiguous()})


class UnlabelledImages(Dataset[Tensor]):
    """Pictures float32 `[C, H, W]`, brought to what those of training were.

    path: a picture; a folder, of which all pictures at any depth are taken, by name; or a CSV file with a column of
        paths, which start at its own folder. picture: that column. resize, crop, mode, mean, std,
        background: as of Images.

    Raises: ConfigError where there is no picture, or one of those that are looked at before cannot be opened.
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
            except (*UNREADABLE, FileNotFoundError) as error:
                raise ConfigError([broken(str(file), error)]) from error

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.form.read(self.files[index], named=str(self.files[index]))


class UnlabelledRecords(Dataset[object]):
    """Samples out of records, by the columns that training read.

    path: of a .csv, .parquet, .jsonl or .npz file. target: columns of the answers, not read where they are there.
    inputs, dtypes, scale: as of Fields. resize, crop, mode, mean, std, background: of pictures, as of Images.

    Raises: ConfigError for a file or a column that is not there, and for a record that makes no sample.
    """

    def __init__(
        self,
        *,
        path: str,
        inputs: Inputs | None = None,
        target: str | Sequence[str] | None = None,
        dtypes: Mapping[str, NumberDtype] | None = None,
        scale: float = 1.0,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        background: str = "white",
    ) -> None:
        self.path, columns = path, read_columns(Path(path))
        if inputs is None:  # else they are looked for by their names
            refuse_numbers_as_names(Path(path), list(columns))
        answers = () if target is None else listed(target)
        columns = {name: values for name, values in columns.items() if name not in answers}
        self.length = len(next(iter(columns.values()))) if columns else 0
        fields = Fields(
            inputs=inputs,
            target=None,
            dtypes=dtypes,
            scale=scale,
            picture=PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std, background=background),
        )
        self.columns = {name: columns[name] for name in fields.wanted(list(columns), where=path)}
        try:
            self.fields = fields.settled(self._record(0), where=f"row 0 of {path}")
        except SampleError as error:
            raise ConfigError([error.fault]) from error

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        where = f"row {index} of {self.path}"
        sample = self.fields.sample(self._record(index), where=where)
        entries: Mapping[str, Any] = sample if isinstance(sample, Mapping) else {INPUT: sample}
        for name, value in entries.items():
            columns = self.fields.fields[name].columns
            if value.is_floating_point() and not value.isfinite().all():
                entry = (~value.isfinite()).nonzero()[0].tolist()
                place = columns[entry[0]] if self.fields.fields[name].is_row else f"{columns[0]}, entry {entry},"
                got = f"a number that is not finite in {str(value.dtype).removeprefix('torch.')}, in {place} of {where}"
                raise record_error("path", got, held(value.dtype))
        return sample

    def _record(self, index: int) -> dict[str, object]:
        return {name: values[index] for name, values in self.columns.items()}


class UnlabelledArrays(Tensors):
    """Arrays `[N, ...]` by the name of the input, as the run's data set gives them, before transforms.

    Floating numbers and bytes become float32, or what the network is fed; other whole numbers int64.

    path: of an .npz or .npy file of arrays; of a .jsonl file of records, lists under the names of the inputs; or of a
        .csv or .parquet file, whose columns of numbers are the values of one input, one after the other.
    inputs: of the network, {input: {shape: [1, 8, 8], dtype: float32}}. is_final: whether samples go to the network as
        they are, and have that shape; else transforms make it.
    scale: factor on floating inputs and bytes.

    Raises: ConfigError for a file that cannot be read, and for arrays of other names or shapes.
    """

    def __init__(
        self, *, path: str, inputs: Mapping[str, Mapping[str, Any]], is_final: bool = True, scale: float = 1.0
    ) -> None:
        file, only = Path(path), next(iter(inputs)) if len(inputs) == 1 else None
        columns = {} if only and file.suffix == ".csv" else read_columns(file)
        if only and (file.suffix == ".csv" or (file.suffix == ".parquet" and len(columns) > 1)):
            columns = {only: _rows(file, inputs=inputs, is_final=is_final)}
        elif only and len(columns) == 1:
            columns = {only: next(iter(columns.values()))}
        missing = [name for name in inputs if name not in columns]
        if missing:
            raise data_fault(
                "dataset.path",
                got=f"{path} with {', '.join(columns)}, and no {', '.join(missing)}",
                expected=f"an array [N, ...] for each input of the network: {', '.join(inputs)}",
            )
        entries = {
            name: _tensor(columns[name], spec, named=f"{name} of {path}", is_final=is_final, scale=scale)
            for name, spec in inputs.items()
        }
        if len({len(value) for value in entries.values()}) > 1:
            told = ", ".join(f"{name} has {len(value)}" for name, value in entries.items())
            raise data_fault("dataset.path", got=f"{path}, where {told}", expected="as many samples in each")
        super().__init__(entries=entries)


def refuse_numbers_as_names(file: Path, names: Sequence[str], *, known: Sequence[str] | None = None) -> None:
    """Keep the first sample of a .csv file without a header from being taken for the names of its columns.

    known: the columns of training, which may be called by numbers; None where nobody reads the names, of which
        0, 1, 2 and so on are some all the same.
    Raises: ConfigError.
    """
    own = [str(number) for number in range(len(names))] if known is None else known
    is_named = list(names) == own if known is None else not {*own} - {*names}
    if file.suffix == ".csv" and are_numbers(names) and not is_named:
        raise data_fault(
            "dataset.path",
            got=f"{file}, whose first line, {shortened(', '.join(names), most=60)}, holds numbers alone",
            expected="a header there, the names of the columns, and the samples below it",
            cure="Write one above it; a run that was trained with data.dataset.header=false needs none",
        )


def first_beyond(values: np.ndarray, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Where the first number is that a dtype does not hold; None where it holds all. values: finite numbers."""
    if dtype.is_floating_point:
        is_held = torch.from_numpy(np.array(values, order="C")).to(dtype).isfinite().numpy()
    elif values.dtype.kind in "fiu" and dtype != torch.bool:
        bounds = torch.iinfo(dtype)
        is_held = (values >= bounds.min) & (values <= bounds.max)
    else:
        return None
    return None if is_held.all() else tuple(np.argwhere(~is_held)[0].tolist())


def held(dtype: torch.dtype) -> str:
    """In words, the numbers that a dtype holds."""
    name = str(dtype).removeprefix("torch.")
    if dtype.is_floating_point:
        return f"a number that {name} holds, {torch.finfo(dtype).max:.3g} at most"
    return f"a number that {name} holds, {torch.iinfo(dtype).min} to {torch.iinfo(dtype).max}"


def pictures_at(place: Path, *, picture: Name = "path") -> list[Path]:
    """The pictures of UnlabelledImages in their order. Raises: ConfigError where there is none."""
    if place.suffix.lower() == ".csv":
        sheet = read_sheet(place)
        return [place.parent / str(text) for text in sheet.texts(sheet.column(picture, key="dataset.path"))]
    below = pictures_below(place) if place.is_dir() else ()
    found = [place] if place.is_file() else sorted(map(Path, below))
    if not found:
        raise data_fault("dataset.path", got=f"{place} without a picture", expected=f"one in {', '.join(ENDINGS)}")
    return found


def _rows(path: Path, *, inputs: Mapping[str, Mapping[str, Any]], is_final: bool) -> np.ndarray:
    """The columns of numbers as float64 `[N, F]`."""
    sheet = sheet_of(path)
    refuse_numbers_as_names(path, sheet.names)
    (name,) = inputs
    size = math.prod(length for length in inputs[name]["shape"] if length is not None)
    if len(sheet.names) != size:
        raise data_fault(
            "dataset.path",
            got=f"{path} with {len(sheet.names)} columns",
            expected=f"{size} of numbers, the values of {name} {list(inputs[name]['shape'])} one after the other",
        )
    found = sheet.read(numbers=range(size))
    if faults := list(feature_faults(sheet, found, range(size), (), cure="Fill it in")):
        raise ConfigError(faults)
    dtype = getattr(torch, inputs[name]["dtype"]) if is_final else torch.float32
    beyond = first_beyond(found.numbers, dtype)
    if beyond is not None:
        row, column = beyond
        raise sheet.bad(row, column, f"{found.numbers[row, column]:g}", held(dtype))
    return found.numbers


def _no_training() -> ConfigError:
    return data_fault("test", got="rows without answers, and no checkpoint", expected="the checkpoint of a run")


def _tensor(values: Any, spec: Mapping[str, Any], *, named: str, is_final: bool, scale: float) -> Tensor:
    try:
        array = np.asarray(values)
    except ValueError as error:
        got = f"{named}, lists of different lengths"
        raise data_fault("dataset.path", got=got, expected="samples of one shape, [N, ...]") from error
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise data_fault("dataset.path", got=f"{named}, which is no array of numbers", expected="numbers [N, ...]")
    if not len(array):
        raise data_fault("dataset.path", got=f"{named}, without a sample", expected="at least one")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int((~np.isfinite(array)).reshape(len(array), -1).any(1).argmax())
        raise data_fault("dataset.path", got=f"{named}, not finite in sample {row}", expected="finite numbers")
    dtype = getattr(torch, spec["dtype"])
    if is_final:
        array = _shaped(array, tuple(spec["shape"]), named=named)
        if array.dtype.kind == "f" and not dtype.is_floating_point and (array != np.trunc(array)).any():
            raise data_fault("dataset.path", got=f"{named}, with fractions", expected=f"whole numbers, {spec['dtype']}")
    is_scaled = array.dtype.kind == "f" or array.dtype == np.uint8
    if not is_final:
        dtype = torch.float32 if is_scaled else torch.int64
    factor = scale if is_scaled else 1.0
    place = first_beyond(array, dtype) or (first_beyond(array * factor, dtype) if factor != 1.0 else None)
    tensor = torch.from_numpy(np.array(array, order="C")).to(dtype)
    if place is not None:
        entry = f", entry {list(place[1:])}" if place[1:] else ""
        got = f"{array[place]:g} in sample {place[0]}{entry} of {named}"
        raise data_fault("dataset.path", got=got, expected=held(dtype))
    return tensor * factor if factor != 1.0 else tensor


def _shaped(array: np.ndarray, shape: tuple[int | None, ...], *, named: str) -> np.ndarray:
    """As samples of the shape; rows of numbers are brought to it."""
    known = [size for size in shape if size is not None]
    if len(known) == len(shape) and array.ndim == 2 and array.shape[1:] != shape and array.shape[1] == math.prod(known):
        return array.reshape(len(array), *known)
    fits = len(array.shape[1:]) == len(shape) and all(
        size in (None, length) for size, length in zip(shape, array.shape[1:], strict=True)
    )
    if not fits:
        raise data_fault("dataset.path", got=f"{named}, {list(array.shape)}", expected=f"[N, *{list(shape)}]")
    return array
