"""precision.keep: layers that keep another dtype than that of the precision, by name or type."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.build import Parts
from exp.errors import ConfigError
from exp.models.containers import ModuleDictModel, with_forward
from exp.precision.keep import kept_layers
from exp.precision.plugin import build_precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TRANSFORMER = (
    "model=transformer", "model.constants.width=16", "model.constants.hidden=32", "model.constants.heads=2",
)  # fmt: skip


class Block(nn.Module):
    """Attention block of a user with a norm and two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.value = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.softmax, self.head = nn.Softmax(-1), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, temperature: Tensor) -> dict[str, Tensor]:
        y = self.norm(x)
        weights = self.softmax(self.query(y) @ y.transpose(1, 2) * temperature)
        z = x + weights @ self.value(y)
        return {"hidden": z, "output": self.head(z.mean(1))}


def run(word: str, keep: dict[str, str], network: nn.Module | None = None) -> tuple[nn.Module, Any, Any]:
    """Run a forward with a precision, and return network, output and precision plug-in."""
    torch.manual_seed(0)
    network = network or Block()
    plugin = build_precision(word, device_type="cpu", keep=keep, enabled=word == "fp16")
    plugin.convert_module(network)
    with plugin.forward_context():
        output = network(torch.randn(2, 3, 8), temperature=torch.tensor(0.5))
    return network, output, plugin


@pytest.mark.parametrize(("word", "half"), [("bf16", BF16), ("fp16", F16)])
def test_a_kept_layer_leaves_autocast(word: str, half: torch.dtype) -> None:
    network, output, plugin = run(word, {"query": "fp32", "norm": "fp32"})
    seen = {}
    for name, module in network.named_children():
        # The output of a matrix product has the dtype in which the layer computes.
        module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    x = torch.randn(2, 3, 8)
    with plugin.forward_context():
        network(x, temperature=torch.tensor(0.5))
        assert torch.is_autocast_enabled("cpu")
    assert seen["query"] == (F32, F32)
    assert seen["value"][1] == seen["head"][1] == half
    # The result equals that of float32 bit for bit.
    reference = copy.deepcopy(network.query)
    with plugin.forward_context():
        kept = network.query(x)
    reference._forward_hooks.clear()
    reference._forward_pre_hooks.clear()
    assert torch.equal(kept, reference(x))
    assert {p.dtype for p in network.parameters()} == {F32}
    output["output"].float().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(("word", "half"), [("bf16_true", BF16), ("fp16_true", F16)])
def test_a_kept_layer_of_a_true_word_converts_its_output(word: str, half: torch.dtype) -> None:
    network, output, _ = run(word, {"norm": "fp32", "torch.nn.Softmax": "fp32"})
    assert {p.dtype for p in network.norm.parameters()} == {F32}
    assert {p.dtype for name, p in network.named_parameters() if not name.startswith("norm")} == {half}
    # The products of query and norm, and of softmax and value, need equal dtypes.
    assert {value.dtype for value in output.values()} == {half}
    sum(value.float().sum() for value in output.values()).backward()
    assert all(p.grad.dtype == p.dtype for p in network.parameters())


def test_a_kept_last_layer_is_not_rounded() -> None:
    network, _, _ = run("bf16_true", {"head": "fp32"})
    held: list[Tensor] = []
    network.head.register_forward_hook(lambda _, args, out: held.insert(0, args[0]))
    for training in (True, False):
        output = network.train(training)(torch.randn(2, 3, 8), temperature=torch.tensor(0.5))
        plain = copy.deepcopy(network.head)
        plain._forward_hooks.clear()
        plain._forward_pre_hooks.clear()
        assert output["hidden"].dtype == BF16
        assert output["output"].dtype == F32
        assert torch.equal(output["output"], plain(held[0].float()))
        assert not torch.equal(output["output"], output["output"].bfloat16().float())


def test_each_forward_has_its_own_last_layers() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("body", "head", "critic")}
    network = ModuleDictModel(
        layers=layers,
        forward="return head(body(x))",
        programs={"judge": "return critic(body(x))", "inner": "return body(critic(x))"},
    )
    build_precision("bf16_true", device_type="cpu", keep={"head": "fp32", "critic": "fp32"}).convert_module(network)
    views = [network, *(with_forward(network, name) for name in ("judge", "inner"))]
    for training in (True, False):
        outputs = [view.train(training)(torch.randn(2, 4)) for view in views]
        assert [output.dtype for output in outputs] == [F32, F32, BF16]
        assert not torch.equal(outputs[1], outputs[1].bfloat16().float())


@pytest.mark.parametrize(
    ("word", "kept", "own"),
    [("fp32", "fp64", F64), ("bf16", "fp64", F64), ("fp16_true", "fp64", F64), ("fp64", "fp32", F32)],
)
def test_a_layer_may_be_more_or_less_exact(word: str, kept: str, own: torch.dtype) -> None:
    network, output, _ = run(word, {"norm": kept})
    assert {p.dtype for p in network.norm.parameters()} == {own}
    assert own not in {value.dtype for value in output.values()}
    sum(value.float().sum() for value in output.values()).backward()
    assert network.norm.weight.grad.dtype == own


def test_the_later_pattern_counts_in_a_kept_container() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4))
    kept = kept_layers(network, {"0*": "fp32", "LayerNorm": "fp64"})
    assert kept == {"0": F32, "0.0": F32, "0.1": F64}
    plugin = build_precision("bf16_true", device_type="cpu", keep={"0*": "fp32", "LayerNorm": "fp64"})
    plugin.convert_module(network)
    assert [bool(m._forward_pre_hooks) for _, m in network.named_modules()] == [True, True, False, True, False]
    seen: list[torch.dtype] = []
    network[0][1].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    assert network(torch.randn(2, 4)).dtype == BF16
    assert seen == [F32]  # the container around the norm keeps float32


def test_autocast_is_restored_after_an_error() -> None:
    network, _, plugin = run("bf16", {"query": "fp32"})
    with plugin.forward_context():
        with pytest.raises(RuntimeError):
            network(torch.randn(2, 3, 5), temperature=torch.tensor(0.5))
        with pytest.raises(RuntimeError):
            network.query(torch.randn(3, 5))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("word", ["bf16", "bf16_true"])
def test_copies_and_pickles_work_by_themselves(word: str) -> None:
    plain = list(Block().state_dict())
    network, expected, plugin = run(word, {"norm": "fp32", "head": "fp64"})
    assert list(network.state_dict()) == plain
    torch.manual_seed(0)
    Block()
    x = torch.randn(2, 3, 8)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        with plugin.forward_context():
            assert torch.equal(other(x, temperature=torch.tensor(0.5))["output"], expected["output"])
            with torch.no_grad():
                other.norm.weight.zero_()
            assert not torch.equal(other(x, temperature=torch.tensor(0.5))["output"], expected["output"])
            assert torch.equal(network(x, temperature=torch.tensor(0.5))["output"], expected["output"])


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bf16", "bf16_true"])
def test_a_compiled_network_computes_the_same(word: str) -> None:
    network, expected, plugin = run(word, {"norm": "fp32", "head": "fp32"})
    torch.manual_seed(0)
    Block()
    x, temperature = torch.randn(2, 3, 8), torch.tensor(0.5)
    with plugin.forward_context():
        network.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            output = network(x, temperature=temperature)
            assert {name: value.dtype for name, value in output.items()} == {
                name: value.dtype for name, value in expected.items()
            }
            assert all(torch.equal(output[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "word", ["bf16_true", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_a_run_keeps_layers_of_a_forward_program(word: str, parts: Callable[..., Parts]) -> None:
    built = parts(f"precision={word}", *TRANSFORMER, "+precision.keep={blocks.*.norm1: fp32, head: fp32}")
    seen: dict[str, set[torch.dtype]] = {}
    network = built.module.network
    keys = list(network.state_dict())
    for name in ("blocks.0.norm1", "blocks.1.norm1", "head", "blocks.0.query"):
        weight = network.get_submodule(name).weight
        weight.register_hook(lambda grad, name=name: seen.setdefault(name, set()).add(grad.dtype))
    built.trainer.fit(built.module, datamodule=built.data)
    assert list(network.state_dict()) == keys
    own = BF16 if word == "bf16_true" else F32
    assert seen == {"blocks.0.norm1": {F32}, "blocks.1.norm1": {F32}, "head": {F32}, "blocks.0.query": {own}}
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values())


def errors(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        exp.validate(exp.compose(["launch.accelerator=cpu", *overrides]))
    return [str(error) for error in error.value.errors]


def test_wrong_patterns_and_dtypes_are_errors() -> None:
    lines = errors("model=lenet", "precision=bf16", "+precision.keep={haed: fp32, Conv3d: fp32}")
    assert [line.split(";")[0] for line in lines] == [
        "precision.keep.haed: the pattern matches no layer",
        "precision.keep.Conv3d: the pattern matches no layer",
    ]
    assert "there are conv1, relu1, pool1" in lines[0]
    assert "Did you mean head?" in lines[0]
    assert "Did you mean Conv2d?" in lines[1]
    (line,) = errors("model=lenet", "precision=bf16", "+precision.keep={head: fp23}")
    assert line.startswith("precision.keep: ")
    assert "one of fp32, fp64" in line
    (line,) = errors("precision.keep={head: fp32}")
    assert "Write '+precision.keep={head: fp32}', which adds to the mapping" in line


def test_a_shared_parameter_is_kept_in_both_places() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    plugin = build_precision("bf16_true", device_type="cpu", keep={"head": "fp32"})
    with pytest.raises(ConfigError, match=r"table.weight and head.weight are one parameter, and only one"):
        plugin.convert_module(Tied())
    build_precision("bf16", device_type="cpu", keep={"head": "fp32"}).convert_module(Tied())
    both = build_precision("bf16_true", device_type="cpu", keep={"head": "fp32", "table": "fp32"})
    both.convert_module(tied := Tied())
    assert tied(torch.arange(5)).dtype == F32
