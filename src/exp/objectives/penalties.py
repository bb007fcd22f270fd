"""Penalties on derivatives, such as the gradient of a critic or the Jacobian of an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional

from exp.errors import RunError
from exp.objectives.loss_inputs import Values, full, pick
from exp.objectives.passes import Passes
from exp.objectives.term import AbstractTerm
from exp.shared_types import Batch


class DerivativeTerm(AbstractTerm):
    """Base class of terms on the derivative of an output of the network with respect to an input.

    Args:
        weight: The factor of this term in the objective, default 1.
        output: The name of the value to differentiate, `[B, ...]`.
        input: The name of the value with respect to which it is differentiated, `[B, ...]`.
    """

    needs = frozenset({"input_gradients"})
    selects = ("output", "input")

    def __init__(self, *, weight: float = 1.0, output: str = "output", input: str = "input") -> None:
        super().__init__(weight=weight)
        self.output, self.input = output, input

    def ends(self, values: Values) -> tuple[Tensor, Tensor]:
        """Return the output and the input of the derivative.

        Raises:
            RunError: A value does not exist.
        """
        return pick(values, self.output, "output"), pick(values, self.input, "input")


class R1(DerivativeTerm):
    """Mean over samples of the squared norm of the gradient of an output with respect to an input.

        E_x [ || d D(x) / d x ||^2 ]

    Mescheder, Geiger and Nowozin 2018, "Which Training Methods for GANs do actually Converge?", arXiv:1801.04406,
    equation 9, where `weight` is gamma/2. If the output has several numbers per sample, their sum is differentiated.

    The input may be an intermediate value. If it is the generated samples, the penalty is the paper's R2. See
    DerivativeTerm for the arguments.
    """

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the penalty, 0-d. Raise RunError if a value is missing or the input has no gradient."""
        assert passes is not None
        return _squared_norms(passes.gradients(*self.ends(values))).mean()


class WGANGP(AbstractTerm):
    """Gradient penalty of WGAN-GP: the mean squared distance of the norm of a critic's gradient from 1.

        E_x^ [ (|| d D(x^) / d x^ ||_2 - 1)^2 ],   x^ = e x + (1 - e) x~,   e uniform in [0, 1] for each sample

    x is a real sample, and x~ a generated sample. Gulrajani et al. 2017, "Improved Training of Wasserstein GANs",
    arXiv:1704.00028, equation 3, where `weight` is lambda. The penalty trains the critic, not the generator.

    Args:
        critic: The dotted name of the critic in the network. An empty name is the whole network.
        weight: The factor of this term in the objective, default 10.
        real: The name of the real samples, `[B, ...]`.
        fake: The name of the generated samples, which have the same shape.
        output: The name of the critic's output, if the critic returns several values.
    """

    needs = frozenset({"input_gradients", "forward_passes"})
    selects = ("real", "fake")

    def __init__(
        self,
        *,
        critic: str,
        weight: float = 10.0,
        real: str = "input",
        fake: str = "fake",
        output: str = "output",
    ) -> None:
        super().__init__(weight=weight)
        self.critic, self.real, self.fake, self.output = critic, real, fake, output
        self.parts = (critic,)

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the penalty, 0-d. Raise RunError if a value is missing or the shapes differ."""
        assert passes is not None
        real = full(pick(values, self.real, "real samples").detach())
        fake = full(pick(values, self.fake, "fake samples").detach())
        if real.shape != fake.shape:
            raise RunError(
                f"got real samples {self.real} {list(real.shape)} and fake samples {self.fake} {list(fake.shape)}; "
                "expected equal shapes, because the gradient penalty interpolates between real and fake samples"
            )
        share = torch.rand((len(real), *[1] * (real.dim() - 1)), dtype=real.dtype, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        given = passes.call(self.critic, between)
        output = pick(given, self.output, "output") if isinstance(given, Mapping) else given
        return (_norm(_squared_norms(passes.gradients(output, between))) - 1).square().mean()


class JacobianNorm(DerivativeTerm):
    """Mean over samples of the squared Frobenius norm of the Jacobian of an output with respect to an input.

        E_x [ || d f(x) / d x ||_F^2 ]

    Hoffman, Roberts and Yaida 2019, "Robust Learning with Jacobian Regularization", arXiv:1908.02729, equation 5, where
    `weight` is lambda/2. The exact norm needs a backward pass for each of the C numbers of an output. With
    `projections`, the norm is estimated by algorithm 1 of the paper: C times the mean of || v^T J ||^2 over random unit
    vectors v. The estimate is unbiased.

    Args:
        weight: The factor of this term in the objective, default 1.
        output: The name of the value to differentiate, `[B, ...]`, with C numbers per sample.
        input: The name of the value with respect to which it is differentiated, `[B, ...]`.
        projections: The number of random vectors per sample. None (default) computes the exact norm.
    """

    def __init__(
        self,
        *,
        weight: float = 1.0,
        output: str = "output",
        input: str = "input",
        projections: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        super().__init__(weight=weight, output=output, input=input)
        self.projections = projections

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the penalty, 0-d. Raise RunError if a value is missing or the input has no gradient."""
        assert passes is not None
        output, given = self.ends(values)
        output = full(output).flatten(1)
        if self.projections is None:
            squares = [_squared_norms(passes.gradients(column, given)) for column in output.unbind(1)]
            return torch.stack(squares).sum(0).mean()
        squares = []
        for _ in range(self.projections):
            direction = functional.normalize(torch.randn_like(output), dim=1)
            squares.append(_squared_norms(passes.gradients((direction * output).sum(1), given)))
        return output.shape[1] * torch.stack(squares).mean()


class GradientNorm(nn.Module):
    """Loss module that returns the 2-norm of the gradient of another loss with respect to all trained parameters.

        || d L / d theta ||_2

    This is the penalty of PyTorch's AMP notes,
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty. The norm is not a mean over samples,
    and depends on the batch size. A stage averages it over batches. Several ranks and gradient accumulation are errors.

    Args:
        loss: A module that is called with (output, target) and returns a 0-d tensor, such as
            exp.objectives.terms.CrossEntropy.
    """

    needs = frozenset({"parameter_gradients"})

    def __init__(self, *, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor, passes: Passes) -> Tensor:
        """Return the norm, 0-d. If all gradients are 0, the norm and its gradient are 0."""
        trained = [parameter for parameter in passes.network.parameters() if parameter.requires_grad]
        gradients = passes.gradients(self.loss(output, target), trained)
        return _norm(torch.stack([gradient.square().sum() for gradient in gradients]).sum())


def _norm(squared: Tensor) -> Tensor:
    """Return the square root, with the derivative 0 at 0, where the true derivative is infinite."""
    return torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)


def _squared_norms(gradient: Tensor) -> Tensor:
    """Return the squared norm of each sample's gradient: `[B, ...]` to `[B]`."""
    return gradient.flatten(1).square().sum(1)
