"""Layers that work against each other, or to no end, are noted with their line and the cure; healthy ones are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import exp
from exp.check.layer_notes import layer_notes
from exp.check.plan import plan, resolve
from exp.check.shapes import examine_shapes
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import CrossEntropy
from exp.shared_types import DataSpec

IMAGES = DataSpec(input_shape=(3, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
CLASSES = Objective(terms={"cross_entropy": CrossEntropy()})
SMALL = ("hooks=[]", "logger=[]", "metrics=[]")


def notes(build: Callable[[], nn.Module], objective: Objective = CLASSES) -> list[str]:
    seen = examine_shapes(network_factory=build, spec=IMAGES, objective=objective)
    assert (seen.faults, seen.notes) == ((), ())
    assert seen.network is not None
    found = layer_notes(seen.network, traces=seen.traces, objectives={None: objective}, is_adapted=False)
    return [f"{note.key} {note.text}" for note in found]


def network(*, forward: str | None = None, **layers: nn.Module) -> Callable[[], nn.Module]:
    if forward is None:
        return lambda: SequentialModel(layers=layers)
    return lambda: ModuleDictModel(layers=layers, forward=forward)


def head() -> nn.Module:
    return nn.LazyLinear(10)


class Torchs(nn.Module):
    """A network of the user's own, whose layers are declared in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).detach())


WRONG = {
    "bias": (
        lambda: network(conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), flat=nn.Flatten(), head=head()),
        ["model.layers.conv has a bias, and model.layers.norm, a BatchNorm2d, takes it off again", "Write bias: false"],
    ),
    "bias_by_the_forward": (
        lambda: Torchs,
        ["model.conv has a bias, and model.norm",
         "model.spare (spare) gets no gradient, for the forward never uses it"],
    ),
    "bias_of_a_linear": (
        lambda: network(flat=nn.Flatten(), a=nn.LazyLinear(4), norm=nn.BatchNorm1d(4), head=head()),
        ["model.layers.a has a bias"],
    ),
    "dropout": (
        lambda: network(drop=nn.Dropout2d(0.1), norm=nn.BatchNorm2d(3), flat=nn.Flatten(), head=head()),
        ["model.layers.drop drops values right before model.layers.norm, a BatchNorm2d", "Put it behind that"],
    ),
    "activations": (
        lambda: network(flat=nn.Flatten(), a=nn.LazyLinear(4), act=nn.ReLU(), act2=nn.GELU(), head=head()),
        ["model.layers.act2 has a gelu of a relu of model.layers.act, and nothing", "Take one out"],
    ),
    "activations_of_a_program": (
        lambda: network(flat=nn.Flatten(), act=nn.Tanh(), head=head(), forward="return head(act(relu(flat(x))))"),
        ["model.layers.act has a tanh of a relu of model"],
    ),
    "detached": (
        lambda: Detached,
        ["model.body (body) gets no gradient, for what it gives reaches no output that the objective reads",
         "freeze.param"],
    ),
    "argmax": (
        lambda: network(
            a=nn.LazyLinear(8), e=nn.Embedding(8, 4), head=head(),
            forward="x = a(x.flatten(1)).argmax(1)\nreturn head(e(x))",
        ),
        ["model.layers.a (a) gets no gradient"],
    ),
    "an_element_of_a_list": (
        lambda: network(
            blocks=nn.ModuleList([nn.Linear(192, 10), nn.Linear(192, 10)]), forward="return blocks[0](x.flatten(1))"
        ),
        ["model.layers.blocks.layer (blocks.1) gets no gradient, for the forward never uses it"],
    ),
    "a_statement": (
        lambda: network(a=nn.LazyLinear(4), head=head(), forward="x = x.flatten(1)\ny = a(x)\nreturn head(x)"),
        ["model.forward sets `y`, which nothing reads: the branch reaches no", "model.layers.a (a) gets no gradient"],
    ),
    "a_parameter": (
        lambda: lambda: Scaled(uses=False),
        ["model (scale) gets no gradient, for the forward never uses it"],
    ),
}  # fmt: skip


class Scaled(nn.Module):
    """A parameter of its own beside another, and a linear layer whose weight alone is used."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
        self.head = nn.Linear(192, 10, bias=False)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(1), self.head.weight) + self.shift
        return y * self.scale if self.uses else y


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_in_vain_is_noted_once_with_its_cure(name: str) -> None:
    make, words = WRONG[name]
    with torch.device("meta"):
        found = notes(make())
    for word in words:
        assert sum(word in note for note in found) == 1, found
    assert len(found) <= len(words)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True, bidirectional=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1, 2))[0][:, -1])


class Attention(nn.Module):
    """torch's own encoder, whose attention holds a layer that it never calls, and calls by its weight."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1, 2)).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight, self.head = self.first.weight, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.mean((1, 2)))))


class Mish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


class HardMish(nn.Module):
    """An activation of the user's own that is made of two of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(torch.relu(x))


def frozen_norm() -> nn.Module:
    made = SequentialModel(layers={"c": nn.Conv2d(3, 4, 3), "n": nn.BatchNorm2d(4), "f": nn.Flatten(), "h": head()})
    made.n.eval()
    return made


RIGHT = {
    "no_bias": lambda: network(c=nn.Conv2d(3, 4, 3, bias=False), n=nn.BatchNorm2d(4), f=nn.Flatten(), h=head()),
    "used_twice": lambda: network(
        c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3), h=head(), forward="y = c(x)\nreturn h((y + n(y)).flatten(1))"
    ),
    "called_twice": lambda: network(
        c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3), h=head(), forward="return h((c(x) + n(c(x))).flatten(1))"
    ),
    "other_axis": lambda: network(
        f=nn.Flatten(1, 2), a=nn.Linear(8, 4), n=nn.BatchNorm1d(24), g=nn.Flatten(), h=head()
    ),
    "layer_norm": lambda: network(f=nn.Flatten(), a=nn.LazyLinear(4), n=nn.LayerNorm(4), h=head()),
    "activation_between": lambda: network(
        c=nn.Conv2d(3, 4, 3), r=nn.ReLU(), n=nn.BatchNorm2d(4), f=nn.Flatten(), h=head()
    ),
    "frozen_norm": lambda: frozen_norm,
    "dropout_of_0": lambda: network(d=nn.Dropout(0.0), n=nn.BatchNorm2d(3), f=nn.Flatten(), h=head()),
    "norm_between": lambda: network(f=nn.Flatten(), r=nn.ReLU(), n=nn.LayerNorm(192), g=nn.GELU(), h=head()),
    "spare_state": lambda: network(
        r=nn.GRU(8, 4, batch_first=True), h=head(), forward="y, last = r(x.flatten(1, 2))\nreturn h(y[:, -1])"
    ),
    "loop": lambda: network(
        b=nn.ModuleList([nn.Linear(192, 192) for _ in range(2)]), h=head(),
        forward="x = x.flatten(1)\nfor layer in b:\n    x = x + layer(x)\nreturn h(x)",
    ),
    "recurrent": lambda: Recurrent,
    "attention": lambda: Attention,
    "tied": lambda: Tied,
    "mish": lambda: lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10), Mish()),
    "own_activation": lambda: lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10), HardMish()),
    "by_its_weight": lambda: lambda: Scaled(uses=True),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_healthy_network_has_no_note(name: str) -> None:
    with torch.device("meta"):
        assert notes(RIGHT[name]()) == []


def test_a_frozen_layer_may_get_no_gradient() -> None:
    def build() -> nn.Module:
        made = Torchs()
        made.spare.requires_grad_(False)
        made.conv.bias.requires_grad_(False)
        return made

    assert notes(build) == []


def test_a_head_that_no_term_reads_is_in_vain_until_one_does() -> None:
    with torch.device("meta"):
        program = "x = f(x)\nreturn {'output': kind(x), 'other': other(x)}"
        build = network(f=nn.Flatten(), kind=head(), other=head(), forward=program)
    (note,) = notes(build)
    assert note.startswith("model.layers.other (other) gets no gradient, for what it gives reaches no output that")
    both = {name: Term(loss=CrossEntropy(), output=name) for name in ("output", "other")}
    assert notes(build, Objective(terms=both)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model=resnet", "+optimizer.weight_decay=0.1"],
            ["optimizer.weight_decay shrinks stage.0.norm1.weight",
             "exempt_from_decay=[norms, biases]", "[command line]"],
        ),
        (
            ["model=resnet", "strategy=ddp", "launch.devices=2", "data.batch_size=16"],
            ["model.layers.stage.layer.layers.norm1 (", "8 samples of its own on each of 2 ranks",
             "sync_batchnorm=true"],
        ),
        (["model=domain_adversarial"], ["model.layers.domain_head (domain_head) gets no gradient",
             "domain_adversarial.yaml, line 18]"]),
        (
            ["+model.layers.last={_target_: torch.nn.LogSoftmax, dim: -1}"],
            ["model.layers.last ends in log_softmax", "it is computed twice", "[command line]"],
        ),
    ],
    ids=["decay", "unsynchronised", "head", "twice"],
)  # fmt: skip
def test_a_note_of_a_run_has_its_line(
    overrides: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = "\n".join(plan(resolve(exp.compose([*SMALL, *overrides]))).notes)
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=resnet", "+optimizer.weight_decay=0.1", "optimizer.exempt_from_decay=[norms]"],
        ["model=lenet", "+optimizer.weight_decay=0.1"],
        ["model=resnet", "strategy=ddp", "launch.devices=2", "data.batch_size=16", "strategy.sync_batchnorm=true"],
        ["model=resnet", "strategy=ddp", "launch.devices=2"],
        ["model=resnet", "strategy=fsdp", "launch.devices=2"],
        ["model=lenet", "strategy=layer_split", "launch.devices=2"],
        ["model=transformer", "strategy=tensor_parallel", "launch.devices=2"],
        ["model=sequential", "strategy=pipeline", "launch.devices=2"],
        ["model=resnet", "strategy=single"],
        ["model=transformer", "lora.layers=['*.query']"],
        ["model=rnn", "model.layers.recurrent._target_=torch.nn.LSTM"],
        ["data=text", "model=gpt", "precision=bf16"],
    ],
    ids=" ".join,
)
def test_a_healthy_run_has_none(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(resolve(exp.compose([*SMALL, *overrides]))).notes == ()


def test_a_program_that_sets_a_value_for_nothing_is_noted_with_line_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf/model/spare.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "# Spare: model=spare\n_target_: exp.models.containers.ModuleDictModel\nlayers:\n"
        "  head: {_target_: torch.nn.Linear, out_features: 10}\nforward: |\n  x = x.flatten(1)\n"
        "  y = x * 2\n  return head(x)\n"
    )
    (note,) = plan(resolve(exp.compose([*SMALL, "model=spare"]))).notes
    assert note.startswith("model.forward sets `y`, which nothing reads")
    assert note.endswith("[conf/model/spare.yaml, line 7, column 3]")
