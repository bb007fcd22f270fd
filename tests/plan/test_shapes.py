"""Values, branches and terms that the check of shapes covers; test_shape_errors.py tests its messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from exp.check.meta_forward import MetaForward, run_on_meta
from exp.check.shapes import shape_errors
from exp.errors import ErrorDetails
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.models.inference import example_inputs, materialise
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import CrossEntropy
from exp.shared_types import DataSpec

DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
CLASSES = Objective(terms={"cross_entropy": CrossEntropy()})


def examine(
    build: Callable[[], nn.Module], spec: DataSpec = DIGITS, objective: Objective | None = None
) -> tuple[MetaForward, list[ErrorDetails]]:
    def factory() -> nn.Module:
        with torch.device("meta"):
            network = build()
            materialise(network, example_inputs(spec, device="meta"))
        return network

    seen = run_on_meta(network_factory=factory, spec=spec, objective=objective)
    return seen, shape_errors(seen, spec, objective)


@pytest.mark.parametrize("name", ["sequential", "shared", "parameter_dict", "rnn"])
def test_a_model_fits_the_digits(name: str, build_model: Callable) -> None:
    found, errors = examine(lambda: build_model(name, device="meta"), objective=CLASSES)
    assert (errors, found.notes) == ([], ())
    assert found.parameters == sum(p.numel() for p in build_model(name).parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            ("sequential", "model.layers.head.out_features=9"),
            "model.layers.head.out_features: 9; expected 10, because the data has this number of classes. "
            "Write out_features: ${data.num_outputs}",
        ),
        (
            ("transformer", "model.constants.heads=7"),
            "model.layers.blocks.layer.forward: line 2, column 12: `part(y).unflatten(2, [heads, -1])`: unflatten ge",
        ),
        (
            ("shared", "model.layers.linears.repeat=1", "model.forward='return head(linears[1](stem(flatten(x))))'"),
            "model.forward: line 1, column 13: `linears` (ModuleList) has 1 elements, and no element 1",
        ),
    ],
)
def test_the_layer_that_does_not_fit_is_named(model: tuple, message: str, build_model: Callable) -> None:
    (error,) = examine(lambda: build_model(*model, device="meta"), objective=CLASSES)[1]
    assert message in str(error)


def test_each_output_is_checked_by_its_own_term() -> None:
    def build() -> nn.Module:
        layers = {"flatten": nn.Flatten(), "kind": nn.LazyLinear(10), "other": nn.LazyLinear(3)}
        return ModuleDictModel(layers=layers, forward="x = flatten(x)\nreturn {'kind': kind(x), 'other': other(x)}")

    by_name = Objective(terms={"kind": Term(loss=CrossEntropy(), output="kind")})
    assert not examine(build, objective=by_name)[1]
    wrong = Objective(terms={"kind": Term(loss=CrossEntropy(), output="other")})
    (error,) = examine(build, objective=wrong)[1]
    assert error.key == "model.layers.other.out_features"
    (error,) = examine(build, objective=CLASSES)[1]
    assert "Set objective.cross_entropy.output to one of kind, other" in str(error)


def test_a_torch_loss_reads_classes_from_axis_1() -> None:
    def build() -> nn.Module:
        return SequentialModel(layers={"head": nn.LazyConv2d(10, 1)})

    assert not examine(build, objective=Objective(terms={"ce": nn.CrossEntropyLoss()}))[1]


class NeedsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, : int(x.sum().item())]


class OwnError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("only squares, please")


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except RuntimeError:
            return self.head(x.flatten(1))


def test_an_undecided_shape_is_noted() -> None:
    found, errors = examine(NeedsNumbers, objective=CLASSES)
    assert errors == []
    assert "were not checked" in found.notes[0]


def test_an_error_of_a_user_names_its_line() -> None:
    (error,) = examine(lambda: nn.Sequential(nn.Flatten(), OwnError()), objective=CLASSES)[1]
    line = OwnError.forward.__code__.co_firstlineno + 1
    assert str(error) == (
        f"model.1: OwnError gets [B, 64] float32: only squares, please (test_shapes.py, line {line}); "
        "expected an input that the layer accepts"
    )
    (error,) = examine(Catches, objective=CLASSES)[1]
    assert error.key == "model.head.out_features"


def test_a_network_that_cannot_be_built_is_an_error() -> None:
    def fail() -> nn.Module:
        raise TypeError("no such argument")

    (error,) = shape_errors(run_on_meta(network_factory=fail, spec=DIGITS), DIGITS)
    assert (error.key, error.got) == ("model", "TypeError: no such argument")


def test_the_branch_of_evaluation_is_checked() -> None:
    program = "x = flat(x)\nif not training:\n    x = hidden(head(x))\nreturn head(hidden(x))"

    def build() -> nn.Module:
        layers = {"flat": nn.Flatten(), "hidden": nn.Linear(64, 64), "head": nn.Linear(64, 10)}
        return ModuleDictModel(layers=layers, forward=program)

    (error,) = examine(build, objective=CLASSES)[1]
    assert error.key == "model.layers.hidden"
    assert "gets [B, 10] float32" in error.got


def test_multiply_adds_are_half_of_torchs_flops() -> None:
    def build() -> nn.Module:
        convolutions = nn.Conv2d(1, 6, 3, bias=False), nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False)
        return nn.Sequential(*convolutions, nn.Flatten(1, 2), nn.Linear(2, 24, bias=False))

    trace = examine(build)[0].traces[None]
    with FlopCounterMode(display=False) as count:
        build()(torch.rand(3, *DIGITS.input_shape))
    assert 3 * 2 * sum(trace.multiply_adds) == count.get_total_flops()


def test_each_step_of_an_lstm_is_an_operator() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, bias=False, batch_first=True), nn.Linear(16, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            output, _ = self.lstm(x.squeeze(1))
            return self.head(output[:, -1])

    trace = examine(Rows)[0].traces[None]
    assert list(trace.multiply_adds) == [4 * 16 * (8 + 16)] * 8 + [160]
