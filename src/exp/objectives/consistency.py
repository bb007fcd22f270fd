"""Consistency loss, which compares two forward passes of the same batch under dropout and noise."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from exp.objectives.loss_inputs import Values, full, pick
from exp.objectives.passes import Passes
from exp.objectives.term import AbstractTerm
from exp.shared_types import Batch

Distance = Literal["mse", "kl"]


class Consistency(AbstractTerm):
    """The distance between the outputs of two forward passes with different random numbers.

    p1 and p2 are the probabilities in the two passes, for B samples and C classes.

    `mse`: the mean squared difference of the probabilities, (1/BC) sum || p1 - p2 ||^2.
        Laine and Aila 2017, "Temporal Ensembling for Semi-Supervised Learning", arXiv:1610.02242, algorithm 1.
    `kl`: half the sum of the two Kullback-Leibler divergences, (KL(p1 || p2) + KL(p2 || p1)) / 2.
        Wu et al. 2021, "R-Drop: Regularized Dropout for Neural Networks", arXiv:2106.14448, equation 2.

    Other terms of the objective use the first pass. In evaluation, dropout is off, so this term is 0.

    Args:
        weight: The factor of this term in the objective. Default: 1.
        output: The name of the scores to compare, `[..., C]`. Default: `output`.
        distance: The formula, `mse` (default) or `kl`.
    """

    needs = frozenset({"forward_passes"})
    selects = ("output",)

    def __init__(self, *, weight: float = 1.0, output: str = "output", distance: Distance = "mse") -> None:
        super().__init__(weight=weight)
        self.output, self.distance = output, distance

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the distance as a 0-d tensor.

        Raises:
            RunError: The network returns no scores with the name `output`.
        """
        assert passes is not None
        first, second = (full(pick(given, self.output, "output")) for given in (values, passes.run()))
        if self.distance == "mse":
            return functional.mse_loss(first.softmax(-1), second.softmax(-1))
        one, other = first.log_softmax(-1), second.log_softmax(-1)
        return ((one.exp() - other.exp()) * (one - other)).sum(-1).mean() / 2
