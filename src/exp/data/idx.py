"""Data sets in the IDX format of MNIST. Images and labels are in IDX files, plain or compressed."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from exp.data.data_errors import data_error, file_error
from exp.data.dataset_files import data_folder
from exp.data.in_memory import Tensors

FILES = {"train": "train", "test": "t10k"}
# The dtype by the third byte of an IDX file. Numbers of several bytes are big-endian.
DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class Idx(Tensors):
    """Images float32 `[1, H, W]` from 0 to 1 before normalization, and int64 classes.

    MNIST, FashionMNIST and KMNIST have this format. Nothing is downloaded.

    Args:
        path: The folder of the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, with or without .gz. The path is relative to the current folder or to `directory`.
        part: "train", or "test" for the t10k files.
        directory: The folder that is searched if the path does not exist in the current folder.
        mean: The mean that is subtracted from the pixels.
        std: The standard deviation that divides the pixels.

    Raises:
        ConfigError: A file does not exist, or is not an IDX file.
    """

    def __init__(
        self,
        *,
        path: str,
        part: Literal["train", "test"] = "train",
        directory: str = "data",
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        folder = data_folder(path, directory=directory)
        images, labels = (read_idx(_file(folder, f"{FILES[part]}-{kind}")) for kind in ("images-idx3", "labels-idx1"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            got = f"images {list(images.shape)} and labels {list(labels.shape)} in {folder}"
            raise data_error("dataset.path", got=got, expected="images [N, H, W] and as many labels [N]")
        pixels = (torch.from_numpy(images.astype(np.float32)) / 255 - mean) / std
        classes = torch.from_numpy(labels.astype(np.int64))
        super().__init__(entries=(pixels[:, None], classes), num_classes=int(classes.max()) + 1)


def read_idx(file: Path) -> np.ndarray:
    """Return the array of an IDX file.

    The file has two zero bytes, a dtype, the number of axes, the sizes of the axes, and the numbers.

    Raises:
        ConfigError: The file is not an IDX file, or is truncated.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise file_error(file, error, "an IDX file") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES:
        raise data_error("dataset.path", got=f"{file}, which starts with {content[:4]!r}", expected="an IDX file")
    dtype, axes = np.dtype(DTYPES[content[2]]), content[3]
    start = 4 + 4 * axes
    shape = tuple(int(size) for size in np.frombuffer(content[4:start].ljust(4 * axes, b"\0"), dtype=">u4"))
    wanted = start + dtype.itemsize * math.prod(shape)
    if len(content) != wanted:
        got = f"{file} of {len(content)} bytes"
        raise data_error("dataset.path", got=got, expected=f"{wanted} bytes, as its header states")
    return np.frombuffer(content[start:], dtype=dtype).reshape(shape)


def _file(folder: Path, name: str) -> Path:
    names = [f"{name}-ubyte", f"{name}-ubyte.gz"]
    for one in names:
        if (folder / one).is_file():
            return folder / one
    got = f"{folder} without {names[0]}"
    raise data_error("dataset.path", got=got, expected="a folder with this file, with or without .gz")
