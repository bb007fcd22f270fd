"""A model that does not fit the data is refused at the layer that fails, before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from exp.check.shapes import ShapeExamination, examine_shapes
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.models.inference import example_inputs, materialise
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import CrossEntropy
from exp.shared_types import DataSpec

DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
HOUSES = DataSpec(input_shape=(6,), input_dtype="float32", num_classes=None, num_outputs=1)
TEXT = DataSpec(input_shape=(16,), input_dtype="int64", num_classes=30, num_outputs=30)
CLASSES = Objective(terms={"cross_entropy": CrossEntropy()})


def examine(
    build: Callable[[], nn.Module], spec: DataSpec = DIGITS, objective: Objective | None = None
) -> ShapeExamination:
    def factory() -> nn.Module:
        with torch.device("meta"):
            network = build()
            materialise(network, example_inputs(spec, device="meta"))
        return network

    return examine_shapes(network_factory=factory, spec=spec, objective=objective)


IMAGE_MODELS = [
    *("sequential", "module_list", "module_dict", "shared", "branches", "parameter_list", "parameter_dict"),
    *("mlp", "lenet", "resnet", "rnn", "transformer"),
]


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_model_fits_the_digits(name: str, build_model: Callable) -> None:
    found = examine(lambda: build_model(name, device="meta"), objective=CLASSES)
    assert (found.faults, found.notes) == ((), ())
    assert found.parameters == sum(p.numel() for p in build_model(name).parameters())


def test_gpt_fits_text_and_not_images(build_model: Callable) -> None:
    assert not examine(lambda: build_model("gpt", spec=TEXT, device="meta"), TEXT, CLASSES).faults
    (fault,) = examine(lambda: build_model("gpt", spec=TEXT, device="meta"), objective=CLASSES).faults
    assert str(fault) == (
        "model.layers.tokens: Embedding is given [B, 1, 8, 8] float32; "
        "expected whole numbers (int64), such as classes or characters. Give int64, of the data set or as x.long()"
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x: torch.softmax(x, 9), lambda x: torch.softmax(x, -2)),
        (lambda x: nn.Softmin(dim=-3)(x), lambda x: nn.Softmin(dim=1)(x)),
        (lambda x: x.sort(dim=2).values, lambda x: x.sort(dim=1).values),
        (lambda x: x.index_select(2, torch.tensor([0])), lambda x: x.index_select(1, torch.arange(10, device="meta"))),
    ],
)
def test_a_dim_that_only_a_real_device_refuses_is_refused_on_stand_ins(
    wrong: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
) -> None:
    class Net(nn.Module):
        def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.body, self.last = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x))

    (fault,) = examine(lambda: Net(wrong)).faults
    assert "Dimension out of range (expected to be in range of [-2, 1], but got" in fault.got
    assert not examine(lambda: Net(right)).faults


WRONG = [
    (
        ("sequential", "model.layers.head.out_features=9"),
        "model.layers.head.out_features: 9; expected 10: the data has that many classes. "
        "Write out_features: ${data.num_outputs}",
    ),
    (
        ("sequential", "model.layers.hidden2.in_features=9"),
        "model.layers.hidden2: Linear is given [B, 256] float32; expected floats [B, ..., 9]. "
        "Write in_features: 256, or leave it out: it is inferred from the data",
    ),
    (
        ("transformer", "model.layers.blocks.layer.layers.key.in_features=9"),
        "model.layers.blocks.layer.layers.key: Linear is given [B, 8, 64] float32; expected floats [B, ..., 9]",
    ),
    (("transformer", "model.constants.heads=7"),
     "model.layers.blocks.layer.forward: line 2, column 12: `part(y).unflatten(2, [heads, -1])`: unflatten is given "
     ),
    (("rnn", "model.layers.recurrent.input_size=7"), "GRU is given [B, 8, 8] float32; expected floats [B, T, 7]"),
    (("lenet", "model.layers.pool2.kernel_size=9"), "model.layers.pool2: MaxPool2d is given [B, 16, 4, 4] float32; "),
    (("resnet", "model.layers.down.in_channels=4"), "model.layers.down: Conv2d is given [B, 16, 8, 8] float32; "),
    (("resnet", "model.layers.norm.num_features=4"), "model.layers.norm: BatchNorm2d is given [B, 32, 4, 4] float32"),
    (("mlp", "model.layers.blocks.layer.layers.norm.normalized_shape=4"), "expected floats [B, ..., 4]"),
    (("shared", "model.layers.linears.repeat=1", "model.forward='return head(linears[1](stem(flatten(x))))'"),
     "model.forward: line 1, column 13: `linears` has 1 elements, and no number 1"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "words"), WRONG, ids=[" ".join(model) for model, _ in WRONG])
def test_the_layer_that_does_not_fit_is_named(model: tuple, words: str, build_model: Callable) -> None:
    (fault,) = examine(lambda: build_model(*model, device="meta"), objective=CLASSES).faults
    assert words in str(fault)


def linear(width: int) -> Callable[[], nn.Module]:
    return lambda: SequentialModel(layers={"head": nn.LazyLinear(width)})


def test_a_regressions_width_is_checked() -> None:
    mse = Objective(terms={"mse": nn.MSELoss()})
    assert not examine(linear(1), HOUSES, mse).faults
    (fault,) = examine(linear(3), HOUSES, mse).faults
    assert (fault.key, fault.got) == ("model.layers.head.out_features", "3")
    flat = ModuleDictModel(layers={"head": nn.Linear(6, 1)}, forward="return head(x).squeeze(1)")
    assert not examine(lambda: flat, HOUSES, mse).faults


def test_two_terms_that_disagree_alike_make_one_fault() -> None:
    objective = Objective(terms={"mse": nn.MSELoss(), "l1": nn.L1Loss()})
    assert len(examine(linear(3), HOUSES, objective).faults) == 1


def test_each_output_is_checked_by_its_own_term() -> None:
    def build() -> nn.Module:
        layers = {"flatten": nn.Flatten(), "kind": nn.LazyLinear(10), "other": nn.LazyLinear(3)}
        return ModuleDictModel(layers=layers, forward="x = flatten(x)\nreturn {'kind': kind(x), 'other': other(x)}")

    by_name = Objective(terms={"kind": Term(loss=CrossEntropy(), output="kind")})
    assert not examine(build, objective=by_name).faults
    wrong = Objective(terms={"kind": Term(loss=CrossEntropy(), output="other")})
    (fault,) = examine(build, objective=wrong).faults
    assert fault.key == "model.layers.other.out_features"
    (fault,) = examine(build, objective=CLASSES).faults
    assert "Set objective.cross_entropy.output to one of kind, other" in str(fault)


def test_a_torch_loss_reads_classes_from_axis_1() -> None:
    def build() -> nn.Module:
        return SequentialModel(layers={"head": nn.LazyConv2d(10, 1)})

    assert not examine(build, objective=Objective(terms={"ce": nn.CrossEntropyLoss()})).faults


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


def test_what_cannot_be_decided_is_a_note_and_no_fault() -> None:
    found = examine(NeedsNumbers, objective=CLASSES)
    assert found.faults == ()
    assert "were not checked" in found.notes[0]


def test_a_users_own_network_is_named_by_its_own_path_and_line() -> None:
    (fault,) = examine(lambda: nn.Sequential(nn.Flatten(), OwnError()), objective=CLASSES).faults
    line = OwnError.forward.__code__.co_firstlineno + 1
    assert str(fault) == (
        f"model.1: OwnError is given [B, 64] float32: only squares, please (test_shapes.py, line {line}); "
        "expected an input that it takes"
    )
    (fault,) = examine(Catches, objective=CLASSES).faults
    assert fault.key == "model.head.out_features"


def test_a_network_that_cannot_be_built_is_a_fault() -> None:
    def fail() -> nn.Module:
        raise TypeError("no such argument")

    (fault,) = examine_shapes(network_factory=fail, spec=DIGITS).faults
    assert (fault.key, fault.got) == ("model", "TypeError: no such argument")


def test_no_hook_stays_behind() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    examine(OwnError)
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == before


def test_the_branch_that_training_does_not_take_is_looked_at_too() -> None:
    program = "x = flat(x)\nif not training:\n    x = hidden(head(x))\nreturn head(hidden(x))"

    def build() -> nn.Module:
        layers = {"flat": nn.Flatten(), "hidden": nn.Linear(64, 64), "head": nn.Linear(64, 10)}
        return ModuleDictModel(layers=layers, forward=program)

    (fault,) = examine(build, objective=CLASSES).faults
    assert fault.key == "model.layers.hidden"
    assert "is given [B, 10] float32" in fault.got


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


BARE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), _linear(64, 32), nn.ReLU(), _linear(32, 10)),
    "groups and strides": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False),
        nn.Flatten(),
        _linear(16, 10),
    ),
    "one dimension": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Conv1d(8, 4, 3, padding=1, bias=False), nn.Flatten(), _linear(32, 10)
    ),
    "at each position": lambda: nn.Sequential(_linear(8, 24), nn.Flatten(), _linear(192, 10)),
}


@pytest.mark.parametrize("name", BARE)
def test_multiply_adds_are_half_the_flops_that_torch_counts(name: str) -> None:
    trace = examine(BARE[name]).traces[None]
    with FlopCounterMode(display=False) as count:
        BARE[name]()(torch.rand(3, *DIGITS.input_shape))
    assert 3 * 2 * sum(trace.multiply_adds) == count.get_total_flops()


def test_each_step_of_a_recurrent_layer_is_an_operator() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, bias=False, batch_first=True), nn.Linear(16, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            output, _ = self.lstm(x.squeeze(1))
            return self.head(output[:, -1])

    trace = examine(Rows).traces[None]
    assert list(trace.multiply_adds) == [4 * 16 * (8 + 16)] * 8 + [160]
