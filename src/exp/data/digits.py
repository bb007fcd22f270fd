"""Data set of 1,797 handwritten digits from the UCI repository, which is included in scikit-learn's package."""

from __future__ import annotations

import numpy as np
import torch

from exp.data.dataset_files import shipped_columns
from exp.data.in_memory import Tensors

# Rounded mean and standard deviation of the pixels, which are integers from 0 to 16. Rounded constants leak no
# statistics of the test split.
CENTRE, SPREAD = 5.0, 6.0


class Digits(Tensors):
    """Data set of handwritten digits in memory.

    The input is an image, float32 `[1, 8, 8]`, with about mean 0 and variance 1. The target is the digit, int64, from
    0 to 9.
    """

    def __init__(self) -> None:
        pixels, labels = shipped_columns("digits.csv.gz", delimiter=",")
        images = torch.from_numpy(((pixels - CENTRE) / SPREAD).astype(np.float32)).reshape(-1, 1, 8, 8)
        super().__init__(entries=(images, torch.from_numpy(labels.astype(np.int64))), num_classes=10)
