"""Handwritten digits: 1,797 images of 8x8 pixels in ten classes, from the UCI repository, shipped by scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from exp.data.dataset_files import shipped_columns
from exp.data.in_memory import Tensors

# About the mean and the standard deviation of the pixels, which are 0 to 16. The constants are rounded, so that they
# leak no statistics of the test split.
CENTRE, SPREAD = 5.0, 6.0


class Digits(Tensors):
    """Images float32 `[1, 8, 8]` with about mean 0 and variance 1, and classes 0 to 9, int64."""

    def __init__(self) -> None:
        pixels, labels = shipped_columns("digits.csv.gz", delimiter=",")
        images = torch.from_numpy(((pixels - CENTRE) / SPREAD).astype(np.float32)).reshape(-1, 1, 8, 8)
        super().__init__(entries=(images, torch.from_numpy(labels.astype(np.int64))), num_classes=10)
