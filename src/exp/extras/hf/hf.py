"""Data sets of Hugging Face's package `datasets`, an extra, from files of one's own or from memory.

Nothing is downloaded and no code beside a data set is run: folders of save_to_disk and files of tables are read as
Arrow tables, and pictures that are named by a path from there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.dataset_files import data_folder, find_files
from exp.data.faults import SampleError, data_fault, fitted_entry, name_cure, require_extra
from exp.data.fields import Fields, Inputs, Names, NumberDtype
from exp.data.in_memory import Fitted
from exp.data.pictures import Mode, PictureForm
from exp.data.shard_files import arrow_value
from exp.data.source import Task
from exp.data.splits import PART_NAMES, random_splits
from exp.data.value_names import ValueNames
from exp.errors import ConfigError
from exp.shared_types import STAGES, Stage

if TYPE_CHECKING:
    import datasets

# What fit() calls the names of the classes.
FITTED = "hf"
# The reader of datasets for files that end so.
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
Files = str | Sequence[str]


class HuggingFace(Dataset[object]):
    """A data set of `datasets`, with columns as inputs and as target.

    One of three says where it is, none of which is asked for on the net:
    path: a folder that save_to_disk made, of a Dataset or a DatasetDict.
    files: a glob of .csv, .json, .jsonl, .parquet or .arrow, or several, or a mapping of parts to either.
    source: a Dataset or a DatasetDict, or a node whose `_target_` is a function of one's own that returns one.

    split: the one to take of a DatasetDict. Without it those called train, validation and test (and their like) are
        the parts; of others, and of a single one, data.parts chooses by parts_seed.
    target, inputs, task, dtypes, scale: see Fields. A ClassLabel has names for its numbers; texts are classes in the
        order of the alphabet, of the training part.
    resize, crop, mode, mean, std, background: of pictures, see Images.
    directory: where path and files are looked for besides the current folder.

    Raises: ConfigError for files and columns that are not there or cannot be read, columns of texts, sound or video,
        splits that are no parts; where the package is not installed.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledRecords"

    def __init__(
        self,
        *,
        path: str | None = None,
        files: Files | Mapping[Stage, Files | None] | None = None,
        source: Any = None,
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
        background: str = "white",
        parts_seed: int = 0,
    ) -> None:
        require_extra("datasets", feature="data=hf", extra="hf")
        given = {"path": path, "files": files, "source": source}
        if len(named := [f"data.dataset.{name}" for name, one in given.items() if one is not None]) != 1:
            expected = "one of data.dataset.path, data.dataset.files and data.dataset.source"
            raise data_fault("dataset", got=" and ".join(named) or "no data set", expected=expected)
        if path is not None:
            found = _saved(data_folder(path, directory=directory))
        else:
            found = _checked(source) if files is None else _of_files(files, directory=directory)
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
            picture=PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std, background=background),
        )
        self._settle()

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Self]:
        """The splits that are called as parts are; a part that no split is for is taken out of train, by its size.

        Raises: ConfigError for splits of other names.
        """
        by_stage = {stage: rows for stage in STAGES for name, rows in self.held.items() if name in PART_NAMES[stage]}
        if len(by_stage) < len(self.held) and len(self.held) > 1:
            other = next(name for name in self.held if not any(name in names for names in PART_NAMES.values()))
            raise data_fault(
                "dataset.split",
                got=f"null, and splits {', '.join(self.held)}, of which {other} is no part",
                expected="splits train, validation and test",
                cure=f"Take one with data.dataset.split={other}, or name data sets in data.train, data.val, data.test",
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
            raise data_fault("parts", got=got, expected="a part that there is")
        return {stage: self._part(parts[stage]) for stage in STAGES if stage in parts}

    def fit(self) -> Fitted:
        """The names of the classes in order; None where they have none."""
        rows = self._rows()
        names = _class_names(rows, self._target) if self._target is not None else None
        return {FITTED: {"classes": names}}

    def prepare(self, fitted: Fitted) -> Self:
        """Numbers the classes as the training part does."""
        part = copy.copy(self)
        part.known = fitted_entry(fitted, FITTED, part=self)["classes"]
        part.fields = copy.copy(self.fields)
        part.fields.classes = None if part.known is None else tuple(part.known)
        # Of a ClassLabel a row has the number, and of others the name.
        part.classes = _label_names(self._rows(), self._target) if part.known is not None else None
        return part

    @property
    def value_names(self) -> ValueNames:
        # Not `classes`, whose order is that of the data set, and not of training.
        return self.fields.value_names

    @property
    def num_classes(self) -> int | None:
        """How many there are: names, or one more than the largest number; None of a regression."""
        if self.known is not None:
            return len(self.known)
        if self._target is None:
            return None
        held = self._rows().unique(self._target)
        return max(held) + 1 if held and all(isinstance(one, int) for one in held) else None

    @property
    def targets(self) -> Tensor | None:
        """The class of every sample, int64 `[N]`, for a sampler; None where they are no single numbers."""
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
        """The column of classes, where it holds single numbers or texts."""
        from datasets import ClassLabel, Value

        if self.fields.task == "regression" or not self.fields.targets:
            return None
        name = self.fields.targets[0]
        return name if isinstance(self._rows().features.get(name), ClassLabel | Value) else None

    def _rows(self) -> datasets.Dataset:
        if self.rows is None:
            raise data_fault(
                "dataset.split",
                got=f"null, and splits {', '.join(self.held)}",
                expected="one of them for one part",
                cure=f"Write split: {next(iter(self.held))}",
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

    def _label(self, value: Any) -> Any:
        # -1, which stands for none, is a class of nobody.
        if self.classes is None or not isinstance(value, int | np.integer) or not 0 <= value < len(self.classes):
            return value
        return self.classes[value]

    def _settle(self) -> None:
        """Look at the columns and at the first row."""
        rows = next(iter(self.held.values()))
        if not len(rows):
            raise data_fault("dataset", got="a data set without a row", expected="at least one")
        first = _values(rows, 0)
        wanted = self.fields.wanted(list(first), where="the data set")
        for name in () if _is_transformed(rows) else wanted:
            _refuse_other_features(name, rows.features[name], key="target" if name in self.fields.targets else "inputs")
        try:
            self.fields = self.fields.settled({name: first[name] for name in wanted}, where="the first row")
        except SampleError as error:
            raise ConfigError([error.fault]) from error


def _is_transformed(rows: datasets.Dataset) -> bool:
    """Return whether rows go through a transform of the user, set by with_transform."""
    return bool(rows.format["type"] == "custom")


def _values(rows: datasets.Dataset, index: int, *, names: Sequence[str] | None = None) -> dict[str, object]:
    """Return the values of a row by column; those of `names` that are there, or all."""
    if _is_transformed(rows):
        return dict(rows[index])
    table = rows.with_format("arrow")[index]
    there: list[str] = table.column_names
    return {name: arrow_value(table.column(name), 0) for name in (there if names is None else names) if name in there}


def _saved(folder: Path) -> Mapping[str, datasets.Dataset]:
    """Return the data sets in a folder of save_to_disk, by split.

    Raises: ConfigError for another folder, and for one that is damaged.
    """
    import datasets
    from pyarrow import ArrowException

    datasets.disable_progress_bars()
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        scripts = [file.name for file in folder.glob("*.py")]
        told = f", a loading script, {scripts[0]}, which is never run," if scripts else ""
        raise data_fault(
            "dataset.path",
            got=f"{folder}{told} without a state.json or a dataset_dict.json",
            expected="a folder that save_to_disk made",
            cure="Files of tables are named in data.dataset.files",
        )
    try:
        return _checked(datasets.load_from_disk(str(folder.absolute())))
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        got = f"{folder} ({_line(error)})"
        raise data_fault("dataset.path", got=got, expected="a whole folder of save_to_disk") from error


def _of_files(files: Files | Mapping[Stage, Files | None], *, directory: str) -> Mapping[str, datasets.Dataset]:
    """Return the data sets in files, by part."""
    given = files if isinstance(files, Mapping) else {"train": files}
    found: dict[str, datasets.Dataset] = {}
    for name, patterns in given.items():
        key = f"dataset.files.{name}" if given is files else "dataset.files"
        if name not in STAGES:
            raise data_fault(key, got="no part", expected="train, val or test")
        if patterns is not None:
            found[name] = _read(find_files(patterns, directory=directory, key=key), key=key)
    return found


def _read(files: Sequence[Path], *, key: str) -> datasets.Dataset:
    import datasets
    from pyarrow import ArrowException

    datasets.disable_progress_bars()
    kinds = {READERS.get(file.suffix.lower()) for file in files}
    if len(kinds) > 1 or None in kinds:
        expected = f"files of one kind, that end in {', '.join(READERS)}"
        raise data_fault(key, got=", ".join(sorted(file.name for file in files)[:4]), expected=expected)
    paths = [str(file.absolute()) for file in files]
    try:
        return datasets.load_dataset(kinds.pop(), data_files=paths, split="train")
    except (datasets.exceptions.DatasetsError, ArrowException, OSError, ValueError) as error:
        cause = error.__cause__ or error
        raise data_fault(key, got=f"{paths[0]} ({_line(cause)})", expected="whole files of a table") from error


def _checked(found: object) -> Mapping[str, datasets.Dataset]:
    """What a function of the user's own, or a folder, gives, by split.

    Raises: ConfigError for what is no data set.
    """
    import datasets

    if isinstance(found, datasets.Dataset):
        return {"train": found}
    if isinstance(found, Mapping) and found and all(isinstance(one, datasets.Dataset) for one in found.values()):
        return {str(name): one for name, one in found.items()}
    cure = (
        "One that streams has no index; data=stream reads files one after another"
        if "Iterable" in _kind(found)
        else None
    )
    raise data_fault("dataset.source", got=f"a {_kind(found)}", expected="a datasets.Dataset or DatasetDict", cure=cure)


def _one_split(found: Mapping[str, datasets.Dataset], split: str | None) -> dict[str, datasets.Dataset]:
    if split is None:
        return dict(found)
    if split not in found:
        cure = name_cure(split, list(found))
        raise data_fault("dataset.split", got=split, expected="a split of the data set", cure=cure)
    return {"train": found[split]}


def _refuse_other_features(name: str, feature: object, *, key: str) -> None:
    """Raises: ConfigError for what no network takes as it stands."""
    from datasets.features import Array2D, Array3D, Array4D, Array5D, ClassLabel, Image, LargeList, List, Value

    inner = feature
    while isinstance(inner, List | LargeList):
        inner = inner.feature
    is_text = isinstance(inner, Value) and "string" in inner.dtype
    if is_text and key == "inputs":
        raise data_fault(
            "dataset.inputs",
            got=f"{name}, a column of texts",
            expected="columns of numbers, lists of them or pictures",
            cure="data=tokens turns files of text into tokens; or let data.dataset.source name a function of your own "
            "that returns the data set with a column of numbers of tokens",
        )
    if not isinstance(inner, Value | ClassLabel | Image | Array2D | Array3D | Array4D | Array5D):
        raise data_fault(
            f"dataset.{key}",
            got=f"{name}, a column of {type(inner).__name__}",
            expected="columns of numbers, lists of them or pictures",
            cure="Leave it out: data.dataset.inputs names those that the network takes",
        )


def _label_names(rows: datasets.Dataset, target: str | None) -> list[str] | None:
    """The names that a ClassLabel has; None where rows hold names themselves."""
    from datasets import ClassLabel

    feature = None if target is None else rows.features[target]
    return list(feature.names) if isinstance(feature, ClassLabel) and feature.names else None


def _class_names(rows: datasets.Dataset, target: str) -> list[str] | None:
    """The names of the classes: a ClassLabel's, or those of texts by the alphabet; None of plain numbers."""
    if (names := _label_names(rows, target)) is not None:
        return names
    held = [value for value in rows.unique(target) if value is not None]
    return sorted(held) if held and all(isinstance(one, str) for one in held) else None


def _whole(sizes: Mapping[Stage, int | float]) -> dict[Stage, int | float]:
    """Fractions of the part that is left, where all are fractions."""
    if all(isinstance(size, float) for size in sizes.values()):
        total = sum(sizes.values())
        return {stage: size / total for stage, size in sizes.items()} if total > 0 else dict(sizes)
    return dict(sizes)


def _kind(value: object) -> str:
    return type(value).__name__


def _line(error: BaseException) -> str:
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__
