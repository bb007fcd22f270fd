"""Data set of the tensors in a file: .npz of NumPy, or .pt of torch."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exp.data.arrays import NUMERIC, read_archive
from exp.data.data_errors import data_error, file_error, refuse_unknown_columns, require_equal_lengths
from exp.data.dataset_files import data_file
from exp.data.entries import TARGET
from exp.data.in_memory import Tensors
from exp.data.labels import classes_in


class TensorFile(Tensors):
    """Data set of two arrays `[N, ...]` in a file: the inputs and the targets.

    Pickles in an .npz file and code in a .pt file are errors, because loading them could execute code.

    Inputs of float64 keep their dtype. Inputs of other floating dtypes and of uint8 (pixels) become float32. Inputs of
    other integers (tokens) become int64. Targets of integers are class numbers, int64. Targets of floating numbers are
    regression targets with the same dtypes as inputs, and are reshaped from `[N]` to `[N, 1]`. The run converts float64
    to float32 later, unless its precision is fp64.

    Args:
        path: The file, relative to the current folder or to `directory`.
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        input: The name of the inputs in the file. Default: `input`. If a .pt file contains a pair of tensors without
            names, the first tensor is the inputs.
        target: The name of the targets in the file. Default: `target`. None means that samples have no targets.
        scale: The factor by which inputs of floating numbers and of uint8 are multiplied. Default: 1. The factor
            0.00392 maps pixels to the range 0 to 1.

    Raises:
        ConfigError: The file or an array does not exist, the arrays differ in length, or a number is not finite.
    """

    def __init__(
        self,
        *,
        path: str,
        directory: str = "data",
        input: str = "input",
        target: str | None = "target",
        scale: float = 1.0,
    ) -> None:
        file = data_file(path, directory=directory)
        names = {"input": input} if target is None else {"input": input, TARGET: target}
        arrays = read_arrays(file, names=names)
        require_equal_lengths({name: len(tensor) for name, tensor in arrays.items()}, file)
        for name, tensor in arrays.items():
            bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
            if bad.any():
                got = f"{file} with a number that is not finite in {name} of sample {int(bad.nonzero()[0])}"
                raise data_error("dataset.path", got=got, expected="finite numbers")
        inputs, targets = arrays["input"], arrays.get(TARGET)
        is_scaled = inputs.is_floating_point() or inputs.dtype == torch.uint8
        inputs = _float(inputs) * scale if is_scaled else inputs.long()
        if targets is None:
            super().__init__(entries={"input": inputs})
            return
        targets = _float(targets) if targets.is_floating_point() else targets.long()
        if targets.is_floating_point() and targets.dim() == 1:
            targets = targets[:, None]
        super().__init__(entries=(inputs, targets), num_classes=classes_in(targets))


def _float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def read_arrays(file: Path, *, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return some arrays of a file as tensors.

    Args:
        file: A .npz, .pt or .pth file.
        names: A mapping from the names of the tensors to return to the names of the arrays in the file.

    Raises:
        ConfigError: The format of the file is not supported, or an array does not exist.
    """
    if file.suffix == ".npz":
        arrays = {name: array for name, array in read_archive(file).items() if array.dtype.kind in NUMERIC}
        native = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
        held = {name: torch.from_numpy(np.atleast_1d(array)) for name, array in native.items()}
    elif file.suffix in (".pt", ".pth"):
        held = _read_pt(file, tuple(names.values()))
    else:
        raise data_error("dataset.path", got=str(file), expected="a file that ends in .npz, .pt or .pth")
    refuse_unknown_columns(file, list(held), {role: [name] for role, name in names.items()})
    return {role: held[name] for role, name in names.items()}


def _read_pt(file: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise file_error(file, f"{type(error).__name__}: {error}", "only tensors, saved by torch.save") from error
    if isinstance(held, tuple | list) and len(held) == len(names):
        held = dict(zip(names, held, strict=True))
    if not isinstance(held, Mapping) or not all(isinstance(value, Tensor) for value in held.values()):
        expected = "a mapping of names to tensors, or a pair of tensors"
        got = f"{file} with a value of the type {type(held).__name__}"
        raise data_error("dataset.path", got=got, expected=expected)
    return dict(held)
