"""Data set of windows of a time series.

The input of a sample is a window of consecutive rows. The target is in the rows after the window.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Len
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.cells import DecimalSign, finite_number
from exp.data.column_source import open_source
from exp.data.csv_source import Dialect
from exp.data.data_errors import data_error, fitted_entry, refuse_unknown_columns
from exp.data.dataset_files import data_file
from exp.data.entries import SCALES, TARGET, ValueNames
from exp.data.in_memory import Fitted, Gathered
from exp.data.source import NAMELESS, Days, Name, Source
from exp.data.splits import contiguous_splits
from exp.data.tables import moments
from exp.shared_types import Stage

FITTED = "windows"
NO_NUMBER = "Set data.dataset.columns to the columns of numbers, and data.dataset.time to a column of dates"


class Windows(Dataset[object]):
    """Data set of windows of a time series in a file.

    The input is a window of T consecutive rows, float32 `[T, C]` for C columns. The target is the target column in the
    next `horizon` rows, float32 `[horizon]`. If `targets` is a list of K columns, the target is float32 `[horizon, K]`.
    The splits are consecutive in time. Columns without a name are left out, such as the index that pandas writes.

    Args:
        path: A .csv, .parquet, .jsonl, .npz or .npy file. The array in a .npy file is `[N]` or `[N, C]` for N rows. The
            path is relative to the current folder or to `directory`.
        targets: The column to predict, or a list of columns. Columns are given by name. If the file has no header, they
            are given by number, counted from 0.
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        length: The number of rows in an input, T. Default: 24.
        horizon: The number of rows to predict. Default: 1.
        stride: The number of rows between the starts of two consecutive windows. Default: 1.
        columns: The input columns in order. Default: all columns except `time`. A target need not be an input.
        time: A column of dates or numbers, which must increase from row to row. Default: None, which does not check the
            order. The column is not an input.
        delimiter: See Csv.
        decimal: See Csv.
        header: See Csv.
        standardise: Whether to scale each column, including targets, to mean 0 and standard deviation 1 in the training
            split. Default: True.

    Raises:
        ConfigError: The file or a column does not exist, a value is not a finite number, or the rows are not in the
            order of time.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledSeries"

    def __init__(
        self,
        *,
        path: str,
        targets: Name | Sequence[Name],
        directory: str = "data",
        length: Annotated[int, Ge(1)] = 24,
        horizon: Annotated[int, Ge(1)] = 1,
        stride: Annotated[int, Ge(1)] = 1,
        columns: Sequence[Name] | None = None,
        time: Name | None = None,
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        decimal: DecimalSign = ".",
        header: bool = True,
        standardise: bool = True,
    ) -> None:
        file = data_file(path, directory=directory)
        source = open_source(file, Dialect(delimiter=delimiter, decimal=decimal, header=header))
        self.is_one = isinstance(targets, str | int)
        self.targets = (str(targets),) if isinstance(targets, str | int) else tuple(map(str, targets))
        moment = [] if time is None else [str(time)]
        named = list(map(str, columns or ()))
        refuse_unknown_columns(file, source.names, {"columns": named, "targets": self.targets, "time": moment})
        if not self.targets:
            raise data_error("dataset.targets", got="no column", expected="one or several columns to predict")
        nameless = [name for name in source.names if name not in self.targets and NAMELESS.fullmatch(name)]
        others = [name for name in source.names if name not in (*moment, *nameless)]
        self.inputs = tuple(others if columns is None else named)
        if moment:
            _require_order(source, moment[0])
        self.columns = tuple(dict.fromkeys([*self.inputs, *self.targets]))
        self.values = series_of(source, self.columns, text_fix=NO_NUMBER)
        self.length, self.horizon, self.stride, self.standardise = length, horizon, stride, standardise

    def __len__(self) -> int:
        """Return the number of windows, which are the samples."""
        return max(0, (len(self.values) - self.length - self.horizon) // self.stride + 1)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Windows]:
        """Return consecutive rows as splits, by name. The rows of a window, including its targets, are in one split.

        Args:
            sizes: The size of each split: a fraction of the rows, or a whole number of windows.
        """
        whole = self.length + self.horizon - self.stride
        rows = {name: size * self.stride + whole if isinstance(size, int) else size for name, size in sizes.items()}
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous_splits(rows, len(self.values)).items():
            parts[name].values = self.values[place]
        return parts

    def fit(self) -> Fitted:
        """Return the statistics of this split: the names, means and standard deviations of the columns."""
        means, deviations = moments(self.values)
        found = {"columns": list(self.columns), "means": means, "deviations": deviations}
        if self.standardise:
            places = self._places(self.targets)
            found[SCALES] = {TARGET: [part[places[0] if self.is_one else places] for part in (means, deviations)]}
        return {FITTED: found}

    def prepare(self, fitted: Fitted) -> WindowedRows:
        """Return a data set of the windows. If `standardise` is True, they are standardized.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: The split has too few rows for one window, or its columns differ from the columns of the
                training split.
        """
        statistics = fitted_entry(fitted, FITTED, part=self)
        if list(self.columns) != statistics["columns"]:
            got, theirs = f"a split with the columns {list(self.columns)}", statistics["columns"]
            expected, fix = f"the columns of the training split, {theirs}", f'Set "data.dataset.columns={theirs}"'
            raise data_error("", got=got, expected=expected, fix=fix)
        if not len(self):
            got = f"{self.length} with a horizon of {self.horizon}, although a split has only {len(self.values)} rows"
            expected = f"a sum of length and horizon of at most {len(self.values)}"
            fix = "Shorten the window, or enlarge the split in data.parts"
            raise data_error("dataset.length", got=got, expected=expected, fix=fix)
        rows = torch.from_numpy(self.values)
        if self.standardise:
            rows = (rows - statistics["means"]) / statistics["deviations"]
        targets = rows[:, self._places(self.targets)].float()
        columns = {"input": self.inputs} if self.is_one else {"input": self.inputs, TARGET: self.targets}
        return WindowedRows(
            rows=rows[:, self._places(self.inputs)].float(),
            targets=targets[:, 0] if self.is_one else targets,
            length=self.length,
            horizon=self.horizon,
            stride=self.stride,
            value_names=ValueNames(columns=columns),
        )

    def _places(self, names: Sequence[str]) -> list[int]:
        return [self.columns.index(name) for name in names]


class WindowedRows(Gathered):
    """Data set of windows of consecutive rows, and of the targets after each window; see Windows.

    Args:
        rows: The input columns of all N rows, float32 `[N, C]`.
        targets: The target column of all rows, float32 `[N]`, or K target columns, float32 `[N, K]`.
        length: The number of rows in an input.
        horizon: The number of rows to predict.
        stride: The number of rows between the starts of two consecutive windows.
        value_names: The names of the columns, for display.
    """

    def __init__(
        self, *, rows: Tensor, targets: Tensor, length: int, horizon: int, stride: int, value_names: ValueNames
    ) -> None:
        self.value_names = value_names
        # unfold returns a view. Its last axis is the position of a row in the window.
        self._rows = rows[: len(rows) - horizon].unfold(0, length, stride)
        self._targets = targets[length:].unfold(0, horizon, stride)

    def __len__(self) -> int:
        return len(self._targets)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch of the windows at some indices, and of their targets."""
        rows, targets = (part.index_select(0, indices) for part in (self._rows, self._targets))
        return rows.transpose(1, 2).contiguous(), targets.transpose(1, targets.dim() - 1).contiguous()


def series_of(source: Source, names: Sequence[str], *, text_fix: str = "") -> np.ndarray:
    """Return some columns of numbers, float64 `[N, C]`.

    Args:
        source: The source of the columns.
        names: The names of the C columns.
        text_fix: The fix that is reported for a text that is not a number. Default: no fix.

    Raises:
        ConfigError: A value is missing or not a number.
    """
    places = [source.column(name, key="dataset.path") for name in names]
    fixes, text_fixes = (dict.fromkeys(places, fix) for fix in ("Fill in the missing value", text_fix))
    return source.read(numbers=places, fixes=fixes, text_fixes=text_fixes).numbers


def _require_order(source: Source, name: str) -> None:
    column = source.column(name, key="dataset.time")
    first = next(filter(None, source.texts(column)), "")
    days: Days = {column: None} if finite_number(first) is None else {}
    instants = source.read(numbers=[column], days=days, fixes={column: "Fill in the missing value"}).numbers
    wrong = np.flatnonzero(np.diff(instants[:, 0]) <= 0)
    if wrong.size:
        raise data_error(
            "dataset.time",
            got=f"{name} of {source.file}, which does not increase from row {wrong[0]} to row {wrong[0] + 1}",
            expected="rows in the order of time, each later than the one before",
            fix="Sort the file, or leave data.dataset.time out",
        )
