"""The identity whose gradient goes back reversed: what is below learns the opposite of what is above."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from exp.functions.number import CopyWithNumber, kept_number


class GradientReversal(CopyWithNumber):
    """Forward a copy of x, backward -weight times the gradient.

    Ganin and Lempitsky 2015, "Unsupervised Domain Adaptation by Backpropagation", arXiv:1409.7495, equations 15 and 16.
    It can be differentiated again, torch.func may transform it, and torch.compile traces it.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -kept_number(ctx, gradient) * gradient, None


def gradient_reversal(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """x, `[...]`, with a gradient that is reversed and multiplied by weight on its way back.

    weight: a number, or one in a tensor, 0-d, which a compiled network reads anew at every call. It may not change
        between a forward and its backward.
    """
    return GradientReversal.apply(x, weight)


def progressive_weight(progress: float, *, steepness: float = 10.0) -> float:
    """The weight that grows with training from 0 to almost 1: 2 / (1 + exp(-steepness * progress)) - 1.

    Ganin and Lempitsky 2015, section 4, lambda_p with steepness 10. progress: p, from 0 to 1.
    """
    # tanh(x / 2) is the same number, and overflows nowhere.
    return math.tanh(steepness * progress / 2)
