"""The hook `scale_gradient`: the gradient that flows back at a module, multiplied by a factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Predicate
from torch import Tensor

from exp.extras.research.gradient_transform import At, GradientTransform
from exp.functions.identities import scale_gradient


class ScaleGradient(GradientTransform):
    """functions/identities.py at modules.

    factor: above 1 what gets the gradient learns faster, below 1 slower, at 0 not at all; below 0 it unlearns.
    at: output: the module gets the scaled gradient and hands it on. input: only what lies before it does.
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
