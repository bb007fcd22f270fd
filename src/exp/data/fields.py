"""Conversion of records to samples.

A record maps columns to values. Its columns become the inputs and the target of a sample.
"""

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
from exp.data.data_errors import SampleError, data_error, name_error, name_fix, refuse_unknown_columns, sample_error
from exp.data.entries import TARGET, ValueNames
from exp.data.pictures import PictureForm
from exp.data.source import NAMELESS, Task
from exp.spelling import among, did_you_mean, show

# A column, or several columns of numbers that are concatenated to a row.
Names: TypeAlias = str | Sequence[str]
Inputs: TypeAlias = Names | Mapping[str, Names]
NumberDtype = Literal["float32", "float64", "int64", "bool"]
# The torch dtype to which values are converted, by the kind of their NumPy dtype.
DTYPES = {"f": torch.float32, "c": torch.complex64, "b": torch.bool, "i": torch.int64, "u": torch.int64}
NUMBERS_FIX = (
    "Fill in a missing value, or remove the record. Leave a column of texts out of data.dataset.inputs. "
    "data=csv encodes words, and data=tokens encodes texts"
)
CLASS_FIX = "Set data.dataset.classes=[...] to the names of the classes, or set data.dataset.task=regression"


@dataclass(frozen=True, kw_only=True)
class Field:
    """Columns from which an input is made, and the dtype of the input.

    Args:
        columns: The names of the columns.
        is_row: Whether the columns are F scalars that are concatenated to a row `[F]`. If not, there is one column of
            arrays.
        dtype: The dtype of the input.
    """

    columns: tuple[str, ...]
    is_row: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Row:
    """Record with its position in the data.

    Args:
        record: A mapping from columns to values.
        place: The position for messages, such as "line 3 of data.jsonl".
    """

    record: Mapping[str, object]
    place: str

    def value(self, column: str, key: str) -> object:
        """Return the value in a column.

        Args:
            column: The name of the column.
            key: The config key below `data.dataset.` that contains the name of the column, for the error.

        Raises:
            SampleError: The record does not have the column, or the value is missing.
        """
        if column not in self.record:
            got, fix = f"{column}, which {self.place} does not have", name_fix(column, list(self.record))
            raise sample_error(f"dataset.{key}", got=got, expected="a column of every record", fix=fix)
        value = self.record[column]
        # pandas and NumPy store a missing number as nan, which does not equal itself.
        is_nan = is_single(value) and value != value
        if value is None or is_nan or (isinstance(value, str) and not value.strip()):
            raise self.no_number(column, key)
        return value

    def number(self, column: str, key: str) -> int | float:
        """Return the value in a column as a number. A text such as "1.5" is converted.

        Args:
            column: The name of the column.
            key: The config key below `data.dataset.` that contains the name of the column, for the error.

        Raises:
            SampleError: The record does not have the column, or the value is missing or not a number.
        """
        value = self.value(column, key)
        is_missing = isinstance(value, str) and value.strip() in MISSING_VALUES
        number = None if is_missing else plain_number(value)
        if number is None or math.isnan(number):
            raise self.no_number(column, key)
        return number

    def array(self, column: str, key: str) -> np.ndarray:
        """Return the value in a column as an array of numbers. Nested lists are converted.

        Args:
            column: The name of the column.
            key: The config key below `data.dataset.` that contains the name of the column, for the error.

        Raises:
            SampleError: The record does not have the column, the value does not consist of numbers, or nested lists
                differ in length.
        """
        try:
            array = np.asarray(self.value(column, key))
        except ValueError:
            raise self.no_number(column, key) from None
        if array.dtype.kind not in DTYPES:
            raise self.no_number(column, key)
        return array

    def no_number(self, column: str, key: str) -> SampleError:
        """Return the error for a value that is missing, or that does not consist of numbers."""
        value = self.record[column]
        got = show(value) if value is None or is_single(value) else f"a {type(value).__name__}"
        got = f"{got} in {column} of {self.place}"
        return sample_error(f"dataset.{key}", got=got, expected="numbers, or lists of equal length", fix=NUMBERS_FIX)


class Fields:
    """Conversion of records to samples. A record maps columns to numbers, texts, lists, arrays or bytes of pictures.

    If there is one input, a sample is the pair (input, target). If there are several inputs, a sample is a mapping from
    the names of the inputs and the name `target` to their values.

    F columns of scalars become an input float32 `[F]`. Arrays keep their shape. Their floating numbers and uint8 become
    float32, other integers become int64, and booleans stay bool. Pictures become float32 `[C, H, W]`.

    Args:
        inputs: The column of the input, or a list of columns, or a mapping from input names to columns. A list of
            columns of scalars forms one input, named `input`. A list of columns of arrays forms one input for each
            column. None means all columns that have a name, except the target.
        target: The column to predict. A list of K columns is one target `[K]`. None if samples have no target.
        task: "classification" for targets that are class numbers or names in `classes`, or "regression" for targets
            float32 `[K]`. Default: "regression".
        classes: The names of the classes in the order of their numbers. Default: None, for targets that are class
            numbers or regression values.
        dtypes: The dtypes of inputs by name. The dtype of an input that is not listed is that of the first record,
            converted by the rules above.
        scale: The factor by which arrays of uint8 are multiplied. The factor 0.00392 maps pixels to the range 0 to 1.
        picture: The size, mode and normalization of pictures.

    Attributes:
        fields: The columns and dtype of each input by name. Empty before `of_record`.

    Raises:
        ConfigError: A class occurs twice, or the options do not match the task.
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
        self.targets = () if target is None else as_tuple(target)
        self.classes = None if classes is None else tuple(map(str, classes))
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in (dtypes or {}).items()}
        self.fields: dict[str, Field] = {}
        if self.classes is not None and (task == "regression" or len({*self.classes}) < len(self.classes)):
            got, expected = f"[{', '.join(self.classes)}] with task={task}", "different names, or null for a regression"
            raise data_error("dataset.classes", got=got, expected=expected)
        if task == "classification" and len(self.targets) > 1:
            got = f"{len(self.targets)} columns in a classification"
            fix = "Set data.dataset.task=regression to predict several columns of numbers"
            raise data_error("dataset.target", got=got, expected="one column of classes", fix=fix)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all inputs and targets, without duplicates."""
        return tuple(dict.fromkeys([name for one in self.fields.values() for name in one.columns] + [*self.targets]))

    @property
    def value_names(self) -> ValueNames:
        """The names of the columns of inputs and targets that are rows, and the names of the classes, for display."""
        columns = {name: one.columns for name, one in self.fields.items() if one.is_row}
        return ValueNames(
            columns={**columns, TARGET: self.targets} if len(self.targets) > 1 else columns,
            classes={} if self.classes is None else {TARGET: self.classes},
        )

    def columns_to_read(self, names: Sequence[str], *, where: str) -> tuple[str, ...]:
        """Return the names of the columns that are needed for the inputs and the targets.

        Args:
            names: The names of all columns of a file or data set.
            where: The file or data set, for messages.

        Raises:
            ConfigError: A column does not exist, or there is no input column.
        """
        if self.inputs is None:
            others = [name for name in names if name not in self.targets and not NAMELESS.fullmatch(name)]
            # The column json.label is left out if the column json exists, because json contains it.
            found = [name for name in others if name.partition(".")[0] not in {*names} - {name}]
        else:
            given = self.inputs.values() if isinstance(self.inputs, Mapping) else [self.inputs]
            found = [name for columns in given for name in as_tuple(columns)]
        if not found:
            got = "no column"
            raise data_error("dataset.inputs", got=got, expected=f"at least one column of {where} that is not a target")
        refuse_unknown_columns(where, names, {"inputs": found, "target": self.targets})
        return tuple(dict.fromkeys([*found, *self.targets]))

    def of_record(self, first: Mapping[str, object], *, where: str) -> Self:
        """Return a copy with a Field for each input. Dtypes that the config does not set come from the first record.

        Args:
            first: The first record, with only the columns that `columns_to_read` returns.
            where: The position of the first record, for messages.

        Raises:
            ConfigError: `dtypes` names an unknown input.
            SampleError: A value is not a number.
        """
        made = copy.copy(self)
        names = [name for name in first if name not in self.targets]
        if isinstance(self.inputs, Mapping):
            grouped = {name: as_tuple(columns) for name, columns in self.inputs.items()}
        else:
            names = names if self.inputs is None else list(as_tuple(self.inputs))
            is_one = len(names) == 1 or all(is_single(first[name]) for name in names)
            grouped = {"input": tuple(names)} if is_one else {name: (name,) for name in names}
        for name in self.dtypes:
            if name not in grouped:
                raise name_error(f"dataset.dtypes.{name}", name, list(grouped), expected="the name of an input")
        made.fields = {name: self._field(name, columns, Row(first, where)) for name, columns in grouped.items()}
        return made

    def sample(self, record: Mapping[str, object], *, where: str) -> object:
        """Return the sample that is made from a record.

        Args:
            record: A mapping from columns to values.
            where: The position of the record, for messages.

        Raises:
            SampleError: A column does not exist, or a value is missing or cannot be converted to the dtype of its
                input or target.
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
            got = f"{len(columns)} columns, although {arrays[0]} contains arrays"
            expected = "columns of single numbers, or one column of arrays"
            raise data_error(f"dataset.inputs.{name}", got=got, expected=expected)
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
        return self.picture.read(found, named=named, key="dataset.inputs").to(field.dtype)

    def _cast(self, name: str, values: np.ndarray, field: Field, row: Row) -> Tensor:
        tensor = torch.from_numpy(np.array(values, order="C"))
        found = tensor.to(field.dtype)
        is_whole = not (field.dtype.is_floating_point or field.dtype.is_complex)
        if (tensor.is_floating_point() or tensor.is_complex()) and is_whole and not (found == tensor).all():
            dtype = str(field.dtype).removeprefix("torch.")
            expected = "complex64" if tensor.is_complex() else "float32"
            got = f"{dtype}, although {row.place} has numbers with fractions"
            raise sample_error(f"dataset.dtypes.{name}", got=got, expected=expected)
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
            got, expected = f"the class {label} in {row.place}", f"one of the classes {among(self.classes, word=label)}"
            raise sample_error("dataset.target", got=got, expected=expected, fix=did_you_mean(label, self.classes))
        else:
            number = plain_number(value)
            if number is not None and float(number).is_integer():
                return torch.tensor(int(number))
        got = f"{show(value)} in {name} of {row.place}"
        raise sample_error("dataset.target", got=got, expected="the number of a class", fix=CLASS_FIX)


def is_single(value: object) -> bool:
    """Return True for a number, a boolean or a text. Return False for an array, a list or a picture."""
    return isinstance(value, str | int | float | complex | np.generic) or (
        isinstance(value, np.ndarray) and not value.ndim
    )


def picture_of(value: object) -> Image | Path | io.BytesIO | None:
    """Return the picture in a value, as pillow can open it. Return None if the value is not a picture.

    Args:
        value: A pillow image, a path, or the bytes of a file. Hugging Face data sets store a picture as a mapping with
            the keys `bytes` and `path`.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} >= set(value):
        held, path = value.get("bytes"), value.get("path")
        # A URL is not downloaded. pillow reports the URL as a file that does not exist.
        value = held if isinstance(held, bytes) else Path(path) if isinstance(path, str) else None
    if isinstance(value, bytes):
        return io.BytesIO(value)
    return value if isinstance(value, Image | Path) else None


def as_tuple(columns: Names) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


def plain_number(value: object) -> int | float | None:
    """Return a value as a Python number. A text such as "1.5" is converted. Return None if it is not a number."""
    if isinstance(value, np.generic | np.ndarray) and not np.ndim(value):
        value = value.item()
    if isinstance(value, str):
        try:
            return number_in(value.strip())
        except ValueError:
            return None
    return value if isinstance(value, int | float) else None
