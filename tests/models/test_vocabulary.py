"""The vocabulary of forward programs: supported names, refused names with reasons, and names of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.check.meta_forward import run_on_meta
from exp.check.shapes import shape_errors
from exp.models import vocabulary
from exp.models.containers import ModuleDictModel
from exp.models.syntax import ProgramError
from exp.shared_types import DataSpec
from exp.spelling import habits

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
HOMES = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
}


def run(text: str, x: torch.Tensor = X, **options: object) -> object:
    return ModuleDictModel(layers=options.pop("layers", {}), forward=text, **options)(x)


def refused(text: str, **options: object) -> str:
    with pytest.raises(ProgramError) as caught:
        ModuleDictModel(layers=options.pop("layers", {}), forward=text, **options)
    return f"{caught.value.message}; expected {caught.value.expected}"


def test_each_listed_name_is_torchs() -> None:
    missing = {home: [name for name in vocabulary.members(home) if not hasattr(HOMES[home], name)] for home in HOMES}
    # The names are those of torch 2.13. Older supported versions lack this name.
    added = {"torch.nn.functional": ["linear_cross_entropy"]}
    assert all(names in ([], added.get(home)) for home, names in missing.items())
    assert [one for one in vocabulary.METHODS | vocabulary.ATTRIBUTES if not hasattr(torch.Tensor, one)] == []


def test_no_listed_name_is_refused() -> None:
    listed = vocabulary.FUNCTIONS | vocabulary.METHODS | vocabulary.ATTRIBUTES
    assert not listed & habits()["torch"].keys()


# -- operations of usual models --


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return x.to(torch.float), x.type(torch.long)", (X.float(), X.long())),
        ("return view_as_real(polar(x.abs(), x))", torch.view_as_real(torch.polar(X.abs(), X))),
        ("return linalg.norm(x, dim=-1) + torch.linalg.vector_norm(x)", X.norm(dim=-1) + X.norm()),
        ("return fft.irfft(torch.fft.rfft(x), n=4)", torch.fft.irfft(torch.fft.rfft(X), n=4)),
        ("return x.sort(-1).values[:, 0] + x.max(1).values", X.sort(-1).values[:, 0] + X.max(1).values),
        ("return x.nonzero()", X.nonzero()),
        ("return x.sum((0, 1)) + torch.sum(x, (0, 1))", X.sum((0, 1)) * 2),
        ("return sum((x, x * 2)) + sum(x.chunk(2, 1)).repeat(1, 2)", X * 3 + sum(X.chunk(2, 1)).repeat(1, 2)),
        ("return x.contiguous(memory_format=torch.contiguous_format) * torch.pi", X * torch.pi),
        ("return log2(x.abs()).clip(-1, 1).expm1()", torch.log2(X.abs()).clip(-1, 1).expm1()),
        ("return x + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)", X + torch.arange(1.0, 5.0)),
    ],
)
def test_a_program_gives_what_torch_gives(text: str, expected: object) -> None:
    torch.testing.assert_close(run(text), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y = x.relu_()\nreturn y", "`.relu_` is not allowed in a program: it writes into its tensor"),
        ("y = x.relu_()\nreturn y", "expected `relu`, which returns a new tensor"),
        ("x.fill_(0.0)\nreturn x", "expected `full_like(x, value)`"),
        ("x.copy_(x)\nreturn x", "expected the other tensor itself"),
        ("return F.relu(x, inplace=True)", "`inplace` of `relu` writes into a tensor"),
        ("return F.relu(x, True)", "`inplace` of `relu` writes into a tensor"),
        ("return F.dropout(x, 0.1, training, True)", "`inplace` of `dropout` writes"),
        ("return embedding(x, x, max_norm=1.0)", "`max_norm` of `embedding` writes"),
        ("return batch_norm(x, x[0], x[1], training=training)", "`running_mean` of `batch_norm` writes"),
        ("y = x + 1\ny[0] = 0\nreturn y", "an assignment into this tensor; expected where(mask, a, x)"),
        ("return torch.empty(3)", "expected `zeros`"),
        ("return x * x.item()", "expected the tensor itself"),
        ("return x.data", "expected `detach()`"),
        ("return x.cuda()", "expected `to(other)`"),
        ("return x.gelu()", "is a function of torch.nn.functional; expected `gelu(x)`"),
        ("return x.view", "is a method of a tensor; expected `x.view()`"),
        ("return torch.conv2d(x, x)", "is a function of torch.nn.functional; expected `conv2d(x)`"),
        ("return torch.T(x)", "is an attribute of a tensor; expected `x.T`"),
        ("return torch.load(x)", "`torch.load` is not allowed in a program"),
        ("return nn.Linear(x)", "expected an entry of `layers`"),
        ("return x.flaten(1)", "`.flaten` is not allowed in a program; expected `flatten`"),
        ("return x * torch.finfo(x.dtype).min", "expected a number, such as -math.inf"),
        ("y = relu(x)\nreturn y.flaten(1)", "attribute of a tensor; expected `flatten`"),
        ("y = '{0.T}'\nreturn y.format(x)", "`.format` of a str"),
        ("return x.max", "is a function of torch; expected `max(x)`"),
        ("y = x.values\nreturn y(x)", "a tensor is called"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_refused_with_the_reason(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "return torch.linalg.torch.load(x)",
        "return x.values.__self__",
        "y = relu(x)\nreturn y.__class__",
        "y = head\nreturn y.forward(x)",
        "y = [x]\ny.clear()\nreturn x",
    ],
)
def test_the_wall_stands(text: str) -> None:
    refused(text, layers={"head": nn.Linear(4, 4)} if "head" in text else {})


def test_a_shape_that_depends_on_numbers_is_left_to_the_run() -> None:
    spec = DataSpec(input_shape=(4,), input_dtype="float32", num_classes=None, num_outputs=4)
    found = run_on_meta(
        network_factory=lambda: ModuleDictModel(layers={}, forward="return masked_select(x, x > 0)"), spec=spec
    )
    assert shape_errors(found, spec) == []
    assert "the shapes of the model were not checked" in found.notes[0]
