"""Data sets of Hugging Face's package `datasets`, from folders that save_to_disk has written, or from memory.

Data are not downloaded. Code in a folder is not executed. A folder is read as Arrow tables. If a table contains the
paths of pictures, the pictures are read from these paths.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.data_errors import SampleError, data_error, fitted_entry, name_fix, require_extra
from exp.data.dataset_files import data_folder
from exp.data.entries import ValueNames
from exp.data.fields import Fields, Inputs, Names, NumberDtype
from exp.data.in_memory import Fitted
from exp.data.pictures import Mode, PictureForm
from exp.data.shard_files import arrow_value
from exp.data.source import Task
from exp.data.splits import PART_NAMES, random_splits
from exp.errors import ConfigError
from exp.shared_types import STAGES, Stage

if TYPE_CHECKING:
    import datasets

# The key of the class names in the statistics that HuggingFace.fit returns.
FITTED = "hf"


class HuggingFace(Dataset[object]):
    """Data set of the rows of a Dataset or DatasetDict of the package `datasets`. Columns are inputs and the target.

    Exactly one of `path` and `source` must be given.

    Args:
        path: Folder with a Dataset or DatasetDict that save_to_disk has written. Default: None.
        source: Dataset or DatasetDict. The config can set a function of the user that returns it. Default: None.
        split: Name of the split of a DatasetDict to use; the other splits are ignored. Default: None, which uses all
            splits. They need names such as train, validation and test. If a split is missing, random samples of the
            training split are used instead. Their number is in data.parts.
        target: See Fields. The class names are those of the column if its type is ClassLabel. If the column contains
            texts, the texts are the class names, in alphabetical order.
        directory: Folder that is searched if the path does not exist in the current folder. Default: `data`.
        inputs: See Fields.
        task: See Fields. Default: "classification".
        dtypes: See Fields.
        scale: See Fields. Default: 1.
        resize: See PictureForm.
        crop: See PictureForm.
        mode: See PictureForm.
        mean: See PictureForm.
        std: See PictureForm.
        parts_seed: Seed that divides the training split if a split is missing. Default: 0.

    Raises:
        ConfigError: The package is not installed, a folder or column cannot be read, an input contains texts, sound or
            video, or a split is unknown.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledRecords"

    def __init__(
        self,
        *,
        path: str | None = None,
        source: object = None,
        split: str | None = None,
        target: Names | None,
        directory: str = "data",
        inputs: Inputs | None = None,
        task: Task = "classification",
        dtypes: Mapping[str, NumberDtype] | None = None,
        scale: float = 1.0,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        parts_seed: int = 0,
    ) -> None:
        require_extra("datasets", feature="data=hf", extra="hf")
        if (path is None) == (source is None):
            got = "no data set" if path is None else "data.dataset.path and data.dataset.source"
            raise data_error("dataset", got=got, expected="one of data.dataset.path and data.dataset.source")
        found = _check_splits(source) if path is None else _load_saved(data_folder(path, directory=directory))
        self.held = _one_split(found, split)
        self.rows: datasets.Dataset | None = next(iter(self.held.values())) if len(self.held) == 1 else None
        self.parts_seed = parts_seed
        self.known: list[str] | None = None
        self.classes: list[str] | None = None
        self.fields = Fields(
            inputs=inputs,
            target=target,
            task=task,
            classes=None,
            dtypes=dtypes,
            scale=scale,
            picture=PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std),
        )
        self._settle()

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Self]:
        """Return the splits by name. If a split is missing, random samples of the training split are used instead.

        Args:
            sizes: Size of each split: a number of samples, or a fraction. Existing validation and test splits are used
                completely, regardless of their size here.

        Raises:
            ConfigError: The name of a split is unknown, or `sizes` contains no split that exists.
        """
        by_stage = {stage: rows for stage in STAGES for name, rows in self.held.items() if name in PART_NAMES[stage]}
        if len(by_stage) < len(self.held) and len(self.held) > 1:
            other = next(name for name in self.held if not any(name in names for names in PART_NAMES.values()))
            raise data_error(
                "dataset.split",
                got=f"null, and splits {', '.join(self.held)}, with the unknown name {other}",
                expected="splits train, validation and test",
                fix=f"Take one with data.dataset.split={other}, or name data sets in data.train, data.val, data.test",
            )
        by_stage = by_stage or {"train": next(iter(self.held.values()))}
        parts = {stage: rows for stage, rows in by_stage.items() if stage in sizes}
        if "train" in parts:
            missing = {stage: size for stage, size in sizes.items() if stage == "train" or stage not in by_stage}
            if len(missing) > 1:
                chosen = random_splits(_whole(missing), length=len(parts["train"]), seed=self.parts_seed)
                parts |= {stage: by_stage["train"].select(indices.tolist()) for stage, indices in chosen.items()}
        if not parts:
            got = f"sizes of {', '.join(sizes)}, and splits {', '.join(self.held)}"
            raise data_error("parts", got=got, expected="sizes only of splits that the data set has")
        return {stage: self._part(parts[stage]) for stage in STAGES if stage in parts}

    def fit(self) -> Fitted:
        """Return the statistics of this split: the names of the classes in order, or None if they have no names."""
        rows = self._rows()
        names = _class_names(rows, self._target) if self._target is not None else None
        return {FITTED: {"classes": names}}

    def prepare(self, fitted: Fitted) -> Self:
        """Return a copy of the split that uses the class numbers of the training split.

        Args:
            fitted: The statistics of the training split.
        """
        part = copy.copy(self)
        part.known = fitted_entry(fitted, FITTED, part=self)["classes"]
        part.fields = copy.copy(self.fields)
        part.fields.classes = None if part.known is None else tuple(part.known)
        # If the target is a ClassLabel, rows contain class numbers, which are converted to these names. If not, rows
        # contain the names.
        part.classes = _label_names(self._rows(), self._target) if part.known is not None else None
        return part

    @property
    def value_names(self) -> ValueNames:
        # The attribute `classes` is not used, because it has the order of this data set instead of the training split.
        return self.fields.value_names

    @property
    def num_classes(self) -> int | None:
        """The number of classes: the number of class names, or the largest label plus 1 if classes have no names.

        None for a regression.
        """
        if self.known is not None:
            return len(self.known)
        if self._target is None:
            return None
        held = self._rows().unique(self._target)
        return max(held) + 1 if held and all(isinstance(one, int) for one in held) else None

    @property
    def targets(self) -> Tensor | None:
        """The class numbers of all samples, int64 `[N]`, for samplers. None if samples have no single class number."""
        if self._target is None:
            return None
        labels = [self._label(value) for value in self._rows().with_format(None)[self._target]]
        known = self.fields.classes
        return torch.tensor([label if known is None else known.index(str(label)) for label in labels])

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: int) -> object:
        where = f"row {index} of the split {self._rows().split or 'train'}"
        return self.fields.sample(self._row(index), where=where)

    @property
    def _target(self) -> str | None:
        """The name of the target column if its values are single class numbers or class names. None otherwise."""
        from datasets import ClassLabel, Value

        if self.fields.task == "regression" or not self.fields.targets:
            return None
        name = self.fields.targets[0]
        return name if isinstance(self._rows().features.get(name), ClassLabel | Value) else None

    def _rows(self) -> datasets.Dataset:
        if self.rows is None:
            raise data_error(
                "dataset.split",
                got=f"null, and a data set with the splits {', '.join(self.held)}",
                expected="one of these splits",
                fix=f"Write split: {next(iter(self.held))}",
            )
        return self.rows

    def _part(self, rows: datasets.Dataset) -> Self:
        part = copy.copy(self)
        part.rows, part.held = rows, {"train": rows}
        return part

    def _row(self, index: int) -> dict[str, object]:
        row = _values(self._rows(), index, names=self.fields.columns)
        if self._target is not None and row.get(self._target) is not None:
            row[self._target] = self._label(row[self._target])
        return row

    def _label(self, value: object) -> object:
        # The label -1 means that the sample has no class. It is not converted to a name.
        if self.classes is None or not isinstance(value, int | np.integer) or not 0 <= value < len(self.classes):
            return value
        return self.classes[value]

    def _settle(self) -> None:
        """Check the columns and the first row. Set the columns and dtypes of `fields` from the first row.

        Raises:
            ConfigError: A column or a value is not supported.
        """
        rows = next(iter(self.held.values()))
        if not len(rows):
            raise data_error("dataset", got="a data set without rows", expected="at least one row")
        first = _values(rows, 0)
        wanted = self.fields.columns_to_read(list(first), where="the data set")
        for name in () if _is_transformed(rows) else wanted:
            _refuse_other_features(name, rows.features[name], key="target" if name in self.fields.targets else "inputs")
        try:
            self.fields = self.fields.of_record({name: first[name] for name in wanted}, where="the first row")
        except SampleError as error:
            raise ConfigError([error.error]) from error


def _is_transformed(rows: datasets.Dataset) -> bool:
    """Return whether the user has set a transform of the rows with the method `with_transform`."""
    return bool(rows.format["type"] == "custom")


def _values(rows: datasets.Dataset, index: int, *, names: Sequence[str] | None = None) -> dict[str, object]:
    """Return a mapping from columns to the values of a row.

    Args:
        rows: The data set.
        index: Index of the row.
        names: Columns to read. Columns that do not exist are left out. Default: all columns. The rows of a data set
            with a transform always contain all columns.
    """
    if _is_transformed(rows):
        return dict(rows[index])
    table = rows.with_format("arrow")[index]
    there: list[str] = table.column_names
    return {name: arrow_value(table.column(name), 0) for name in (there if names is None else names) if name in there}


def _load_saved(folder: Path) -> Mapping[str, datasets.Dataset]:
    """Return a mapping from the names of the splits to the data sets in a folder that save_to_disk has written.

    Raises:
        ConfigError: The folder does not contain the files that save_to_disk writes, or is damaged.
    """
    import datasets
    from pyarrow import ArrowException

    datasets.disable_progress_bars()
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        scripts = [file.name for file in folder.glob("*.py")]
        script = f" with the loading script {scripts[0]}, which is never run, and" if scripts else ""
        raise data_error(
            "dataset.path",
            got=f"{folder}{script} without state.json or dataset_dict.json",
            expected="a folder of save_to_disk",
            fix="data=parquet and data=csv read files of tables",
        )
    try:
        return _check_splits(datasets.load_from_disk(str(folder.absolute())))
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        got = f"{folder} ({_line(error)})"
        raise data_error("dataset.path", got=got, expected="an undamaged folder of save_to_disk") from error


def _check_splits(found: object) -> Mapping[str, datasets.Dataset]:
    """Return a mapping from the names of the splits to the data sets in a Dataset or DatasetDict.

    The name of a single Dataset is `train`.

    Raises:
        ConfigError: The value is not a Dataset or DatasetDict.
    """
    import datasets

    if isinstance(found, datasets.Dataset):
        return {"train": found}
    if isinstance(found, Mapping) and found and all(isinstance(one, datasets.Dataset) for one in found.values()):
        return {str(name): one for name, one in found.items()}
    fix = "Streams have no index; data=stream reads files one after another" if "Iterable" in _kind(found) else None
    raise data_error("dataset.source", got=f"a {_kind(found)}", expected="a datasets.Dataset or DatasetDict", fix=fix)


def _one_split(found: Mapping[str, datasets.Dataset], split: str | None) -> dict[str, datasets.Dataset]:
    if split is None:
        return dict(found)
    if split not in found:
        fix = name_fix(split, list(found))
        raise data_error("dataset.split", got=split, expected="a split of the data set", fix=fix)
    return {"train": found[split]}


def _refuse_other_features(name: str, feature: object, *, key: str) -> None:
    """Raise ConfigError if the type of a column is not supported.

    Args:
        name: Name of the column.
        feature: Type of the column.
        key: Config key below `data.dataset.` that contains the column: `inputs` or `target`.
    """
    from datasets.features import Array2D, Array3D, Array4D, Array5D, ClassLabel, Image, LargeList, List, Value

    inner = feature
    while isinstance(inner, List | LargeList):
        inner = inner.feature
    is_text = isinstance(inner, Value) and "string" in inner.dtype and key == "inputs"
    if is_text or not isinstance(inner, Value | ClassLabel | Image | Array2D | Array3D | Array4D | Array5D):
        raise data_error(
            f"dataset.{key}",
            got=f"{name}, a column of {'texts' if is_text else type(inner).__name__}",
            expected="columns of numbers, lists of numbers or pictures",
            fix="Leave this column out of data.dataset.inputs. For texts, data=tokens turns files of text into tokens",
        )


def _label_names(rows: datasets.Dataset, target: str | None) -> list[str] | None:
    """Return the class names of a target column of type ClassLabel. Return None for other columns."""
    from datasets import ClassLabel

    feature = None if target is None else rows.features[target]
    return list(feature.names) if isinstance(feature, ClassLabel) and feature.names else None


def _class_names(rows: datasets.Dataset, target: str) -> list[str] | None:
    """Return the class names of a target column. Return None if the column contains numbers without names.

    The names are those of a ClassLabel, or the different texts in the column, in alphabetical order.
    """
    if (names := _label_names(rows, target)) is not None:
        return names
    held = [value for value in rows.unique(target) if value is not None]
    return sorted(held) if held and all(isinstance(one, str) for one in held) else None


def _whole(sizes: Mapping[Stage, int | float]) -> dict[Stage, int | float]:
    """Return the sizes of splits. If all sizes are fractions, they are scaled so that their sum is 1."""
    if all(isinstance(size, float) for size in sizes.values()):
        total = sum(sizes.values())
        return {stage: size / total for stage, size in sizes.items()} if total > 0 else dict(sizes)
    return dict(sizes)


def _kind(value: object) -> str:
    return type(value).__name__


def _line(error: BaseException) -> str:
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__
