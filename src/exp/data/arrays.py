"""Data set of named arrays from NumPy's files.

.npy files are memory-mapped, so they may be larger than memory. .npz files are read into memory completely.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exp.data.data_errors import data_error, file_error, name_error, require_equal_lengths
from exp.data.dataset_files import data_file, data_folder
from exp.data.entries import TARGET
from exp.data.in_memory import Entries, Gathered
from exp.data.labels import classes_in

# The kinds of NumPy dtypes that are supported: floating, complex, signed, unsigned and boolean. Text, dates and objects
# are not.
NUMERIC = "fciub"


class Arrays(Gathered):
    """Data set of named NumPy arrays `[N, ...]` of equal length: one or several inputs and a target.

    If there is one input, a sample is the pair (input, target). If there are several inputs, a sample is a mapping
    from the names of the inputs and the name `target` to their values. Pickles and arrays of objects are errors,
    because loading them could execute code.

    Arrays of float64, complex128 and bool (masks) keep their dtype. Arrays of other floating dtypes become float32, and
    complex64 is kept. Input arrays of uint8 (pixels) become float32. Other integers (tokens, classes) become int64. The
    run converts float64 to float32 later, unless its precision is fp64.

    Args:
        path: Path of a folder with .npy files, or of an .npz file. It is relative to the current folder or to
            `directory`.
        target: The name of the target array, for example `labels` for labels.npy. Default: `target`. Integers are class
            numbers. Floating numbers of shape `[N]` are reshaped to `[N, 1]`.
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        inputs: The names of the input arrays. Default: all arrays except the target.
        scale: The factor by which input arrays of uint8 are multiplied. Default: 1. The factor 0.00392 maps pixels to
            the range 0 to 1.

    Raises:
        ConfigError: A file or an array name does not exist, arrays differ in length, or the values of an array are not
            numbers.
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
                raise name_error(key, name, list(held), expected=f"an array of {self.place}")
        if not names:
            got = f"{self.place} with only the target {target}"
            raise data_error("dataset.path", got=got, expected="an input array")
        self.names = {**{name: name for name in names}, TARGET: target}
        if len(names) == 1:
            self.names = {"input": names[0], TARGET: target}
        for name in self.names.values():
            _require_rows(held[name], f"{name} of {self.place}")
        lengths = {name: len(held[name]) for name in self.names.values()}
        require_equal_lengths(lengths, self.place)
        self.num_classes = classes_in(self._tensor(TARGET, held[target])) if lengths[target] else None

    @functools.cached_property
    def _held(self) -> Mapping[str, np.ndarray]:
        return read_archive(self.place) if self.place.is_file() else _map_folder(self.place)

    def __getstate__(self) -> dict[str, object]:
        # Worker processes map the files themselves, because a pickled memory map would contain the whole array.
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def __len__(self) -> int:
        return len(self._held[self.names[TARGET]])

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
        is_wide = rows.dtype.itemsize >= 8
        floating, complexes = (
            (np.float64 if is_wide else np.float32),
            (np.complex128 if rows.dtype.itemsize >= 16 else np.complex64),
        )
        kinds = {"f": floating, "c": complexes, "b": np.bool_}
        return torch.from_numpy(rows.astype(kinds.get(rows.dtype.kind, np.int64)))


def _map_folder(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise data_error("dataset.path", got=f"{folder} without a .npy file", expected="a .npy file for each array")
    return {file.stem: map_file(file) for file in files}


def map_file(file: Path) -> np.ndarray:
    """Return the array in a .npy file, memory-mapped.

    Raises:
        ConfigError: The file cannot be read, or does not contain an array of numbers with at least one axis.
    """
    try:
        found: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise file_error(file, error, "an array of numbers in .npy") from error
    _require_rows(found, f"{file}")
    return found


def read_archive(file: Path) -> dict[str, np.ndarray]:
    """Return a mapping from the names of the arrays in an .npz file to the arrays.

    Raises:
        ConfigError: The file is not an .npz file, or contains Python objects. Objects are not unpickled.
    """
    try:
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, TypeError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise file_error(file, error, "arrays of numbers in NumPy's .npz") from error


def _require_rows(array: np.ndarray, what: str) -> None:
    if array.dtype.kind not in NUMERIC:
        raise data_error("dataset.path", got=f"{what} of dtype {array.dtype}", expected="an array of numbers")
    if not array.ndim:
        raise data_error("dataset.path", got=f"{what}, which is a single number", expected="an array [N, ...]")
