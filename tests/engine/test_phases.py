"""Phases against loops written by hand: PyTorch's AMP notes for several models, losses and optimizers; WGAN's critic."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import softplus

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.data.randomness import reseed
from exp.engine.phases import PhasedModule
from exp.errors import RunError
from exp.hooks.gradients import Gradients
from exp.hooks.memory import Memory
from exp.objectives.adversarial import DiscriminatorLoss, GeneratorLoss
from exp.objectives.objective import Objective
from exp.optim.optimization import Optimization
from exp.optim.phase import Phase
from exp.optim.schedules import Cosine

pytestmark = [
    # Lightning 2.6 on torch 2.13, in its copy of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

BATCH, STEPS_AN_EPOCH = 15, 7
AdamW = functools.partial(torch.optim.AdamW, lr=2e-2)
SGD = functools.partial(torch.optim.SGD, lr=5e-2, momentum=0.9)
WIDTHS = {"generator": (3, 8, 6), "discriminator": (6, 8, 1)}


class Gan(nn.Module):
    """Generates from a part of the data (`plain`), or from noise: two methods for two phases."""

    def __init__(self, *, noisy: bool = False, inf_at: int | None = None) -> None:
        """inf_at: the discriminator's backward, counted from 1, whose gradient is infinite."""
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
        # In one call, for autocast would otherwise cast the weights twice, or, with its cache, add up in float16.
        real_score, fake_score = self.discriminator(torch.cat([x, fake])).chunk(2)
        return {"real_score": real_score, "fake_score": fake_score}

    def imitate(self, x: Tensor) -> dict[str, Tensor]:
        return {"fake_score": self.discriminator(self.generator(self.source(x)))}


def phase(name: str, **settings: Any) -> Phase:
    """One of the two, with plain settings."""
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
    **settings: Any,
) -> Any:
    """A run of the GAN on 105 samples, 7 batches an epoch."""
    inputs = small_run.samples(105)[0].to(dtype)
    module = functools.partial(
        PhasedModule,
        phases=[phase("discriminator", **(discriminator or {})), phase("generator", **(generator or {}))],
    )
    settings.setdefault("max_steps", 50)
    small = small_run.Small(
        directory,
        module=module,
        data=Data(
            train=Tensors(entries=(inputs,)),
            val=Tensors(entries=(inputs[:20],)),
            batch_size=batch_size,
            num_outputs=6,
        ),
        model=Gan(noisy=noisy, inf_at=inf_at).to(dtype),
        terms={"discriminator_loss": DiscriminatorLoss(), "generator_loss": GeneratorLoss()},
        metrics={},
        max_epochs=None,
        **settings,
    )
    small.fit(resume=resume)
    return small


def full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


class Seen(Callback):
    """Keeps the batches of a run by their place, for the loop by hand."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        data = batch.data
        data = data if isinstance(data, Tensor) else data[0]
        self.batches.append((trainer.current_epoch, batch_idx, data))


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
) -> tuple[Gan, list[list[float]]]:
    """PyTorch's AMP notes, several models, losses and optimizers: one scaler, updated once an iteration.

    https://docs.pytorch.org/docs/stable/notes/amp_examples.html
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
                # Else the generator's phase calls the discriminator's hook, too.
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
                if name in (clip or {}):
                    nn.utils.clip_grad_norm_(list(getattr(network, name).parameters()), clip[name])
                scaler.step(optimizer[name])
            row.append(total.item())
        scaler.update()
        for name in schedule:
            if name != "discriminator" or scaler.get_scale() >= scale:
                schedule[name].step()
        losses.append(row)
    return network, losses


def assert_same(small: Any, network: nn.Module) -> None:
    found = small.weights()
    for name, tensor in network.state_dict().items():
        assert torch.equal(found[name], tensor), name


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "float64": ({"dtype": torch.float64}, {"dtype": torch.float64}),
    "accumulated": ({"accumulate_grad_batches": 3, "max_steps": 20}, {"accumulate": 3}),
    "clipped": (
        {"discriminator": {"gradient_clip_val": 0.05}, "generator": {"gradient_clip_val": 0.01}},
        {"clip": {"discriminator": 0.05, "generator": 0.01}},
    ),
    "own_optimizers": (
        {"discriminator": {"optimizer": SGD}},
        {"optimizers": {"discriminator": SGD}},
    ),
    "repeats": ({"discriminator": {"repeats": 3}, "noisy": True, "max_steps": 20}, {"repeats": 3, "noisy": True}),
    "every_second": ({"generator": {"every_n_steps": 2}, "noisy": True}, {"generator_every": 2, "noisy": True}),
    "schedules": (
        {"discriminator": {"schedule": functools.partial(Cosine, warmup_steps=5)}},
        {"schedules": {"discriminator": functools.partial(Cosine, total_steps=50, warmup_steps=5)}},
    ),
    "fp16": ({"word": "fp16"}, {"scaled": True}),
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
def test_a_gan_of_two_phases_equals_the_loop_by_hand_bit_for_bit(
    tmp_path: Path, small_run: ModuleType, name: str
) -> None:
    settings, hand = CASES[name]
    seen = Seen()
    small = run(small_run, tmp_path, callbacks=(seen,), **settings)
    network, losses = by_hand(seen.batches, **hand)
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
