"""A term with missing values or passes is an error before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import exp
from exp.check.meta_forward import run_on_meta
from exp.check.shapes import double_backward_errors
from exp.errors import ConfigError
from exp.models.forward_trace import ForwardTrace
from exp.objectives.objective import Objective
from exp.objectives.penalties import R1
from exp.objectives.terms import CrossEntropy
from exp.shared_types import DataSpec


@pytest.mark.parametrize(
    ("overrides", "message"), yaml.safe_load(Path(__file__).with_name("term_errors.yaml").read_text())
)
def test_an_unmet_need_of_a_term_is_an_error(
    overrides: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        exp.validate(exp.compose(overrides.split("; ")))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


@pytest.mark.parametrize("place", [0, 2])
def test_a_penalty_needs_a_backward_differentiable_twice(place: int) -> None:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10)]
    layers.insert(place, Squared())
    spec = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)

    def trace(objective: Objective) -> ForwardTrace:
        found = run_on_meta(network_factory=lambda: nn.Sequential(*layers).to("meta"), spec=spec, objective=objective)
        return found.traces[None]

    plain, penalised = Objective({"ce": CrossEntropy()}), Objective({"ce": CrossEntropy(), "r1": R1()})
    assert list(double_backward_errors(trace(plain), plain)) == []
    (error,) = double_backward_errors(trace(penalised), penalised)
    assert error.key == f"model.{place}"
    assert error.got == "Squared, whose backward is marked once_differentiable"
    layers[place] = nn.ReLU()
    assert list(double_backward_errors(trace(penalised), penalised)) == []


class Centers(nn.Module):
    """Loss with trained parameters, like center loss and ArcFace."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(10, 10), requires_grad=not frozen)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - self.centers[target]).square().mean()


@pytest.mark.parametrize(
    "node", ["{_target_: NAME}", "{_target_: exp.objectives.objective.Term, loss: {_target_: NAME}}"]
)
def test_a_loss_with_parameters_is_an_error(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    node = node.replace("NAME", "test_term_errors.Centers")
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([f"+objective.centers={node}", "security.allow=[test_term_errors]"]))
    (error,) = raised.value.errors
    assert error.key == ("objective.centers" if "Term" not in node else "objective.centers.loss")
    assert error.got == "Centers with trainable parameters (centers), which no optimizer would update"
    frozen = node.replace("test_term_errors.Centers", "test_term_errors.Centers, frozen: true")
    exp.validate(exp.compose([f"+objective.centers={frozen}", "security.allow=[test_term_errors]"]))
