"""Containers equal hand-written modules bit for bit, have the same names, and work with torch's tools."""

from __future__ import annotations

import copy
import cProfile
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from exp.errors import ConfigError
from exp.models.containers import (
    ModuleDictModel,
    ModuleListModel,
    ParameterDictModel,
    ParameterListModel,
    ProgramModel,
    SequentialModel,
)
from exp.models.graphs import graph_of
from exp.models.layers import Parameter
from exp.models.syntax import ProgramError

pytestmark = pytest.mark.numeric


class ByHandList(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(10, 10) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.linears):
            x = self.linears[i // 2](x) + linear(x)
        return x


class ByHandTwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(10, 16, batch_first=True)
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 3), "size": nn.Linear(16, 1)})

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        states, last = self.encoder(x * mask)
        x = states[:, -1] + last.squeeze(0)
        return {name: head(x) for name, head in self.heads.items()}


class ByHandParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(10, 10) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.scale
        return x


class ByHandParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"gate": torch.randn(10, 10), "value": torch.randn(10, 10)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.weights["gate"]) * (x @ self.weights["value"])


class ByHandBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, time, 4, width // 4).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


LIST_PROGRAM = "for i, linear in enumerate(linears):\n    x = linears[i // 2](x) + linear(x)\nreturn x"


def list_model(count: int) -> ModuleListModel:
    linears = [nn.Linear(10, 10) for _ in range(count)]
    return ModuleListModel(layers={"linears": linears}, forward=LIST_PROGRAM)


def two_outputs() -> ModuleDictModel:
    heads = {"kind": nn.Linear(16, 3), "size": nn.Linear(16, 1)}
    return ModuleDictModel(
        layers={"encoder": nn.GRU(10, 16, batch_first=True), "heads": heads},
        inputs=["x", "mask"],
        forward="""
            states, last = encoder(x * mask)
            x = states[:, -1] + last.squeeze(0)
            return {name: head(x) for name, head in heads.items()}
        """,
    )


def parameter_list() -> ParameterListModel:
    repeated = nn.ModuleList(Parameter(shape=[10, 10], initialisation="normal") for _ in range(3))
    return ParameterListModel(
        layers={"weights": repeated, "scale": Parameter(shape=[10], initialisation="ones")},
        forward="for weight in weights:\n    x = tanh(x @ weight) * scale\nreturn x",
    )


def parameter_dict() -> ParameterDictModel:
    return ParameterDictModel(
        layers={"weights": {"gate": nn.Parameter(torch.randn(10, 10)), "value": nn.Parameter(torch.randn(10, 10))}},
        forward="return sigmoid(x @ weights['gate']) * (x @ weights['value'])",
    )


def block() -> ModuleDictModel:
    return ModuleDictModel(
        constants={"heads": 4},
        layers={
            "norm1": nn.LayerNorm(16),
            "norm2": nn.LayerNorm(16),
            "qkv": nn.Linear(16, 48),
            "project": nn.Linear(16, 16),
            "mlp": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)),
        },
        forward="""
            B, T, C = x.shape
            q, k, v = qkv(norm1(x)).split(C, dim=2)
            q, k, v = [part.view(B, T, heads, C // heads).transpose(1, 2) for part in (q, k, v)]
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + project(y.transpose(1, 2).reshape(B, T, C))
            return x + mlp(norm2(x))
        """,
    )


CASES = {
    "2 layers": (lambda: ByHandList(2), lambda: list_model(2), [(64, 10)]),
    "20 layers": (lambda: ByHandList(20), lambda: list_model(20), [(64, 10)]),
    "two outputs": (ByHandTwoOutputs, two_outputs, [(5, 4, 10), (10,)]),
    "parameter list": (ByHandParameterList, parameter_list, [(7, 10)]),
    "parameter dict": (ByHandParameterDict, parameter_dict, [(7, 10)]),
    "transformer block": (ByHandBlock, block, [(3, 6, 16)]),
}


def pair(case: str) -> tuple[nn.Module, ProgramModel, list[Tensor]]:
    by_hand, program, shapes = CASES[case]
    torch.manual_seed(0)
    ours, hand = program(), by_hand()
    ours.load_state_dict(hand.state_dict())  # strict, so both have the same keys
    return hand, ours, [torch.randn(shape) for shape in shapes]


def outputs_and_gradients(network: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(1)
    result = network(*inputs)
    results = list(result.values()) if isinstance(result, dict) else [result]
    sum(tensor.square().sum() for tensor in results).backward()
    return [*results, *(tensor.grad for tensor in (*inputs, *network.parameters()))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_forward_and_gradients_equal_the_hand_written_module_bit_for_bit(case: str, training: bool) -> None:
    hand, ours, inputs = pair(case)
    expected = outputs_and_gradients(hand.train(training), inputs)
    got = outputs_and_gradients(ours.train(training), inputs)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_copies_pickles_and_graph_modules_are_the_same_network(case: str) -> None:
    hand, ours, inputs = pair(case)
    hand.eval(), ours.eval()
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(saved, weights_only=False),
        fx.GraphModule(ours, graph_of(ours)),
    ]
    expected = hand(*inputs)
    for network in copies:
        torch.testing.assert_close(network(*inputs), expected, rtol=0, atol=0)
        assert network.state_dict().keys() == ours.state_dict().keys()
    with torch.no_grad():
        for parameter in copies[0].parameters():
            parameter.zero_()
    torch.testing.assert_close(ours(*inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", ["2 layers", "parameter list", "transformer block"])
def test_torch_export_understands_a_program(case: str, strict: bool) -> None:
    _, ours, inputs = pair(case)
    exported = torch.export.export(ours.eval(), tuple(inputs), strict=strict).module()
    torch.testing.assert_close(exported(*inputs), ours(*inputs), rtol=0, atol=0)


def test_torch_export_with_any_batch_size() -> None:
    model = block().eval()
    dynamic = {"x": {0: torch.export.Dim("batch", max=64)}}
    exported = torch.export.export(model, (torch.randn(3, 6, 16),), dynamic_shapes=dynamic).module()
    x = torch.randn(7, 6, 16)
    torch.testing.assert_close(exported(x), model(x), rtol=0, atol=0)


def test_dynamo_sees_one_graph_without_breaks() -> None:
    """The eager backend captures the graph without the minutes of code generation."""
    _, ours, inputs = pair("transformer block")
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs)[0], outputs_and_gradients(ours, inputs)[0])
    explained = torch._dynamo.explain(ours)(*inputs)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_hooks_fire_and_replaced_layers_run() -> None:
    _, ours, inputs = pair("2 layers")
    seen = []
    ours.linears[0].register_forward_hook(lambda module, args, output: seen.append("forward"))
    ours.linears[0].register_full_backward_hook(lambda module, given, got: seen.append("backward"))
    ours(inputs[0].requires_grad_()).sum().backward()
    assert sorted(seen) == ["backward"] * 3 + ["forward"] * 3
    for index in range(2):
        ours.linears[index] = nn.Identity()
    assert torch.equal(ours(*inputs), inputs[0] * 4)


def test_parameters_may_be_swapped_and_parametrised() -> None:
    hand, ours, inputs = pair("parameter list")
    zeros = {name: torch.zeros_like(value) for name, value in ours.state_dict().items()}
    assert not torch.func.functional_call(ours, zeros, tuple(inputs)).any()
    hand.scale = nn.Parameter(torch.ones(10))
    ours.scale = hand.scale
    assert torch.equal(ours(*inputs), hand(*inputs))
    _, ours, inputs = pair("2 layers")
    torch.nn.utils.parametrizations.weight_norm(ours.linears[0])
    assert ours(*inputs).shape == (64, 10)


def test_moving_to_another_dtype_moves_what_runs() -> None:
    _, ours, inputs = pair("parameter dict")
    assert ours.double()(inputs[0].double()).dtype == torch.float64
    assert ours.to("meta")(torch.empty(2, 10, dtype=torch.float64, device="meta")).shape == (2, 10)


def test_several_inputs_by_position_and_by_name() -> None:
    _, ours, (x, mask) = pair("two outputs")
    expected = ours(x, mask)["kind"]
    assert torch.equal(ours(x=x, mask=mask)["kind"], expected)
    assert list(inspect.signature(ours.forward).parameters) == ["x", "mask"]
    assert ours.input_names == ("x", "mask")


def test_layers_without_a_program_are_called_in_order() -> None:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 4), "act": nn.Tanh(), "repeated": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))}
    x = torch.randn(3, 4)
    expected = layers["repeated"][1](layers["repeated"][0](layers["act"](layers["first"](x))))
    assert torch.equal(SequentialModel(layers=layers)(x), expected)
    assert torch.equal(ModuleListModel(layers=layers)(x), expected)
    assert torch.equal(ModuleDictModel(layers=layers)(x), expected)


def test_a_thousand_layers_are_called_in_order() -> None:
    many = SequentialModel(
        layers={
            "first": [nn.Linear(2, 2) for _ in range(500)],
            **{f"layer_{place}": nn.Linear(2, 2) for place in range(500)},
        }
    )
    x = torch.randn(3, 2, dtype=torch.float64)
    by_hand = nn.Sequential(
        *many.get_submodule("first").children(), *[many.get_submodule(f"layer_{n}") for n in range(500)]
    )
    many.double()
    assert torch.equal(many(x), by_hand(x))


def test_the_work_of_making_a_network_grows_as_its_layers() -> None:
    """The test counts function calls, which must not grow with the square of the number of layers."""

    def calls(layers: int) -> int:
        profile, held = cProfile.Profile(), {"many": [nn.Linear(2, 2) for _ in range(layers)]}
        profile.runcall(SequentialModel, layers=held)
        return sum(one.callcount for one in profile.getstats())

    calls(10)
    assert calls(400) < 2.2 * calls(200)


def test_a_program_keeps_no_activation_longer_than_by_hand() -> None:
    """`x = layer(x)` frees the old x. Code with a new name for each value would keep all of them."""
    import weakref

    alive, count = [], []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            count.append(sum(reference() is not None for reference in alive))
            result = x + 1
            alive.append(weakref.ref(result))
            return result

    layers = {f"layer{i}": Counting() for i in range(6)}
    with torch.no_grad():
        SequentialModel(layers=layers)(torch.zeros(3))
    assert max(count) == 1


REFUSED = [
    (ParameterDictModel, {"layers": {"a": nn.Linear(1, 1)}}, "forward: no forward program"),
    (ParameterListModel, {"layers": {"a": nn.Linear(1, 1)}}, "forward: no forward program"),
    (SequentialModel, {"layers": {"a": Parameter(shape=[2])}}, "layers.a: a Parameter, which cannot be called"),
    (SequentialModel, {"layers": {"train": nn.Linear(1, 1)}}, "which is an attribute of the network"),
    (SequentialModel, {"layers": {"a b": nn.Linear(1, 1)}}, "layers.a b: a layer named 'a b'"),
    (SequentialModel, {"layers": {"a": 3}}, "layers.a: a int; expected a layer"),
    (
        SequentialModel,
        {"layers": {"a": [nn.Linear(1, 1), Parameter(shape=[1])]}},
        "layers.a.1: a parameter among layers",
    ),
    (SequentialModel, {"layers": {"a": nn.ReLU()}, "constants": {"k": {}}}, "constants.k: a dict"),
    (SequentialModel, {"layers": {"a": nn.ReLU()}, "inputs": ["y"]}, "inputs: ['y']"),
]


@pytest.mark.parametrize(("container", "arguments", "words"), REFUSED)
def test_a_container_says_what_it_cannot_hold(container: type, arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        container(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", [list, dict])
def test_a_program_is_checked_for_each_number_of_parameters(kind: type) -> None:
    """The key of a cached program has the structure of the network, including the parameters of a layer."""
    for count, accepted in ((3, True), (2, False)):
        values = [nn.Parameter(torch.ones(1)) for _ in range(count)]
        scales = values if kind is list else {f"n{index}": one for index, one in enumerate(values)}
        forward = "return x * scales[2]" if kind is list else 'return x * scales["n2"]'
        if accepted:
            ModuleDictModel(layers={"scales": scales}, forward=forward)
        else:
            with pytest.raises(ProgramError, match="`scales`"):
                ModuleDictModel(layers={"scales": scales}, forward=forward)


def test_a_compiled_program_trains() -> None:
    _, ours, inputs = pair("2 layers")
    expected = outputs_and_gradients(ours, inputs)
    ours.zero_grad()
    ours.compile(
        backend="aot_eager", fullgraph=True
    )  # captures forward and backward graphs without the minutes of C++ compilation
    got = outputs_and_gradients(ours, inputs)
    torch.testing.assert_close(got, expected)
