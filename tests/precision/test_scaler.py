"""The loss scale equals that of the loops in PyTorch's AMP notes bit for bit; warnings if it keeps falling."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from exp.build import Parts
from exp.precision.plugin import build_precision
from exp.precision.scaler import CountingScaler
from exp.precision.words import WORDS

STEPS, ACCUMULATE, CLIP, FORCED = 12, 2, 0.5, 4
GROWTH = 5
RUN = (
    "precision=fp16", "precision.scaler.init_scale=1024", f"precision.scaler.growth_interval={GROWTH}", "model=lenet",
    f"trainer.max_steps={STEPS}", f"trainer.accumulate_grad_batches={ACCUMULATE}", f"trainer.gradient_clip_val={CLIP}",
    "trainer.log_every_n_steps=1", "checkpoint.save_last=false", "checkpoint.save_best=false",
    "scheduler=step", "scheduler.interval=step", "scheduler.step_size=3",
)  # fmt: skip


class Logged(Logger):
    """Logger that keeps the values by tag and step."""

    name, version = "logged", "0"

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, dict[int, float]] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for tag, value in metrics.items():
            self.values.setdefault(tag, {})[step] = value

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Infinite(Callback):
    """Callback that makes a gradient of step FORCED infinite after its last backward, and records gradient norms."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(norm_of(module.network))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == FORCED * ACCUMULATE - 1:
            force(module.network)


def force(network: nn.Module) -> None:
    next(network.parameters()).grad[0] = torch.inf


def norm_of(network: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in network.parameters()]))


def by_hand(parts: Parts, **options: Any) -> tuple[nn.Module, list[float], list[float], list[float]]:
    """Train with the loops "Gradient accumulation" and "Gradient clipping" of PyTorch's AMP notes.

    Returns:
        network, and for each step the scale, the learning rate, and the norm of unscaled gradients before clipping
    """
    network = copy.deepcopy(parts.module.network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=GROWTH)
    scales, rates, norms = [], [], []
    batches = iter(parts.data.data.loader("train", rank=0, world_size=1))
    for index in range(STEPS * ACCUMULATE):
        inputs, target = next(batches).data
        with torch.autocast("cpu", dtype=torch.float16):
            output = network(inputs)
        loss = nn.functional.cross_entropy(output.float(), target) / ACCUMULATE
        scaler.scale(loss).backward()
        if (index + 1) % ACCUMULATE == 0:
            if index + 1 == FORCED * ACCUMULATE:
                force(network)
            scaler.unscale_(optimizer)
            norms.append(norm_of(network))
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            rates.append(optimizer.param_groups[0]["lr"])
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= before:
                schedule.step()
            scales.append(scaler.get_scale())
    return network, scales, rates, norms


@pytest.mark.parametrize("fused", [True, False])
def test_a_run_equals_the_amp_notes(fused: bool, parts: Callable[..., Parts]) -> None:
    built, logged = parts(*RUN, f"optimizer.fused={str(fused).lower()}"), Logged()
    expected, scales, rates, norms = by_hand(built, fused=fused)
    built.trainer.loggers = [logged]
    built.trainer.callbacks.append(infinite := Infinite())
    built.trainer.fit(built.module, datamodule=built.data)
    network = built.module.network.state_dict()
    assert all(torch.equal(network[name], tensor) for name, tensor in expected.state_dict().items())
    steps = range(1, STEPS + 1)
    assert [logged.values["precision/loss_scale"][step] for step in steps] == scales
    assert scales[FORCED - 1] == scales[FORCED - 2] / 2
    assert [logged.values["precision/skipped_steps"][step] for step in steps] == [
        float(step >= FORCED) for step in steps
    ]
    assert [logged.values["optimizer/lr/default"][step] for step in steps] == rates
    # Callbacks see unscaled gradients. Scaled ones are a thousand times larger.
    assert infinite.norms == norms
    assert scales[-1] > scales[FORCED - 1]
    plugin = built.trainer.precision_plugin
    again = build_precision("fp16", device_type="cpu", enabled=True)
    again.load_state_dict(plugin.state_dict())
    assert again.state_dict() == plugin.state_dict()


def two_networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2)]


def two_losses(networks: list[nn.Module], inputs: Tensor) -> list[Tensor]:
    """Return two losses that depend on both networks, as in PyTorch's AMP notes."""
    with torch.autocast("cpu", dtype=torch.float16):
        first, second = networks[0](inputs), networks[1](inputs)
    return [(2 * first + 3 * second).float().pow(2).mean(), (3 * first - 5 * second).float().pow(2).mean()]


@pytest.mark.parametrize("fused", [True, False])
def test_two_networks_equal_the_amp_notes(fused: bool) -> None:
    """The loop is "Working with Multiple Models, Losses, and Optimizers" of the AMP notes, with inf in one model."""
    adam = functools.partial(torch.optim.AdamW, lr=1e-2, fused=fused)
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    networks, scaler = two_networks(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=GROWTH)
    optimizers, scales = [adam(network.parameters()) for network in networks], []
    for step, inputs in enumerate(batches, start=1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = two_losses(networks, inputs)
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        if step == FORCED:
            force(networks[1])
        for network, optimizer in zip(networks, optimizers, strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    own = two_networks()
    plugin = build_precision("fp16", device_type="cpu", init_scale=1024.0, growth_interval=GROWTH, enabled=True)
    optimizers = [adam(network.parameters()) for network in own]
    for step, inputs in enumerate(batches, start=1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with plugin.forward_context():
            # Only the forward runs under autocast.
            losses = two_losses(own, inputs)
            with torch.autocast("cpu", enabled=False):
                plugin.scale(losses[0]).backward(retain_graph=True)
                plugin.scale(losses[1]).backward()
        if step == FORCED:
            force(own[1])
        for network, optimizer in zip(own, optimizers, strict=True):
            plugin.unscale(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            plugin.step(optimizer)
        plugin.update()
        assert [plugin.has_skipped(optimizer) for optimizer in optimizers] == [False, step == FORCED]
        assert float(plugin.loss_scale) == scales[step - 1]
    assert scales[FORCED - 1] == scales[FORCED - 2] / 2
    assert float(plugin.skipped_steps) == 1.0
    for network, expected in zip(own, networks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), expected.parameters(), strict=True))


def test_a_step_unscales_gradients_once() -> None:
    weight, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for fused in (False, True):
        scaler = CountingScaler(device="cpu", init_scale=8.0)
        optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for p in (weight, idle)]
        weight.data.fill_(1.0)
        scaler.scale(weight.sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, torch.zeros(2))
        assert torch.equal(idle, torch.ones(2))
        assert [scaler.has_skipped(optimizer) for optimizer in optimizers] == [False, False]
        weight.grad = None


def steps_of_a_rank(rank: Any) -> list[list[tuple[bool, float, float]]]:
    """Return (skipped, scale, weight) after each of two steps, for each case of CASES.

    Each rank has a part of one model. Rank 0 has a gradient, no gradient, or no trained parameter.
    """
    found = []
    for fused in (False, True):
        for has_parameter, has_gradient, is_finite in CASES:
            weight = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, fused=fused)
            if rank.global_rank == 0 and not has_parameter:
                optimizer.param_groups[0]["params"] = []
            plugin = build_precision("fp16", device_type="cpu", init_scale=4.0, enabled=True)
            plugin.scaler.agree_over(torch.distributed.group.WORLD)
            steps = []
            for _ in range(2):
                if rank.global_rank == 1:
                    weight.grad = torch.full((2,), 1.0 if is_finite else torch.inf)
                elif has_gradient:
                    weight.grad = torch.ones(2)
                plugin.unscale(optimizer)
                plugin.step(optimizer)
                plugin.update()
                scale, value = float(plugin.loss_scale), round(float(weight[0].detach()), 4)
                steps.append((plugin.has_skipped(optimizer), scale, value))
            found.append(steps)
    return found


CASES = [(True, True, False), (True, False, False), (False, False, False), (False, False, True)]


def test_ranks_of_one_model_skip_together(ranks: Any) -> None:
    skipped = [(True, 2.0, 1.0), (True, 1.0, 1.0)]
    first, second = ranks.call(steps_of_a_rank, ranks=2)
    assert first == [skipped, skipped, skipped, [(False, 4.0, 1.0)] * 2] * 2
    assert second == [skipped, skipped, skipped, [(False, 4.0, 0.5), (False, 4.0, 0.0)]] * 2


def test_a_run_without_finite_gradients_warns(parts: Callable[..., Parts], caplog: pytest.LogCaptureFixture) -> None:
    class Always(Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            force(module.network)

    built = parts("precision=fp16", "model=lenet", "trainer.max_steps=40")
    built.trainer.callbacks.append(Always())
    built.trainer.fit(built.module, datamodule=built.data)
    assert [record.message for record in caplog.records if "loss scale" in record.message] == [
        "step 32: the loss scale has fallen to 1.52588e-05, because a gradient is not finite with any scale. Find the "
        "layer with python -m exp.precision and keep it in fp32 (precision.keep), or train in bf16"
    ]


def test_a_skipped_first_step_leaves_no_momentum() -> None:
    """If torch's fused SGD skips its first step, it leaves the new momentum uninitialized, which may be NaN."""

    def weights(*, fused: bool) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5, fused=fused)
        scaler = CountingScaler(device="cpu", init_scale=8.0)
        for gradient in (float("inf"), 1.0, 2.0):
            scaler.scale(torch.zeros(()))
            weight.grad = torch.full((3,), gradient)
            scaler.step(optimizer)
            if gradient == float("inf"):
                assert not optimizer.state
            scaler.update()
        return weight.detach(), optimizer.state[weight]["momentum_buffer"]

    for found, expected in zip(weights(fused=True), weights(fused=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_optimizer_that_cannot_skip_is_refused() -> None:
    (error,) = WORDS["fp16"].optimizer_errors(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))
    assert "LBFGS cannot skip a step" in str(error)
