"""How much an output moves with an input: the Frobenius norm of the Jacobian, whole or by random projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exp.objectives.passes import Passes, Precision
from exp.objectives.penalties import checked_precision
from exp.objectives.term import AbstractTerm
from exp.objectives.values import full, pick
from exp.types import Batch


class JacobianNorm(AbstractTerm):
    """Mean over samples of the squared Frobenius norm of the Jacobian of an output with respect to an input.

        E_x [ || d f(x) / d x ||_F^2 ]

    Hoffman, Roberts and Yaida 2019, "Robust Learning with Jacobian Regularization", arXiv:1908.02729, equation 5, where
    `weight` is lambda/2. Exact, it takes a backward for each of the output's numbers, C. With projections, algorithm 1
    there: C times the mean over random unit vectors v of || v^T J ||^2, which is right on the mean (Hutchinson's).

    output: the value that is differentiated, `[B, ...]`, C numbers a sample. input: with respect to which, `[B, ...]`.
    projections: how many random vectors for each sample; None for the exact norm.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    needs = frozenset({"input_gradients"})

    def __init__(
        self,
        *,
        weight: float = 1.0,
        output: str = "output",
        input: str = "input",
        projections: int | None = None,
        precision: Precision = "step",
    ) -> None:
        super().__init__(weight=weight)
        if projections is not None and projections < 1:
            raise ValueError(f"projections is {projections}; it must be 1 or more, or null for the exact norm")
        self.output, self.input, self.projections = output, input, projections
        self.precision = checked_precision(precision)
        if precision == "full":
            self.needs = self.needs | {"forward_passes"}

    def forward(self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the input has no gradient."""
        assert passes is not None
        if self.precision == "full":
            values = passes.run(precision="full")
        output = full(pick(values, self.output, "output")).flatten(1)
        given = pick(values, self.input, "input")
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
