"""How much an output moves with an input: the Frobenius norm of the Jacobian, whole or by random projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exp.objectives.derivative import DerivativeTerm
from exp.objectives.passes import Passes, Precision
from exp.objectives.values import full
from exp.types import Batch


class JacobianNorm(DerivativeTerm):
    """Mean over samples of the squared Frobenius norm of the Jacobian of an output with respect to an input.

        E_x [ || d f(x) / d x ||_F^2 ]

    Hoffman, Roberts and Yaida 2019, "Robust Learning with Jacobian Regularization", arXiv:1908.02729, equation 5, where
    `weight` is lambda/2. Exact, it takes a backward for each of the output's numbers, C. With projections, algorithm 1
    there: C times the mean over random unit vectors v of || v^T J ||^2, which is right on the mean (Hutchinson's).

    output: the value that is differentiated, `[B, ...]`, C numbers a sample. input: with respect to which, `[B, ...]`.
    projections: how many random vectors for each sample; None for the exact norm.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    def __init__(
        self,
        *,
        weight: float = 1.0,
        output: str = "output",
        input: str = "input",
        projections: int | None = None,
        precision: Precision = "step",
    ) -> None:
        super().__init__(weight=weight, output=output, input=input, precision=precision)
        if projections is not None and projections < 1:
            raise ValueError(f"projections is {projections}; it must be 1 or more, or null for the exact norm")
        self.projections = projections

    def forward(self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the input has no gradient."""
        assert passes is not None
        output, given = self.ends(values, passes)
        output = full(output).flatten(1)
        if self.projections is None:
            return sum(_squared(passes.gradients(column, given)) for column in output.unbind(1)).mean()
        total = 0.0
        for _ in range(self.projections):
            direction = functional.normalize(torch.randn_like(output), dim=1)
            total = total + _squared(passes.gradients((direction * output).sum(1), given))
        return output.shape[1] * (total / self.projections).mean()


def _squared(gradient: Tensor) -> Tensor:
    """The squared norm of each sample's row: `[B, ...]` to `[B]`."""
    return gradient.flatten(1).square().sum(1)
