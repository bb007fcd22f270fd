"""Time series: windows of rows, and the rows behind them to predict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Len
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.arrays import map_file
from exp.data.cells import DecimalSign
from exp.data.columns import Name, row_numbers
from exp.data.csv_sheet import Dialect, read_sheet
from exp.data.dataset_files import data_file
from exp.data.entries import TARGET
from exp.data.faults import data_fault, fitted_entry, refuse_unknown_columns
from exp.data.in_memory import Entries, Fitted
from exp.data.splits import lengths
from exp.data.tables import moments
from exp.data.value_names import SCALES, ValueNames
from exp.errors import ConfigError, Fault
from exp.shared_types import Stage

FITTED = "windows"


class Series(Dataset[object]):
    """Rows in the order of time, float64 `[N, C]`, that are not standardised yet. See Windows."""

    notes: Sequence[str] = ()
    _plain: WindowedRows | None = None

    def __init__(
        self,
        *,
        values: np.ndarray,
        columns: Sequence[str],
        inputs: Sequence[str],
        targets: Sequence[str] | str,
        length: int,
        horizon: int,
        stride: int,
        standardise: bool,
    ) -> None:
        self.values, self.columns, self.inputs, self.targets = values, tuple(columns), tuple(inputs), targets
        self.length, self.horizon, self.stride, self.standardise = length, horizon, stride, standardise

    def __len__(self) -> int:
        """The number of windows."""
        return max(0, (len(self.values) - self.length - self.horizon) // self.stride + 1)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Series]:
        """Splits into contiguous parts in the order of time, so that no window reaches into another part.

        sizes: fractions of the rows, or whole numbers of windows.
        """
        whole = self.length + self.horizon - self.stride
        counts = lengths(
            {name: size * self.stride + whole if isinstance(size, int) else size for name, size in sizes.items()},
            len(self.values),
        )
        parts: dict[Stage, Series] = {}
        start = 0
        for name, count in counts.items():
            parts[name] = self._of(self.values[start : start + count])
            start += count
        return parts

    def fit(self) -> Fitted:
        """Mean and deviation of each column in this part's rows."""
        means, deviations = moments(self.values)
        found = {"columns": list(self.columns), "means": means, "deviations": deviations}
        if self.standardise:
            is_one = isinstance(self.targets, str)
            places = _places([self.targets] if isinstance(self.targets, str) else self.targets, self.columns)
            scale = [means[places], deviations[places]]
            found[SCALES] = {TARGET: [part[0] for part in scale] if is_one else scale}
        return {FITTED: found}

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> Sequence[str]:
        """Return what to say of the file, a line each."""
        return self.notes

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return windows that are not standardised."""
        if self._plain is None:
            part = copy.copy(self)
            part.standardise = False
            self._plain = part.prepare(fitted)
        return dict(zip(("input", TARGET), self._plain.gather(indices), strict=True))

    def prepare(self, fitted: Fitted) -> WindowedRows:
        """Standardises the rows by the training part.

        Raises: ConfigError where this part is shorter than a window, or has other columns.
        """
        told = fitted_entry(fitted, FITTED, part=self)
        if list(self.columns) != told["columns"]:
            got, theirs = f"a part with the columns {list(self.columns)}", told["columns"]
            cure = f'"data.dataset.columns={theirs}" reads them, nameless ones, too'
            raise data_fault("", got=got, expected=f"training's, {theirs}", cure=cure)
        if not len(self):
            raise data_fault(
                "dataset.length",
                got=f"{self.length} with a horizon of {self.horizon}, and a part of {len(self.values)} rows",
                expected=f"{len(self.values)} at most together",
                cure="Shorten the window, or make the part larger in data.parts",
            )
        rows = torch.from_numpy(self.values)
        if self.standardise:
            rows = (rows - told["means"]) / told["deviations"]
        targets = rows[:, _places([self.targets] if isinstance(self.targets, str) else self.targets, self.columns)]
        return WindowedRows(
            rows=rows[:, _places(self.inputs, self.columns)].float(),
            targets=(targets[:, 0] if isinstance(self.targets, str) else targets).float(),
            length=self.length,
            horizon=self.horizon,
            stride=self.stride,
            value_names=ValueNames(
                columns={"input": self.inputs} | ({} if isinstance(self.targets, str) else {TARGET: self.targets})
            ),
        )

    def _of(self, values: np.ndarray) -> Series:
        part = copy.copy(self)
        part.values = values
        return part


class Windows(Series):
    """A time series from a CSV file or a .npy array, a row a time step, cut into windows.

    A sample is (input, target): input float32 `[T, C]`, T rows; target float32 `[horizon]`, the target column in the
    rows behind them, or `[horizon, K]` for a list of columns. The parts follow each other in time.

    path: a file that ends in .npy, `[N]` or `[N, C]`, else CSV. Relative to the current folder, or else to directory.
    length: rows of an input, T. horizon: rows to predict. stride: rows from the beginning of one window to the next.
    targets: the column to predict, or several, by name, or by number from 0 where columns have no names.
    columns: those that the network sees, in order; None for all. A target need not be among them.
    time: a column of dates or numbers, which must grow from row to row; it is left out of the input.
    delimiter, decimal, header: of a CSV file; see Csv.
    standardise: whether each column has the mean 0 and the deviation 1 in the training part, targets too.

    Raises: ConfigError for a file or a column that is not there, a value that is no finite number, and rows that are
        not in the order of time.
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
        moment = [] if time is None else [str(time)]
        dialect = Dialect(delimiter=delimiter, decimal=decimal, header=header)
        is_array = file.suffix == ".npy"
        wanted = [targets] if isinstance(targets, str | int) else list(targets)
        named = [*moment, *map(str, [*wanted, *(columns or ())])]
        names, read, notes = _npy_columns(file) if is_array else _csv_columns(file, dialect, *moment, named=named)
        if not wanted:
            raise data_fault("dataset.targets", got="no column", expected="one to predict, or several")
        inputs = [name for name in names if name not in moment] if columns is None else [str(name) for name in columns]
        refuse_unknown_columns(file, names, {"columns": inputs, "targets": wanted, "time": moment})
        if moment:
            _require_order(file, moment[0], read)
        kept = list(dict.fromkeys([*inputs, *map(str, wanted)]))
        super().__init__(
            values=_values(kept, read),
            columns=kept,
            inputs=inputs,
            targets=str(targets) if isinstance(targets, str | int) else [str(name) for name in wanted],
            length=length,
            horizon=horizon,
            stride=stride,
            standardise=standardise,
        )
        self.notes = notes


class WindowedRows(Dataset[Entries]):
    """Windows of rows `[N, C]`, and of the targets behind them, `[N]` or `[N, K]`. See Windows."""

    def __init__(
        self,
        *,
        rows: Tensor,
        targets: Tensor,
        length: int,
        horizon: int,
        stride: int,
        value_names: ValueNames | None = None,
    ) -> None:
        self.value_names = value_names
        # Views, in which the rows of a window are the last axis.
        self._rows = rows[: len(rows) - horizon].unfold(0, length, stride)
        self._targets = targets[length:].unfold(0, horizon, stride)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Entries:
        rows, targets = self.gather(torch.tensor([index]))
        return rows[0], targets[0]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows, targets = (part.index_select(0, indices) for part in (self._rows, self._targets))
        return rows.transpose(1, 2).contiguous(), targets.transpose(1, targets.dim() - 1).contiguous()


def _csv_columns(
    file: Path, dialect: Dialect, time: str | None = None, *, named: Collection[str]
) -> tuple[Sequence[str], Callable[[str], np.ndarray], Sequence[str]]:
    """Return the names of a file's columns, the function that reads one, and notes.

    time: a column that may hold dates. named: columns that the config names.
    """
    sheet = read_sheet(file, dialect)
    found = sheet.read(numbers=range(len(sheet.names)))

    def read(name: str) -> np.ndarray:
        column = sheet.column(name, key="dataset.columns")
        values = found.numbers[:, column]
        if column in found.faults:
            if name != time:
                raise found.faults[column]
            values = sheet.numbers(column, {column: None})
        sheet.complete(column, values, cure="Fill it in before, as only you know how the series goes there")
        return values

    index = row_numbers(sheet, named=[column for column, name in enumerate(sheet.names) if name in named])
    names = [name for column, name in enumerate(sheet.names) if column not in index]
    return names, read, [sheet.left_out(column) for column in index]


def _npy_columns(file: Path) -> tuple[Sequence[str], Callable[[str], np.ndarray], Sequence[str]]:
    held = map_file(file)
    table = np.asarray(held, dtype=np.float64).reshape(len(held), -1) if held.ndim in (1, 2) else None
    if table is None:
        raise data_fault("dataset.path", got=f"{file} of shape {list(held.shape)}", expected="rows, [N] or [N, C]")

    def read(name: str) -> np.ndarray:
        values: np.ndarray = table[:, int(name)]
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            got = f"{values[bad[0]]} in row {bad[0]} of {file}, column {name}"
            raise data_fault("dataset.path", got=got, expected="a finite number")
        return values

    return [str(number) for number in range(table.shape[1])], read, []


def _require_order(file: Path, name: str, read: Callable[[str], np.ndarray]) -> None:
    moments = read(name)
    wrong = np.flatnonzero(np.diff(moments) <= 0)
    if wrong.size:
        raise data_fault(
            "dataset.time",
            got=f"{name} of {file}, which does not grow from row {wrong[0]} to row {wrong[0] + 1}",
            expected="rows in the order of time, each later than the one before",
            cure="Sort the file, or leave data.dataset.time out where rows are in order without it",
        )


def _values(names: Sequence[str], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Columns, float64 `[N, C]`; the faults of all of them together."""
    found: list[np.ndarray] = []
    faults: list[Fault] = []
    for name in names:
        try:
            found.append(read(name))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return np.stack(found, 1)


def _places(names: Sequence[str], columns: Sequence[str]) -> list[int]:
    return [columns.index(name) for name in names]
