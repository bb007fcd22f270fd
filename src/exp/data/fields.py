"""The inputs and the target of a sample, made of the columns of a record."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from exp.data.cells import number_in
from exp.data.csv_source import MISSING_VALUES
from exp.data.data_errors import SampleError, data_error, name_fix, refuse_unknown_columns
from exp.data.entries import TARGET
from exp.data.pictures import PictureForm
from exp.data.source import NAMELESS, Task
from exp.data.value_names import ValueNames
from exp.errors import ErrorDetails
from exp.spelling import among, did_you_mean, show

# A column, several that are one row, or either by the name of the input that they become.
Names: TypeAlias = str | Sequence[str]
Inputs: TypeAlias = Names | Mapping[str, Names]
NumberDtype = Literal["float32", "float64", "int64", "bool"]
# The dtypes of networks by NumPy's kind; whole numbers other than bytes are int64.
DTYPES = {"f": torch.float32, "c": torch.complex64, "b": torch.bool, "i": torch.int64, "u": torch.int64}
NUMBERS_FIX = (
    "Fill in a missing value, or leave the record out; leave a column of texts out of data.dataset.inputs, or write "
    "its numbers there: data=tokens turns texts into tokens, and data=csv encodes words"
)
CLASS_FIX = "Name the classes in their order, data.dataset.classes=[...], or write data.dataset.task=regression"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One input.

    Args:
        columns: the columns of a record.
        is_row: whether they are single numbers, a row `[F]`.
        dtype: of the tensor.
    """

    columns: tuple[str, ...]
    is_row: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Row:
    """A record with the name of its place.

    Args:
        record: the values by column.
        place: the record in words.
    """

    record: Mapping[str, object]
    place: str

    def value(self, column: str, key: str) -> object:
        """Return the value of a column. key: of the config that names the column, below `data.dataset.`.

        Raises: SampleError for a column that the record does not have, and for a missing value.
        """
        if column not in self.record:
            fix = name_fix(column, list(self.record))
            raise record_error(key, f"{column}, which {self.place} does not have", "a column of every record", fix)
        value = self.record[column]
        # Not equal to itself: nan, as pandas and NumPy write a missing number.
        is_nan = is_single(value) and value != value
        if value is None or is_nan or (isinstance(value, str) and not value.strip()):
            raise self.no_number(column, key)
        return value

    def number(self, column: str, key: str) -> int | float:
        """Return the number of a column. Raises: SampleError as value, and for another value."""
        value = self.value(column, key)
        is_missing = isinstance(value, str) and value.strip() in MISSING_VALUES
        number = None if is_missing else plain_number(value)
        if number is None or math.isnan(number):
            raise self.no_number(column, key)
        return number

    def array(self, column: str, key: str) -> np.ndarray:
        """Return the numbers of a column. Raises: SampleError as value, and for lists of unequal length."""
        try:
            array = np.asarray(self.value(column, key))
        except ValueError:
            raise self.no_number(column, key) from None
        if array.dtype.kind not in DTYPES:
            raise self.no_number(column, key)
        return array

    def no_number(self, column: str, key: str) -> SampleError:
        """Return the error of a value that is missing, or no number."""
        value = self.record[column]
        got = show(value) if value is None or is_single(value) else f"a {type(value).__name__}"
        expected = "numbers, or lists of them of one length"
        return record_error(key, f"{got} in {column} of {self.place}", expected, NUMBERS_FIX)


class Fields:
    """Reads samples out of records: mappings of columns to numbers, texts, lists, arrays and bytes of pictures.

    A sample is (input, target) with one input, else a mapping of the inputs' names and `target`. Single numbers become
    a row float32 `[F]`. Arrays keep their shape: floating numbers and bytes become float32, other whole numbers int64,
    booleans stay. Pictures become float32 `[C, H, W]`.

    Args:
        inputs: a column; several, which are one `input` if they hold single numbers, and otherwise inputs by their
            names; or a mapping of the inputs' names to columns. None for all with a name except the target.
        target: the column to predict; several are a row of numbers `[K]`; None if there is nothing to predict.
        task: "classification", with targets that are class numbers or names of `classes`, or "regression", float32
            `[K]`.
        classes: the names of the classes, in the order of their numbers; None if targets are numbers.
        dtypes: of inputs by name, for what the first record does not show, such as whole numbers that become float32.
        scale: factor on bytes, 0.00392 for pixels between 0 and 1.
        picture: the form of pictures.

    Raises:
        ConfigError: for a class that is there twice, and for options that do not fit the task.
    """

    def __init__(
        self,
        *,
        inputs: Inputs | None,
        target: Names | None,
        task: Task = "regression",
        classes: Sequence[str] | None = None,
        dtypes: Mapping[str, NumberDtype] | None,
        scale: float,
        picture: PictureForm,
    ) -> None:
        self.inputs, self.task, self.scale, self.picture = inputs, task, scale, picture
        self.targets = () if target is None else listed(target)
        self.classes = None if classes is None else tuple(map(str, classes))
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in (dtypes or {}).items()}
        self.fields: dict[str, Field] = {}
        if self.classes is not None and (task == "regression" or len({*self.classes}) < len(self.classes)):
            got, expected = f"[{', '.join(self.classes)}] with task={task}", "different names, of a classification"
            raise data_error("dataset.classes", got=got, expected=expected)
        if task == "classification" and len(self.targets) > 1:
            got = f"{len(self.targets)} columns in a classification"
            fix = "Write data.dataset.task=regression for columns of numbers to predict"
            raise data_error("dataset.target", got=got, expected="one column of classes", fix=fix)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(dict.fromkeys([name for one in self.fields.values() for name in one.columns] + [*self.targets]))

    @property
    def value_names(self) -> ValueNames:
        """The columns of rows, and the classes."""
        columns = {name: one.columns for name, one in self.fields.items() if one.is_row}
        return ValueNames(
            columns={**columns, TARGET: self.targets} if len(self.targets) > 1 else columns,
            classes={} if self.classes is None else {TARGET: self.classes},
        )

    def wanted(self, names: Sequence[str], *, where: str) -> tuple[str, ...]:
        """Return the columns to read. names: the columns that there are. where: their place in words.

        Raises: ConfigError for a column that is not there.
        """
        if self.inputs is None:
            others = [name for name in names if name not in self.targets and not NAMELESS.fullmatch(name)]
            # json.label is a part of json.
            found = [name for name in others if name.partition(".")[0] not in {*names} - {name}]
        else:
            given = self.inputs.values() if isinstance(self.inputs, Mapping) else [self.inputs]
            found = [name for columns in given for name in listed(columns)]
        if not found:
            raise data_error("dataset.inputs", got="no column", expected=f"a column of {where} that is no target")
        refuse_unknown_columns(where, names, {"inputs": found, "target": self.targets})
        return tuple(dict.fromkeys([*found, *self.targets]))

    def settled(self, first: Mapping[str, object], *, where: str) -> Self:
        """Return the fields with the form of each input, as the first record shows it. first: the columns to read.

        Raises: ConfigError for dtypes of an unknown input; SampleError for a value that is no number.
        """
        made = copy.copy(self)
        names = [name for name in first if name not in self.targets]
        if isinstance(self.inputs, Mapping):
            grouped = {name: listed(columns) for name, columns in self.inputs.items()}
        else:
            names = names if self.inputs is None else list(listed(self.inputs))
            is_one = len(names) == 1 or all(is_single(first[name]) for name in names)
            grouped = {"input": tuple(names)} if is_one else {name: (name,) for name in names}
        for name in self.dtypes:
            if name not in grouped:
                fix = name_fix(name, list(grouped))
                raise data_error(f"dataset.dtypes.{name}", got=name, expected="the name of an input", fix=fix)
        made.fields = {name: self._field(name, columns, Row(first, where)) for name, columns in grouped.items()}
        return made

    def sample(self, record: Mapping[str, object], *, where: str) -> object:
        """Return the sample of a record. where: the record in words.

        Raises: SampleError for a column that is not there, and for a value that is missing or does not fit its column.
        """
        row = Row(record, where)
        entries = {name: self._input(name, field, row) for name, field in self.fields.items()}
        if self.targets:
            entries[TARGET] = self._target(row)
        names = list(entries)
        if names == ["input", TARGET]:
            return entries["input"], entries[TARGET]
        return entries["input"] if names == ["input"] else entries

    def _field(self, name: str, columns: tuple[str, ...], first: Row) -> Field:
        arrays = [column for column in columns if not is_single(first.record[column])]
        if arrays and len(columns) > 1:
            got = f"{len(columns)} columns, of which {arrays[0]} holds arrays"
            raise data_error(f"dataset.inputs.{name}", got=got, expected="columns of single numbers, or one of arrays")
        dtype = self.dtypes.get(name, torch.float32)
        if arrays and name not in self.dtypes and picture_of(first.record[columns[0]]) is None:
            array = first.array(columns[0], "inputs")
            dtype = torch.float32 if array.dtype == np.uint8 else DTYPES[array.dtype.kind]
        return Field(columns=columns, is_row=not arrays, dtype=dtype)

    def _input(self, name: str, field: Field, row: Row) -> Tensor:
        if field.is_row:
            return self._cast(name, np.array([row.number(one, "inputs") for one in field.columns]), field, row)
        column = field.columns[0]
        found = picture_of(row.value(column, "inputs"))
        if found is None:
            return self._cast(name, row.array(column, "inputs"), field, row)
        named = f"{column} of {row.place}"
        return self.picture.read(found, named=named, key="data.dataset.inputs").to(field.dtype)

    def _cast(self, name: str, values: np.ndarray, field: Field, row: Row) -> Tensor:
        tensor = torch.from_numpy(np.array(values, order="C"))
        found = tensor.to(field.dtype)
        is_whole = not (field.dtype.is_floating_point or field.dtype.is_complex)
        if (tensor.is_floating_point() or tensor.is_complex()) and is_whole and not (found == tensor).all():
            dtype = str(field.dtype).removeprefix("torch.")
            expected = "complex64" if tensor.is_complex() else "float32"
            raise record_error(f"dtypes.{name}", f"{dtype}, and numbers with a fraction in {row.place}", expected)
        return found * self.scale if values.dtype == np.uint8 and self.scale != 1.0 else found

    def _target(self, row: Row) -> Tensor:
        name = self.targets[0]
        value = row.value(name, "target")
        if self.task == "regression":
            if len(self.targets) > 1 or is_single(value):
                return torch.tensor([row.number(one, "target") for one in self.targets], dtype=torch.float32)
            return torch.from_numpy(np.array(row.array(name, "target"), dtype=np.float32))
        if not is_single(value):
            array = row.array(name, "target")
            if array.dtype.kind in "iub":
                return torch.from_numpy(array.astype(np.int64))
        elif self.classes is not None:
            label = str(value)
            if label in self.classes:
                return torch.tensor(self.classes.index(label))
            got, expected = (
                f"{row.place} of the class {label}",
                f"one of the classes {among(self.classes, word=label)}",
            )
            raise record_error("target", got, expected, did_you_mean(label, self.classes))
        else:
            number = plain_number(value)
            if number is not None and float(number).is_integer():
                return torch.tensor(int(number))
        raise record_error("target", f"{show(value)} in {name} of {row.place}", "the number of a class", CLASS_FIX)


def record_error(key: str, got: str, expected: str, fix: str | None = None) -> SampleError:
    """Return the error of a sample. key: of the config, below `data.dataset.`."""
    return SampleError(ErrorDetails(key=f"data.dataset.{key}", got=got, expected=expected, fix=fix))


def is_single(value: object) -> bool:
    """Return whether a value is one number or text, and no array, list or picture."""
    return isinstance(value, str | int | float | complex | np.generic) or (
        isinstance(value, np.ndarray) and not value.ndim
    )


def picture_of(value: object) -> Image | Path | io.BytesIO | None:
    """Return Pillow's picture, or where to read it: from bytes, or from a mapping of `bytes` and `path`."""
    if isinstance(value, Mapping) and {"bytes", "path"} >= set(value):
        held, path = value.get("bytes"), value.get("path")
        # Pillow takes a URL for the name of a file, which is not there.
        value = held if isinstance(held, bytes) else Path(path) if isinstance(path, str) else None
    if isinstance(value, bytes):
        return io.BytesIO(value)
    return value if isinstance(value, Image | Path) else None


def listed(columns: Names) -> tuple[str, ...]:
    """Return one column, or several, as a tuple."""
    return (columns,) if isinstance(columns, str) else tuple(columns)


def plain_number(value: object) -> int | float | None:
    """Return a number, or the number that a text is; None for any other value."""
    if isinstance(value, np.generic | np.ndarray) and not np.ndim(value):
        value = value.item()
    if isinstance(value, str):
        try:
            return number_in(value.strip())
        except ValueError:
            return None
    return value if isinstance(value, int | float) else None
