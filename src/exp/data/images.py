"""Data set of picture files.

The files are in one folder for each class, or their paths and targets are in a CSV file. A picture is decoded when its
sample is read.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.csv_source import CsvSource
from exp.data.data_errors import data_detail, data_error, fitted_entry, refuse_unknown_columns
from exp.data.dataset_files import data_file, data_folder
from exp.data.entries import TARGET
from exp.data.in_memory import Fitted
from exp.data.pictures import (
    EIGHT_BITS,
    KEPT,
    UNREADABLE,
    Mode,
    PictureForm,
    deep_picture,
    mode_error,
    pair_of,
    stored_mode,
    unreadable_picture,
)
from exp.data.source import Name, Task, refuse_labels
from exp.data.splits import PART_NAMES
from exp.errors import ConfigError, ErrorDetails, raise_errors
from exp.shared_types import Stage

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
# The maximum number of pictures that are checked before the run. They are evenly spaced in the list of all pictures.
LOOKED_AT = 2000
# The names of folders that file managers, network drives and archives create next to pictures.
JUNK = ("__macosx", "@eadir", "lost+found")
FITTED = "images"


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Data set of picture files.

    The input is a picture, float32 `[C, H, W]`. The target is a class number, int64 `[]`, or a number to predict,
    float32 `[1]`. The headers of at most 2,000 pictures are checked before the run. The other pictures are checked when
    they are read.

    Args:
        path: A folder or a CSV file, relative to the current folder or to `directory`. A folder contains one folder for
            each class, or folders train, val and test that contain the class folders. A CSV file has a column of paths,
            which are relative to the folder of the CSV file.
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        target: The column of the CSV file to predict. Default: `target`.
        picture: The column of the CSV file that contains the paths. Default: `path`.
        task: The task for the column `target` of a CSV file: "classification" or "regression". Default:
            "classification".
        resize: See PictureForm.
        crop: See PictureForm.
        mode: See PictureForm.
        mean: See PictureForm.
        std: See PictureForm.
        any_size: Whether pictures may differ in size. Default: False. True is for pictures that transforms resize to
            the same size.

    Attributes:
        own_parts: The data set of each split, if the folder contains folders train, val and test. Empty otherwise.

    Raises:
        ConfigError: A picture does not exist or cannot be read, pictures differ in size or mode, or there are fewer
            than two classes.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledImages"
    own_parts: Mapping[Stage, Images] = {}

    def __init__(
        self,
        *,
        path: str,
        directory: str = "data",
        target: Name = TARGET,
        picture: Name = "path",
        task: Task = "classification",
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        any_size: bool = False,
    ) -> None:
        self.form = PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std)
        self.indices: Tensor | None = None
        self.any_size = any_size
        self.listing: Path | None = None
        if path.endswith(".csv"):
            self.listing = file = data_file(path, directory=directory)
            self.files, self.targets, self.classes = _read_list(file, target=target, picture=picture, task=task)
        else:
            folder = data_folder(path, directory=directory)
            places = _folders_of_parts(folder)
            self.own_parts = {stage: self._of(*_in_folders(place)) for stage, place in places.items()}
            if places:
                self._join()
            else:
                self.files, self.targets, self.classes = _in_folders(folder)
        self._look()

    def _of(self, files: list[str], targets: Tensor, classes: tuple[str, ...]) -> Images:
        part = copy.copy(self)
        part.files, part.targets, part.classes = files, targets, classes
        return part

    def _join(self) -> None:
        """Set the files and targets to those of all splits. The class numbers of the training split are used."""
        fitted = self.own_parts["train"].fit()
        parts = [part.prepare(fitted) for part in self.own_parts.values()]
        self.files, self.classes = [file for part in parts for file in part.files], parts[0].classes
        self.targets = torch.cat([part.targets for part in parts])

    def fit(self) -> Fitted:
        """Return the statistics of this split: the names of the classes in the order of their numbers."""
        return {FITTED: {"classes": list(self.classes)}}

    def prepare(self, fitted: Fitted) -> Images:
        """Return a copy of this split that uses the class numbers of the training split.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: A class of this split does not exist in the training split.
        """
        known: list[str] = fitted_entry(fitted, FITTED, part=self)["classes"]
        unknown = [name for name in self.classes if name not in known]
        if unknown:
            got = f"the class {unknown[0]}, which is not in the training split"
            raise data_error("", got=got, expected=f"one of the training split's classes, {', '.join(known)}")
        part = copy.copy(self)
        part.classes = tuple(known)
        if self.classes:
            part.targets = torch.tensor([known.index(name) for name in self.classes])[self.targets]
        return part

    @property
    def num_classes(self) -> int | None:
        return len(self.classes) or None

    def select(self, indices: Tensor) -> Self:
        """Return a data set of the pictures at some indices.

        Args:
            indices: The indices, int64 `[n]`.
        """
        part = copy.copy(self)
        part.files = [self.files[index] for index in indices.tolist()]
        part.targets, part.indices = self.targets[indices], indices
        return part

    def column_texts(self, name: str, *, key: str) -> list[str | None]:
        """Return the texts in a column of the CSV file that lists the pictures.

        Args:
            name: The name of the column.
            key: The config key that contains the name of the column, for the error.

        Raises:
            ConfigError: The pictures are in class folders instead of a CSV file, or the column does not exist.
        """
        if self.listing is None:
            expected = "pictures that a CSV file lists"
            raise data_error(key, got=f"{name}, although pictures in folders have no columns", expected=expected)
        source = CsvSource(self.listing, missing_values=())
        return source.texts(source.column(name, key=key))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.form.read(self.files[index], named=self.files[index]), self.targets[index]

    def _look(self) -> None:
        """Raise ConfigError if a file is not a picture, or if pictures differ in mode or size.

        At most LOOKED_AT files are opened. Different sizes are accepted if pictures are cropped or `any_size` is True.
        """
        modes, sizes = dict[str, str](), dict[tuple[int, int], str]()
        for file in self.files[:: -(-len(self.files) // LOOKED_AT)]:
            try:
                with Image.open(file) as picture:
                    modes.setdefault(stored_mode(picture), file)
                    sizes.setdefault(self.form.size_of(picture), file)
            except UNREADABLE as error:
                raise ConfigError([unreadable_picture(file, error)]) from error
        errors = [deep_picture(file, mode) for mode, file in modes.items() if mode not in EIGHT_BITS]
        if not errors and self.form.mode is None and (len(modes) > 1 or not modes.keys() <= {*KEPT}):
            errors.append(mode_error(" and ".join(f"{file} is of mode {mode}" for mode, file in [*modes.items()][:2])))
        raise_errors([*errors, *self._size_errors(sizes)])

    def _size_errors(self, sizes: Mapping[tuple[int, int], str]) -> Iterator[ErrorDetails]:
        shown = [f"{file} has {height} x {width} pixels" for (width, height), file in sizes.items()]
        if self.form.crop is not None:
            height, width = self.form.crop
            small = [text for text, size in zip(shown, sizes, strict=True) if size[0] < width or size[1] < height]
            if small:
                got = f"{height} x {width}, although {small[0]}"
                fix = "Enlarge the pictures with data.dataset.resize"
                yield data_detail("dataset.crop", got=got, expected="at most the size of the smallest picture", fix=fix)
        elif len(sizes) > 1 and not self.any_size:
            got = f"{self.form.resize or 'null'}, although the pictures differ: {shown[0]}, {shown[1]}"
            fix = (
                "Set data.dataset.resize=[224,224], or data.dataset.resize and data.dataset.crop to a length each. "
                "If transforms resize the pictures, set data.dataset.any_size=true"
            )
            yield data_detail("dataset.resize", got=got, expected="pictures of the same size", fix=fix)


class RandomFlip:
    """Transform that mirrors a picture `[C, H, W]` from left to right at random.

    Args:
        p: The probability that a picture is mirrored. Default: 0.5.
    """

    def __init__(self, *, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, picture: Tensor) -> Tensor:
        return picture.flip(-1) if torch.rand(()) < self.p else picture


class RandomCrop:
    """Transform that cuts a rectangle from a picture `[C, H, W]` at a random position.

    Args:
        size: The size of the rectangle in pixels: the side of a square, or [H, W].
        padding: The number of zero pixels that are added on each side of the picture before cropping. Default: 0.
    """

    def __init__(self, *, size: int | Sequence[int], padding: int = 0) -> None:
        self.height, self.width = pair_of("size", [size, size] if isinstance(size, int) else size)
        self.padding = padding

    def __call__(self, picture: Tensor) -> Tensor:
        picture = torch.nn.functional.pad(picture, [self.padding] * 4)
        top, left = (
            int(torch.randint(there - wanted + 1, ()))
            for there, wanted in zip(picture.shape[1:], (self.height, self.width), strict=True)
        )
        return picture[:, top : top + self.height, left : left + self.width]


def pictures_below(folder: str | Path) -> Iterator[str]:
    """Yield the paths of the pictures in a folder and its subfolders, sorted by name.

    Hidden files and folders, folders with a name in JUNK, and links to folders are skipped.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=operator.attrgetter("name")):
            if entry.name.startswith("."):
                continue  # Examples: .ipynb_checkpoints, and ._name.png, which macOS writes.
            # scandir has already read the type of each entry. A system call for each file would double the time.
            if entry.is_dir(follow_symlinks=False):
                if entry.name.casefold() not in JUNK:
                    yield from pictures_below(entry.path)
            elif (dot := entry.name.rfind(".")) > 0 and entry.name[dot:].lower() in ENDINGS:
                yield entry.path


def _in_folders(folder: Path) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """Return the pictures and classes in a folder that contains one folder for each class.

    Returns:
        The paths of the pictures, the class number of each picture, int64 `[N]`, and the sorted names of the classes.

    Raises:
        ConfigError: A class has no picture, or there are fewer than two classes.
    """
    folders = _folders_in(folder)
    found = {one.name: list(pictures_below(one)) for one in folders}
    if empty := [name for name, files in found.items() if not files]:
        got, expected = f"{folder / empty[0]} without a picture", f"at least one file that ends in {', '.join(ENDINGS)}"
        raise data_error("dataset.path", got=got, expected=expected, fix="Remove the folder, or put its pictures there")
    if len(found) < 2:
        expected = (
            "a folder of pictures for each of two or more classes, or a CSV file with the columns path and target"
        )
        raise data_error("dataset.path", got=f"{folder} with {'only one' if found else 'no'} folder", expected=expected)
    files = [file for several in found.values() for file in several]
    targets = [number for number, several in enumerate(found.values()) for _ in several]
    return files, torch.tensor(targets), tuple(found)


def _folders_of_parts(folder: Path) -> dict[Stage, Path]:
    """Return the folder of each split, by name, in a folder that is divided into splits.

    Return an empty mapping if the folder is not divided into splits: it contains no training split with class folders,
    or no second split.

    Raises:
        ConfigError: Two folders belong to the same split, or a folder next to the splits contains folders and is not a
            split.
    """
    folders = [one for one in _folders_in(folder) if _folders_in(one)]
    named = [(stage, one) for stage, names in PART_NAMES.items() for one in folders if one.name.casefold() in names]
    found = dict(named)
    if "train" not in found or len(named) < 2:
        return {}
    if others := [one for one in folders if one not in found.values()]:
        known = " and ".join(one.name for one in found.values())
        got = f"{folder} with {others[0].name}, a folder of classes, next to {known}"
        expected, fix = "one folder for each of train, val and test", f"Rename or move {others[0]}"
        raise data_error("dataset.path", got=got, expected=expected, fix=fix)
    return found


def _folders_in(folder: Path) -> list[Path]:
    # scandir has already read the type of each entry. No system call is needed for each file of a class.
    with os.scandir(folder) as entries:
        found = [Path(one.path) for one in entries if not one.name.startswith(".") and one.is_dir()]
    return sorted(one for one in found if one.name.casefold() not in JUNK)


def _read_list(file: Path, *, target: Name, picture: Name, task: Task) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """Return the pictures and targets that a CSV file lists.

    Args:
        file: The CSV file.
        target: The column of targets.
        picture: The column of paths.
        task: The task.

    Returns:
        The paths of the pictures, their targets, and the names of the classes. Targets are int64 `[N]` for class
        numbers, and float32 `[N, 1]` for a regression. There are no class names for a regression.

    Raises:
        ConfigError: A picture does not exist, or there are fewer than two classes.
    """
    source = CsvSource(file, missing_values=())
    refuse_unknown_columns(file, source.names, {"picture": [picture], "target": [target]})
    column, wanted = source.names.index(str(picture)), source.names.index(str(target))
    is_class = task == "classification"
    found = source.read(
        numbers=() if is_class else [wanted],
        words=[column, wanted] if is_class else [column],
        fixes=dict.fromkeys((column, wanted), "Leave the row out"),
    )
    files = [os.path.join(file.parent, str(text)) for text in found.words[column].texts()]
    for row, one in enumerate(files):
        if not os.path.isfile(one):
            got = f"{one}, which does not exist,"
            raise source.value_error(row, column, got, "a picture", "Paths are relative to the folder of the CSV file")
    if not is_class:
        return files, torch.from_numpy(found.numbers).float(), ()
    labels = found.words[wanted]
    refuse_labels(source, wanted, labels)
    if len(labels.names) < 2:
        got = f"one class, {labels.names[0]}, in {file}"
        raise data_error("dataset.target", got=got, expected="two or more classes")
    return files, torch.from_numpy(labels.codes), labels.names
