"""The identity whose gradient goes back multiplied by a factor: what is below learns faster, slower or not at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from exp.functions.number import CopyWithNumber, kept_number


class ScaleGradient(CopyWithNumber):
    """Forward a copy of x, backward factor times the gradient.

    It can be differentiated again, torch.func may transform it, and torch.compile traces it.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return kept_number(ctx, gradient) * gradient, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """x, `[...]`, with a gradient that is multiplied by factor on its way back.

    factor: a number, or one in a tensor, 0-d, which a compiled network reads anew at every call. It may not change
        between a forward and its backward.
    """
    return ScaleGradient.apply(x, factor)
