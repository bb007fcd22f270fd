"""clip_module, scale_gradient and gradient_reversal equal gradients by hand, in runs and under torch.compile."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from exp.engine.runtime import compile_network
from exp.errors import RunError
from exp.extras.research.clip_module import ClipModule
from exp.extras.research.gradient_reversal import GradientReversal
from exp.extras.research.scale_gradient import ScaleGradient
from exp.functions.gradient_layers import GradientReversal as Layer
from exp.functions.identities import gradient_reversal
from exp.models.containers import SequentialModel

pytestmark = pytest.mark.numeric

# --- clip_module ---

# The gradient of the hidden layer's output has a norm of about 0.03 and entries of about 0.001.
LIMITS = {"norm": 0.004, "value": 0.0001}
STEPS = 3
CLIP = [
    *("model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "data.batch_size=32"),
    *("optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *(f"trainer.max_steps={STEPS}", "hooks=[clip_module]", "hooks.clip_module.modules=[hidden]"),
]
FP16 = ["precision=fp16", "trainer.accumulate_grad_batches=2"]
TWO = ["launch.devices=2", "launch.accelerator=cpu", "test=false", "metrics=[]", "trainer.limit_val_batches=0"]
TWO += ["monitor=loss/train", "checkpoint.save_best=false"]


def clipping(algorithm: str) -> list[str]:
    options = {"algorithm": algorithm, "limit": LIMITS[algorithm]}
    return [*CLIP, *(f"hooks.clip_module.{name}={value}" for name, value in options.items())]


def clipped(gradient: torch.Tensor, algorithm: str, limit: float) -> torch.Tensor:
    if algorithm == "value":
        return gradient.clamp(-limit, limit)
    return gradient * min(1.0, limit / gradient.norm().item())


def by_hand(net: nn.Module, batches: Any, algorithm: str, limit: float, micro: int) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps, with the clipping written out."""
    layers = dict(net.named_children())
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(micro):
            inputs, target = next(batches).data
            hidden = layers["hidden"](inputs.double().flatten(1))
            below = hidden.detach().requires_grad_()
            rest = [layers[name] for name in ("activation", "hidden2", "activation2", "head")]
            (cross_entropy(nn.Sequential(*rest)(below), target) / micro).backward()
            hidden.backward(clipped(below.grad, algorithm, limit))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.5 * parameter.grad
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def assert_clipped(trained: Any, reference: Any, algorithm: str, overrides: list[str]) -> None:
    micro = 2 if "trainer.accumulate_grad_batches=2" in overrides else 1
    expected = by_hand(*reference(*CLIP), algorithm, LIMITS[algorithm], micro)
    apart = by_hand(*reference(*CLIP), algorithm, 1e9, micro)
    found = trained.checkpoint()["state_dict"]
    tolerance = 5e-3 if "precision=fp16" in overrides else 1e-4
    for name, tensor in expected.items():
        if name.startswith("hidden."):
            # The error is small compared with the effect of the clipping.
            assert (found[f"network.{name}"].double() - tensor).norm() < 0.05 * (apart[name] - tensor).norm()
        torch.testing.assert_close(found[f"network.{name}"].double(), tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_clipping_of_scaled_losses_equals_clipping_by_hand(fit, reference, algorithm: str) -> None:
    assert_clipped(fit(*clipping(algorithm), *FP16), reference, algorithm, FP16)


@pytest.mark.parametrize(
    ("more", "algorithm"),
    [
        (["strategy=fsdp"], "norm"),
        *(pytest.param(["strategy=ddp", *FP16], algorithm, marks=pytest.mark.slow) for algorithm in LIMITS),
    ],
)
def test_ranks_clip_as_one_process(ranks, reference, more: list[str], algorithm: str) -> None:
    assert_clipped(ranks.train(*clipping(algorithm), *TWO, *more, ranks=2), reference, algorithm, more)


# --- gradient_reversal ---

DANN = ["experiment=domain_adversarial", "trainer.max_steps=3", "data.batch_size=32", "optimizer=sgd"]
DANN += ["mode=min", "optimizer.lr=0.1", *(f"model.layers.features.layers.conv{one}.out_channels=4" for one in (1, 2))]
HOOK = [
    *(*DANN, "hooks=[gradient_reversal]", "hooks.gradient_reversal.modules=[domain_hidden]"),
    *("hooks.gradient_reversal.weight=0.7", "model.layers.reversal={_target_: torch.nn.Identity}"),
]
SCHEDULED = [*HOOK, "hooks.gradient_reversal.schedule=progressive"]


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return trained.checkpoint()["state_dict"]


@pytest.mark.any_processor
def test_the_reversal_hook_trains_as_the_layer(fit) -> None:
    layer = fit(*DANN, "hooks=[]", "model.layers.reversal.weight=0.7", *FP16)
    hook = fit(*HOOK, *FP16)
    assert hook.values["loss/train"] == layer.values["loss/train"]
    found, expected = weights(hook), weights(layer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "count"),
    [(["strategy=ddp", *TWO], 2), (["runtime.compile=true", "runtime.compile_backend=aot_eager", *TWO[2:]], 1)],
)
def test_reversal_schedules_are_equal_in_other_runs(fit, ranks, more: list[str], count: int) -> None:
    plain, other = fit(*SCHEDULED), ranks.train(*SCHEDULED, *more, ranks=count)
    expected = {n: 0.7 * (2 / (1 + math.exp(-10 * (n - 1) / 3)) - 1) for n in (1, 2, 3)}
    for found in (plain, other):
        assert found.values["gradient_reversal/weight"] == pytest.approx(expected)
    assert other.values["loss/train"] == pytest.approx(plain.values["loss/train"], rel=1e-5)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-4, atol=1e-6)


# --- the transforms of one backward ---


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 3), "act": nn.Tanh(), "second": nn.Linear(3, 3), "last": nn.Linear(3, 2)}
    return SequentialModel(layers=layers).double()


def gradients(net: nn.Module, run: Any = None) -> dict[str, torch.Tensor]:
    net.zero_grad()
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (run or net)(inputs).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(("at", "scaled"), [("output", ["first", "second"]), ("input", ["first"])])
@pytest.mark.parametrize("factor", [3.0, 0.0])
def test_the_factor_scales_gradients_before_the_module(at: Any, scaled: list[str], factor: float) -> None:
    net = network()
    plain = gradients(net)
    hook = ScaleGradient(modules=["second"], factor=factor, at=at)
    hook.attach(net)
    for name, found in gradients(net).items():
        torch.testing.assert_close(found, (factor if name.partition(".")[0] in scaled else 1.0) * plain[name])
    hook.detach()
    assert all(torch.equal(found, plain[name]) for name, found in gradients(net).items())


def test_reversal_hook_layer_and_function_have_one_gradient() -> None:
    net = network()
    first, act, second, last = net.children()
    plain = gradients(net)
    by_function = gradients(net, lambda x: last(second(gradient_reversal(act(first(x)), 0.3))))
    by_layer = gradients(net, nn.Sequential(first, act, Layer(weight=0.3), second, last))
    hook = GradientReversal(modules=["second"], weight=0.3)
    hook.attach(net)
    by_hook = gradients(net)
    for name, true in plain.items():
        assert torch.equal(by_function[name], by_layer[name])
        assert torch.equal(by_function[name], by_hook[name])
        torch.testing.assert_close(by_hook[name], (-0.3 if name.startswith("first") else 1.0) * true)


def test_the_schedule_sets_the_weight_of_each_step(step) -> None:
    net = network()
    plain = gradients(net)
    hook = GradientReversal(modules=["second"], weight=0.5, schedule="progressive")
    hook.attach(net)
    for index in (1, 2, 50, 100):
        now = step(net, index=index, total_steps=100)
        hook.passed("batch", now)
        weight = 0.5 * (2 / (1 + math.exp(-10 * (index - 1) / 100)) - 1)
        assert hook.after_step(now) == {"gradient_reversal/weight": pytest.approx(weight)}
        torch.testing.assert_close(gradients(net)["first.weight"], -weight * plain["first.weight"])
    hook.detach()
    hook.attach(net)
    with pytest.raises(RunError, match="the length of the run is not known"):
        hook.passed("batch", step(net, total_steps=None))


def test_torch_func_sees_transformed_gradients() -> None:
    net = network()
    ScaleGradient(modules=["second"], factor=3.0).attach(net)
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (sample[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(net.named_parameters()), inputs)
    for name, whole in gradients(net).items():
        torch.testing.assert_close(found[name].sum(0), whole)


def test_a_module_without_floating_tensors_is_an_error() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    ScaleGradient(modules=["0"], factor=2.0, at="input").attach(net, name="mine")
    with pytest.raises(RunError, match=r"hooks\.mine: the input of 0 has no floating-point tensor"):
        net(torch.ones(2, 3, dtype=torch.long))
    with torch.no_grad():
        net(torch.ones(2, 3, dtype=torch.long))


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# The compiler of torch 2.13 makes an instance of each Function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_network_with_transforms_compiles_once(compiler: None, step) -> None:
    net = network()
    compiled = copy.deepcopy(net)
    scale = torch.tensor(4.0)
    pairs = []
    for one in (net, compiled):
        reversal = GradientReversal(modules=["last"], weight=0.5, schedule="progressive")
        clip = ClipModule(modules=["second"], limit=0.25)
        ranged = ClipModule(modules=["act"], limit=0.05, algorithm="value")
        for hook in (reversal, ScaleGradient(modules=["first"], factor=3.0), clip, ranged):
            hook.attach(one, loss_scale=lambda: scale)
        pairs.append((reversal, clip, ranged))
    compile_network(compiled, backend="aot_eager", needs=frozenset())
    for index in (2, 3, 4):
        scale.mul_(2)
        now = step(net, index=index, total_steps=10)
        for reversal, clip, ranged in pairs:
            reversal.passed("batch", now)
            clip.around_forward(now)
            ranged.around_forward(now)
        expected = gradients(net)
        for name, found in gradients(compiled).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert not counters["graph_break"]
