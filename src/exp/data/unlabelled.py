"""Data sets of samples without targets, for the prediction of a trained run.

The samples are encoded with the statistics of the run's training split. The attribute `unlabelled` of the run's data
set names the class in this module that reads files of the same format. If the data set does not have the attribute,
UnlabelledArrays reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.cells import finite_number
from exp.data.column_source import open_source, read_columns
from exp.data.csv_source import CsvSource, Dialect
from exp.data.data_errors import (
    SampleError,
    data_error,
    fitted_entry,
    refuse_unknown_columns,
    require_sample,
    sample_error,
)
from exp.data.delimited import date_forms
from exp.data.fields import Fields, as_tuple
from exp.data.images import ENDINGS, pictures_below
from exp.data.in_memory import Fitted, Tensors
from exp.data.pictures import OPTIONS as PICTURE
from exp.data.pictures import PictureForm
from exp.data.shard_files import Record
from exp.data.shards import open_shard
from exp.data.source import Name, Source
from exp.data.tables import FITTED, Encoding, Impute, Statistics, Table
from exp.data.windows import FITTED as WINDOWS
from exp.data.windows import series_of
from exp.errors import ConfigError
from exp.nested import tensors_in
from exp.shared_types import Stage, TensorSpec, tensor_specs

INPUT = "input"
# The values of the options that the run's config sets for its data set, by name.
Options = Mapping[str, Any]
NONE: Options = MappingProxyType({})
DIALECT = ("delimiter", "decimal", "header")
ENCODING = ("dates", "impute", "encoding", "standardise")
HELD = f"a finite number that fits in float32, {torch.finfo(torch.float32).max:.3g} at most"


class Unlabelled(Dataset[object]):
    """Base class of data sets that need statistics from the checkpoint of a run."""

    def fit(self) -> Fitted:
        """Raise ConfigError, because the statistics must be read from a checkpoint."""
        raise data_error("test", got="rows without targets, and no checkpoint", expected="the checkpoint of a run")


class UnlabelledTable(Unlabelled):
    """Data set of the rows of a table without targets, for a run on a Csv data set.

    Only the columns that are inputs of the run are read.

    Args:
        path: A .csv, .parquet, .jsonl or .npz file with named columns.
        options: The options of the run's Csv data set, for the names in OPTIONS. Missing options have their default.

    Attributes:
        table: The rows. `prepare` sets this attribute.

    Raises:
        ConfigError: The file cannot be read.
    """

    OPTIONS = (*DIALECT, "missing_values", *ENCODING)
    table: Table

    def __init__(self, *, path: str, options: Options = NONE) -> None:
        self.source = open_source(Path(path), Dialect.of(options), missing_values=options.get("missing_values"))
        self.encoding = {name: options[name] for name in ENCODING if name in options}

    def prepare(self, fitted: Fitted) -> Tensors:
        """Return a data set of the encoded rows in memory.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: A column of the training split does not exist, or a value does not match its column.
        """
        self.table = trained_table(self.source, fitted_entry(fitted, FITTED, part=self), **self.encoding)
        return self.table.prepare(fitted)

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> list[str]:
        """Return a note of one line for each column with words that are not in the training split."""
        return self.table.notes_in(fitted, stage="the input")


def trained_table(
    source: Source,
    statistics: Statistics,
    *,
    dates: Sequence[Name] | Mapping[str, str | None] = (),
    impute: Impute | None = None,
    encoding: Encoding = "one_hot",
    standardise: bool = True,
) -> Table:
    """Return a table without targets that has the same columns as the training split.

    Args:
        source: The source of the columns.
        statistics: The statistics of the training split; see Table.fit.
        dates: The columns of dates, in addition to the columns of dates in the training split; see Csv.
        impute: See Table.
        encoding: See Table.
        standardise: See Table.

    Raises:
        ConfigError: A column of the training split does not exist, or a value does not match its column.
    """
    numbers, words = list(statistics["numbers"]), list(statistics.get("words", ()))
    refuse_unknown_columns(source.file, source.names, {"path": [*numbers, *words]})
    place = {name: source.names.index(name) for name in (*numbers, *words)}
    forms = {**statistics.get("dates", {}), **date_forms(dates)}
    fix = "Fill in the value, because the run did not impute missing values (data.dataset.impute=null)"
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
        # The check uses encoded numbers in float64, because a number above the range of float32 may be in the range
        # after standardization.
        encoded = table.encode({FITTED: statistics})[INPUT][:, : len(numbers)]
        refuse_overflow(encoded, source, numbers, found.numbers)
    return table


class UnlabelledSeries(Unlabelled):
    """Data set of windows of a time series without targets, for a run on a Windows data set.

    A sample is a window, float32 `[T, C]`, standardized with the statistics of the training split.

    Args:
        path: A .csv, .parquet, .jsonl, .npz or .npy file with rows in the order of time.
        options: The options of the run's Windows data set, for the names in OPTIONS. Missing options have their
            default.

    Raises:
        ConfigError: The file cannot be read.
    """

    OPTIONS = (*DIALECT, "length", "stride", "columns", "standardise")

    def __init__(self, *, path: str, options: Options = NONE) -> None:
        self.source = open_source(Path(path), Dialect.of(options))
        given = {"length": 24, "stride": 1, "columns": None, "standardise": True, **options}
        self.length, self.stride, self.columns, self.standardise = (given[name] for name in self.OPTIONS[-4:])

    def prepare(self, fitted: Fitted) -> Tensors:
        """Return a data set of the standardized windows in memory.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: A column of the training split does not exist, or the file has fewer rows than a window.
        """
        statistics, source = fitted_entry(fitted, WINDOWS, part=self), self.source
        order: list[str] = statistics["columns"]
        names = order if self.columns is None else list(map(str, self.columns))
        refuse_unknown_columns(source.file, source.names, {"path": names})
        values = series_of(source, names)
        rows, places = torch.from_numpy(values), [order.index(name) for name in names]
        if self.standardise:
            rows = (rows - statistics["means"][places]) / statistics["deviations"][places]
        refuse_overflow(rows, source, names, values)
        if len(rows) < self.length:
            got = f"{source.file} with {len(rows)} rows"
            raise data_error("dataset.path", got=got, expected=f"at least {self.length} rows, the length of a window")
        windows = rows.unfold(0, self.length, self.stride)
        return Tensors(entries={INPUT: windows.movedim(-1, 1).float().contiguous()})


class UnlabelledImages(Dataset[Tensor]):
    """Data set of pictures without targets, for a run on an Images data set.

    A sample is a picture, float32 `[C, H, W]`, converted with the options of the run.

    Args:
        path: A picture, a folder, or a CSV file. All pictures in a folder and its subfolders are read, sorted by path.
            A CSV file has a column of paths, which are relative to the folder of the CSV file.
        options: The options of the run's Images data set, for the names in OPTIONS. Missing options have their default.

    Raises:
        ConfigError: The path contains no picture.
    """

    OPTIONS = ("picture", *PICTURE)

    def __init__(self, *, path: str, options: Options = NONE) -> None:
        self.form = PictureForm.of(options)
        self.files = pictures_at(Path(path), options)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.form.read(self.files[index], named=str(self.files[index]))


class UnlabelledRecords(Dataset[object]):
    """Data set of records without targets, for a run on a Shards data set.

    Args:
        path: A file of records; see Shards for the formats.
        options: The options of the run's Shards data set, for the names in OPTIONS. Missing options have their default.
            The columns in `target` are not read.

    Raises:
        ConfigError: The file or a column does not exist, or the first record is not a valid sample.
    """

    OPTIONS = ("inputs", "target", "dtypes", "delimiter", "scale", *PICTURE)

    def __init__(self, *, path: str, options: Options = NONE) -> None:
        defaults: dict[str, Any] = {**dict.fromkeys(self.OPTIONS), "delimiter": ",", "scale": 1.0, "target": ()}
        inputs, target, dtypes, delimiter, scale = ({**defaults, **options}[name] for name in self.OPTIONS[:5])
        self.file = open_shard(Path(path), delimiter=delimiter)
        picture = PictureForm.of(options)
        fields = Fields(inputs=inputs, target=None, dtypes=dtypes, scale=scale, picture=picture)
        answers = as_tuple(target or ())
        try:
            require_sample(len(self._records), path)
            first = self._records[0]
            names = [name for name in self.file.names_of(first) if name not in answers]
            if inputs is None:
                _require_header(self.file.file, names)
            columns = first.columns(fields.columns_to_read(names, where=path))
            self.fields = fields.of_record(columns, where=str(first))
        except SampleError as error:
            raise ConfigError([error.error]) from error

    @cached_property
    def _records(self) -> list[Record]:
        return list(self.file.records())

    def __getstate__(self) -> dict[str, object]:
        # Records may refer to open files, which cannot be pickled. A worker opens the file itself.
        return {name: value for name, value in vars(self).items() if name != "_records"}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> object:
        record = self._records[index]
        sample = self.fields.sample(record.columns(self.fields.columns), where=str(record))
        if not all(value.isfinite().all() for value in tensors_in(sample)):
            raise sample_error("dataset.path", got=f"a number in {record} that is not finite in float32", expected=HELD)
        return sample


class UnlabelledArrays(Tensors):
    """Data set of arrays `[N, ...]` with the names of the network's inputs.

    The arrays must be in the form that the run's data set returns before its transforms. If there are no transforms,
    the arrays are converted to the dtypes of the network's inputs. If there are transforms, floating numbers and uint8
    become float32, and other integers become int64.

    Args:
        path: An .npz or .npy file of arrays, or a .jsonl file of objects with a list for each input.
        options: The option `inputs` is the shape and dtype of each network input, such as
            {input: {shape: [1, 8, 8], dtype: float32}}. The option `is_final` is true if there are no transforms, so
            that the arrays must have these shapes; default: true. The option `scale` is a factor for floating numbers
            and uint8; default: 1.

    Raises:
        ConfigError: The file cannot be read, or the names or shapes of the arrays are wrong.
    """

    OPTIONS = ("inputs", "is_final", "scale")

    def __init__(self, *, path: str, options: Options) -> None:
        given = {"is_final": True, "scale": 1.0, **options}
        file, specs, is_final, scale = Path(path), tensor_specs(given["inputs"]), given["is_final"], given["scale"]
        only = next(iter(specs)) if len(specs) == 1 else None
        columns = read_columns(file)
        columns = {only: next(iter(columns.values()))} if only and len(columns) == 1 else columns
        if missing := [name for name in specs if name not in columns]:
            got = f"{path} with {', '.join(columns)}, but without {', '.join(missing)}"
            expected = f"an array [N, ...] for each input of the network: {', '.join(specs)}"
            raise data_error("dataset.path", got=got, expected=expected)
        entries = {
            name: _tensor(columns[name], spec, named=f"{name} of {path}", is_final=is_final, scale=scale)
            for name, spec in specs.items()
        }
        super().__init__(entries=entries)


def refuse_overflow(encoded: Tensor, source: Source, names: Sequence[str], values: np.ndarray) -> None:
    """Raise ConfigError if an encoded value is outside the range of float32.

    Args:
        encoded: The encoded values of C columns, float64 `[N, C]`.
        source: The source of the columns, for the message.
        names: The names of the columns.
        values: The values before their encoding, `[N, C]`, for the message.
    """
    wrong = (~encoded.float().isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise source.value_error(row, source.names.index(names[column]), f"{values[row, column]:g}", HELD)


def pictures_at(place: Path, options: Options) -> list[Path]:
    """Return the paths of the pictures that a path contains; see UnlabelledImages.

    Args:
        place: A picture, a folder, or a CSV file with a column of paths.
        options: The option `picture` is the name of the column of paths in a CSV file; default: `path`.

    Raises:
        ConfigError: The path contains no picture.
    """
    if place.suffix.lower() == ".csv":
        given = {"picture": "path", **options}
        source = CsvSource(place)
        return [place.parent / str(text) for text in source.texts(source.column(given["picture"], key="dataset.path"))]
    below = pictures_below(place) if place.is_dir() else ()
    found = [place] if place.is_file() else sorted(map(Path, below))
    if not found:
        got = f"{place} without a picture"
        raise data_error("dataset.path", got=got, expected=f"a file that ends in {', '.join(ENDINGS)}")
    return found


def _require_header(file: Path, names: Sequence[str]) -> None:
    """Raise ConfigError if a .csv file has no header, because its first row would be read as column names.

    Args:
        file: The file.
        names: The texts in the first line of the file. The file has no header if all of them are numbers.
    """
    are_numbers = file.suffix == ".csv" and all(finite_number(name) is not None for name in names)
    if are_numbers and list(names) != [str(number) for number in range(len(names))]:
        fix = "Add a first line with the names of the columns"
        raise data_error("dataset.path", got=f"{file}, whose first line holds numbers", expected="a header", fix=fix)


def _tensor(values: object, spec: TensorSpec, *, named: str, is_final: bool, scale: float) -> Tensor:
    try:
        array = np.asarray(values)
    except ValueError as error:
        got = f"{named}, which contains lists of different lengths"
        raise data_error("dataset.path", got=got, expected="samples of one shape, [N, ...]") from error
    if array.dtype.kind not in "fiub":
        raise data_error("dataset.path", got=f"{named}, which is not an array of numbers", expected="numbers [N, ...]")
    is_scaled = array.dtype.kind == "f" or array.dtype == np.uint8
    dtype = getattr(torch, spec.dtype) if is_final else torch.float32 if is_scaled else torch.int64
    shape = list(spec.shape)
    fits = array.ndim == len(shape) + 1 and all(
        size in (None, length) for size, length in zip(shape, array.shape[1:], strict=True)
    )
    if is_final and not fits:
        raise data_error("dataset.path", got=f"{named} of shape {list(array.shape)}", expected=f"[N, *{shape}]")
    given = torch.from_numpy(np.array(array.astype(np.int64) if array.dtype.kind == "u" else array, order="C"))
    tensor = given.to(dtype)
    tensor = tensor * scale if is_scaled and scale != 1.0 else tensor
    wrong = ~tensor.isfinite()
    if not dtype.is_floating_point and dtype != torch.bool:
        wrong |= tensor != given
    if wrong.any():
        sample, *entry = wrong.nonzero()[0].tolist()
        got = f"{given[(sample, *entry)]:g} in sample {sample}{f', entry {entry}' if entry else ''} of {named}"
        expected = HELD if dtype == torch.float32 else f"a number that {spec.dtype} can represent"
        raise data_error("dataset.path", got=got, expected=expected)
    return tensor
