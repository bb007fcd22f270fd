"""Options of precision: dtypes of tensors, arithmetic, and tensors that keep their dtype."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from exp.build import Parts
from exp.errors import ConfigError
from exp.optim.optimizer import Optimization
from exp.precision.plugin import ScaledPrecision, build_precision
from exp.precision.words import WORDS

pytestmark = pytest.mark.numeric

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MODELS = {
    "mlp": ("model=mlp", "model.constants.width=16"),
    "lenet": ("model=lenet",),
    "transformer": (
        *("model=transformer", "model.constants.width=16", "model.constants.hidden=32"),
        "model.constants.heads=2",
    ),
}
# Layers with matrix products. Under autocast, other layers may run in float32.
PRODUCTS = (nn.Linear, nn.Conv2d)
# Dtype of parameters, gradients and optimizer state; dtype of the outputs of products; dtype of the loss.
DTYPES = {
    "fp32": (F32, F32, F32),
    "tf32": (F32, F32, F32),
    "bf16": (F32, BF16, F32),
    "fp16": (F32, F16, F32),
    "bf16_true": (BF16, BF16, F32),
    "fp16_true": (F16, F16, F32),
    "fp64": (F64, F64, F64),
}
FAST = [("bf16", "mlp"), ("bf16_true", "mlp"), ("fp16_true", "lenet")]


class Watch(torch.autograd.Function):
    """Function that records if autocast is on in the forward and in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, noted: set[tuple[str, bool]]) -> Tensor:
        context.noted = noted
        noted.add(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.noted.add(("backward", torch.is_autocast_enabled("cpu")))
        return gradient, None


class Seen(Callback):
    """Callback that records the dtypes in a run."""

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.losses: list[Tensor] = []
        self.gradients: set[torch.dtype] = set()
        self.weights: list[dict[str, Tensor]] = []
        self.autocast: set[tuple[str, bool]] = set()
        self.terms: dict[str, set[torch.dtype]] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights.append(copy.deepcopy(module.network.state_dict()))
        for part in module.network.modules():
            if isinstance(part, PRODUCTS):
                part.register_forward_hook(self.after_product)
        module.objective.register_forward_pre_hook(self.before_objective)

    def after_product(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self.products.add(output.dtype)
        return Watch.apply(output, self.autocast) if output.requires_grad else output

    def before_objective(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        for name, value in arguments[0].items():
            self.terms.setdefault(name, set()).add(value.dtype)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients |= {p.grad.dtype for p in module.network.parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.losses.append(module.last.loss.clone())


def fit(parts: Parts) -> Seen:
    seen = Seen()
    parts.trainer.callbacks.append(seen)
    parts.trainer.fit(parts.module, datamodule=parts.data)
    return seen


@pytest.mark.parametrize(
    ("word", "model"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in itertools.product(DTYPES, MODELS)],
)
def test_every_tensor_has_the_dtype_of_the_word(word: str, model: str, parts: Callable[..., Parts]) -> None:
    built = parts(f"precision={word}", *MODELS[model], "optimizer.eps=1e-4")
    seen = fit(built)
    own, product, loss = DTYPES[word]
    network = built.module.network
    assert {p.dtype for p in network.parameters()} == {own}
    assert seen.gradients == {own}
    assert seen.products == {product}
    assert {value.dtype for value in seen.losses} == {loss}
    assert seen.autocast == {("forward", word in ("bf16", "fp16")), ("backward", False)}
    (optimizer,) = built.trainer.optimizers
    # torch keeps `step` in float32 for all dtypes of parameters.
    state = {v.dtype for values in optimizer.state.values() for key, v in values.items() if key != "step"}
    assert state == {own}
    assert all(value.isfinite() for value in seen.losses)
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values())
    assert any(not torch.equal(seen.weights[0][name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("word", ["fp64", "bf16"])
def test_a_run_equals_a_loop_by_hand(word: str, parts: Callable[..., Parts]) -> None:
    """The loop uses no code of Lightning and exp.precision."""
    run = ("model=lenet", "trainer.max_steps=5", "optimizer=sgd", "optimizer.fused=false")
    by_hand, built = parts(*run), parts(f"precision={word}", *run)
    network = by_hand.module.network.to(F64 if word == "fp64" else F32)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in list(by_hand.data.data.loader("train", rank=0, world_size=1))[:5]:
        inputs, target = batch.data
        with torch.autocast("cpu", dtype=BF16, enabled=word == "bf16"):
            output = network(inputs.to(F64 if word == "fp64" else F32))
        loss = nn.functional.cross_entropy(output if word == "fp64" else output.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(fit(built).losses, losses, rtol=0.0, atol=1e-10 if word == "fp64" else 0.0)


@pytest.mark.parametrize(("word", "own", "target"), [("fp64", F64, F64), ("bf16_true", BF16, F32)])
def test_targets_and_metrics_stay_exact(word: str, own: Any, target: Any, parts: Callable[..., Parts]) -> None:
    built = parts(f"precision={word}", "data=diabetes", "model=mlp", "model.constants.width=8", "metrics=[mae]")
    seen = fit(built)
    assert seen.terms["output"] == {own}
    assert seen.terms["target"] == {target}
    (metric,) = built.module.values_of("val").metrics
    assert metric.metric_state["sum_abs_error"].dtype == F64


class Statistics(nn.Module):
    """Network with an embedding, two convolutions with a batch norm between them, and buffers."""

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


TOKENS = torch.arange(12).view(3, 4) % 10


@pytest.mark.parametrize("word", ["bf16_true", "fp16_true", "fp64"])
def test_a_true_word_converts_buffers_and_inputs(word: str) -> None:
    own = DTYPES[word][0]
    network = Statistics()
    plugin = build_precision(word, device_type="cpu")
    plugin.convert_module(network)
    statistics = F64 if word == "fp64" else F32
    assert {tensor.dtype for tensor in network.norm.state_dict().values()} == {statistics, torch.int64}
    assert network.shift.dtype == own
    assert network.count.dtype == torch.int64
    output = network(TOKENS, scale=torch.full((), 0.5))
    assert output.dtype == own
    output.float().sum().backward()
    assert network.first.weight.grad.dtype == own
    assert torch.get_default_dtype() == F32


def test_running_statistics_converge_under_bfloat16() -> None:
    """Statistics in bfloat16 would have an error of 1 percent in the mean after 100 batches."""
    true, plain = nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4))
    build_precision("bf16_true", device_type="cpu").convert_module(true)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        x = 1.0 + torch.randn(64, 4, generator=generator).bfloat16().float()
        true(x)
        plain(x.bfloat16().float())
    torch.testing.assert_close(true[0].running_mean, plain[0].running_mean, rtol=1e-5, atol=1e-5)


def test_autocast_casts_nothing_in_place() -> None:
    network = Statistics()
    before = {name: (tensor, tensor.dtype) for name, tensor in network.state_dict(keep_vars=True).items()}
    plugin = build_precision("bf16", device_type="cpu")
    plugin.convert_module(network)
    with plugin.forward_context():
        network(TOKENS, torch.ones(()))
    after = network.state_dict(keep_vars=True)
    assert all(after[name] is tensor and tensor.dtype == dtype for name, (tensor, dtype) in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_teardown_removes_hooks() -> None:
    network = Statistics()
    plugin = build_precision("bf16_true", device_type="cpu", keep={"second": "fp32"})
    plugin.convert_module(network)
    keys, scale = list(network.state_dict()), torch.ones(())
    expected = network.eval()(TOKENS, scale)
    plugin.convert_module(network)
    assert torch.equal(network(TOKENS, scale), expected)
    plugin.teardown()
    plugin.teardown()
    assert list(network.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.any_processor
@pytest.mark.parametrize("word", ["bf16_true", pytest.param("fp64", marks=pytest.mark.slow)])
def test_a_resumed_run_is_exact(word: str, parts: Callable[..., Parts]) -> None:
    run = (f"precision={word}", "model=lenet", "checkpoint.every_n_steps=2", "optimizer.eps=1e-4")
    whole = parts(*run, "trainer.max_steps=4")
    fit(whole)
    first = parts(*run, "trainer.max_steps=2")
    fit(first)
    second = parts(*run, "trainer.max_steps=4")
    path = str(first.checkpointing.last_path)
    second.trainer.fit(second.module, datamodule=second.data, ckpt_path=path, weights_only=True)
    expected = whole.module.network.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.module.network.state_dict().items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_steps_in_half_precision(kind: Any) -> None:
    """The fused SGD of torch 2.13 does not work on a CPU, so `fused: null` must not select it."""
    options = {} if kind == torch.optim.SGD else {"eps": 1e-3}
    for dtype in (BF16, F16):
        ends = []
        for each in (dtype, F32):
            torch.manual_seed(0)
            network = nn.Linear(32, 32).to(each)
            factory = functools.partial(kind, lr=0.1, fused=None, **options)
            optimizer = Optimization(optimizer_factory=factory).make_optimizer(network)
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                for parameter in network.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(each)
                optimizer.step()
            ends.append(network.weight.detach().float())
        assert (ends[0] - ends[1]).abs().max() < 0.05  # three steps of 0.1; the fused SGD has an error of 0.9


def test_a_wrong_fused_optimizer_is_refused() -> None:
    network = nn.Linear(32, 32).bfloat16()
    factory = functools.partial(torch.optim.SGD, lr=0.1, fused=True)
    with pytest.raises(ConfigError, match="fused SGD on a CPU computes wrong steps"):
        Optimization(optimizer_factory=factory).make_optimizer(network)


def test_an_eps_of_zero_in_float16_is_refused() -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    (error,) = WORDS["fp16_true"].optimizer_errors(adam)
    assert str(error).startswith("optimizer.eps: 1e-08 with precision=fp16_true; expected 6e-08 or more")
    assert WORDS["bf16_true"].optimizer_errors(adam) == WORDS["fp16"].optimizer_errors(adam) == []
    assert WORDS["fp16_true"].optimizer_errors(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)) == []


def test_a_run_restores_the_switches_of_torch(parts: Callable[..., Parts], caplog: pytest.LogCaptureFixture) -> None:
    def switches() -> tuple[Any, ...]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    class Fails(Callback):
        def on_train_start(self, *_: Any) -> None:
            during.append(switches())
            raise ValueError("on purpose")

    before, during = switches(), []
    for word in ("tf32", "fp32", "fp64"):
        built = parts(f"precision={word}", "model=lenet")
        built.trainer.callbacks.append(Fails())
        with pytest.raises(ValueError, match="on purpose"):
            built.trainer.fit(built.module, datamodule=built.data)
        assert switches() == before
        assert torch.get_default_dtype() == F32
    assert during[:2] == [("high", True), ("highest", False)]
    assert "precision=tf32 has no effect, and the run trains in float32: TensorFloat-32 needs a GPU" in caplog.text


class OwnLSTM(nn.LSTM):
    pass


@pytest.mark.parametrize("kind", ["torch.nn.LSTM", f"{__name__}.OwnLSTM"])
def test_an_lstm_without_float16_runs_in_float32(
    parts: Callable[..., Parts], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("exp.precision.plugin._runs_lstm", lambda dtype: False)
    words = ["precision=fp16", f"security.allow=[{__name__.partition('.')[0]}]"]
    built = parts("model=rnn", f"model.layers.recurrent._target_={kind}", *words)
    before = set(built.module.network.state_dict())
    fit(built)
    assert "the LSTM recurrent runs in float32, because this CPU does not support float16" in caplog.text
    assert set(built.module.network.state_dict()) == before


def test_an_unknown_word_and_a_needless_scaler_are_errors() -> None:
    with pytest.raises(ConfigError) as unknown:
        build_precision("bf61", device_type="cpu")
    words = "fp32, tf32, bf16, fp16, bf16_true, fp16_true, fp64, fp8"
    assert str(unknown.value.errors[0]) == f"precision.word: bf61; expected one of {words}. Did you mean bf16?"
    with pytest.raises(ConfigError) as needless:
        build_precision("bf16", device_type="cpu", enabled=True)
    assert needless.value.errors[0].key == "precision.scaler.enabled"


def test_the_scaler_has_the_settings_of_the_config() -> None:
    settings = {"init_scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    plugin = build_precision("fp16", device_type="cpu", enabled=True, **settings)
    assert isinstance(plugin, ScaledPrecision)
    state = plugin.scaler.state_dict()
    assert {"init_scale": state["scale"], **{key: state[key] for key in list(settings)[1:]}} == settings
    plain = build_precision("fp16", device_type="cpu", enabled=False)
    assert (plain.is_scaled, plain.loss_scale, plain.skipped_steps) == (False, 1.0, 0.0)


# Number of ranks of each strategy.
STRATEGIES = {"layer_split": 1, "pipeline": 2, "fsdp": 2, "tensor_parallel": 2, "ddp": 2}


@pytest.mark.slow
def test_every_word_with_every_strategy_and_model(ranks: Any, share: Any) -> None:
    """Half of the cases keep the linear layers in float32, so that the loss gets the last output without rounding."""
    run = (
        *("hooks=[]", "logger=[]", "metrics=[]", "launch.accelerator=cpu", "trainer.max_steps=3", "optimizer=sgd"),
        *("trainer.max_epochs=-1", "data.batch_size=16", "trainer.limit_val_batches=1", "optimizer.lr=0.01"),
        "trainer.limit_test_batches=1",
    )
    words = [word for word in DTYPES if word != "tf32"]
    cases = itertools.product(words, STRATEGIES, ("transformer", "sequential"), ((), ("+precision.keep.Linear=fp32",)))
    for word, strategy, model, keep in share.of(list(cases)):
        print(word, strategy, model, keep)
        command = (*run, f"precision={word}", f"model={model}", *keep)
        expected = ranks.train(*command, "strategy=single").report["metrics"]
        command += (f"strategy={strategy}", "launch.devices=2")
        try:
            found = ranks.train(*command, ranks=STRATEGIES[strategy]).report["metrics"]
        except ConfigError:
            continue
        for tag in ("loss/train", "loss/test"):
            assert found[tag] == pytest.approx(expected[tag], rel=2e-2), tag
