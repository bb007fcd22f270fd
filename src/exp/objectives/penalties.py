"""Gradient penalties: how steep a critic may be, as a function of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exp.errors import RunError
from exp.objectives.derivative import DerivativeTerm, checked_precision
from exp.objectives.passes import Passes, Precision
from exp.objectives.term import AbstractTerm
from exp.objectives.values import full, pick
from exp.types import Batch


class R1(DerivativeTerm):
    """Mean over samples of the squared norm of the gradient of an output with respect to an input.

        E_x [ || d D(x) / d x ||^2 ]

    Mescheder, Geiger and Nowozin 2018, "Which Training Methods for GANs do actually Converge?", arXiv:1801.04406,
    equation 9, where `weight` is gamma/2. Of an output of several numbers a sample their sum is differentiated.

    output: the value that is differentiated, `[B, ...]`. input: with respect to which, `[B, ...]`: an input of the
        network, or what it computed on the way; with the generated samples for it, it is the paper's R2.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    def __init__(
        self, *, weight: float = 1.0, output: str = "output", input: str = "input", precision: Precision = "step"
    ) -> None:
        super().__init__(weight=weight, output=output, input=input, precision=precision)

    def forward(self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the input has no gradient."""
        assert passes is not None
        slope = passes.gradients(*self.ends(values, passes))
        return slope.flatten(1).square().sum(1).mean()


class WGANGP(AbstractTerm):
    """Mean over samples of the squared distance of a critic's slope from 1, between real and generated samples.

        E_x^ [ (|| d D(x^) / d x^ ||_2 - 1)^2 ],   x^ = e x + (1 - e) x~,   e uniform in [0, 1] for each sample

    Gulrajani et al. 2017, "Improved Training of Wasserstein GANs", arXiv:1704.00028, equation 3, where `weight` is
    lambda. The critic learns from it, what generated the samples does not.

    critic: the part of the network that judges, by its dotted name; the empty one is the whole network.
    real, fake: the values between which it is judged, `[B, ...]`, of one shape.
    output: which value is the critic's, where it returns several by name.
    precision: `full` runs the critic in float32 for this term.
    """

    needs = frozenset({"input_gradients", "forward_passes"})

    def __init__(
        self,
        *,
        critic: str,
        weight: float = 10.0,
        real: str = "input",
        fake: str = "fake",
        output: str = "output",
        precision: Precision = "step",
    ) -> None:
        super().__init__(weight=weight)
        self.critic, self.real, self.fake, self.output = critic, real, fake, output
        self.parts = (critic,)
        self.precision = checked_precision(precision)

    def forward(self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the two differ in shape."""
        assert passes is not None
        real = full(pick(values, self.real, "real samples").detach())
        fake = full(pick(values, self.fake, "fake samples").detach())
        if real.shape != fake.shape:
            raise RunError(
                f"{self.real} is {list(real.shape)} and {self.fake} is {list(fake.shape)}; a gradient penalty goes "
                "from one to the other, and both must have one shape"
            )
        share = torch.rand((len(real), *[1] * (real.dim() - 1)), dtype=real.dtype, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        given = passes.call(self.critic, between, precision=self.precision)
        output = pick(given, self.output, "output") if isinstance(given, Mapping) else given
        # The norm's own derivative at 0 is no number.
        squared = passes.gradients(output, between).flatten(1).square().sum(1)
        norm = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)
        return (norm - 1).square().mean()
