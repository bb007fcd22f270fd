"""Phases equal loops by hand: PyTorch's AMP notes for several losses and optimizers, and WGAN's critic."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.data.randomness import reseed
from exp.engine.phased_module import PhasedModule
from exp.errors import RunError
from exp.hooks.gradients import Gradients
from exp.hooks.memory import Memory
from exp.objectives.adversarial import DiscriminatorLoss, GeneratorLoss
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.optim.schedules import Cosine

pytestmark = pytest.mark.numeric

BATCH, STEPS_AN_EPOCH = 15, 7
AdamW = functools.partial(torch.optim.AdamW, lr=2e-2)
SGD = functools.partial(torch.optim.SGD, lr=5e-2, momentum=0.9)
WIDTHS = {"generator": (3, 8, 6), "discriminator": (6, 8, 1)}


class Gan(nn.Module):
    """GAN that generates from a part of the data or from noise, with a method per phase: `judge` and `imitate`."""

    def __init__(self, *, noisy: bool = False, inf_at: int | None = None) -> None:
        """Build the GAN; backward number `inf_at` of the discriminator, counted from 1, has an infinite gradient."""
        super().__init__()
        torch.manual_seed(3)
        for name, (first, middle, last) in WIDTHS.items():
            setattr(self, name, nn.Sequential(nn.Linear(first, middle), nn.Tanh(), nn.Linear(middle, last)))
        self.noisy = noisy
        self.backwards = 0

        def overflow(gradient: Tensor) -> Tensor:
            self.backwards += 1
            return gradient * torch.inf if self.backwards == inf_at else gradient

        self.discriminator[0].bias.register_hook(overflow)

    def source(self, x: Tensor) -> Tensor:
        return torch.randn(len(x), 3, dtype=x.dtype) if self.noisy else x[:, :3]

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(self.source(x))

    def judge(self, x: Tensor) -> dict[str, Tensor]:
        fake = self.generator(self.source(x)).detach()
        # One call, because with two calls autocast casts the weights twice, or adds their gradients in float16.
        real_score, fake_score = self.discriminator(torch.cat([x, fake])).chunk(2)
        return {"real_score": real_score, "fake_score": fake_score}

    def imitate(self, x: Tensor) -> dict[str, Tensor]:
        return {"fake_score": self.discriminator(self.generator(self.source(x)))}


def phase(name: str, **settings: Any) -> Phase:
    """Return a phase of the GAN."""
    optimizer, schedule = settings.pop("optimizer", AdamW), settings.pop("schedule", None)
    return Phase(
        name=name,
        terms=[f"{name}_loss"],
        parameters=[f"{name}.*"],
        optimization=Optimization(
            optimizer_factory=optimizer,
            schedule_factory=schedule,
            interval=settings.pop("interval", "step"),
            monitor="loss/val",
        ),
        owns_optimizer=True,
        forward={"discriminator": "judge", "generator": "imitate"}[name],
        **settings,
    )


def run(
    small_run: ModuleType,
    directory: Path,
    *,
    discriminator: dict[str, Any] | None = None,
    generator: dict[str, Any] | None = None,
    noisy: bool = False,
    inf_at: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch_size: int = BATCH,
    resume: Path | None = None,
    phases: list[Phase] | None = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    """Run the GAN on 105 samples, which are 7 batches per epoch, and return the run."""
    inputs = small_run.samples(105)[0].to(dtype)
    both = [phase("discriminator", **(discriminator or {})), phase("generator", **(generator or {}))]
    module = functools.partial(PhasedModule, phases=phases or both)
    settings.setdefault("max_steps", 50)
    small = small_run.Small(
        directory,
        module=module,
        data=Data(
            train=Tensors(entries=(inputs,)),
            val=Tensors(entries=(inputs[:20],)),
            keeps_doubles=True,
            batch_size=batch_size,
            num_outputs=6,
        ),
        model=model or Gan(noisy=noisy, inf_at=inf_at).to(dtype),
        terms={"discriminator_loss": DiscriminatorLoss(), "generator_loss": GeneratorLoss()},
        metrics={},
        max_epochs=None,
        **settings,
    )
    small.fit(resume=resume)
    return small


def full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def by_hand(
    seen: list[tuple[int, int, Tensor]],
    *,
    noisy: bool = False,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    optimizers: dict[str, Any] | None = None,
    schedules: dict[str, Any] | None = None,
    repeats: int = 1,
    generator_every: int = 1,
    scaled: bool = False,
    inf_at: int | None = None,
) -> tuple[Gan, list[list[float]], list[tuple[int, str, float]]]:
    """Train the GAN with the loop of PyTorch's AMP notes, with one scaler that is updated once per iteration.

    https://docs.pytorch.org/docs/stable/notes/amp_examples.html

    Returns:
        network, losses of the phases per step, and (step, phase, norm of the gradients)
    """
    network = Gan(noisy=noisy, inf_at=inf_at).to(dtype)
    factories = {"discriminator": AdamW, "generator": AdamW} | (optimizers or {})
    optimizer = {name: factories[name](list(getattr(network, name).parameters()), fused=True) for name in WIDTHS}
    schedule = {name: make(optimizer[name]) for name, make in (schedules or {}).items()}
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    windows = [
        window
        for epoch in range(seen[-1][0] + 1)
        for whole in [[one for one in seen if one[0] == epoch]]
        for window in (whole[i : i + accumulate] for i in range(0, len(whole), accumulate))
    ]
    losses = []
    norms = []
    for step, window in enumerate(windows, start=1):
        row = []
        scale = scaler.get_scale()
        for index, name in enumerate(("discriminator", "generator")):
            if name == "generator" and (step - 1) % generator_every:
                continue
            rounds = repeats if name == "discriminator" else 1
            for repeat in range(rounds):
                if repeat:
                    scaler.update()
                for one in optimizer.values():
                    one.zero_grad()
                # Otherwise the generator's phase also calls the hook in the discriminator.
                network.discriminator.requires_grad_(name == "discriminator")
                total = torch.zeros((), dtype=dtype)
                for epoch, batch, x in window:
                    reseed(seed=0, rank=0, epoch=epoch, batch=batch, turn=(index, repeat) if index + repeat else ())
                    with torch.autocast("cpu", torch.float16, enabled=scaled):
                        if name == "discriminator":
                            given = {key: full(value) for key, value in network.judge(x).items()}
                            loss = softplus(-given["real_score"]).mean() + softplus(given["fake_score"]).mean()
                        else:
                            loss = softplus(-full(network.imitate(x)["fake_score"])).mean()
                    loss = loss / len(window)
                    total = total + loss.detach()
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer[name])
                norm = nn.utils.get_total_norm([p.grad for p in getattr(network, name).parameters()]).item()
                if name in (clip or {}):
                    nn.utils.clip_grad_norm_(list(getattr(network, name).parameters()), clip[name])
                scaler.step(optimizer[name])
            row.append(total.item())
            norms.append((step, name, norm))
        scaler.update()
        for name in schedule:
            if name != "discriminator" or scaler.get_scale() >= scale:
                schedule[name].step()
        losses.append(row)
    return network, losses, norms


def assert_same(small: Any, network: nn.Module) -> None:
    found = small.weights()
    for name, tensor in network.state_dict().items():
        assert torch.equal(found[name], tensor), name


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({"accumulate_grad_batches": 3, "max_steps": 20}, {"accumulate": 3}),
    "clipped": (
        {"discriminator": {"gradient_clip_val": 0.05}, "generator": {"gradient_clip_val": 0.01}},
        {"clip": {"discriminator": 0.05, "generator": 0.01}},
    ),
    "own_optimizers": (
        {"discriminator": {"optimizer": SGD}},
        {"optimizers": {"discriminator": SGD}},
    ),
    "repeats": (
        {"discriminator": {"repeats": 3}, "generator": {"every_n_steps": 2}, "noisy": True, "max_steps": 20},
        {"repeats": 3, "generator_every": 2, "noisy": True},
    ),
    "fp16_inf_at_step_7": (
        {
            "word": "fp16",
            "inf_at": 7,
            "discriminator": {"schedule": functools.partial(Cosine, warmup_steps=5)},
            "generator": {"schedule": functools.partial(Cosine, warmup_steps=5)},
        },
        {
            "scaled": True,
            "inf_at": 7,
            "schedules": dict.fromkeys(WIDTHS, functools.partial(Cosine, total_steps=50, warmup_steps=5)),
        },
    ),
    "fp16_accumulated_clipped": (
        {
            "word": "fp16",
            "accumulate_grad_batches": 3,
            "max_steps": 20,
            "discriminator": {"gradient_clip_val": 0.05, "repeats": 2},
        },
        {"scaled": True, "accumulate": 3, "clip": {"discriminator": 0.05}, "repeats": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_phases_equal_a_loop_by_hand(tmp_path: Path, small_run: ModuleType, name: str) -> None:
    settings, hand = CASES[name]
    seen = small_run.Batches()
    small = run(small_run, tmp_path, callbacks=(seen,), hooks={"gradients": Gradients()}, **settings)
    network, losses, norms = by_hand([(epoch, batch, data[0]) for epoch, batch, data in seen.seen], **hand)
    assert small.trainer.global_step == settings.get("max_steps", 50) == len(losses)
    assert_same(small, network)
    start = Gan().to(hand.get("dtype", torch.float32)).state_dict()
    for part in ("generator.0.weight", "discriminator.0.weight"):
        assert not torch.equal(network.state_dict()[part], start[part])
    for step, row in enumerate(losses, start=1):
        assert small.values.seen["loss/train", step] == pytest.approx(sum(row), rel=1e-6)
        assert small.values.seen["loss/train/discriminator_loss", step] == pytest.approx(row[0], rel=1e-6)
        there = ("loss/train/generator_loss", step) in small.values.seen
        assert there == (len(row) == 2)
    for step, name, norm in norms:
        # Norms of the phase's parameters, from gradients without scale and before clipping.
        assert small.values.seen[f"gradients/norm/total/{name}", step] == pytest.approx(norm, rel=1e-5)


def test_accumulated_batches_equal_large_ones(tmp_path: Path, small_run: ModuleType) -> None:
    settings = {"dtype": torch.float64, "discriminator": {"repeats": 2, "gradient_clip_val": 0.05}, "max_steps": 14}
    # An epoch of 105 samples is 5 batches of 20 and one of 5, or steps of two batches of 10 and one batch of 5.
    large = run(small_run, tmp_path / "large", batch_size=20, **settings)
    small = run(small_run, tmp_path / "small", batch_size=10, accumulate_grad_batches=2, **settings)
    assert large.trainer.global_step == small.trainer.global_step == 14
    for name, tensor in large.weights().items():
        assert torch.allclose(small.weights()[name], tensor, rtol=0, atol=1e-10), name
    losses = [[one.values.seen["loss/train", step] for step in range(1, 15)] for one in (large, small)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)


def test_each_phase_draws_its_own_noise(tmp_path: Path, small_run: ModuleType) -> None:
    drawn: list[Tensor] = []

    class Listening(Gan):
        def source(self, x: Tensor) -> Tensor:
            noise = super().source(x)
            if self.training:
                drawn.append(noise.clone())
            return noise

    network = Listening(noisy=True)
    run(small_run, tmp_path, model=network, discriminator={"repeats": 2}, max_steps=1)
    assert len(drawn) == 3
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    reseed(seed=0, rank=0, epoch=0, batch=0)
    assert torch.equal(drawn[0], torch.randn(BATCH, 3))


def test_evaluation_runs_every_phases_forward(tmp_path: Path, small_run: ModuleType) -> None:
    small = run(small_run, tmp_path, max_steps=7)
    network = small.module.network.eval()
    x = small_run.samples(105)[0][:20]
    real, fake = network.judge(x).values()
    judged = (softplus(-real).mean() + softplus(fake).mean()).item()
    imitated = softplus(-network.imitate(x)["fake_score"]).mean().item()
    metrics = small.recording.metrics
    assert metrics["loss/val/discriminator_loss"] == pytest.approx(judged, abs=1e-5)
    assert metrics["loss/val"] == pytest.approx(judged + imitated, abs=1e-5)


def test_the_tags_of_a_run_with_phases(tmp_path: Path, small_run: ModuleType) -> None:
    groups = {"first": {"parameters": "generator.0.*", "lr": 1e-3}}
    generator = dataclasses.replace(
        phase("generator"), optimization=Optimization(optimizer_factory=AdamW, groups=groups)
    )
    small = run(
        small_run, tmp_path, phases=[phase("discriminator", every_n_steps=2), generator],
        hooks={"gradients": Gradients(each_parameter=True), "memory": Memory()}, max_steps=2,
    )  # fmt: skip
    tags = {step: {tag for tag, at in small.values.seen if at == step} for step in (1, 2)}
    names = {"optimizer/lr": ("discriminator", "generator/default", "generator/first")}
    names |= {"gradients/norm": ("total/discriminator", "generator.0.weight/generator")}
    names |= {"memory": ("parameters_mib", "activations_mib", "gradients_mib/generator")}
    assert {f"{first}/{rest}" for first, others in names.items() for rest in others} <= tags[1]
    # The phase discriminator does not run at the second step.
    assert not {tag for tag in tags[2] if "discriminator" in tag and "/val" not in tag}
    assert small.values.seen["optimizer/lr/generator/first", 1] == 1e-3
    assert small.values.seen["memory/activations_mib", 1] > 0


def test_a_checkpoint_of_other_phases_is_refused(tmp_path: Path, small_run: ModuleType) -> None:
    first = run(small_run, tmp_path / "a", max_steps=7)
    with pytest.raises(RunError, match=r"the phases \[discriminator, generator\]; expected those of \[generator\]"):
        run(small_run, tmp_path / "b", phases=[phase("generator")], max_steps=9, resume=first.last)
