"""Losses and penalties of the gallery equal loops by hand. The site shows the docstrings of the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from exp.data.randomness import reseed

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]

DOUBLE = ("precision=fp64",)


class Perceptron(nn.Module):
    """Network of conf/model/sequential.yaml."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.hidden2, self.head = nn.Linear(64, 256), nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        gelu = nn.functional.gelu
        return self.head(gelu(self.hidden2(gelu(self.hidden(x.flatten(1))))))


def test_gradient_penalty_inputs(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a loop that uses `torch.autograd.grad` with respect
    to the input to 1e-9.
    """

    def loss(network: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        scores = network(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return cross_entropy(scores, batch[1]) + 0.01 * slope.flatten(1).square().sum(1).mean()

    gallery.descend("gradient_penalty_inputs", Perceptron(), loss=loss)


def of_the_notes(network: nn.Module, batch: Any, *, weight: float = 0.01) -> Tensor:
    """Return the loss of https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty, unscaled."""
    loss = cross_entropy(network(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
    norm = torch.zeros((), dtype=loss.dtype)
    for gradient in gradients:
        norm = norm + gradient.pow(2).sum()
    return loss + weight * norm.sqrt()


@pytest.mark.slow
def test_gradient_penalty_parameters(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of the loop of PyTorch's AMP notes to 1e-9."""
    gallery.descend("gradient_penalty_parameters", Perceptron(), loss=of_the_notes)


@pytest.mark.slow
def test_gradient_penalty_scaled(gallery: Any, hand: Any) -> None:
    """The change of the weights by three steps in float16 with a loss scale of 1024 equals that in float64 to 1
    percent. Without the penalty the change differs by more than 5 percent.
    """
    network = Perceptron()
    start = {name: value.double() for name, value in network.state_dict().items()}
    torch.save(network.state_dict(), hand.START)
    fp16 = (
        "precision=fp16",
        "precision.scaler.init_scale=1024",
        f"weights.from={hand.START}",
        "objective.gradient_norm.weight=0.2",
    )
    ran = gallery.run("gradient_penalty_scaled", *hand.DESCENT[1:], *hand.SHORT, *fp16)
    assert ran.metrics["precision/skipped_steps"] == 0

    def away(weight: float) -> float:
        """Return the difference between the weights of the run and of a loop, divided by the change in the loop."""
        network.load_state_dict(start)
        batches = gallery.batches("gradient_penalty_scaled", *DOUBLE)
        hand.by_hand(network.double(), batches, loss=lambda *given: of_the_notes(*given, weight=weight))
        moved = torch.cat([(value - start[name]).flatten() for name, value in network.state_dict().items()])
        found = torch.cat([(ran.weights[name].double() - start[name]).flatten() for name in start])
        return ((found - moved).norm() / moved.norm()).item()

    assert away(0.2) < 0.01
    assert away(0.0) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fp16", "bf16"])
def test_amp_fp16_and_bf16_are_autocast(gallery: Any, hand: Any, build_model: Any, word: str) -> None:
    name, model = {"fp16": ("amp_fp16", "sequential"), "bf16": ("amp_bf16", "resnet")}[word]
    network = build_model(model)
    torch.save(network.state_dict(), hand.START)
    ran = gallery.run(name, *hand.DESCENT[1:], *hand.SHORT, f"weights.from={hand.START}")
    scaler = torch.amp.GradScaler("cpu", enabled=word == "fp16")
    optimizer = torch.optim.SGD(network.parameters(), lr=hand.RATE)
    for x, target in gallery.batches(name):
        optimizer.zero_grad()
        with torch.autocast("cpu", {"fp16": torch.float16, "bf16": torch.bfloat16}[word], cache_enabled=False):
            scores = network(x.float())
        scaler.scale(cross_entropy(scores.float(), target)).backward()
        scaler.step(optimizer)
        scaler.update()
    hand.assert_equal(ran.weights, network.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_amp_fp16(gallery: Any) -> None:
    """After three steps, the weights equal those of a loop with `torch.autocast` and `GradScaler` to 1e-6. A step that
    overflows halves the scale of 65536.
    """
    ran = gallery.run("amp_fp16", "debug=few_batches", "test=false", "logger=[csv]")
    scales = ran.column("precision/loss_scale")
    assert scales[0] in (65536.0, 32768.0)
    assert scales[-1] == 65536.0 / 2 ** ran.metrics["precision/skipped_steps"]


@pytest.mark.slow
def test_amp_bf16(gallery: Any) -> None:
    """After three steps, the float32 weights equal those of a loop with `torch.autocast` in bfloat16 to 1e-6."""
    ran = gallery.run("amp_bf16", "debug=one_batch", "test=false")
    assert {value.dtype for value in ran.weights.values()} == {torch.float32, torch.int64}
    assert ran.report["precision"] == "bf16"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)


@pytest.mark.parametrize("word", ["fp64", "fp16"])
def test_two_models_two_losses(gallery: Any, hand: Any, word: str) -> None:
    """After three steps, the weights equal those of the loop of PyTorch's AMP notes with two optimizers and one scaler:
    to 1e-9 in float64, to 1e-4 in float16.
    """
    network, dtype = Two(), torch.float64 if word == "fp64" else torch.float32
    network.to(dtype)
    torch.save(network.state_dict(), hand.START)
    start = (
        f"weights.from={hand.START}",
        f"precision={word}",
        "precision.scaler.init_scale=1024" if word == "fp16" else "seed=0",
    )
    ran = gallery.run("two_models_two_losses", *hand.SHORT, *start)
    optimizers = [
        torch.optim.SGD(network.first.parameters(), lr=0.05),
        torch.optim.SGD(network.second.parameters(), lr=0.02),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=word == "fp16")
    for x, target in gallery.batches("two_models_two_losses"):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=word == "fp16", cache_enabled=False):
            a, b = network.first(x.to(dtype).flatten(1)), network.second(x.to(dtype).flatten(1))
            one, other = 2 * a + 3 * b, 3 * a - 5 * b
        losses = [cross_entropy(scores.to(dtype), target) for scores in (one, other)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    close = {"rtol": 1e-9, "atol": 1e-11} if word == "fp64" else {"rtol": 0, "atol": 1e-4}
    hand.assert_equal(ran.weights, network.state_dict(), **close)


def phases_by_hand(
    network: nn.Module, batches: list[Any], *, critic_rounds: int, penalty: float, wasserstein: bool
) -> None:
    """Make the repeated steps of the discriminator, then one of the generator, with plain gradient descent."""
    parts = {name: list(getattr(network, name).parameters()) for name in ("discriminator", "generator")}
    for index, (x, *_) in enumerate(batches):
        for turn in [(0, repeat) for repeat in range(critic_rounds)] + [(1, 0)]:
            reseed(seed=0, rank=0, epoch=0, batch=index, turn=turn if any(turn) else ())
            fake = network.generator(torch.randn(len(x), 16, dtype=x.dtype))
            if turn[0] == 1:
                score = network.discriminator(fake)
                loss = -score.mean() if wasserstein else softplus(-score).mean()
                learning = parts["generator"]
            else:
                fake = fake.detach()
                real_score, fake_score = network.discriminator(x), network.discriminator(fake)
                loss = (
                    (fake_score - real_score).mean()
                    if wasserstein
                    else (softplus(-real_score) + softplus(fake_score)).mean()
                )
                if penalty:
                    share = torch.rand(len(x), 1, 1, 1, dtype=x.dtype)
                    between = (share * x + (1 - share) * fake).requires_grad_()
                    (slope,) = torch.autograd.grad(network.discriminator(between).sum(), between, create_graph=True)
                    loss = loss + penalty * (slope.flatten(1).norm(dim=1) - 1).square().mean()
                learning = parts["discriminator"]
            gradients = torch.autograd.grad(loss, learning)
            with torch.no_grad():
                for parameter, gradient in zip(learning, gradients, strict=True):
                    parameter -= 0.05 * gradient


def adversaries(gallery: Any, hand: Any, build_model: Any, name: str, *more: str, **options: Any) -> None:
    network = build_model("gan").double()
    torch.save(network.state_dict(), hand.START)
    plain = [
        f"phases.{one}.optimizer={{_target_: torch.optim.SGD, lr: 0.05}}" for one in ("discriminator", "generator")
    ]
    ran = gallery.run(name, *hand.SHORT, *DOUBLE, "scheduler=constant", f"weights.from={hand.START}", *plain, *more)
    phases_by_hand(network, gallery.batches(name), **options)
    hand.assert_equal(ran.weights, network.state_dict())


def test_gan(gallery: Any, hand: Any, build_model: Any) -> None:
    """After three SGD steps in float64, the weights of both networks equal those of the two updates written by hand to
    1e-9.
    """
    unclipped = "phases.discriminator.gradient_clip_val=null"
    adversaries(gallery, hand, build_model, "gan", unclipped, critic_rounds=1, penalty=0, wasserstein=False)


@pytest.mark.slow
def test_wgan_gp(gallery: Any, hand: Any, build_model: Any) -> None:
    """Three steps have five updates of the critic and one of the generator each. After them, the weights equal those of
    Gulrajani's algorithm 1 by hand in float64 to 1e-9.
    """
    adversaries(gallery, hand, build_model, "wgan_gp", critic_rounds=5, penalty=10, wasserstein=True)


def opposed(network: nn.Module, batches: list[Any], weight: float) -> None:
    """Make steps without a reversal layer: the features ascend the weighted domain loss, and the other layers descend
    their losses.
    """
    parameters = dict(network.named_parameters())
    for batch in batches:
        h = network.features(batch["input"])
        domain = network.domain_head(network.domain_hidden(h).relu())
        losses = (
            cross_entropy(network.head(h), batch["target"], ignore_index=-100),
            cross_entropy(domain, batch["domain"]),
        )
        both = [torch.autograd.grad(loss, parameters.values(), retain_graph=True, allow_unused=True) for loss in losses]
        with torch.no_grad():
            for (name, parameter), one, other in zip(parameters.items(), *both, strict=True):
                sign = -weight if name.startswith("features") else 1.0
                parameter -= 0.05 * ((0 if one is None else one) + (0 if other is None else sign * other))


@pytest.mark.parametrize("name", ["domain_adversarial", "dann"])
def test_domain_adversarial_and_dann_are_one(gallery: Any, hand: Any, build_model: Any, name: str) -> None:
    network = build_model("domain_adversarial").double()
    torch.save(network.state_dict(), hand.START)
    plain = [*hand.DESCENT, *hand.SHORT, f"weights.from={hand.START}"]
    if name == "dann":
        plain.append("hooks.gradient_reversal.schedule=constant")
    ran = gallery.run(name, *plain)
    opposed(network, gallery.batches(name), 0.1)
    hand.assert_equal(ran.weights, network.state_dict())


@pytest.mark.parametrize("epochs", [2])
def test_dann(gallery: Any, epochs: int) -> None:
    """After three SGD steps in float64, the weights equal those of two gradients added by hand to 1e-9. With the
    paper's schedule, the weight is 0.1 (2 / (1 + exp(-10 p)) - 1), where p is the fraction of completed steps.
    """
    short = (
        f"trainer.max_epochs={epochs}",
        "trainer.limit_train_batches=5",
        "trainer.limit_val_batches=1",
        "test=false",
    )
    weights = gallery.run("dann", *short, "logger=[csv]").column("gradient_reversal/weight")
    wanted = [0.1 * torch.tanh(torch.tensor(5 * step / (5 * epochs))).item() for step in range(5 * epochs)]
    assert weights == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_domain_adversarial(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of two gradients added by hand to 1e-9. After 8 epochs,
    the network recognizes more digits of the other domain than without the reversal.
    """
    short = ("trainer.max_epochs=8", "hooks=[]")
    found = gallery.run("domain_adversarial", *short).metrics["accuracy/test"]
    without = gallery.run("domain_adversarial", *short, "model.layers.reversal.weight=0").metrics["accuracy/test"]
    assert found > without


@pytest.mark.slow
def test_jacobian(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a loop with `torch.func.jacrev` of each sample to
    1e-9.
    """

    def loss(network: nn.Module, batch: Any) -> Tensor:
        rows = torch.func.vmap(torch.func.jacrev(lambda x: network(x[None])[0]))(batch[0])
        return cross_entropy(network(batch[0]), batch[1]) + 0.005 * rows.flatten(1).square().sum(1).mean()

    gallery.descend("jacobian", Perceptron(), loss=loss)


def test_label_out_of_range(gallery: Any, hand: Any) -> None:
    """The run ends with exit status 2 and reports the label -100. With the fix, three steps equal those of a
    loop over the labeled samples to 1e-9.
    """
    import exp
    from exp.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        exp.fit(exp.compose(gallery.command("label_out_of_range", "objective.cross_entropy.loss.ignore_index=null")))
    assert "-100" in str(caught.value)
    assert caught.value.exit_status == 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2)
            self.linear1, self.linear2, self.head = nn.Linear(64, 120), nn.Linear(120, 84), nn.Linear(84, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
            x = nn.functional.max_pool2d(self.conv2(x).relu(), 2).flatten(1)
            return self.head(self.linear2(self.linear1(x).relu()).relu())

    def loss(network: nn.Module, batch: Any) -> Tensor:
        known = batch["target"] >= 0
        return cross_entropy(network(batch["input"][known]), batch["target"][known])

    gallery.descend("label_out_of_range", Net(), loss=loss)
