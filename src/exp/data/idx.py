"""Data sets in the IDX format of MNIST. The IDX files may be compressed with gzip."""

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
# The third byte of an IDX file, and the NumPy dtype that it means. The numbers in the file are big-endian.
DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class Idx(Tensors):
    """Data set of images and classes in IDX files, such as MNIST, FashionMNIST and KMNIST.

    The input is an image, float32 `[1, H, W]`. Its pixels are scaled to the range 0 to 1 and then normalized. The
    target is a class number, int64. The files are not downloaded.

    Args:
        path: The folder of the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, with or without .gz. The path is relative to the current folder or to `directory`.
        part: The files to read: "train", or "test" for the t10k files. Default: "train".
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        mean: The mean that is subtracted from the pixels. Default: 0.
        std: The standard deviation by which the pixels are divided. Default: 1.

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
    """Return the array in an IDX file.

    The file starts with two zero bytes, a byte for the dtype and a byte for the number of axes. The sizes of the axes
    follow, each with 4 bytes, and then the numbers.

    Raises:
        ConfigError: The file is not an IDX file, or its length does not match its header.
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
