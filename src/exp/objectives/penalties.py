"""Terms that penalize derivatives, such as the gradient of a critic or the Jacobian of an output."""

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
    """Base class of terms that use the derivative of an output of the network with respect to an input.

    Args:
        weight: The factor of this term in the objective. Default: 1.
        output: The name of the value to differentiate, `[B, ...]`. Default: `output`.
        input: The name of the value in the denominator of the derivative, `[B, ...]`. Default: `input`.
    """

    needs = frozenset({"input_gradients"})
    selects = ("output", "input")

    def __init__(self, *, weight: float = 1.0, output: str = "output", input: str = "input") -> None:
        super().__init__(weight=weight)
        self.output, self.input = output, input

    def ends(self, values: Values) -> tuple[Tensor, Tensor]:
        """Return the output to differentiate, and the input in the denominator of the derivative.

        Raises:
            RunError: One of the two names has no value.
        """
        return pick(values, self.output, "output"), pick(values, self.input, "input")


class R1(DerivativeTerm):
    """Squared norm of the gradient of an output with respect to an input, averaged over samples.

        E_x [ || d D(x) / d x ||^2 ]

    D(x) is the output, and x is the input. This is equation 9 of Mescheder, Geiger and Nowozin 2018, "Which Training
    Methods for GANs do actually Converge?", arXiv:1801.04406. `weight` is gamma/2 in this equation. If the output has
    several numbers per sample, the sum of these numbers is differentiated.

    The input may be an intermediate value of the network. If the input is the generated samples, the penalty is R2 of
    the paper. DerivativeTerm describes the arguments.
    """

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the penalty as a 0-d tensor.

        Raises:
            RunError: A value is missing, or the input has no gradient.
        """
        assert passes is not None
        return _squared_norms(passes.gradients(*self.ends(values))).mean()


class WGANGP(AbstractTerm):
    """Gradient penalty of WGAN-GP, which keeps the norm of a critic's gradient near 1.

        E_x^ [ (|| d D(x^) / d x^ ||_2 - 1)^2 ],   x^ = e x + (1 - e) x~,   e uniform in [0, 1] for each sample

    x is a real sample, and x~ is a generated sample. This is equation 3 of Gulrajani et al. 2017, "Improved Training of
    Wasserstein GANs", arXiv:1704.00028. `weight` is lambda in this equation. The penalty trains the critic, not the
    generator.

    Args:
        critic: The dotted name of the critic in the network. The empty name stands for the whole network.
        weight: The factor of this term in the objective. Default: 10.
        real: The name of the real samples, `[B, ...]`. Default: `input`.
        fake: The name of the generated samples, with the same shape as the real samples. Default: `fake`.
        output: The name of the critic's output, if the critic returns a mapping. Default: `output`.
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
        """Return the penalty as a 0-d tensor.

        Raises:
            RunError: A value is missing, or real and generated samples have different shapes.
        """
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
    """Squared Frobenius norm of the Jacobian of an output with respect to an input, averaged over samples.

        E_x [ || d f(x) / d x ||_F^2 ]

    f(x) is the output, x is the input, and J is the Jacobian d f(x) / d x. This is equation 5 of Hoffman, Roberts and
    Yaida 2019, "Robust Learning with Jacobian Regularization", arXiv:1908.02729. `weight` is lambda/2 in this equation.

    The exact norm needs a backward pass for each of the C numbers of an output. With `projections`, algorithm 1 of the
    paper estimates the norm: C times the mean of || v^T J ||^2 over random unit vectors v. The estimate is unbiased.

    Args:
        weight: The factor of this term in the objective. Default: 1.
        output: The name of the value to differentiate, `[B, ...]`, with C numbers per sample. Default: `output`.
        input: The name of the value in the denominator of the derivative, `[B, ...]`. Default: `input`.
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
        """Return the penalty as a 0-d tensor.

        Raises:
            RunError: A value is missing, or the input has no gradient.
        """
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
    """Loss that returns the 2-norm of the gradient of a given loss with respect to all trained parameters.

        || d L / d theta ||_2

    This is the penalty of PyTorch's AMP notes,
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty. The norm depends on the batch size,
    because it is not a mean over samples. The value of a stage is the mean over batches. The check reports an error for
    several ranks and for gradient accumulation.

    Args:
        loss: The given loss L: a module that is called with (output, target) and returns a 0-d tensor, such as
            exp.objectives.terms.CrossEntropy.
    """

    needs = frozenset({"parameter_gradients"})

    def __init__(self, *, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor, passes: Passes) -> Tensor:
        """Return the norm as a 0-d tensor. If all gradients are 0, the norm and the gradient of the norm are 0."""
        trained = [parameter for parameter in passes.network.parameters() if parameter.requires_grad]
        gradients = passes.gradients(self.loss(output, target), trained)
        return _norm(torch.stack([gradient.square().sum() for gradient in gradients]).sum())


def _norm(squared: Tensor) -> Tensor:
    """Return the square root of a tensor. The derivative at 0 is set to 0, because the true derivative is infinite."""
    return torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)


def _squared_norms(gradient: Tensor) -> Tensor:
    """Return the squared norm of the gradient of each sample, `[B]`, for gradients `[B, ...]`."""
    return gradient.flatten(1).square().sum(1)
