"""Adversarial losses of a discriminator and a generator, computed from scores of real and generated samples.

D is the score of the discriminator, without a sigmoid. A high score means that the discriminator takes the sample for
real. x is a real sample, and x~ is a generated sample. E is the mean over samples.

    loss             discriminator                              generator
    non_saturating   E softplus(-D(x)) + E softplus(D(x~))      E softplus(-D(x~))      Goodfellow et al. 2014
    hinge            E relu(1 - D(x)) + E relu(1 + D(x~))       -E D(x~)                Lim and Ye 2017
    wasserstein      -E D(x) + E D(x~)                          -E D(x~)                Arjovsky et al. 2017
    least_squares    (E (D(x) - 1)^2 + E D(x~)^2) / 2           E (D(x~) - 1)^2 / 2     Mao et al. 2016

The papers are arXiv:1406.2661, 1705.02894, 1701.07875 and 1611.04076.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.nn.functional import relu, softplus

from exp.objectives.loss_inputs import Values, full, pick
from exp.objectives.term import AbstractTerm
from exp.shared_types import Batch

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

Adversarial = Literal["non_saturating", "hinge", "wasserstein", "least_squares"]
Formula = Callable[[Tensor], Tensor]

# For each loss, three functions of a score. They return the discriminator's loss of a real sample, the discriminator's
# loss of a generated sample, and the generator's loss of a generated sample.
FORMULAS: dict[str, tuple[Formula, Formula, Formula]] = {
    "non_saturating": (lambda real: softplus(-real), softplus, lambda fake: softplus(-fake)),
    "hinge": (lambda real: relu(1 - real), lambda fake: relu(1 + fake), lambda fake: -fake),
    "wasserstein": (lambda real: -real, lambda fake: fake, lambda fake: -fake),
    "least_squares": (
        lambda real: (real - 1).square() / 2,
        lambda fake: fake.square() / 2,
        lambda fake: (fake - 1).square() / 2,
    ),
}


class DiscriminatorLoss(AbstractTerm):
    """The discriminator's loss: the mean over real samples plus the mean over generated samples.

    Args:
        weight: The factor of this term in the objective. Default: 1.
        loss: `non_saturating` (default), `hinge`, `wasserstein` or `least_squares`. The table at the top of this module
            has the formulas.
        real: The name of the scores of real samples, `[B, ...]`. Default: `real_score`.
        fake: The name of the scores of generated samples, `[B, ...]`. Default: `fake_score`.
    """

    selects = ("real", "fake")

    def __init__(
        self,
        *,
        weight: float = 1.0,
        loss: Adversarial = "non_saturating",
        real: str = "real_score",
        fake: str = "fake_score",
    ) -> None:
        super().__init__(weight=weight)
        self._of_real, self._of_fake, _ = FORMULAS[loss]
        self.loss_name, self.real, self.fake = loss, real, fake

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the loss as a 0-d tensor.

        Raises:
            RunError: The network returns no scores with one of the two names.
        """
        real, fake = (full(pick(values, name, "score")) for name in (self.real, self.fake))
        return self._of_real(real).mean() + self._of_fake(fake).mean()


class GeneratorLoss(AbstractTerm):
    """The generator's loss: the mean over generated samples.

    Args:
        weight: The factor of this term in the objective. Default: 1.
        loss: `non_saturating` (default), `hinge`, `wasserstein` or `least_squares`. The table at the top of this module
            has the formulas.
        fake: The name of the scores of generated samples, `[B, ...]`. Default: `fake_score`.
    """

    selects = ("fake",)

    def __init__(self, *, weight: float = 1.0, loss: Adversarial = "non_saturating", fake: str = "fake_score") -> None:
        super().__init__(weight=weight)
        *_, self._of_fake = FORMULAS[loss]
        self.loss_name, self.fake = loss, fake

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the loss as a 0-d tensor.

        Raises:
            RunError: The network returns no scores with the name `fake`.
        """
        return self._of_fake(full(pick(values, self.fake, "score"))).mean()
