"""Penalties on derivatives: how steep a critic may be, and how much an output may move with an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional

from exp.errors import RunError
from exp.objectives.loss_inputs import Values, full, pick
from exp.objectives.passes import Passes, Precision
from exp.objectives.term import AbstractTerm
from exp.shared_types import Batch


class DerivativeTerm(AbstractTerm):
    """Base of terms on the derivative of an output of the network with respect to an input.

    output: the value that is differentiated, `[B, ...]`. input: with respect to which, `[B, ...]`.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    needs = frozenset({"input_gradients"})

    def __init__(
        self, *, weight: float = 1.0, output: str = "output", input: str = "input", precision: Precision = "step"
    ) -> None:
        super().__init__(weight=weight)
        self.output, self.input = output, input
        self.precision = precision
        if precision == "full":
            self.needs = self.needs | {"forward_passes"}

    @property
    def names(self) -> Mapping[str, str]:
        return {"output": self.output, "input": self.input}

    def ends(self, values: Values, passes: Passes) -> tuple[Tensor, Tensor]:
        """The output and the input, of this pass or of one of the term's own.

        Raises: RunError where a value is not there.
        """
        if self.precision == "full":
            values = passes.run(precision="full")
        return pick(values, self.output, "output"), pick(values, self.input, "input")


class R1(DerivativeTerm):
    """Mean over samples of the squared norm of the gradient of an output with respect to an input.

        E_x [ || d D(x) / d x ||^2 ]

    Mescheder, Geiger and Nowozin 2018, "Which Training Methods for GANs do actually Converge?", arXiv:1801.04406,
    equation 9, where `weight` is gamma/2. Of an output of several numbers a sample their sum is differentiated.

    output: the value that is differentiated, `[B, ...]`. input: with respect to which, `[B, ...]`: an input of the
        network, or what it computed on the way; with the generated samples for it, it is the paper's R2.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the input has no gradient."""
        assert passes is not None
        return _squared(passes.gradients(*self.ends(values, passes))).mean()


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
        self.precision = precision

    @property
    def names(self) -> Mapping[str, str]:
        return {"real": self.real, "fake": self.fake}

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
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
        return (_norm(_squared(passes.gradients(output, between))) - 1).square().mean()


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
        projections: Annotated[int, Ge(1)] | None = None,
        precision: Precision = "step",
    ) -> None:
        super().__init__(weight=weight, output=output, input=input, precision=precision)
        self.projections = projections

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Raises: RunError where a value is not there, or the input has no gradient."""
        assert passes is not None
        output, given = self.ends(values, passes)
        output = full(output).flatten(1)
        if self.projections is None:
            squares = [_squared(passes.gradients(column, given)) for column in output.unbind(1)]
            return torch.stack(squares).sum(0).mean()
        squares = []
        for _ in range(self.projections):
            direction = functional.normalize(torch.randn_like(output), dim=1)
            squares.append(_squared(passes.gradients((direction * output).sum(1), given)))
        return output.shape[1] * torch.stack(squares).mean()


class GradientNorm(nn.Module):
    """The 2-norm of the gradient of a loss with respect to all parameters that learn: the loss of a term.

        || d L / d theta ||_2

    The penalty of PyTorch's AMP notes,
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty. It is that of a batch as a whole and
    no mean over samples: in a stage it is the mean over batches, and depends on their size; over several ranks or
    accumulated batches it is refused.

    loss: a module called with (output, target) that gives a 0-d tensor, such as exp.objectives.terms.CrossEntropy.
    """

    needs = frozenset({"parameter_gradients"})

    def __init__(self, *, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor, passes: Passes) -> Tensor:
        """The norm, 0-d, of `[B, ...]` and `[B, ...]`; 0 with the gradient 0 where no parameter has a slope."""
        learning = [parameter for parameter in passes.network.parameters() if parameter.requires_grad]
        gradients = passes.gradients(self.loss(output, target), learning)
        return _norm(torch.stack([gradient.square().sum() for gradient in gradients]).sum())


def _norm(squared: Tensor) -> Tensor:
    """The root, whose derivative at 0 is no number, and is 0 here."""
    return torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)


def _squared(gradient: Tensor) -> Tensor:
    """The squared norm of each sample's row: `[B, ...]` to `[B]`."""
    return gradient.flatten(1).square().sum(1)
