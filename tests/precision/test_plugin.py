"""Precision: fp16 equals the hand-written loop of PyTorch's AMP notes, hooks see true gradients, bf16 is bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from exp.errors import ConfigError
from exp.objectives.objective import Objective
from exp.objectives.terms import CrossEntropy
from exp.precision.plugin import ScaledPrecision, build_precision

STEPS = 20
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
AdamW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings(
        # Lightning's advice, of no use to data in memory.
        "ignore:The 'train_dataloader' does not have many workers",
        "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    ),
]


class Classifier(LightningModule):
    """The least that a TrainingModule does: a network, an objective, an optimizer."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network, self.optimizer_factory = network, optimizer
        self.objective = Objective({"cross_entropy": CrossEntropy()})
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        output = self.network(batch[0])
        self.dtypes.add(output.dtype)
        loss, _ = self.objective({"output": output, "target": batch[1]})
        self.dtypes.add(loss.dtype)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_factory(self.parameters())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)) for _ in range(STEPS)
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def trained(
    plugin: Precision,
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW,
    callbacks: Sequence[Callback] = (),
    device: str = "cpu",
    **settings: Any,
) -> Classifier:
    module = Classifier(network(), optimizer)
    trainer = Trainer(
        plugins=[plugin],
        accelerator=device,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return module


def amp_by_hand(
    *,
    init_scale: float,
    growth_interval: int = 2000,
    clip: float | None = None,
    optimizer: Callable = AdamW,
    device: str = "cpu",
    accumulate: int = 1,
) -> tuple[nn.Module, list[Tensor], torch.amp.GradScaler]:
    """The loop of https://docs.pytorch.org/docs/stable/notes/amp_examples.html, with gradient clipping."""
    model = network().to(device)
    optimizer = optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=growth_interval)
    norms = []
    for index, (inputs, target) in enumerate(batches()):
        with torch.autocast(device, dtype=torch.float16):
            output = model(inputs.to(device))
        loss = nn.functional.cross_entropy(output.float(), target.to(device)) / accumulate
        scaler.scale(loss).backward()
        if (index + 1) % accumulate:
            continue
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.cpu(), norms, scaler


class Norms(Callback):
    """The gradients' norm where hooks and callbacks look at it."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.values.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(AdamW, id="fused AdamW"),
        pytest.param(functools.partial(torch.optim.AdamW, lr=1e-2, fused=False), id="AdamW"),
        pytest.param(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), id="fused SGD"),
    ],
)
def test_fp16_with_clipping_is_the_hand_written_loop_bit_for_bit(
    optimizer: Callable, accumulate: int, device: str
) -> None:
    norms = Norms()
    plugin = build_precision("fp16", device_type=device, init_scale=1024.0, enabled=True)
    settings = {"gradient_clip_val": 0.2, "accumulate_grad_batches": accumulate, "device": device}
    module = trained(plugin, optimizer, [norms], **settings)
    model, expected, _ = amp_by_hand(
        init_scale=1024.0, clip=0.2, optimizer=optimizer, device=device, accumulate=accumulate
    )
    assert same(module.network, model)
    assert torch.equal(torch.stack(norms.values), torch.stack(expected))
    assert max(norms.values) < 10.0  # true ones: scaled ones would be a thousand times larger
    assert module.dtypes == {torch.float16, torch.float32}


def test_true_gradients_reach_the_callbacks_without_clipping() -> None:
    scaled, plain = Norms(), Norms()
    trained(build_precision("fp16", device_type="cpu", init_scale=4096.0, enabled=True), callbacks=[scaled])
    trained(build_precision("fp32", device_type="cpu"), callbacks=[plain])
    torch.testing.assert_close(torch.stack(scaled.values), torch.stack(plain.values), rtol=2e-2, atol=1e-3)


def test_a_skipped_step_is_counted_and_changes_nothing() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[bool, bool]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            moved = any(not torch.equal(a, b) for a, b in zip(self.before, module.parameters(), strict=True))
            self.seen.append((trainer.precision_plugin.skipped(module.optimizers().optimizer), moved))

    for optimizer in (AdamW, functools.partial(torch.optim.SGD, lr=0.1)):
        watch = Watch()
        plugin = build_precision("fp16", device_type="cpu", init_scale=2.0**24, enabled=True)
        module = trained(plugin, optimizer, [watch])
        model, _, scaler = amp_by_hand(init_scale=2.0**24, optimizer=optimizer)
        skipped = [skip for skip, _ in watch.seen]
        assert 0 < sum(skipped) < STEPS
        assert all(moved is not skip for skip, moved in watch.seen)
        assert plugin.skipped_steps == sum(skipped)
        assert plugin.loss_scale == scaler.get_scale() == 2.0 ** (24 - sum(skipped))
        assert same(module.network, model)


def test_the_scale_grows_and_the_state_comes_back() -> None:
    plugin = build_precision("fp16", device_type="cpu", init_scale=2.0**24, growth_interval=5, enabled=True)
    trained(plugin)
    _, _, scaler = amp_by_hand(init_scale=2.0**24, growth_interval=5)
    state = plugin.state_dict()
    assert {key: state[key] for key in scaler.state_dict()} == scaler.state_dict()
    again = build_precision("fp16", device_type="cpu", enabled=True)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert again.skipped_steps == plugin.skipped_steps > 0


def test_fp16_without_a_scaler_is_plain_autocast() -> None:
    plugin = build_precision("fp16", device_type="cpu", enabled=False)
    trained(plugin)
    assert plugin.loss_scale == 1.0
    assert plugin.skipped_steps == 0.0
    assert not plugin.is_scaled


def test_bf16_equals_plain_autocast_and_keeps_weights_and_loss_in_float32() -> None:
    module = trained(build_precision("bf16", device_type="cpu"))
    model = network()
    optimizer = AdamW(model.parameters())
    for inputs, target in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs)
        optimizer.zero_grad()
        nn.functional.cross_entropy(output.float(), target).backward()
        optimizer.step()
    assert same(module.network, model)
    assert module.dtypes == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_backward_is_not_under_autocast() -> None:
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    class Through(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Spy.apply(super().forward(x))

    for word in ("bf16", "fp16"):
        seen.clear()
        module = Classifier(Through(8, 4), AdamW)
        trainer = Trainer(
            plugins=[build_precision(word, device_type="cpu", enabled=word == "fp16")],
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
        assert seen == [("forward", True), ("backward", False)]


@pytest.mark.parametrize("word", ["fp16", "bf16"])
def test_an_lstm_that_a_cpu_has_not_in_a_dtype_says_that_it_runs_in_float32(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.view(-1, 4, 2))[0][:, -1])

    torch.manual_seed(0)
    module = Classifier(Last(), AdamW)
    before = set(module.network.state_dict())
    with caplog.at_level("WARNING"):
        trainer = Trainer(
            plugins=[build_precision(word, device_type="cpu", enabled=word == "fp16")],
            accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    # In bfloat16 it runs where the processor has AVX-512.
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[word]
    is_told = f"lstm: an LSTM has no {dtype} on this CPU; it runs in float32" in caplog.text
    assert is_told or (word == "bf16" and has_lstm_of_bfloat16())
    assert set(module.network.state_dict()) == before


def has_lstm_of_bfloat16() -> bool:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(2, 6)(torch.zeros(1, 1, 2))
        except RuntimeError:
            return False
    return True


def test_each_word_gives_its_plugin() -> None:
    assert build_precision("fp32", device_type="cpu").word.autocast is None
    bf16 = build_precision("bf16", device_type="cuda")
    assert bf16.word.autocast is torch.bfloat16
    assert not bf16.is_scaled
    settings = {"init_scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    fp16 = build_precision("fp16", device_type="cpu", enabled=True, **settings)
    assert isinstance(fp16, ScaledPrecision)
    state = fp16.scaler.state_dict()
    assert {"init_scale": state["scale"], **{key: state[key] for key in list(settings)[1:]}} == settings


def test_an_unknown_word_and_a_scaler_without_need_are_faults() -> None:
    with pytest.raises(ConfigError) as unknown:
        build_precision("bf61", device_type="cpu")
    words = "fp32, tf32, bf16, fp16, bf16_true, fp16_true, fp64, fp8"
    assert str(unknown.value.faults[0]) == f"precision.word: bf61; expected one of {words}. Did you mean bf16?"
    with pytest.raises(ConfigError) as needless:
        build_precision("bf16", device_type="cpu", enabled=True)
    assert needless.value.faults[0].key == "precision.scaler.enabled"
    with pytest.raises(ConfigError, match="LBFGS cannot skip a step"):
        trained(build_precision("fp16", device_type="cpu", enabled=True), torch.optim.LBFGS)
