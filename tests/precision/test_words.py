"""Every word of precision trains, and its tensors are in the dtypes that it says."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from exp.build import Parts
from exp.errors import ConfigError
from exp.optim.optimizer import build_optimizer
from exp.precision.conversion import STATISTICS
from exp.precision.plugin import build_precision
from exp.precision.words import WORDS

pytestmark = pytest.mark.numeric

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MODELS = {
    "mlp": ("model.constants.width=16",),
    "lenet": (),
    "transformer": ("model.constants.width=16", "model.constants.hidden=32", "model.constants.heads=2"),
}
# What multiplies matrices. Others (norms, softmax) run in float32 under autocast where torch's lists say so.
PRODUCTS = (nn.Linear, nn.Conv2d)
# word: parameters and gradients and state, products' outputs, loss.
DTYPES = {
    "fp32": (F32, F32, F32),
    "tf32": (F32, F32, F32),
    "bf16": (F32, BF16, F32),
    "fp16": (F32, F16, F32),
    "bf16_true": (BF16, BF16, F32),
    "fp16_true": (F16, F16, F32),
    "fp64": (F64, F64, F64),
}


class Seen(Callback):
    """The dtypes of a run, read where they are."""

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.losses: list[Tensor] = []
        self.gradients: set[torch.dtype] = set()
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights.append(copy.deepcopy(module.network.state_dict()))
        for part in module.network.modules():
            if isinstance(part, PRODUCTS):
                part.register_forward_hook(lambda _, __, output: self.products.add(output.dtype))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients |= {p.grad.dtype for p in module.network.parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.losses.append(module.last.loss.clone())


def fit(parts: Parts) -> Seen:
    seen = Seen()
    parts.trainer.callbacks.append(seen)
    parts.trainer.fit(parts.module, datamodule=parts.data)
    return seen


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("word", DTYPES)
def test_a_word_trains_and_every_tensor_has_its_dtype(word: str, model: str, parts: Callable[..., Parts]) -> None:
    built = parts(f"precision={word}", f"model={model}", *MODELS[model], "optimizer.eps=1e-4", "trainer.max_steps=4")
    seen = fit(built)
    own, product, loss = DTYPES[word]
    network = built.module.network
    assert {p.dtype for p in network.parameters()} == {own}
    assert seen.gradients == {own}
    assert seen.products == {product}
    assert {value.dtype for value in seen.losses} == {loss}
    (optimizer,) = built.trainer.optimizers
    # `step` counts, and torch keeps it in float32 whatever the parameters are.
    state = {v.dtype for values in optimizer.state.values() for key, v in values.items() if key != "step"}
    assert state == {own}
    assert all(value.isfinite() for value in seen.losses)
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values())
    assert any(not torch.equal(seen.weights[0][name], tensor) for name, tensor in network.state_dict().items())


def test_every_word_is_tried_or_says_why_not() -> None:
    assert set(WORDS) - set(DTYPES) == {"fp8"}  # refused on CPU: tests/precision/test_fp8.py


def test_float64_equals_a_loop_in_float64(parts: Callable[..., Parts]) -> None:
    """Weights, batches and losses of a plain loop, without Lightning and without this package's precision."""
    run = ("model=lenet", "trainer.max_steps=10", "optimizer=sgd")
    by_hand, built = parts(*run), parts("precision=fp64", *run)
    network = by_hand.module.network.double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in list(by_hand.data.data.loader("train", rank=0, world_size=1))[:10]:
        inputs, target = batch.data
        loss = nn.functional.cross_entropy(network(inputs.double()), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(fit(built).losses, losses, rtol=0.0, atol=1e-10)


def test_float64_takes_targets_and_metrics_along(parts: Callable[..., Parts]) -> None:
    built = parts("precision=fp64", "data=diabetes", "model=mlp", "model.constants.width=8", "metrics=[mae]")
    seen: list[torch.dtype] = []
    built.module.objective.register_forward_pre_hook(lambda _, args: seen.extend(v.dtype for v in args[0].values()))
    built.trainer.fit(built.module, datamodule=built.data)
    assert set(seen) == {F64}
    (metric,) = built.module.values_of("val").metrics
    assert metric.metric_state["sum_abs_error"].dtype == F64


def test_a_half_word_leaves_targets_as_exact_as_they_are(parts: Callable[..., Parts]) -> None:
    built = parts("precision=bf16_true", "data=diabetes", "model=mlp", "model.constants.width=8")
    seen: dict[str, set[torch.dtype]] = {}

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        for name, value in args[0].items():
            seen.setdefault(name, set()).add(value.dtype)

    built.module.objective.register_forward_pre_hook(note)
    built.trainer.fit(built.module, datamodule=built.data)
    assert seen["target"] == {F32}
    assert seen["output"] == {BF16}


class Statistics(nn.Module):
    """A batch norm between two convolutions, a table for integers, and a tensor made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)
        self.first, self.norm, self.second = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)
        self.register_buffer("shift", torch.ones(4, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        self.count += 1
        x = self.norm(self.first(self.table(tokens).transpose(1, 2) * scale)) + self.shift
        return self.second(x + torch.zeros(4, 1)).mean(2)


@pytest.mark.parametrize("word", ["bf16_true", "fp16_true", "fp64"])
def test_buffers_inputs_and_running_statistics_under_a_true_word(word: str) -> None:
    own = DTYPES[word][0]
    network = Statistics()
    plugin = build_precision(word, device_type="cpu")
    plugin.convert_module(network)
    statistics = F64 if word == "fp64" else F32
    assert {tensor.dtype for tensor in network.norm.state_dict().values()} == {statistics, torch.int64}
    assert network.shift.dtype == own
    assert network.count.dtype == torch.int64
    output = network(torch.arange(12).view(3, 4) % 10, scale=torch.full((), 0.5))
    assert output.dtype == own
    output.float().sum().backward()
    assert network.first.weight.grad.dtype == own
    assert torch.get_default_dtype() == F32


def test_running_statistics_settle_under_bfloat16() -> None:
    """The mean of 100 batches around 1.0, that of float32; in bfloat16 it would stop a per cent away."""
    true, plain = nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4))
    build_precision("bf16_true", device_type="cpu").convert_module(true)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        x = 1.0 + torch.randn(64, 4, generator=generator).bfloat16().float()
        true(x)
        plain(x.bfloat16().float())
    torch.testing.assert_close(true[0].running_mean, plain[0].running_mean, rtol=1e-5, atol=1e-5)
    assert all(issubclass(kind, nn.Module) for kind in STATISTICS)


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_autocast_casts_nothing_in_place(word: str) -> None:
    network = Statistics()
    before = {name: (tensor, tensor.dtype) for name, tensor in network.state_dict(keep_vars=True).items()}
    plugin = build_precision(word, device_type="cpu", enabled=word == "fp16")
    plugin.convert_module(network)
    with plugin.forward_context():
        network(torch.arange(12).view(3, 4) % 10, torch.ones(()))
    after = network.state_dict(keep_vars=True)
    assert all(after[name] is tensor and tensor.dtype == dtype for name, (tensor, dtype) in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_the_hooks_go_when_the_run_ends_and_a_copy_works() -> None:
    network = Statistics()
    plugin = build_precision("bf16_true", device_type="cpu", keep={"second": "fp32"})
    plugin.convert_module(network)
    keys, tokens, scale = list(network.state_dict()), torch.arange(12).view(3, 4) % 10, torch.ones(())
    expected = network.eval()(tokens, scale)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(tokens, scale), expected)
    plugin.convert_module(network)
    assert torch.equal(network(tokens, scale), expected)
    plugin.teardown()
    plugin.teardown()
    assert list(network.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.any_processor
@pytest.mark.parametrize("word", ["fp64", "bf16_true"])
def test_a_resumed_run_goes_on_bit_for_bit(word: str, parts: Callable[..., Parts]) -> None:
    run = (f"precision={word}", "model=lenet", "checkpoint.every_n_steps=3", "optimizer.eps=1e-4")
    whole = parts(*run, "trainer.max_steps=6")
    fit(whole)
    first = parts(*run, "trainer.max_steps=3")
    fit(first)
    second = parts(*run, "trainer.max_steps=6")
    path = str(first.checkpointing.last_path)
    second.trainer.fit(second.module, datamodule=second.data, ckpt_path=path, weights_only=True)
    expected = whole.module.network.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.module.network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_in_half_precision_makes_the_steps_of_float32(kind: Any, dtype: torch.dtype) -> None:
    """torch 2.13's fused SGD on CPU does not: `fused: null` must not choose it."""
    ends = []
    for each in (dtype, torch.float32):
        torch.manual_seed(0)
        network = nn.Linear(32, 32).to(each)
        optimizer = build_optimizer(
            network, functools.partial(kind, lr=0.1, fused=None, **({"eps": 1e-3} if kind != torch.optim.SGD else {})),
            groups={}, exempt_from_decay=[],
        )  # fmt: skip
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(each)
            optimizer.step()
        ends.append(network.weight.detach().float())
    assert (ends[0] - ends[1]).abs().max() < 0.05  # three steps of 0.1; the fault was 0.9


def test_a_fused_optimizer_that_is_wrong_is_refused() -> None:
    network = nn.Linear(32, 32).bfloat16()
    factory = functools.partial(torch.optim.SGD, lr=0.1, fused=True)
    with pytest.raises(ConfigError, match="fused SGD on CPU makes wrong steps"):
        build_optimizer(network, factory, groups={}, exempt_from_decay=[])


def test_an_eps_that_is_nothing_in_float16_is_refused() -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    (fault,) = WORDS["fp16_true"].optimizer_faults(adam)
    assert str(fault).startswith("optimizer.eps: 1e-08 with precision=fp16_true; expected 6e-08 or more")
    assert WORDS["bf16_true"].optimizer_faults(adam) == WORDS["fp16"].optimizer_faults(adam) == []
    assert WORDS["fp16_true"].optimizer_faults(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)) == []


def test_tf32_switches_are_put_back_and_say_on_cpu_that_they_do_nothing(
    parts: Callable[..., Parts], caplog: pytest.LogCaptureFixture
) -> None:
    def switches() -> tuple[Any, ...]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    class During(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(switches())

    before, seen = switches(), []
    for word in ("tf32", "fp32"):
        built = parts(f"precision={word}", "model=lenet")
        built.trainer.callbacks.append(During())
        built.trainer.fit(built.module, datamodule=built.data)
        assert switches() == before
    assert seen == [("high", True), ("highest", False)]
    assert "precision=tf32 changes nothing here and trains in float32: cpu has no TensorFloat-32" in caplog.text


def test_the_switches_are_put_back_where_a_run_fails(parts: Callable[..., Parts]) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("on purpose")

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_default_dtype()
    for word in ("tf32", "fp64"):
        built = parts(f"precision={word}", "model=lenet")
        built.trainer.callbacks.append(Fails())
        with pytest.raises(ValueError, match="on purpose"):
            built.trainer.fit(built.module, datamodule=built.data)
        after = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_default_dtype()
        assert after == before


@pytest.mark.parametrize(("strategy", "count"), [("layer_split", 1), ("pipeline", 2)])
def test_a_true_word_where_a_strategy_runs_the_layers_by_itself(strategy: str, count: int, ranks: Any) -> None:
    """Nobody calls the network there, whose entrance casts what comes in."""
    run = (
        "hooks=[]", "logger=[]", "metrics=[]", "launch.accelerator=cpu", "model=sequential", "trainer.max_steps=3",
        "trainer.max_epochs=-1", "data.batch_size=16", "test=false", "trainer.limit_val_batches=1", "optimizer=sgd",
        "precision=bf16_true",
    )  # fmt: skip
    expected = ranks.train(*run, "strategy=single")
    found = ranks.train(*run, f"strategy={strategy}", "launch.devices=2", ranks=count)
    assert found.report["metrics"]["loss/train"] == pytest.approx(expected.report["metrics"]["loss/train"], rel=1e-2)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_kept_layers_and_a_true_word_in_shards_and_parts(strategy: str, ranks: Any) -> None:
    """With a test behind fit, and the last layer kept: its output meets the loss before it is rounded."""
    run = (
        "hooks=[]", "logger=[]", "metrics=[]", "launch.accelerator=cpu", "model=transformer", "trainer.max_steps=3",
        "trainer.max_epochs=-1", "data.batch_size=16", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
        "optimizer=sgd", "optimizer.lr=0.01", "precision=bf16_true", "+precision.keep={LayerNorm: fp32, head: fp32}",
    )  # fmt: skip
    expected = ranks.train(*run, "strategy=single").report["metrics"]
    found = ranks.train(*run, f"strategy={strategy}", "launch.devices=2", ranks=2).report["metrics"]
    for tag in ("loss/train", "loss/test"):
        assert found[tag] == pytest.approx(expected[tag], rel=2e-2)
