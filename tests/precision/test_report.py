"""The comparison of a precision with float32: measurements and command."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.extras.debugging.comparison import Comparison, compare
from exp.extras.debugging.precision_report import main
from exp.precision.plugin import build_precision

pytestmark = pytest.mark.numeric

SMALL = ("data.batch_size=16", "model=mlp", "model.constants.width=16", "launch.accelerator=cpu")


class Cube(nn.Module):
    """Layer that computes x**3, which overflows float16 for 300 and underflows for 0.002."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x * x


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def compared(word: str, *layers: nn.Module, keep: dict[str, str] | None = None, size: float = 1.0) -> Comparison:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), *copy.deepcopy(layers), nn.Linear(8, 4))

    inputs = size * torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return compare(
        network(), network(), seed=0, loss=lambda model: model(inputs).float().pow(2).mean(),
        precision=build_precision(word, device_type="cpu", keep=keep, enabled=word == "fp16"),
    )  # fmt: skip


class Switch(nn.Module):
    """Layer that records torch's settings of matrix products and of cuDNN at each call."""

    def __init__(self, seen: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.seen = seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return Switch(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return x * 1.0


@pytest.mark.parametrize(("word", "own"), [("tf32", ("high", True)), ("fp32", ("highest", False))])
def test_the_reference_never_runs_in_tensor_float_32(
    word: str, own: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default
    seen: list[tuple[str, bool]] = []
    compared(word, Switch(seen))
    # Calls: the reference, the network in the precision, and the layer alone.
    exact = ("highest", False)
    assert seen == [exact, own]
    assert torch.backends.cudnn.allow_tf32


def test_float32_has_no_error() -> None:
    comparison = compared("fp32", nn.LayerNorm(8), nn.Dropout(0.5))
    for layer in comparison.layers:
        assert layer.output_error == layer.gradient_error == layer.overflow == layer.underflow == 0
    assert comparison.loss == comparison.loss_float32


@pytest.mark.parametrize(("word", "name", "eps"), [("bf16", "bfloat16", 2.0**-7), ("fp16", "float16", 2.0**-10)])
def test_errors_are_those_of_the_dtype(word: str, name: str, eps: float) -> None:
    comparison = compared(word, nn.ReLU(), nn.Linear(8, 8))
    assert [layer.name for layer in comparison.layers] == ["0", "1", "2", "3"]
    assert {layer.dtype for layer in comparison.layers} == {name}
    for layer in comparison.layers:
        assert layer.output_error < 4 * eps
        assert layer.gradient_error < 4 * eps


class Residual(nn.Module):
    """Network with the in-place operations of torchvision's residual networks: ReLU after BatchNorm, and the sum."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.entry = nn.Hardtanh(-2.0, 2.0, inplace=in_place)
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.relu, self.scale = nn.ReLU(inplace=in_place), Scale(3.0)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        y = self.norm(self.linear(self.relu(self.norm(self.linear(x)))))
        y += x  # in both variants, because under autocast x + y may have another dtype
        y = self.scale(self.relu(y))
        return nn.functional.relu_(y) if self.in_place else nn.functional.relu(y)


@pytest.mark.parametrize("word", ["fp32", "bf16", "fp16", "bf16_true", "fp64"])
def test_layers_that_work_in_place_are_compared_alike(word: str) -> None:
    def network(in_place: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Residual(in_place=in_place), nn.Linear(8, 8), Residual(in_place=in_place))

    inputs = 2 * torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    plain, mutating = (
        compare(
            network(in_place), network(in_place), seed=0, precision=build_precision(word, device_type="cpu"),
            loss=lambda model: model(inputs.clone().to(next(model.parameters()).dtype)).float().pow(2).mean(),
        )
        for in_place in (False, True)
    )  # fmt: skip
    assert [layer.name for layer in mutating.layers] == [layer.name for layer in plain.layers]
    for found, expected in zip(mutating.layers, plain.layers, strict=True):
        assert found == expected


def test_overflow_and_underflow_are_counted() -> None:
    layers = (Scale(300.0), Cube(), nn.Linear(8, 8))
    comparison = compared("fp16", *layers)
    by_name = {layer.name: layer for layer in comparison.layers}
    torch.manual_seed(0)
    x = nn.Linear(8, 8)(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))) * 300.0
    too_large = int((x.abs() ** 3 > 65520).sum())
    assert by_name["2"].overflow >= too_large > 0
    assert by_name["1"].overflow < by_name["2"].overflow
    kept = compared("fp16", *layers, keep=dict.fromkeys("234", "fp32"))
    assert sum(layer.overflow for layer in kept.layers) < sum(layer.overflow for layer in comparison.layers)
    comparison = compared("fp16_true", Scale(1e-3), Cube(), Scale(1e9))
    assert next(layer for layer in comparison.layers if layer.name == "2").underflow > 0.3


@pytest.mark.parametrize("word", ["bf16", "bf16_true"])
def test_a_row_has_the_dtype_of_its_layer(word: str) -> None:
    kept = compared(word, nn.Linear(8, 8), nn.LayerNorm(8), keep={"1": "fp32", "2": "fp64"})
    assert [layer.dtype for layer in kept.layers] == ["bfloat16", "float32", "float64", "bfloat16"]


@pytest.mark.parametrize("word", ["bf16", "fp64", "tf32", "fp16_true"])
def test_the_command_prints_each_layer(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"precision={word}", "optimizer.eps=1e-4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# precision={word} against float32, one batch\n")
    assert "| blocks.0.norm | LayerNorm |" in text


def test_the_command_refuses_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=gan", "launch.accelerator=cpu"]) == 2
    assert "phases: several losses; expected a network" in capsys.readouterr().err
