"""The hook scale_gradient: what it scales, in which runs; and that all transforms are compiled once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from exp.engine.compilation import compile_network, forget_compiled
from exp.errors import RunError
from exp.hooks.clip_module import ClipModule
from exp.hooks.gradient_reversal import GradientReversal
from exp.hooks.scale_gradient import ScaleGradient
from exp.hooks.step import Step
from exp.models.containers import SequentialModel

pytestmark = pytest.mark.numeric


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 3), "act": nn.Tanh(), "second": nn.Linear(3, 3), "last": nn.Linear(3, 2)}
    return SequentialModel(layers=layers).double()


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    net.zero_grad()
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net(inputs).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(("at", "scaled"), [("output", ["first", "second"]), ("input", ["first"])])
@pytest.mark.parametrize("factor", [3.0, 0.0])
def test_the_factor_is_on_what_lies_before(at: Any, scaled: list[str], factor: float) -> None:
    net = network()
    plain = gradients(net)
    hook = ScaleGradient(modules=["second"], factor=factor, at=at)
    hook.attach(net)
    for name, found in gradients(net).items():
        expected = factor if name.partition(".")[0] in scaled else 1.0
        torch.testing.assert_close(found, expected * plain[name])
    hook.detach()
    assert all(torch.equal(found, plain[name]) for name, found in gradients(net).items())


def test_torch_func_sees_the_scaled_gradients() -> None:
    net = network()
    hook = ScaleGradient(modules=["second"], factor=3.0)
    hook.attach(net)
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (sample[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(net.named_parameters()), inputs)
    for name, whole in gradients(net).items():
        torch.testing.assert_close(found[name].sum(0), whole)


def test_a_module_without_a_floating_tensor_is_an_error_that_names_it() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    hook = ScaleGradient(modules=["0"], factor=2.0, at="input")
    hook.attach(net, name="mine")
    with pytest.raises(RunError, match=r"hooks.mine: 0 has no floating tensor among what it is given by position"):
        net(torch.ones(2, 3, dtype=torch.long))
    with torch.no_grad():
        net(torch.ones(2, 3, dtype=torch.long))


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    forget_compiled()


# torch's own compiler makes an instance of each Function that it traces (torch 2.13).
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_network_has_all_transforms_and_is_compiled_once(compiler: None) -> None:
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
        step = Step(index=index, network=net, optimizers=[], batch_size=5, device=torch.device("cpu"), total_steps=10)
        for reversal, clip, ranged in pairs:
            reversal.passed("batch", step)
            clip.around_forward(step)
            ranged.around_forward(step)
        expected = gradients(net)
        for name, found in gradients(compiled).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert not counters["graph_break"]
