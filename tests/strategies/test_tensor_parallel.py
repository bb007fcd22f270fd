"""strategy=tensor_parallel: plans, collectives, and networks in parts compared with whole ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.shared_types import DataSpec
from exp.strategies.tensor_comparison import difference
from exp.strategies.tensor_plan import division_faults, make_plan

DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
TEXT = DataSpec(input_shape=(16,), input_dtype="int64", num_classes=65, num_outputs=65)
AUTO = {"divide": "auto", "sequence": False, "vocabulary": False}


# --- plans ---


def test_the_automatic_plan_of_gpt(build_model):
    network = build_model("gpt", spec=TEXT, device="meta")
    plan = make_plan(network, "auto", divide="auto", sequence=True, vocabulary=True)
    assert plan.constants == {"blocks.0": ["heads"], "blocks.1": ["heads"]}
    assert plan.layers["blocks.0"] == ["split_sequence"]
    assert plan.layers["blocks.1"] == ["gather_sequence"]
    assert plan.layers["blocks.1.query"] == ["column_of_sequence"]
    assert plan.layers["blocks.1.contract"] == ["row_to_sequence"]
    assert plan.layers["blocks.0.norm2"] == ["sequence"]
    assert plan.layers["tokens"] == ["vocabulary"]
    assert plan.layers["head"] == ["column_whole"]
    assert "norm" not in plan.layers


def test_a_chain_of_layers_is_divided_in_pairs(build_model):
    plan = make_plan(build_model("sequential"), "auto", **AUTO)
    assert plan.layers == {"hidden": ["column"], "hidden2": ["row"]}
    # Dropout between two layers would need another mask.
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert make_plan(network, "auto", **AUTO).layers == {"2": ["column"], "4": ["row"]}


def test_a_plan_that_does_not_fit_is_refused(build_model):
    network = build_model("transformer", device="meta")
    with pytest.raises(ConfigError) as caught:
        make_plan(network, {"blocks.*.qury": "column", "norm": "row", "head": "colum"}, **AUTO)
    messages = {fault.key: str(fault) for fault in caught.value.faults}
    assert "matches nothing" in messages["strategy.plan.blocks.*.qury"]
    assert "a Linear of torch.nn" in messages["strategy.plan.norm"]
    assert "Did you mean column?" in messages["strategy.plan.head"]
    with pytest.raises(ConfigError, match="whole-number constants"):
        make_plan(network, "auto", divide=["blocks.*.head"], sequence=False, vocabulary=False)
    lenet = build_model("lenet", device="meta")
    with pytest.raises(ConfigError, match=r"strategy\.sequence"):
        make_plan(lenet, "auto", divide="auto", sequence=True, vocabulary=False)


def test_three_ranks_do_not_divide_four_heads(build_model):
    network = build_model("transformer", device="meta")
    (fault,) = division_faults(network, make_plan(network, "auto", **AUTO), ranks=3)
    assert fault.key == "launch.devices"
    assert "the outputs of blocks.0.query (64)" in fault.got
    assert fault.expected.endswith("1, 2, 4")


# --- what ranks send each other ---


def differentiated(rank):
    """Return values, gradients and second gradients of whole tensors, and of tensors in parts in two ways."""
    import torch.distributed as dist

    from exp.strategies import tensor_layers as functions

    group, ranks = dist.group.WORLD, dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator)
    # Both layers as one rank has them, and in two ways as two ranks have them.
    first, second = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(2))

    def by_hand(x):
        return (x @ first.T).tanh() @ second

    def features(x):
        mine = functions.own(first, group, dim=0), functions.own(second, group, dim=0)
        return functions.add_up((functions.copy(x, group) @ mine[0].T).tanh() @ mine[1], group)

    def sequence(x):
        mine = functions.own(first, group, dim=0), functions.own(second, group, dim=0)
        x = functions.gather_partial(functions.split(x, group, dim=1), group, dim=1)
        y = functions.add_up_split((x @ mine[0].T).tanh() @ mine[1], group, dim=1)
        return functions.gather(y, group, dim=1)

    found = []
    for function in (by_hand, features, sequence):
        x = whole.clone().requires_grad_()
        y = function(x)
        (slope,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad((slope**2).sum(), x)
        found.append((y.detach(), slope.detach(), bend))
    uneven = torch.arange(5.0)
    part = functions.own(uneven, group, dim=0)
    assert len(part) == (5 + ranks - 1) // ranks or rank.global_rank > 0
    assert torch.equal(functions.join(part, group, dim=0, size=5), uneven)
    return found


def test_functions_can_be_differentiated_twice(ranks):
    for by_hand, *others in ranks.call(differentiated, ranks=2):
        for other in others:
            for one, two in zip(by_hand, other, strict=True):
                torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


# --- networks in parts ---


def outputs_and_gradients(network, inputs):
    """Return outputs in training and in evaluation, with the same random numbers, and gradients by name."""
    torch.manual_seed(1)
    output = network.train()(inputs)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype)
    (output * weights.view_as(output)).sum().backward()
    with torch.no_grad():
        evaluated = network.eval()(inputs)
    return [output.detach(), evaluated], {name: one.grad for name, one in network.named_parameters()}


DROPOUT = "model.layers.activation._target_=torch.nn.Dropout"
EXACT = {
    "sequential": ("sequential", {"plan": "auto"}),
    "transformer": ("transformer", {"plan": "auto"}),
    "gpt": ("gpt", {"plan": "auto", "spec": TEXT, "words": True}),
    # The mask of the dropout is that of the whole network.
    "dropout of whole values": ("sequential", {"plan": {"hidden": "column_whole"}, "overrides": [DROPOUT]}),
}
# Only their numbers show that these plans change the network.
INEXACT = {
    "half of the heads, twice as wide": ("transformer", {"plan": "auto", "divide": []}),
    "dropout of parts": ("sequential", {"plan": {"hidden": "column", "hidden2": "row"}, "overrides": [DROPOUT]}),
}


def differences(rank):
    """Return by name how much outputs and gradients of a divided network differ from the whole one's, in float64."""
    import runpy
    from pathlib import Path

    build = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["build"]
    return {
        name: largest_difference(build, model, **options) for name, (model, options) in {**EXACT, **INEXACT}.items()
    }


def largest_difference(build, model, *, plan, overrides=(), spec=DIGITS, divide="auto", words=False):
    import torch.distributed as dist

    from exp.strategies.tensor_layers import carry_out, own

    torch.manual_seed(0)
    whole = build(model, *overrides, spec=spec).double()
    parts = copy.deepcopy(whole)
    cut = make_plan(parts, plan, divide=divide, sequence=words, vocabulary=words)
    cuts = carry_out(cut, parts, dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 65, (2, 16), generator=generator) if words else torch.rand(2, 1, 8, 8).double()
    expected, gradients = outputs_and_gradients(whole, inputs)
    found, own_gradients = outputs_and_gradients(parts, inputs)
    for name, gradient in gradients.items():
        expected.append(own(gradient, dist.group.WORLD, dim=cuts[name].dim) if name in cuts else gradient)
        found.append(own_gradients[name])
    return max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True) if one.numel())


def test_a_divided_network_computes_what_the_whole_does(ranks):
    for found in ranks.call(differences, ranks=2):
        assert {name for name, difference in found.items() if difference < 1e-12} == {*EXACT}
        assert {name for name, difference in found.items() if difference > 1e-3} == {*INEXACT}


COLUMNS = ("query", "key", "value", "expand")
MEGATRON = {f"blocks.*.{name}": "column" for name in COLUMNS}
MEGATRON |= {f"blocks.*.{name}": "row" for name in ("project", "contract")}
SEQUENCE = {
    pattern: {"column": "column_of_sequence", "row": "row_to_sequence"}[word] for pattern, word in MEGATRON.items()
}
SEQUENCE |= {"blocks.0": "split_sequence", "blocks.1": "gather_sequence"}
HEADS = ["blocks.*.heads"]


@pytest.mark.parametrize(
    ("plan", "divide", "expected"),
    [
        (MEGATRON, HEADS, None),
        (SEQUENCE | {"blocks.*.norm?": "sequence"}, HEADS, None),
        ({"blocks.*.expand": "column", "blocks.*.contract": "row"}, [], None),
        ({"head": "column_whole"}, [], None),
        (MEGATRON, ["heads"], "output"),
        (MEGATRON, ["blocks.1.heads"], "output"),
        (SEQUENCE, HEADS, "gradient of blocks.0.norm1.weight"),
        ({"blocks.*.expand": "column"}, [], "raises RuntimeError: "),
        ({"head": "column"}, [], "output"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_that_changes_the_function_is_found(build_model, plan, divide, expected, ranks):
    def build():
        return build_model("transformer", "model.constants.width=16", "model.constants.hidden=32")

    made = make_plan(build(), plan, divide=divide, sequence=False, vocabulary=False)
    found = difference(build, made, {"input": torch.zeros(2, 1, 8, 8)}, ranks=ranks)
    assert found is None if expected is None else expected in found


# --- runs ---


@pytest.mark.slow
def test_a_penalty_of_gradients(ranks, settings, alone, require_same_run):
    command = ("model=sequential", *settings, "+objective=r1", "objective.r1.precision=full")
    words = ("strategy=tensor_parallel", "launch.accelerator=cpu", "launch.devices=2")
    require_same_run(alone(*command), ranks.train(*command, *words, ranks=2))
