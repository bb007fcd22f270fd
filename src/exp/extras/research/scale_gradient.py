"""The hook `scale_gradient`: multiplies the gradient at chosen modules by a factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Predicate
from torch import Tensor

from exp.extras.research.gradient_transform import At, GradientTransform
from exp.functions.identities import scale_gradient


class ScaleGradient(GradientTransform):
    """Hook that multiplies the gradient at modules by a factor.

    Args:
        modules: Name patterns of modules.
        factor: Factor of the gradient. If it is 0, modules that get the scaled gradient do not learn. A negative factor
            reverses the gradient. Default: 1.
        at: "output": the matching module and modules before it in the forward get the scaled gradient. "input": only
            modules before the matching module get the scaled gradient. Default: output.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str],
        factor: Annotated[float, "a finite number", Predicate(math.isfinite)] = 1.0,
        at: At = "output",
    ) -> None:
        super().__init__(modules=modules, at=at)
        self.factor = factor

    def change(self, tensor: Tensor) -> Tensor:
        return scale_gradient(tensor, self.factor)
