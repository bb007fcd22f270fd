"""Arrays by name from NumPy's files: .npy mapped into memory, so that a data set may be larger than it; or .npz."""

from __future__ import annotations

import functools
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.data_errors import data_error, name_fix
from exp.data.dataset_files import data_file, data_folder
from exp.data.entries import TARGET
from exp.data.in_memory import Entries
from exp.data.labels import classes_in
from exp.nested import map_tensors

# Floating and complex numbers, whole ones, booleans; no texts, dates or objects.
NUMERIC = "fciub"


class Arrays(Dataset[Entries]):
    """Arrays `[N, ...]` of one length by name, of which one is the target.

    A sample is (input, target) with one input, else a mapping of the inputs' names and `target`. float64, complex128
    and booleans (masks) stay, other floating numbers and bytes (pixels) become float32, other integers (tokens,
    classes) int64. A run rounds float64 to float32 unless its precision is fp64. Nothing in a file is executed:
    pickles and arrays of objects are refused.

    path: a folder of .npy files, which are read where a batch needs them, or an .npz file, which is read whole;
        relative to the current folder, or else to directory.
    target: the target's name, labels for labels.npy. Whole numbers, bytes too, are classes; floating
        ones `[N]` become `[N, 1]`.
    inputs: the names of the inputs; None for all that are there but the target.
    scale: factor on bytes, 0.00392 for pixels between 0 and 1.

    Raises: ConfigError for a file or a name that is not there, arrays of unequal length, and what holds no numbers.
    """

    def __init__(
        self,
        *,
        path: str,
        target: str = TARGET,
        directory: str = "data",
        inputs: Sequence[str] | None = None,
        scale: float = 1.0,
    ) -> None:
        is_archive = path.endswith(".npz")
        self.place = data_file(path, directory=directory) if is_archive else data_folder(path, directory=directory)
        self.scale = scale
        held = self._held
        names = [name for name in held if name != target] if inputs is None else list(inputs)
        for key, name in (("dataset.target", target), *(("dataset.inputs", name) for name in names)):
            if name not in held:
                raise data_error(
                    key, got=name, expected=f"an array that {self.place} holds", fix=name_fix(name, list(held))
                )
        if not names:
            raise data_error("dataset.path", got=f"{self.place} with {target} alone", expected="an input, too")
        self.names = {**{name: name for name in names}, TARGET: target}
        if len(names) == 1:
            self.names = {"input": names[0], TARGET: target}
        for name in self.names.values():
            _require_rows(held[name], f"{name} of {self.place}")
        lengths = {name: len(held[name]) for name in self.names.values()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise data_error("dataset.path", got=f"{self.place}, where {told}", expected="as many samples in each")
        self.num_classes = classes_in(self._tensor(TARGET, held[target])) if lengths[target] else None

    @functools.cached_property
    def _held(self) -> Mapping[str, np.ndarray]:
        return read_archive(self.place) if self.place.is_file() else _map_folder(self.place)

    def __getstate__(self) -> dict[str, object]:
        # A worker maps the files itself: pickled, a mapped array is its whole content.
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def __len__(self) -> int:
        return len(self._held[self.names[TARGET]])

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.gather(torch.tensor([index])), lambda tensor: tensor[0])

    def gather(self, indices: Tensor) -> Entries:
        rows = indices.numpy()
        entries = {entry: self._tensor(entry, self._held[name][rows]) for entry, name in self.names.items()}
        target = entries[TARGET]
        if target.is_floating_point() and target.dim() == 1:
            entries[TARGET] = target[:, None]
        return (entries["input"], entries[TARGET]) if list(entries) == ["input", TARGET] else entries

    def _tensor(self, entry: str, rows: np.ndarray) -> Tensor:
        if rows.dtype == np.uint8 and entry != TARGET:
            return torch.from_numpy(rows.astype(np.float32) * np.float32(self.scale))
        kinds = {"f": np.float32, "c": np.complex64, "b": np.bool_}
        wide = {"f": np.float64, "c": np.complex128}
        is_wide = rows.dtype.itemsize >= {"f": 8, "c": 16}.get(rows.dtype.kind, math.inf)
        return torch.from_numpy(rows.astype((wide if is_wide else kinds).get(rows.dtype.kind, np.int64)))


def _map_folder(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise data_error("dataset.path", got=f"{folder} without a .npy file", expected="one for each array")
    return {file.stem: map_file(file) for file in files}


def map_file(file: Path) -> np.ndarray:
    """A .npy file's array, read where it is looked at.

    Raises: ConfigError where it is no array of numbers.
    """
    try:
        rows: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise data_error("dataset.path", got=f"{file} ({error})", expected="an array of numbers in .npy") from error
    _require_rows(rows, f"{file}")
    return rows


def read_archive(file: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, by name. Nothing in it is executed.

    Raises: ConfigError where it is no such file, or holds objects.
    """
    try:
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, TypeError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise data_error(
            "dataset.path", got=f"{file} ({error})", expected="arrays of numbers in NumPy's .npz"
        ) from error


def _require_rows(array: np.ndarray, what: str) -> None:
    if array.dtype.kind not in NUMERIC:
        raise data_error("dataset.path", got=f"{what}, which holds {array.dtype}", expected="an array of numbers")
    if not array.ndim:
        raise data_error("dataset.path", got=f"{what}, which is one number", expected="an array of a row a sample")
