"""What the columns of a record become: the inputs and the target of a sample, by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from exp.data.cells import number_in
from exp.data.columns import NAMELESS, NO_NAME, Task
from exp.data.csv_sheet import MISSING_VALUES
from exp.data.entries import TARGET
from exp.data.faults import SampleError, data_fault, name_cure
from exp.data.pictures import PictureForm
from exp.data.value_names import ValueNames
from exp.errors import Fault
from exp.spelling import among, did_you_mean, show

# A column, several that are one row, or either by the name of the input that they become.
Columns: TypeAlias = str | Sequence[str]
Inputs: TypeAlias = Columns | Mapping[str, Columns]
NumberDtype = Literal["float32", "float64", "int64", "bool"]
# Of NumPy's kinds, what networks compute in; other whole numbers than bytes are int64.
DTYPES = {"f": torch.float32, "c": torch.complex64, "b": torch.bool, "i": torch.int64, "u": torch.int64}
TEXT_CURE = (
    "Leave the column out of data.dataset.inputs, or write its numbers there: data=tokens turns texts into tokens, and "
    "data=csv encodes words"
)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One input. columns: of a record. is_row: they are single numbers, a row `[F]`. dtype: of the tensor."""

    columns: tuple[str, ...]
    is_row: bool
    dtype: torch.dtype


class Fields:
    """Reads samples out of records: mappings of columns to numbers, texts, lists, arrays and bytes of pictures.

    A sample is (input, target) with one input, else a mapping of the inputs' names and `target`. Single numbers become
    a row float32 `[F]`. Arrays keep their shape: floating numbers and bytes become float32, other whole numbers int64,
    booleans stay. Pictures become float32 `[C, H, W]`.

    inputs: a column; several, which are one `input` where they hold single numbers, and otherwise inputs by their own
        names; or a mapping of the inputs' names to columns. None for all but the target.
    target: the column to predict; several are a row of numbers `[K]`; None where there is nothing to predict.
    task: "classification", with targets that are class numbers or names of `classes`, or "regression", float32 `[K]`.
    classes: the names of the classes, in the order of their numbers; None where targets are numbers.
    dtypes: of inputs by name, where the first record does not show it: a list of whole numbers that are float32.
    scale: factor on bytes, 0.00392 for pixels between 0 and 1. picture: what pictures are brought to.

    Raises: ConfigError for names that are there twice, and what does not go with the task.
    """

    def __init__(
        self,
        *,
        inputs: Inputs | None,
        target: Columns | None,
        task: Task,
        classes: Sequence[str] | None,
        dtypes: Mapping[str, NumberDtype] | None,
        scale: float,
        picture: PictureForm,
    ) -> None:
        self.inputs, self.task, self.scale, self.picture = inputs, task, scale, picture
        self.targets = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        self.classes = None if classes is None else tuple(map(str, classes))
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in (dtypes or {}).items()}
        self.fields: dict[str, Field] = {}
        if classes is not None and task == "regression":
            raise data_fault("dataset.classes", got="names of classes beside task=regression", expected="null")
        if twice := [name for name in self.classes or () if (self.classes or ()).count(name) > 1]:
            raise data_fault("dataset.classes", got=f"{twice[0]} twice", expected="a name for each class")
        if task == "classification" and len(self.targets) > 1:
            raise data_fault(
                "dataset.target",
                got=f"{len(self.targets)} columns in a classification",
                expected="one column of classes",
                cure="Columns of numbers to predict go with data.dataset.task=regression",
            )

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
        """The columns to read of those that there are. where: they are, in words.

        Raises: ConfigError for one that is not there.
        """
        if self.inputs is None:
            found = tuple(
                name for name in names if name not in self.targets and name.partition(".")[0] not in {*names} - {name}
            )
            if not found:
                raise data_fault("dataset.inputs", got=f"{where} with the target alone", expected="an input, too")
            if nameless := [name or NO_NAME for name in found if not name or NAMELESS.fullmatch(name)]:
                got = f"null, and {where} has the column {nameless[0]}, such as the row numbers that pandas writes"
                raise data_fault("dataset.inputs", got=got, expected="the columns to read, or names for all of them")
            return (*found, *self._held(self.targets, names, "target", where))
        given = self.inputs.values() if isinstance(self.inputs, Mapping) else [self.inputs]
        asked = [name for columns in given for name in _listed(columns)]
        if not asked:
            raise data_fault("dataset.inputs", got="no column", expected="one, or null for all but the target")
        found = (*self._held(asked, names, "inputs", where), *self._held(self.targets, names, "target", where))
        return tuple(dict.fromkeys(found))

    def settled(self, first: Mapping[str, object], *, where: str) -> Self:
        """The same with the form of each input, as the first record shows it. first: the columns to read.

        Raises: ConfigError for dtypes of an input that there is not; SampleError for a value that is no number.
        """
        made = copy.copy(self)
        asked = () if isinstance(self.inputs, Mapping | None) else _listed(self.inputs)
        names = asked or [name for name in first if name not in self.targets]
        single = [name for name in names if is_single(first[name])]
        if isinstance(self.inputs, Mapping):
            grouped: dict[str, tuple[str, ...]] = {name: _listed(columns) for name, columns in self.inputs.items()}
        elif len(single) == len(names) or len(names) == 1:
            grouped = {"input": tuple(names)}
        else:
            grouped = {name: (name,) for name in names}
        for name in self.dtypes:
            if name not in grouped:
                raise data_fault(
                    f"dataset.dtypes.{name}",
                    got=name,
                    expected="the name of an input",
                    cure=name_cure(name, list(grouped)),
                )
        made.fields = {name: self._field(name, columns, first, where) for name, columns in grouped.items()}
        return made

    def sample(self, record: Mapping[str, object], *, where: str) -> object:
        """The sample of a record. where: it is, in words.

        Raises: SampleError for a column that is not there, a value that is missing or none of what its column holds.
        """
        entries = {name: self._input(name, field, record, where) for name, field in self.fields.items()}
        if self.targets:
            entries[TARGET] = self._target(record, where)
        names = list(entries)
        if names == ["input", TARGET]:
            return entries["input"], entries[TARGET]
        return entries["input"] if names == ["input"] else entries

    def _held(self, asked: Sequence[str], names: Sequence[str], key: str, where: str) -> tuple[str, ...]:
        for name in asked:
            if name not in names:
                raise data_fault(
                    f"dataset.{key}", got=name, expected=f"a column of {where}", cure=name_cure(name, names)
                )
        return tuple(asked)

    def _field(self, name: str, columns: tuple[str, ...], first: Mapping[str, object], where: str) -> Field:
        is_row = all(is_single(first[column]) for column in columns)
        if not is_row and len(columns) > 1:
            column = next(column for column in columns if not is_single(first[column]))
            raise data_fault(
                f"dataset.inputs.{name}",
                got=f"{len(columns)} columns, of which {column} holds arrays",
                expected="columns of single numbers, or one of arrays",
                cure="Give a column of arrays a name of its own",
            )
        if name in self.dtypes:
            dtype = self.dtypes[name]
        elif is_row or picture_of(first[columns[0]]) is not None:
            dtype = torch.float32
        else:
            array = self._array(columns[0], first, where, key="inputs")
            dtype = torch.float32 if array.dtype == np.uint8 else DTYPES[array.dtype.kind]
        return Field(columns=columns, is_row=is_row, dtype=dtype)

    def _input(self, name: str, field: Field, record: Mapping[str, object], where: str) -> Tensor:
        if field.is_row:
            row = [self._number(column, record, where, key="inputs") for column in field.columns]
            return self._cast(name, np.array(row), field, where)
        column, key = field.columns[0], "data.dataset.inputs"
        found = picture_of(self._value(column, record, where, key="inputs"))
        if isinstance(found, Image):
            return self.picture.pixels(found, named=f"{column} of {where}", key=key).to(field.dtype)
        if found is not None:
            return self.picture.read(found, named=f"{column} of {where}", key=key).to(field.dtype)
        return self._cast(name, self._array(column, record, where, key="inputs"), field, where)

    def _cast(self, name: str, values: np.ndarray, field: Field, where: str) -> Tensor:
        if values.dtype.kind in "fc" and not field.dtype.is_floating_point and not field.dtype.is_complex:
            whole = values.astype(np.int64) if np.isfinite(values).all() else None
            if whole is None or (whole != values).any():
                raise SampleError(
                    Fault(
                        key=f"data.dataset.dtypes.{name}",
                        got=f"{str(field.dtype).removeprefix('torch.')}, and numbers with a fraction in {where}",
                        expected="float32",
                    )
                )
        factor = self.scale if values.dtype == np.uint8 else 1.0
        tensor = torch.from_numpy(np.array(values, order="C")).to(field.dtype)
        return tensor * factor if factor != 1.0 else tensor

    def _target(self, record: Mapping[str, object], where: str) -> Tensor:
        name = self.targets[0]
        if self.task == "regression":
            if len(self.targets) > 1 or is_single(self._value(name, record, where, key="target")):
                row = [self._number(column, record, where, key="target") for column in self.targets]
                return torch.tensor(row, dtype=torch.float32)
            return torch.from_numpy(np.array(self._array(name, record, where, key="target"), dtype=np.float32))
        value = self._value(name, record, where, key="target")
        if self.classes is not None and is_single(value):
            return torch.tensor(self._class(str(value), where))
        if not is_single(value):
            array = self._array(name, record, where, key="target")
            if array.dtype.kind in "iub":
                return torch.from_numpy(array.astype(np.int64))
        else:
            number = _plain_number(value)
            if number is not None and float(number).is_integer():
                return torch.tensor(int(number))
        raise SampleError(
            Fault(
                key="data.dataset.target",
                got=f"{show(value)} in {name} of {where}",
                expected="the number of a class",
                cure="Name the classes in their order, data.dataset.classes=[...]; numbers to predict go with "
                "data.dataset.task=regression",
            )
        )

    def _class(self, label: str, where: str) -> int:
        assert self.classes is not None
        if label in self.classes:
            return self.classes.index(label)
        raise SampleError(
            Fault(
                key="data.dataset.target",
                got=f"{where} of the class {label}",
                expected=f"one of the classes {among(self.classes, word=label)}",
                cure=did_you_mean(label, self.classes),
            )
        )

    def _value(self, column: str, record: Mapping[str, object], where: str, *, key: str) -> object:
        if column not in record:
            raise SampleError(
                Fault(
                    key=f"data.dataset.{key}",
                    got=f"{column}, which {where} does not have",
                    expected="a column of every record",
                    cure=name_cure(column, list(record)),
                )
            )
        value = record[column]
        if value is None or (isinstance(value, str) and not value.strip()):
            raise SampleError(_no_value(column, where, key))
        return value

    def _number(self, column: str, record: Mapping[str, object], where: str, *, key: str) -> int | float:
        value = self._value(column, record, where, key=key)
        if isinstance(value, str) and value.strip() in MISSING_VALUES:
            raise SampleError(_no_value(column, where, key))
        number = _plain_number(value)
        if number is None:
            raise SampleError(_no_number(column, value, where, key))
        if number != number:  # nan, as pandas and NumPy write what is not there
            raise SampleError(_no_value(column, where, key))
        return number

    def _array(self, column: str, record: Mapping[str, object], where: str, *, key: str) -> np.ndarray:
        value = self._value(column, record, where, key=key)
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal length
            array = np.asarray(None)
        if array.dtype.kind not in DTYPES:
            raise SampleError(_no_number(column, value, where, key))
        return array


def _no_value(column: str, where: str, key: str) -> Fault:
    return Fault(
        key=f"data.dataset.{key}",
        got=f"no value in {column} of {where}",
        expected="one in every record",
        cure="Fill it in, or leave the record out",
    )


def is_single(value: object) -> bool:
    """Whether a value is one number or text, and no array, list or picture."""
    return isinstance(value, str | int | float | complex | np.generic) or (
        isinstance(value, np.ndarray) and not value.ndim
    )


def picture_of(value: object) -> Image | Path | io.BytesIO | None:
    """Pillow's picture that a value is, or where to read it: bytes, or a mapping of `bytes` and `path`."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if isinstance(value, Mapping) and {"bytes", "path"} >= set(value) and value:
        held = value.get("bytes")
        path = value.get("path")
        if isinstance(held, bytes):
            return io.BytesIO(held)
        # pillow would take a URL for the name of a file, which is not there.
        return None if not isinstance(path, str) else Path(path)
    return None


def _listed(columns: Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


def _plain_number(value: object) -> int | float | None:
    """A number, or a text that is one; None for anything else."""
    if isinstance(value, np.generic | np.ndarray) and not np.ndim(value):
        value = value.item()
    if isinstance(value, str):
        try:
            return number_in(value.strip())
        except ValueError:
            return None
    return value if isinstance(value, int | float) else None


def _no_number(column: str, value: object, where: str, key: str) -> Fault:
    got = f"{show(value) if is_single(value) else f'a {type(value).__name__}'} in {column} of {where}"
    return Fault(key=f"data.dataset.{key}", got=got, expected="numbers, or lists of them of one length", cure=TEXT_CURE)
