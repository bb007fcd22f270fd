"""Windows of time series. A sample is a window of rows, and the target is the rows that follow it."""

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
    """A time series from a file, cut into windows.

    A sample is (input, target). The input is T rows, float32 `[T, C]`. The target is the target column in the next
    rows, float32 `[horizon]`, or `[horizon, K]` if `targets` is a list. The splits are consecutive in time. Columns
    without a name, such as an index that pandas wrote, are left out.

    Args:
        path: A .csv, .parquet, .jsonl, .npz or .npy file, `[N]` or `[N, C]`. The path is relative to the current folder
            or to `directory`.
        targets: The columns to predict, one or a list, by name, or by number from 0 if the file has no header.
        directory: The folder that is searched if the path does not exist in the current folder.
        length: The number of rows in an input, T.
        horizon: The number of rows to predict.
        stride: The number of rows from the start of one window to the start of the next.
        columns: The input columns, in order; None for all columns. A target need not be an input.
        time: A column of dates or numbers that must increase from row to row. It is not an input.
        delimiter: See Csv.
        decimal: See Csv.
        header: See Csv.
        standardise: Whether to scale each column, including targets, to mean 0 and standard deviation 1 in the training
            split.

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
        """Return the number of windows."""
        return max(0, (len(self.values) - self.length - self.horizon) // self.stride + 1)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Windows]:
        """Return contiguous splits in the order of time. No window contains rows of two splits.

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
        """Return the mean and the standard deviation of each column in these rows."""
        means, deviations = moments(self.values)
        found = {"columns": list(self.columns), "means": means, "deviations": deviations}
        if self.standardise:
            places = self._places(self.targets)
            found[SCALES] = {TARGET: [part[places[0] if self.is_one else places] for part in (means, deviations)]}
        return {FITTED: found}

    def prepare(self, fitted: Fitted) -> WindowedRows:
        """Return the windows, standardized with the statistics of the training split.

        Raises:
            ConfigError: There are fewer rows than a window needs, or the columns differ from those of the training
                split.
        """
        statistics = fitted_entry(fitted, FITTED, part=self)
        if list(self.columns) != statistics["columns"]:
            got, theirs = f"a split with the columns {list(self.columns)}", statistics["columns"]
            expected, fix = f"the columns of the training split, {theirs}", f'Set "data.dataset.columns={theirs}"'
            raise data_error("", got=got, expected=expected, fix=fix)
        if not len(self):
            got = f"{self.length} with a horizon of {self.horizon}, although a split has only {len(self.values)} rows"
            expected = f"a sum of at most {len(self.values)}"
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
    """Windows of rows `[N, C]`, and of the targets that follow them, `[N]` or `[N, K]`; see Windows."""

    def __init__(
        self, *, rows: Tensor, targets: Tensor, length: int, horizon: int, stride: int, value_names: ValueNames
    ) -> None:
        self.value_names = value_names
        # unfold returns views in which the rows of a window are the last axis.
        self._rows = rows[: len(rows) - horizon].unfold(0, length, stride)
        self._targets = targets[length:].unfold(0, horizon, stride)

    def __len__(self) -> int:
        return len(self._targets)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows at indices, and their targets."""
        rows, targets = (part.index_select(0, indices) for part in (self._rows, self._targets))
        return rows.transpose(1, 2).contiguous(), targets.transpose(1, targets.dim() - 1).contiguous()


def series_of(source: Source, names: Sequence[str], *, text_fix: str = "") -> np.ndarray:
    """Return columns of numbers, float64 `[N, C]`.

    Args:
        source: The file.
        names: The columns.
        text_fix: The fix for a text that is not a number.

    Raises:
        ConfigError: A value is missing or not a number.
    """
    places = [source.column(name, key="dataset.path") for name in names]
    fixes, text_fixes = (dict.fromkeys(places, fix) for fix in ("Fill it in", text_fix))
    return source.read(numbers=places, fixes=fixes, text_fixes=text_fixes).numbers


def _require_order(source: Source, name: str) -> None:
    column = source.column(name, key="dataset.time")
    first = next(filter(None, source.texts(column)), "")
    days: Days = {column: None} if finite_number(first) is None else {}
    instants = source.read(numbers=[column], days=days, fixes={column: "Fill it in"}).numbers
    wrong = np.flatnonzero(np.diff(instants[:, 0]) <= 0)
    if wrong.size:
        raise data_error(
            "dataset.time",
            got=f"{name} of {source.file}, which does not increase from row {wrong[0]} to row {wrong[0] + 1}",
            expected="rows in the order of time, each later than the one before",
            fix="Sort the file, or leave data.dataset.time out",
        )
