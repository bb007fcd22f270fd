"""The ready terms against their formulas, in float64, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.check.parameters import node_faults
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


def test_r1_is_the_mean_of_the_squared_slopes_of_the_summed_output() -> None:
    model, x = network(), sample(6, 5)
    values, passes = made(model, x)
    expected = torch.stack([jacobian(model, row).sum(0).square().sum() for row in x]).mean()
    value = R1()(values, None, passes)
    torch.testing.assert_close(value, expected)
    assert value.requires_grad
    assert not x.requires_grad, "the batch's own tensor was touched"


def test_the_exact_jacobian_norm_is_that_of_torch_func() -> None:
    model, x = network(4), sample(6, 5)
    expected = torch.stack([jacobian(model, row).square().sum() for row in x]).mean()
    torch.testing.assert_close(JacobianNorm()(*spread(made(model, x))), expected)


def test_projections_have_the_jacobian_norm_as_their_mean() -> None:
    model, x = network(4), sample(512, 5)
    exact = JacobianNorm()(*spread(made(model, x)))
    torch.manual_seed(0)
    found = JacobianNorm(projections=20)(*spread(made(model, x)))
    # 10,240 projections, each off by about its own size: one per cent, and three times that is not seen by chance.
    assert found.item() == pytest.approx(exact.item(), rel=0.03)
    one = JacobianNorm(projections=3)(*spread(made(network(1), x)))
    torch.testing.assert_close(one, JacobianNorm()(*spread(made(network(1), x))))


def spread(values_and_passes: tuple[dict[str, Any], Passes]) -> tuple[dict[str, Any], None, Passes]:
    values, passes = values_and_passes
    return values, None, passes


def test_the_gradients_of_the_penalties_are_those_of_finite_differences() -> None:
    for term in (R1(), JacobianNorm()):
        model, x = network(2), sample(4, 5)

        def penalty(weight: Tensor, term: Any = term, model: nn.Module = model, x: Tensor = x) -> Tensor:
            def runner(data: Tensor) -> Tensor:
                return torch.func.functional_call(model, {"0.weight": weight}, (data,))

            passes = Passes(network=model, run=run, data=(x, x), runner=runner)
            return term(passes.run(), None, passes)

        assert torch.autograd.gradcheck(penalty, model[0].weight)


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


def test_wgan_gp_is_the_paper_s_formula_on_the_line_between_real_and_fake() -> None:
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
    assert all(parameter.grad is None for parameter in model.generator.parameters()), "the generator learned from it"
    assert model.discriminator[0].weight.grad.abs().sum() > 0


def test_wgan_gp_of_a_flat_critic_has_a_gradient_that_is_a_number() -> None:
    model = Gan()
    nn.init.zeros_(model.discriminator[3].weight)
    values, passes = gan_values(model, sample(4, 5))
    value = WGANGP(critic="discriminator")(values, None, passes)
    assert value.item() == 1.0
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.discriminator.parameters() if p.grad is not None)


def test_a_critic_that_is_not_there_and_shapes_that_differ() -> None:
    values, passes = gan_values(Gan(), sample(4, 5))
    with pytest.raises(RunError, match="the network has no part 'critic'; there are discriminator, generator"):
        WGANGP(critic="critic")(values, None, passes)
    values["fake"] = sample(4, 3)
    with pytest.raises(RunError, match=r"input is \[4, 5\] and fake is \[4, 3\]; a gradient penalty goes from one to"):
        WGANGP(critic="discriminator")(values, None, passes)


def test_consistency_is_zero_without_chance_and_the_formula_with_it() -> None:
    for term in (Consistency(), Consistency(distance="kl"), Consistency(probabilities=False)):
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
    torch.set_rng_state(state)
    torch.testing.assert_close(
        Consistency(probabilities=False)(values, None, passes), (values["output"] - second).square().mean()
    )


@pytest.mark.parametrize(
    ("loss", "discriminator", "generator"),
    [
        (
            "non_saturating",
            lambda real, fake: -(math.log(sigmoid(real)) + math.log(1 - sigmoid(fake))),
            lambda fake: -math.log(sigmoid(fake)),
        ),
        ("hinge", lambda real, fake: max(0, 1 - real) + max(0, 1 + fake), lambda fake: -fake),
        ("wasserstein", lambda real, fake: fake - real, lambda fake: -fake),
        ("least_squares", lambda real, fake: ((real - 1) ** 2 + fake**2) / 2, lambda fake: (fake - 1) ** 2 / 2),
    ],
)
def test_adversarial_losses_are_their_formulas(loss: Any, discriminator: Callable, generator: Callable) -> None:
    real, fake = sample(8, 1, seed=1), sample(8, 1, seed=2)
    values = {"real_score": real, "fake_score": fake}
    pairs = list(zip(real.flatten().tolist(), fake.flatten().tolist(), strict=True))
    expected = sum(discriminator(*pair) for pair in pairs) / 8
    assert DiscriminatorLoss(loss=loss)(values).item() == pytest.approx(expected, rel=1e-12)
    expected = sum(generator(fake) for _, fake in pairs) / 8
    assert GeneratorLoss(loss=loss)(values).item() == pytest.approx(expected, rel=1e-12)
    half = {name: value.to(torch.bfloat16) for name, value in values.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = Objective({"d": DiscriminatorLoss(loss=loss), "g": GeneratorLoss(loss=loss)})(half)
    assert total.dtype == torch.float32


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


@pytest.mark.parametrize(
    ("target", "setting", "message"),
    [
        ("objectives.penalties.R1", {"precision": "half"}, "x.precision: 'half'; expected one of step, full"),
        ("objectives.penalties.JacobianNorm", {"projections": 0}, "x.projections: 0; expected an integer, 1 or more"),
        ("objectives.consistency.Consistency", {"distance": "l1"}, "x.distance: 'l1'; expected one of mse, kl"),
        (
            "objectives.adversarial.GeneratorLoss",
            {"loss": "hing"},
            "x.loss: 'hing'; expected one of non_saturating",
        ),
        ("models.layers.GradientReversal", {"weight": -1.0}, "x.weight: -1.0; expected a number, 0 or more"),
        (
            "models.layers.Noise",
            {"shape": [2], "distribution": "gamma"},
            "x.distribution: 'gamma'; expected one of",
        ),
    ],
)
def test_settings_that_are_none(target: str, setting: dict[str, Any], message: str) -> None:
    faults = list(node_faults("x", {"_target_": f"exp.{target}", **setting}, allow=()))
    assert [str(fault).startswith(message) for fault in faults] == [True], faults


def test_a_divergence_compares_probabilities() -> None:
    with pytest.raises(ValueError, match="probabilities is false; expected true, for distance: kl"):
        Consistency(distance="kl", probabilities=False)
