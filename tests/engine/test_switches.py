"""The switches of `runtime`: what each does, that it changes nothing else, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import exp
from exp.engine.checkpoint import lay_out_optimizer_states
from exp.engine.cuda_graphs import GraphedNetwork
from exp.engine.runtime import put_channels_last
from exp.errors import ConfigError, RunError
from exp.hooks.memory import Memory
from exp.precision.plugin import build_precision

SHORT = ("trainer.max_steps=6", "hooks=[]", "metrics=[]", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1")
PICTURES = ("model=lenet", "data=digits", "precision=fp64", *SHORT)


def fit(directory: Path, *overrides: str) -> Any:
    return exp.fit(exp.compose([f"hydra.run.dir={directory}", "trainer.enable_progress_bar=false", *overrides]))


def refused(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(list(overrides)))
    return {fault.key: f"{fault.got}; {fault.expected}; {fault.cure}" for fault in caught.value.faults}


def checkpoint(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_channels_last_trains_as_without_and_a_resume_may_change_it(tmp_path: Path) -> None:
    last = ("runtime.channels_last=true", *PICTURES)
    plain = fit(tmp_path / "plain", *PICTURES)
    other = fit(tmp_path / "last", *last)
    assert other.metrics["loss/val"] == pytest.approx(plain.metrics["loss/val"], rel=1e-9)
    kept = checkpoint(tmp_path / "last")
    weights = [tensor for tensor in kept["state_dict"].values() if tensor.dim() == 4]
    assert weights
    assert any(not weight.is_contiguous() for weight in weights)
    # From one layout to the other: the averages of the optimizer go with the weights.
    longer = ("trainer.max_steps=12", "test=false")
    whole = fit(tmp_path / "whole", *PICTURES, *longer)
    again = fit(tmp_path / "again", *PICTURES, *longer, f"resume={tmp_path}/last/checkpoints/last.ckpt")
    assert again.metrics["loss/val"] == pytest.approx(whole.metrics["loss/val"], rel=1e-9)


def test_optimizer_state_in_another_layout_would_be_wrong() -> None:
    """Why it is laid out anew: should this fail, torch minds the layout itself."""

    def steps(*, lay_out: bool) -> bool:
        torch.manual_seed(0)
        gradients = torch.randn(3, 4, 3, 2, 2)
        first, second = nn.Conv2d(3, 4, 2, bias=False), nn.Conv2d(3, 4, 2, bias=False)
        put_channels_last(first)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, fused=True) for one in (first, second)]
        for gradient in gradients[:2]:
            first.weight.grad = torch.empty_like(first.weight).copy_(gradient)
            optimizers[0].step()
        second.load_state_dict(first.state_dict())
        saved = {"optimizer_states": [copy.deepcopy(optimizers[0].state_dict())]}
        if lay_out:
            lay_out_optimizer_states(saved, second)
        optimizers[1].load_state_dict(saved["optimizer_states"][0])
        for one, optimizer in zip((first, second), optimizers, strict=True):
            one.weight.grad = torch.empty_like(one.weight).copy_(gradients[2])
            optimizer.step()
        return torch.allclose(first.weight, second.weight)

    assert steps(lay_out=True)
    assert not steps(lay_out=False)


def test_the_network_gets_pictures_channels_last_by_position_and_by_name() -> None:
    seen: list[torch.Tensor] = []

    class Network(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> None:
            seen.extend((x, other))

    network = Network()
    put_channels_last(network)
    network(torch.zeros(2, 3, 4, 4), other=torch.zeros(2, 5))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    assert seen[1].shape == (2, 5)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("runtime.channels_last=true",), "runtime.channels_last", "without a convolution"),
        (("runtime.channels_last=true", "data=breast_cancer"), "runtime.channels_last", "samples of shape [30]"),
        (("runtime.cuda_graph=true", "launch.accelerator=cpu"), "runtime.cuda_graph", "true on cpu; a CUDA device"),
        (("runtime.matmul=hihg",), "runtime.matmul", "highest, high, medium"),
        (("runtime.matmul=highest", "precision=tf32"), "runtime.matmul", "highest with precision=tf32"),
        (("checkpoint.keep=3", "checkpoint.save_best=false"), "checkpoint.keep", "3 with checkpoint.save_best=false"),
        (
            ("runtime.cudnn_benchmark=true", "runtime.deterministic=true"),
            "runtime.cudnn_benchmark",
            "true with runtime.deterministic=true",
        ),
        (("runtime.steps_per_execution=0",), "runtime.steps_per_execution", "an integer, 1 or more"),
        (("+trainer.benchmark=true",), "trainer.benchmark", "runtime.cudnn_benchmark"),
    ],
)
def test_what_a_switch_cannot_do_is_said_before_the_run(overrides: tuple[str, ...], key: str, words: str) -> None:
    assert words in refused(*overrides)[key]


def test_matmul_is_the_runs_and_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    for word, matmul, during in (("fp32", None, "highest"), ("fp32", "medium", "medium"), ("tf32", None, "high")):
        precision = build_precision(word, device_type="cpu", matmul=matmul)
        precision.convert_module(nn.Linear(2, 2))
        assert torch.get_float32_matmul_precision() == during
        precision.teardown()
        assert torch.get_float32_matmul_precision() == before


def test_deterministic_and_cudnn_benchmark_reach_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        fit(tmp_path / "a", *SHORT, "runtime.cudnn_benchmark=true", "test=false")
        assert torch.backends.cudnn.benchmark
        fit(tmp_path / "b", *SHORT, "runtime.deterministic=true", "test=false")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        # The next run in this process has its own word.
        fit(tmp_path / "c", *SHORT, "test=false")
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.norm(x if shift is None else x + shift))


def warmed(calls: list[Any]) -> Any:
    """What stands in on a CPU: like torch's, it runs the module before it gives back what is called from then on."""

    def capture(module: nn.Module, samples: tuple[torch.Tensor, ...]) -> Any:
        for _ in range(3):
            module(*samples)
        return lambda *tensors: calls.append(tensors[0].shape) or module(*tensors)

    return capture


def test_a_graph_is_replayed_for_full_batches_in_training_alone() -> None:
    calls: list[Any] = []
    network, twin = Net(), Net()
    graphed = GraphedNetwork(network, capture=warmed(calls))
    generator = torch.Generator().manual_seed(1)
    for size, is_training in ((8, False), (8, True), (3, True), (8, True), (8, False)):
        inputs = torch.randn(size, 4, generator=generator)
        network.train(is_training)
        twin.train(is_training)
        for named in ({}, {"shift": torch.ones(size, 4)}):
            assert torch.equal(graphed(inputs, **named), twin(inputs, **named))
            assert torch.equal(network.norm.running_mean, twin.norm.running_mean)
    assert calls == [torch.Size([8, 4])] * 2


def test_memory_leaves_out_what_lies_in_the_graph(tmp_path: Path, small_run: ModuleType) -> None:
    hooks = {"memory": Memory()}
    small = small_run.Small(tmp_path, hooks=hooks, max_epochs=None, max_steps=1, limit_val_batches=0)
    vars(small.module)["run_network"] = GraphedNetwork(small.module.network, capture=warmed([]))
    small.fit()
    tags = {tag for tag, _ in small.values.seen}
    assert "memory/optimizer_mib" in tags
    assert "memory/activations_mib" not in tags


def test_a_network_that_cannot_be_captured_ends_the_run_with_the_reason() -> None:
    def capture(module: nn.Module, samples: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RunError, match=r"not permitted when stream is capturing.*runtime.cuda_graph=false"):
        GraphedNetwork(Net(), capture=capture)(torch.zeros(2, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device, and here is none")
def test_a_run_with_cuda_graphs_has_the_losses_of_one_without(tmp_path: Path) -> None:
    runs = [fit(tmp_path / word, *PICTURES, f"runtime.cuda_graph={word}") for word in ("false", "true")]
    assert runs[1].metrics["loss/val"] == pytest.approx(runs[0].metrics["loss/val"], rel=1e-5)
