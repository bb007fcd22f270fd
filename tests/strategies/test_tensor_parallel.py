"""strategy=tensor_parallel: plans, collectives, and divided networks compared with whole ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.shared_types import DataSpec
from exp.strategies.tensor_plan import division_errors, make_plan

DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
TEXT = DataSpec(input_shape=(16,), input_dtype="int64", num_classes=65, num_outputs=65)
AUTO = {"divide": "auto"}


# --- plans ---


def test_the_automatic_plan_of_gpt(build_model):
    network = build_model("gpt", spec=TEXT, device="meta")
    plan = make_plan(network, "auto", **AUTO)
    assert plan.constants == {"blocks.0": ["heads"], "blocks.1": ["heads"]}
    assert plan.layers["blocks.1.query"] == "column"
    assert plan.layers["blocks.1.contract"] == "row"
    assert not {"tokens", "norm", "head"} & plan.layers.keys()


def test_a_chain_of_layers_is_divided_in_pairs(build_model):
    plan = make_plan(build_model("sequential"), "auto", **AUTO)
    assert plan.layers == {"hidden": "column", "hidden2": "row"}
    # The first two layers are no pair, because the dropout between them would have another mask.
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert make_plan(network, "auto", **AUTO).layers == {"2": "column", "4": "row"}


def test_a_plan_that_does_not_fit_is_refused(build_model):
    network = build_model("transformer", device="meta")
    with pytest.raises(ConfigError) as caught:
        make_plan(network, {"blocks.*.qury": "column", "norm": "row", "head": "colum"}, **AUTO)
    messages = {error.key: str(error) for error in caught.value.errors}
    assert "matches no layer" in messages["strategy.plan.blocks.*.qury"]
    assert "torch.nn.Linear" in messages["strategy.plan.norm"]
    assert "Did you mean column?" in messages["strategy.plan.head"]
    with pytest.raises(ConfigError, match="integer constants"):
        make_plan(network, "auto", divide=["blocks.*.head"])


def test_three_ranks_do_not_divide_four_heads(build_model):
    network = build_model("transformer", device="meta")
    (error,) = division_errors(network, make_plan(network, "auto", **AUTO), ranks=3)
    assert error.key == "launch.devices"
    assert "the outputs of blocks.0.query (64)" in error.got
    assert error.expected.endswith("1, 2, 4")


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
    "vocabulary": ("gpt", {"plan": {"tokens": "vocabulary", "head": "column_whole"}, "spec": TEXT, "words": True}),
    # The dropout has the same mask as in the whole network.
    "dropout of whole values": ("sequential", {"plan": {"hidden": "column_whole"}, "overrides": [DROPOUT]}),
}
# These plans are valid, but change the results of the network.
INEXACT = {
    "half of the heads, twice as wide": ("transformer", {"plan": "auto", "divide": []}),
    "dropout of parts": ("sequential", {"plan": {"hidden": "column", "hidden2": "row"}, "overrides": [DROPOUT]}),
}


def differences(rank):
    """Return the largest difference between a divided network and the whole one in float64, for each case."""
    import runpy
    from pathlib import Path

    build = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["build"]
    return {
        name: largest_difference(build, model, **options) for name, (model, options) in {**EXACT, **INEXACT}.items()
    }


def largest_difference(build, model, *, plan, overrides=(), spec=DIGITS, divide="auto", words=False):
    import torch.distributed as dist

    from exp.strategies.tensor_layers import apply_plan, model_mesh

    torch.manual_seed(0)
    whole = build(model, *overrides, spec=spec).double()
    parts = copy.deepcopy(whole)
    cut = make_plan(parts, plan, divide=divide)
    cuts = apply_plan(cut, parts, model_mesh(dist.group.WORLD, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 65, (2, 16), generator=generator) if words else torch.rand(2, 1, 8, 8).double()
    expected, gradients = outputs_and_gradients(whole, inputs)
    found, own_gradients = outputs_and_gradients(parts, inputs)
    for name, gradient in gradients.items():
        expected.append(cuts[name].part(gradient) if name in cuts else gradient)
        found.append(own_gradients[name])
    return max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True) if one.numel())


def test_a_divided_network_computes_what_the_whole_does(ranks):
    for found in ranks.call(differences, ranks=2):
        assert {name for name, difference in found.items() if difference < 1e-12} == {*EXACT}
        assert {name for name, difference in found.items() if difference > 1e-3} == {*INEXACT}


def called_by_name(rank):
    """Return the outputs of a divided layer for a positional input and for a named one."""
    import torch.distributed as dist

    from exp.strategies.tensor_layers import apply_plan, model_mesh

    network = nn.Sequential(nn.Linear(8, 4))
    plan = make_plan(network, {"0": "column_whole"}, divide=[])
    apply_plan(plan, network, model_mesh(dist.group.WORLD, torch.device("cpu")))
    return network[0](torch.ones(2, 8)), network[0](input=torch.ones(2, 8))


def test_a_divided_layer_takes_its_input_by_name(ranks):
    for positional, named in ranks.call(called_by_name, ranks=2):
        assert torch.equal(positional, named)


COLUMNS = ("query", "key", "value", "expand")
MEGATRON = {f"blocks.*.{name}": "column" for name in COLUMNS}
MEGATRON |= {f"blocks.*.{name}": "row" for name in ("project", "contract")}
HEADS = ["blocks.*.heads"]


PLANS = {
    "megatron": (MEGATRON, HEADS, None),
    "feed-forward": ({"blocks.*.expand": "column", "blocks.*.contract": "row"}, [], None),
    "whole head": ({"head": "column_whole"}, [], None),
    "whole heads": (MEGATRON, ["heads"], "output"),
    "half of the blocks": (MEGATRON, ["blocks.1.heads"], "output"),
    "no row": ({"blocks.*.expand": "column"}, [], "raises RuntimeError: "),
    "half of the outputs": ({"head": "column"}, [], "output"),
}


def found_differences(rank):
    """Return the difference that a rank finds for each plan, or None."""
    import runpy
    from pathlib import Path

    import torch.distributed as dist

    from exp.strategies.tensor_layers import find_difference, model_mesh

    build = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["build"]
    torch.manual_seed(0)
    network = build("transformer", "model.constants.width=16", "model.constants.hidden=32", spec=DIGITS)
    mesh = model_mesh(dist.group.WORLD, torch.device("cpu"))
    made = {name: make_plan(network, plan, divide=divide) for name, (plan, divide, _) in PLANS.items()}
    inputs = {"input": torch.zeros(2, 1, 8, 8)}
    found = {name: find_difference(network, one, inputs, mesh=mesh) for name, one in made.items()}
    slopes = build("sequential", "model.layers.activation={_target_: torch.nn.PReLU}", spec=DIGITS)
    plan = make_plan(slopes, {"hidden": "column", "hidden2": "row"}, divide=[])
    return {**found, "a weight between the parts": find_difference(slopes, plan, inputs, mesh=mesh)}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_plan_that_changes_the_function_is_found(ranks, count):
    first, *others = ranks.call(found_differences, ranks=count)
    assert all(other == first for other in others)
    for name, (_, _, expected) in PLANS.items():
        assert first[name] is None if expected is None else expected in first[name], name
    # The outputs are equal for this plan, and a gradient differs.
    assert first["a weight between the parts"] == "the gradient of activation.weight differs"


# --- runs ---


def test_a_run_whose_plan_changes_the_network_ends_before_its_first_step(ranks, settings):
    command = ("model=transformer", *settings, "strategy=tensor_parallel", "strategy.divide=[heads]")
    message = r"strategy.plan: .*changes what the network computes with 2 ranks: the output"
    with pytest.raises(AssertionError, match=message):
        ranks.train(*command, "launch.accelerator=cpu", "launch.devices=2", ranks=2)
