"""Sizes inferred from the data, and initial values and freezing by name pattern."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.check.parameters import target_errors
from exp.construct import construct
from exp.errors import ConfigError
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.models.inference import LAZY_CLASSES, example_inputs, lazy_class, materialise
from exp.models.initialisation import SCHEMES, fill, initialise
from exp.models.layers import Parameter
from exp.shared_types import DataSpec

IMAGE = DataSpec(input_shape=(3, 8, 8), input_dtype="float32", num_classes=5, num_outputs=5)


def lazy_network(**options: object) -> SequentialModel:
    layers = {
        "conv": nn.LazyConv2d(4, 3),
        "norm": nn.LazyBatchNorm2d(),
        "flatten": nn.Flatten(),
        "head": nn.LazyLinear(5),
    }
    return SequentialModel(layers=layers, **options)


@pytest.mark.parametrize("cls", LAZY_CLASSES)
def test_a_size_left_out_gives_the_lazy_class(cls: type[nn.Module]) -> None:
    lazy, size = LAZY_CLASSES[cls]
    assert lazy_class(cls, set()) is lazy
    assert lazy_class(cls, {size}) is None
    assert lazy_class(cls, set(), positional=1) is None
    assert lazy.cls_to_become is cls


@pytest.mark.parametrize(
    ("node", "is_right"),
    [
        ({"_target_": "torch.nn.Linear", "_args_": [6, 5]}, True),
        ({"_target_": "torch.nn.Linear", "_args_": [6]}, False),
        ({"_target_": "torch.nn.Conv2d", "_args_": [3, 5, 3], "padding": "same"}, True),
        ({"_target_": "torch.nn.Conv2d", "out_channels": 5, "kernel_size": 3, "padding": "same"}, True),
        ({"_target_": "torch.nn.LazyConv2d", "out_channels": 5, "kernel_size": 3, "padding": "valid"}, True),
        ({"_target_": "torch.nn.Conv1d", "out_channels": 5, "kernel_size": 3, "padding": 0.5}, False),
        ({"_target_": "torch.nn.BatchNorm2d", "eps": 1e-3}, True),
        ({"_target_": "torch.nn.BatchNorm2d", "epsilon": 1e-3}, False),
    ],
)
def test_a_layer_is_held_against_its_own_signature_whoever_gives_its_size(node: dict, is_right: bool) -> None:
    assert (target_errors({"model": {"layers": {"one": node}}}, allow=()) == []) == is_right
    if is_right:
        construct(node, key="model.layers.one", allow=())


def test_other_classes_have_no_lazy_one() -> None:
    assert lazy_class(nn.ReLU, set()) is None
    assert lazy_class(nn.GRU, set()) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lazy_layers_take_their_sizes_from_the_data(device: str) -> None:
    with torch.device(device):
        network = lazy_network()
        materialise(network, example_inputs(IMAGE, device=device))
    assert type(network.head) is nn.Linear
    assert network.head.in_features == 4 * 6 * 6
    assert network.head.weight.device.type == device
    assert all(module.training for module in network.modules())


def test_materialising_changes_no_running_statistics_and_no_fixed_network() -> None:
    network = lazy_network()
    materialise(network, example_inputs(IMAGE))
    assert network.norm.num_batches_tracked == 0
    fixed = nn.Linear(2, 2)
    materialise(
        fixed, example_inputs(IMAGE)
    )  # without lazy layers the network is not called, and the shapes do not fit


def test_example_inputs_have_the_declared_shape_and_dtype() -> None:
    spec = DataSpec(input_shape=(7,), input_dtype="int64", num_classes=9, num_outputs=9)
    tokens = example_inputs(spec, batch_size=3)["input"]
    assert (tokens.shape, tokens.dtype) == ((3, 7), torch.int64)


def test_patterns_are_applied_once_the_shapes_are_known() -> None:
    network = lazy_network(
        initialisation={"*.weight": {"name": "normal", "std": 0.5}, "head.*": "zeros", "head.bias": "ones"},
        freeze=["conv.*"],
    )
    materialise(network, example_inputs(IMAGE))
    assert not network.head.weight.any()
    assert torch.equal(network.head.bias, torch.ones(5))
    assert network.conv.weight.std() > 0.3
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == ["conv.weight", "conv.bias"]
    with torch.no_grad():
        network.head.weight.fill_(3)
    materialise(network, example_inputs(IMAGE))
    assert network.head.weight.all()  # tied weights are initialized once


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("pattern", ["*", "table", "head.weight"])
def test_the_row_of_padding_idx_stays(kind: type[nn.Module], pattern: str) -> None:
    network = nn.ModuleDict({"table": kind(5, 3, padding_idx=-2), "head": nn.Linear(3, 5, bias=False)})
    network["head"].weight = network["table"].weight  # tied
    initialise(network, {pattern: {"name": "constant", "val": 2.0}})
    assert network["table"].weight.tolist() == [[2.0] * 3] * 3 + [[0.0] * 3] + [[2.0] * 3]


def test_the_outer_models_pattern_has_the_last_word() -> None:
    inner = SequentialModel(layers={"linear": nn.LazyLinear(5)}, initialisation={"linear.weight": "ones"})
    outer = SequentialModel(layers={"flatten": nn.Flatten(), "inner": inner}, initialisation={"inner.*": "zeros"})
    materialise(outer, example_inputs(IMAGE))
    assert not outer.inner.linear.weight.any()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_fills_a_matrix(scheme: str) -> None:
    options = {"constant": {"val": 2.0}, "sparse": {"sparsity": 0.1}}.get(scheme, {})
    shape = (3, 3, 3) if scheme == "dirac" else (4, 4)
    parameter = torch.full(shape, float("nan"))
    fill(parameter, {"name": scheme, **options})
    assert parameter.isfinite().all()


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"haed.*": "zeros"}, "initialisation.haed.*: no parameter matches"),
        ({"*": "xavier"}, "Did you mean xavier_normal?"),
        ({"*": {"name": "normal", "sd": 1}}, "got an unexpected keyword argument 'sd'"),
        ({"*.bias": "xavier_normal"}, "xavier_normal of a parameter of shape [2]"),
        ({"*": {}}, "the scheme None"),
    ],
)
def test_a_wrong_initialisation_is_named_by_its_key(patterns: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        initialise(nn.Sequential(nn.Linear(2, 2)), patterns)
    assert words in str(caught.value)


def test_a_nested_models_option_is_named_by_its_whole_key() -> None:
    inner = SequentialModel(layers={"linear": nn.LazyLinear(5)}, freeze=["liner.*"])
    outer = SequentialModel(layers={"flatten": nn.Flatten(), "blocks": nn.ModuleList([inner])})
    with pytest.raises(ConfigError, match=r"model.layers.blocks.layer.freeze.0: no parameter matches"):
        materialise(outer, example_inputs(IMAGE))


def test_freezing_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"freeze.1: no parameter matches"):
        SequentialModel(layers={"a": nn.Linear(1, 1)}, freeze=["a.*", "b.*"])


def test_a_parameter_takes_its_layers_place() -> None:
    layer = Parameter(shape=[2, 3], initialisation={"name": "constant", "val": 2.0}, trainable=False)
    model = ModuleDictModel(layers={"table": layer, "pair": {"a": Parameter(shape=[]), "b": Parameter(shape=[3])}},
                            forward="return x @ table + pair['a'] + pair['b']")  # fmt: skip
    assert list(model.state_dict()) == ["table", "pair.a", "pair.b"]
    assert not model.table.requires_grad
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 3), 4.0))
    assert layer().shape == (2, 3)
