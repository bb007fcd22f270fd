"""Tests of exp's terms: formulas in float64, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.objectives.adversarial import DiscriminatorLoss, GeneratorLoss
from exp.objectives.consistency import Consistency
from exp.objectives.objective import Objective
from exp.objectives.passes import Passes
from exp.objectives.penalties import R1, WGANGP, JacobianNorm

pytestmark = pytest.mark.numeric


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(outputs: int = 3, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, outputs)).double()


def run(runner: Callable[..., Any], data: Any) -> dict[str, Any]:
    output = runner(data[0])
    return {"input": data[0], "target": data[1], "output": output}


def made(model: nn.Module, x: Tensor) -> tuple[dict[str, Any], Passes]:
    passes = Passes(network=model, run=run, data=(x, torch.zeros(len(x))))
    return passes.run(), passes


def jacobian(model: nn.Module, row: Tensor) -> Tensor:
    return torch.func.jacrev(model)(row)


def spread(values_and_passes: tuple[dict[str, Any], Passes]) -> tuple[dict[str, Any], None, Passes]:
    values, passes = values_and_passes
    return values, None, passes


def test_gradient_penalties_equal_those_of_torch_func() -> None:
    model, x = network(4), sample(6, 5)
    jacobians = [jacobian(model, row) for row in x]
    value = R1()(*spread(made(model, x)))
    torch.testing.assert_close(value, torch.stack([one.sum(0).square().sum() for one in jacobians]).mean())
    assert value.requires_grad
    assert not x.requires_grad, "the tensor of the batch was changed"
    expected = torch.stack([one.square().sum() for one in jacobians]).mean()
    torch.testing.assert_close(JacobianNorm()(*spread(made(model, x))), expected)


def test_projections_estimate_the_jacobian_norm() -> None:
    model, x = network(4), sample(512, 5)
    exact = JacobianNorm()(*spread(made(model, x)))
    torch.manual_seed(0)
    found = JacobianNorm(projections=20)(*spread(made(model, x)))
    # The mean of 10,240 projections has a relative standard deviation of about 0.01.
    assert found.item() == pytest.approx(exact.item(), rel=0.03)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.discriminator = network(1)
        self.generator = nn.Linear(5, 5).double()

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        fake = self.generator(input.flip(0))
        return {"fake": fake, "real_score": self.discriminator(input), "fake_score": self.discriminator(fake)}


def gan_values(model: nn.Module, x: Tensor) -> tuple[dict[str, Any], Passes]:
    passes = Passes(network=model, run=lambda runner, data: {"input": data[0], **runner(data[0])}, data=(x, x))
    return passes.run(), passes


def test_wgan_gp_follows_its_formula() -> None:
    model, x = Gan(), sample(6, 5)
    values, passes = gan_values(model, x)
    torch.manual_seed(3)
    value = WGANGP(critic="discriminator")(values, None, passes)
    torch.manual_seed(3)
    share = torch.rand(6, 1, dtype=torch.float64)
    between = share * x + (1 - share) * values["fake"].detach()
    norms = torch.stack([jacobian(model.discriminator, row).flatten().norm() for row in between])
    torch.testing.assert_close(value, (norms - 1).square().mean())
    value.backward()
    assert all(parameter.grad is None for parameter in model.generator.parameters()), "the generator has gradients"
    assert model.discriminator[0].weight.grad.abs().sum() > 0
    # A constant critic has a zero gradient, where the norm must not give nan.
    model = Gan()
    nn.init.zeros_(model.discriminator[3].weight)
    value = WGANGP(critic="discriminator")(*spread(gan_values(model, x)))
    assert value.item() == 1.0
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.discriminator.parameters() if p.grad is not None)


def test_wgan_gp_reports_wrong_shapes() -> None:
    values, passes = gan_values(Gan(), sample(4, 5))
    values["fake"] = sample(4, 3)
    with pytest.raises(RunError, match=r"real samples input \[4, 5\] and fake samples fake \[4, 3\]"):
        WGANGP(critic="discriminator")(values, None, passes)


def test_consistency_follows_its_formula() -> None:
    for term in (Consistency(), Consistency(distance="kl")):
        assert term(*spread(made(network(), sample(6, 5)))).item() == 0.0
    model, x = network(dropout=0.5), sample(6, 5)
    values, passes = made(model, x)
    state = torch.get_rng_state()
    second = passes.run()["output"]
    p, q = values["output"].softmax(-1), second.softmax(-1)
    expected = {
        "mse": (p - q).square().mean(),
        "kl": ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)).mean() / 2,
    }
    for distance, wanted in expected.items():
        torch.set_rng_state(state)
        value = Consistency(distance=distance)(values, None, passes)
        torch.testing.assert_close(value, wanted)
        assert value.item() > 0


@pytest.mark.parametrize("loss", ["non_saturating", "hinge", "wasserstein", "least_squares"])
def test_adversarial_losses_follow_their_formulas(loss: Any) -> None:
    real, fake = sample(8, 1, seed=1), sample(8, 1, seed=2)
    values = {"real_score": real, "fake_score": fake}
    discriminator, generator = {
        "non_saturating": (-(real.sigmoid().log() + (1 - fake.sigmoid()).log()), -fake.sigmoid().log()),
        "hinge": ((1 - real).clamp(min=0) + (1 + fake).clamp(min=0), -fake),
        "wasserstein": (fake - real, -fake),
        "least_squares": (((real - 1) ** 2 + fake**2) / 2, (fake - 1) ** 2 / 2),
    }[loss]
    torch.testing.assert_close(DiscriminatorLoss(loss=loss)(values), discriminator.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(GeneratorLoss(loss=loss)(values), generator.mean(), rtol=1e-12, atol=0)
    half = {name: value.to(torch.bfloat16) for name, value in values.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = Objective({"d": DiscriminatorLoss(loss=loss), "g": GeneratorLoss(loss=loss)})(half)
    assert total.dtype == torch.float32
