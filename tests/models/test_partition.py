"""A network divided into parts computes the same as the whole, and each layer and parameter is in one part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.models.graphs import on_meta
from exp.models.partition import split
from exp.nested import map_tensors

pytestmark = pytest.mark.numeric

MODELS = (
    *("sequential", "module_list", "module_dict", "shared", "branches", "parameter_list", "parameter_dict"),
    *("mlp", "lenet", "resnet", "rnn", "transformer"),
)


def run(network, parts, *inputs, **named):
    """Run the parts one after the other, each with only its declared inputs, and return the output."""
    bound, values = parts.bind(inputs, named), {}
    for index, part in enumerate(parts.parts):
        assert set(part.takes) <= set(parts.values_after(index - 1) if index else ())
        result = part.run(network, *[bound[name] for name in part.inputs], *[values[name] for name in part.takes])
        values = {name: value for name, value in values.items() if name in parts.values_after(index)}
        if index < len(parts.parts) - 1:
            values.update(zip(part.gives, result, strict=True))
    return result


def require_equal_to_the_whole(network, count, *inputs, layers=None):
    parts = split(network, count=count, layers=layers, inputs=inputs)
    expected, found = network(*inputs), run(network, parts, *inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    held = dict(network.named_parameters()) | dict(network.named_buffers())
    assert sorted(name for part in parts.parts for name in part.tensors) == sorted(held)
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_models_of_conf_in_two_parts(build_model, name):
    require_equal_to_the_whole(build_model(name).eval(), 2, torch.randn(4, 1, 8, 8))


def test_the_largest_part_is_as_small_as_whole_layers_allow():
    sizes = [3, 1, 1, 5, 2, 2, 4]
    widths = nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in sizes])
    parts = split(widths, count=3, layers=None, inputs=())
    best = min(max(sum(sizes[:a]), sum(sizes[a:b]), sum(sizes[b:])) for a in range(1, 6) for b in range(a + 1, 7))
    assert max(sum(sizes[int(name)] for name in part.layers) for part in parts.parts) == best


def lines(layers, forward, **options):
    return ModuleDictModel(layers=layers, forward=forward, **options)


def test_several_values_and_residuals_are_carried_over_several_cuts():
    layers = {name: nn.Linear(6, 6) for name in "abcd"}
    network = lines(layers, "y = a(x)\nz = b(y)\nw = c(z)\nreturn d(w + y) + x")
    parts = require_equal_to_the_whole(network, 4, torch.randn(3, 6))
    assert [len(parts.values_after(index)) for index in range(3)] == [1, 2, 1]
    # Every part gets the input of the network, so the parts do not pass it on.
    assert parts.parts[3].inputs == ("x",)


def test_the_tuple_of_a_recurrent_layer_is_carried_whole():
    layers = {"first": nn.LSTM(5, 7, batch_first=True), "second": nn.LSTM(7, 7, batch_first=True)}
    network = lines(layers, "y, state = first(x)\nz, state = second(y, state)\nreturn z + y")
    parts = require_equal_to_the_whole(network, 2, torch.randn(2, 4, 5))
    kinds = [map_tensors(parts.values[name], lambda _: "tensor") for name in parts.values_after(0)]
    assert sorted(map(str, kinds)) == sorted(["tensor", "('tensor', 'tensor')"])


def test_a_shape_is_computed_again_where_it_is_needed():
    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 6)}
    network = lines(layers, "y = a(x)\nrows = y.shape[0] * 2\nz = b(y)\nreturn z.reshape(rows, 3)")
    parts = require_equal_to_the_whole(network, 2, torch.randn(4, 6), layers=[["a"], ["b"]])
    assert all(isinstance(value, torch.Tensor) for value in parts.values.values())
    assert run(network, parts, torch.randn(10, 6)).shape == (20, 3)


def test_a_weight_that_a_later_part_reads_is_carried_with_its_gradient():
    layers = {"tokens": nn.Embedding(11, 6), "body": nn.Linear(6, 6)}
    network = lines(layers, "return body(tokens(x)) @ tokens.weight.transpose(0, 1)")
    x = torch.randint(0, 11, (3, 4))
    parts = require_equal_to_the_whole(network, 2, x, layers=[["tokens"], ["body"]])
    assert parts.parts[1].tensors == ("body.weight", "body.bias")
    run(network, parts, x).square().sum().backward()
    found = network.tokens.weight.grad.clone()
    network.zero_grad()
    network(x).square().sum().backward()
    torch.testing.assert_close(found, network.tokens.weight.grad)


def test_inputs_by_name_and_outputs_by_name():
    layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
    network = lines(layers, "y = a(left)\nreturn {'sum': b(y) + right, 'first': y}", inputs=("left", "right"))
    left, right = torch.randn(2, 6), torch.randn(2, 6)
    parts = require_equal_to_the_whole(network, 2, left, right)
    torch.testing.assert_close(run(network, parts, right=right, left=left), network(left, right))
    with pytest.raises(TypeError, match="left, right"):
        parts.bind((left,), {})


def test_dropout_of_the_program_follows_the_mode_of_the_network():
    network = lines({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}, "return b(dropout(a(x), 0.5, training=training))")
    x = torch.randn(64, 6)
    parts = split(network, count=2, layers=None, inputs=(x,))
    network.eval()
    torch.testing.assert_close(run(network, parts, x), network(x))
    network.train()
    torch.manual_seed(1)
    expected = network(x)
    torch.manual_seed(1)
    torch.testing.assert_close(run(network, parts, x), expected)
    assert not torch.equal(expected, run(network, parts, x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x) + x)


class Undecidable(Branching):
    def forward(self, x):
        return self.head(x if x.sum() > 0 else -x)


def test_a_module_of_the_users_own_is_traced():
    parts = require_equal_to_the_whole(Branching(), 2, torch.randn(3, 6), layers=[["body.0"], ["body.*2", "head"]])
    assert parts.parts[1].layers == ("body.2", "head")
    with pytest.raises(ConfigError, match=r"torch\.fx cannot trace"):
        split(Undecidable(), count=2, layers=None, inputs=())


class Dropping(Branching):
    def forward(self, x):
        return self.head(nn.functional.dropout(self.body(x), training=self.training) + torch.ones(6))


class DroppingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return nn.functional.dropout(self.lin(x), training=self.training)


def test_a_forward_that_asks_for_the_mode_is_refused_and_its_modes_are_restored():
    """torch.fx writes `training=True` into the parts, so that dropout would be active in evaluation."""
    network = nn.Sequential(Dropping(), nn.Linear(2, 2))
    network[0].body.eval()
    modes = [module.training for module in network.modules()]
    with pytest.raises(ConfigError, match=r"layer torch\.nn\.Dropout"):
        split(network, count=2, layers=None, inputs=())
    assert [module.training for module in network.modules()] == modes


class Adding(Branching):
    def forward(self, x):
        return self.head(self.body(x) + torch.ones(6))


def test_layers_ask_for_the_mode_themselves():
    x = torch.randn(64, 6)
    # A network without dropout, whose forward creates a tensor, can be divided.
    require_equal_to_the_whole(Adding(), 2, x)
    for network in (
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6)),
        # torch.fx does not trace into the layers of a container, so a user's module may read the mode.
        SequentialModel(layers={"a": DroppingLayer(), "b": nn.Linear(6, 6)}),
    ):
        parts = split(network, count=2, layers=None, inputs=(x,))
        network.eval()
        torch.testing.assert_close(run(network, parts, x), network(x), rtol=0, atol=0)
        network.train()
        assert not torch.equal(run(network, parts, x), run(network, parts, x))


def test_a_layer_that_is_replaced_later_runs():
    network = SequentialModel(layers={"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    parts = split(network, count=2, layers=None, inputs=())
    network.b = nn.Identity()
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(network, parts, x), network.a(x))


def test_tied_parameters_stay_together_or_are_refused():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    network = SequentialModel(layers={"first": first, "middle": nn.Linear(6, 6), "last": last, "head": nn.Linear(6, 2)})
    parts = split(network, count=2, layers=None, inputs=())
    assert [part.layers for part in parts.parts] == [("first", "middle", "last"), ("head",)]
    with pytest.raises(ConfigError, match="first, middle, last in lists 0, 1; expected one list for these layers"):
        split(network, count=2, layers=[["first"], ["middle", "last", "head"]], inputs=())


def test_a_layer_that_runs_twice_stays_in_one_part():
    network = lines({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 6)}, "return c(a(b(a(x))))")
    parts = require_equal_to_the_whole(network, 2, torch.randn(2, 6))
    assert [part.layers for part in parts.parts] == [("a", "b"), ("c",)]
    with pytest.raises(ConfigError, match="a, b in lists 0, 1; expected one list for these layers"):
        split(network, count=2, layers=[["a"], ["b", "c"]], inputs=())


def test_a_copy_on_the_meta_device_takes_no_memory(build_model):
    network = build_model("transformer")
    copy = on_meta(network)
    assert all(parameter.is_meta for parameter in copy.parameters())
    assert not any(parameter.is_meta for parameter in network.parameters())
    assert {name: p.shape for name, p in copy.named_parameters()} == {
        name: p.shape for name, p in network.named_parameters()
    }
