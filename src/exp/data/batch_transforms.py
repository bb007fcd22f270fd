"""Transforms that mix the samples of a batch in pairs, on the device.

Each rank mixes only the samples that it reads. exp seeds the generators from (seed, rank, epoch, batch) before each
batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor
from torch.nn import functional

from exp.data.labels import is_whole
from exp.errors import RunError


class _Mix(ABC):
    """Base class of Mixup and CutMix. Inputs and targets are mixed by a weight drawn from Beta(alpha, alpha).

    Args:
        alpha: The parameter of the Beta distribution. 1 draws weights uniformly; smaller values draw weights near 0 and
            1.
        num_classes: The number of classes if targets are class numbers `[B]`; None if targets are numbers to predict.
            Class numbers become probabilities `[B, V]`. The loss must accept probabilities, as
            torch.nn.CrossEntropyLoss does.
    """

    def __init__(self, *, alpha: Annotated[float, Gt(0)] = 1.0, num_classes: int | None = None) -> None:
        self.alpha, self.num_classes = alpha, num_classes
        # On the CPU, so that the draws are the same on every device.
        self._beta = torch.distributions.Beta(torch.tensor(alpha).double(), torch.tensor(alpha).double())

    def __call__(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed inputs and targets.

        Args:
            input: Floating numbers `[B, ...]`.
            target: Class numbers `[B]`, or numbers to predict `[B, ...]`.

        Raises:
            RunError: The input or the target cannot be mixed.
        """
        if not input.is_floating_point():
            raise RunError(f"{type(self).__name__} mixes floating inputs, and the input is {input.dtype}")
        share = float(self._beta.sample())
        partner = torch.randperm(len(input)).to(input.device)
        mixed, kept = self.mix(input, input[partner], share)
        targets = self._soft(target).to(mixed.dtype)
        return mixed, kept * targets + (1 - kept) * targets[partner]

    @abstractmethod
    def mix(self, input: Tensor, other: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the mixed inputs, and the weight of `input` in them, from 0 to 1.

        Args:
            input: The inputs of the batch.
            other: The same inputs in a random order.
            share: The weight drawn for `input`, from 0 to 1.
        """

    def _soft(self, target: Tensor) -> Tensor:
        if not is_whole(target):
            return target
        if self.num_classes is None or target.dim() != 1:
            raise RunError(
                f"{type(self).__name__} mixes class numbers [B] of num_classes classes, and got a target of shape "
                f"{list(target.shape)} with num_classes={self.num_classes}; write num_classes: ${{data.num_classes}}"
            )
        return functional.one_hot(target.long(), self.num_classes)


class Mixup(_Mix):
    """Mixes each sample with a random sample of the batch: share * input + (1 - share) * other.

    Targets are mixed likewise.

    Zhang, Cisse, Dauphin and Lopez-Paz, mixup: Beyond Empirical Risk Minimization, 2018.
    """

    def mix(self, input: Tensor, other: Tensor, share: float) -> tuple[Tensor, float]:
        return share * input + (1 - share) * other, share


class CutMix(_Mix):
    """Replaces a box of each picture `[B, ..., H, W]` by the same box of a random picture of the batch.

    Targets are mixed in proportion to the areas.
    Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features, 2019.
    """

    def mix(self, input: Tensor, other: Tensor, share: float) -> tuple[Tensor, float]:
        if input.dim() < 3:
            raise RunError(f"CutMix cuts pictures [B, ..., H, W], and the input has the shape {list(input.shape)}")
        height, width = input.shape[-2:]
        side = math.sqrt(1 - share)
        top, bottom = _span(height, side)
        left, right = _span(width, side)
        mixed = input.clone()
        mixed[..., top:bottom, left:right] = other[..., top:bottom, left:right]
        return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _span(length: int, share: float) -> tuple[int, int]:
    """Return the start and stop of an interval around a random center, clipped to 0 and `length`.

    Args:
        length: The length of the axis, in pixels.
        share: The length of the interval before clipping, as a fraction of `length`.
    """
    middle, half = int(torch.randint(length, ())), round(length * share) / 2
    return max(0, math.floor(middle - half)), min(length, math.floor(middle + half))
