"""runtime.compile: the network is compiled, and has the same results and the same names of parameters."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

import exp
from exp.check.runtime_switches import compile_errors
from exp.engine.forward import enable_needs
from exp.engine.runtime import compile_network
from exp.models.containers import SequentialModel

pytestmark = pytest.mark.numeric

COMPILED = ["runtime.compile=true", "runtime.compile_backend=aot_eager"]  # this backend needs no C++ compiler
SHORT = [
    "optimizer=sgd",
    "trainer.max_steps=3",
    "model.layers.hidden.out_features=16",
    "logger=[]",
    "test=false",
    "hooks=[]",
    "trainer.enable_progress_bar=false",
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def frames() -> int:
    return counters["frames"]["ok"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return SequentialModel(layers={"first": nn.Linear(4, 8), "act": nn.GELU(), "second": nn.Linear(8, 3)})


def test_the_network_is_compiled_in_place_and_keeps_its_state_dict() -> None:
    network, x = small(), torch.randn(5, 4)
    keys, expected = list(network.state_dict()), network(x)
    compile_network(network, backend="aot_eager", needs=frozenset())
    torch.testing.assert_close(network(x), expected)
    assert frames() == 1
    assert list(network.state_dict()) == keys
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.second.bias.add_(1.0)
    torch.testing.assert_close(other(x), expected + 1.0)
    torch.testing.assert_close(network(x), expected)


def test_a_double_backward_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    network, needs = small(), frozenset({"input_gradients"})
    compile_network(network, backend="aot_eager", needs=needs)
    assert "need input_gradients, which a compiled network does not support. Their steps run uncompiled" in caplog.text
    x = torch.randn(5, 4, requires_grad=True)
    network(x)
    compiled = frames()
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(network(x).sum(), x, create_graph=True)[0].square().sum().backward()
    with enable_needs(needs, network):
        torch.autograd.grad(network(x).sum(), x, create_graph=True)[0].square().sum().backward()
    assert network.first.weight.grad is not None
    with enable_needs(frozenset({"forward_passes"}), network):
        network(x)
    assert frames() == compiled


def test_a_compiled_run_finds_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss = {}
    for name, words in {"compiled": COMPILED, "plain": []}.items():
        report = exp.fit(exp.compose([*SHORT, *words, "+hooks=[memory,gradients]", "+callbacks=ema"]))
        loss[name] = {tag: value for tag, value in report.metrics.items() if tag.startswith(("loss", "gradients"))}
        if name == "compiled":
            assert frames() >= 2  # training and evaluation
    assert loss["compiled"] == pytest.approx(loss["plain"], rel=1e-5)


@pytest.mark.slow
def test_two_compiled_ranks_train_as_one(ranks: Any) -> None:
    command = [*SHORT, "metrics=[]", "trainer.limit_val_batches=0", "monitor=loss/train"]
    command += ["checkpoint.save_best=false"]
    alone = ranks.train(*command)
    shared = ranks.train(*command, *COMPILED, "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", ranks=2)
    assert shared.losses == pytest.approx(alone.losses, rel=1e-5)
    assert shared.checkpoint()["state_dict"].keys() == alone.checkpoint()["state_dict"].keys()


def test_a_model_that_torch_never_compiles_is_refused() -> None:
    (error,) = compile_errors(nn.Flatten(), backend="eager", accelerator="cpu")
    assert "a model of torch's own class Flatten, which torch never compiles" in str(error)


def test_a_compile_mode_needs_inductor_on_cuda() -> None:
    (error,) = compile_errors(small(), backend="aot_eager", mode="reduce-overhead", accelerator="cuda")
    assert error.got == "reduce-overhead with aot_eager on cuda"
    assert not list(compile_errors(small(), backend="inductor", mode="reduce-overhead", accelerator="cuda"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_inductor_keeps_the_gradients_of_convolutions(build_model: Callable[..., nn.Module]) -> None:
    network = build_model("lenet")
    x, y = torch.randn(41, 1, 8, 8), torch.randint(10, (41,))
    expected = torch.autograd.grad(cross_entropy(network(x), y), network.parameters())
    compile_network(network, backend="inductor", needs=frozenset())
    found = torch.autograd.grad(cross_entropy(network(x), y), network.parameters())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
