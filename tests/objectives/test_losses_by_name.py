"""Losses of any number of values by name: torch's own and one of the user's, held against a loop by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import exp
from exp.errors import ConfigError
from exp.objectives.objective import Term

FAMILY = {
    "GaussianNLLLoss": "{input: mean, target: target, var: variance}",
    "CTCLoss": "{log_probs: frames, targets: words, input_lengths: frame_lengths, target_lengths: word_lengths}",
    "CosineEmbeddingLoss": "{input1: anchor, input2: like, target: side}",
    "TripletMarginLoss": "{anchor: anchor, positive: like, negative: unlike}",
    "MarginRankingLoss": "{input1: score, input2: other, target: side}",
    "TripletMarginWithDistanceLoss": "{anchor: anchor, positive: like, negative: unlike}",
    "MSELoss": "{input: mean, target: target}",
}
OWN = "{target: target, low: mean, high: variance}"
SIX = "{shape: [6], dtype: float64}"
COMMON = [
    "data={_target_: exp.data.data.Data, dataset: {_target_: by_name.Rows}, parts: {train: 0.75, val: 0.25, test: 0}}",
    f"data.inputs={{x: {SIX}, near: {SIX}, far: {SIX}}}",
    *("model={_target_: by_name.Outputs}", "objective=[]", "metrics=[]", "hooks=[]", "logger=[]", "test=false"),
    *("precision=fp64", "optimizer=sgd", "optimizer.lr=0.05", "data.batch_size=6", "trainer.max_epochs=2"),
    *("security.allow=[by_name]", "trainer.enable_progress_bar=false", "optimizer.momentum=0.0"),
]


def term(loss: str, inputs: str) -> str:
    return f"+objective.it={{_target_: exp.objectives.objective.Term, loss: {{_target_: {loss}}}, inputs: {inputs}}}"


@pytest.fixture(autouse=True)
def importable(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


@pytest.mark.numeric
@pytest.mark.any_processor
@pytest.mark.parametrize("name", [*FAMILY, "own"])
def test_a_run_makes_the_steps_of_a_loop_by_hand(name) -> None:
    """One batch an epoch, of all samples, so that their order changes a sum by its last digits and nothing else."""
    module = importlib.import_module("by_name")
    loss = module.Quantile() if name == "own" else getattr(nn, name)()
    inputs = OWN if name == "own" else FAMILY[name]
    torch.manual_seed(3)
    network = module.Outputs().double()
    torch.save(network.state_dict(), "start.pt")
    dotted = "by_name.Quantile" if name == "own" else f"torch.nn.{name}"
    whole = ["data.parts.train=1.0", "data.parts.val=0", "data.batch_size=24", "monitor=loss/train"]
    config = exp.compose([*COMMON, *whole, term(dotted, inputs), "weights.from=start.pt"])
    directory = Path(exp.fit(config).directory)
    found = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    values = module.rows(24)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    names = dict(pair.split(": ") for pair in inputs.strip("{}").split(", "))
    for _ in range(2):
        given = {**values, **network(values["x"], values["near"], values["far"])}
        optimizer.zero_grad()
        loss(**{parameter: given[value] for parameter, value in names.items()}).backward()
        optimizer.step()
    for key, wanted in network.state_dict().items():
        torch.testing.assert_close(
            found[next(one for one in found if one.endswith(key))], wanted, rtol=1e-9, atol=1e-11
        )


@pytest.mark.numeric
@pytest.mark.parametrize("loss", ["torch.nn.GaussianNLLLoss", "by_name.Quantile"])
def test_two_ranks_with_uneven_shares_are_one_process(loss, ranks) -> None:
    inputs = OWN if loss.startswith("by_name") else FAMILY["GaussianNLLLoss"]
    lines = [*COMMON, term(loss, inputs), "data.batch_size=7"]
    alone = ranks.train(*lines)
    both = ranks.train(
        *lines,
        "strategy=ddp",
        "strategy.find_unused_parameters=true",
        "launch.devices=2",
        "launch.accelerator=cpu",
        ranks=2,
    )
    assert both.losses == pytest.approx(alone.losses, rel=1e-10)
    assert both.values["loss/val"] == pytest.approx(alone.values["loss/val"], rel=1e-10)


@pytest.mark.parametrize(
    ("loss", "inputs", "key", "message"),
    [
        ("GaussianNLLLoss", "{input: mean, target: target, variance: variance}", "inputs.variance", "one of input"),
        ("GaussianNLLLoss", "{input: mean, target: target, var: varianze}", "inputs.var", "Did you mean variance?"),
        ("TripletMarginLoss", "{anchor: anchor, positive: like}", "inputs", "missing a required argument: 'negative'"),
        ("GaussianNLLLoss", "{input: score, target: target, var: variance}", "", "both must have one shape"),
        ("CosineEmbeddingLoss", "{input1: anchor, input2: mean, target: side}", "", "refuses"),
    ],
)  # fmt: skip
def test_names_and_shapes_that_do_not_fit_are_told_before_the_run(loss, inputs, key, message) -> None:
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([*COMMON, term(f"torch.nn.{loss}", inputs)]))
    (fault,) = raised.value.faults
    assert fault.key == f"objective.it.{key}" if key else fault.key.startswith("objective.it")
    assert message in str(fault)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("objective.cross_entropy.output=nothing", "objective.cross_entropy.output"),
        ("objective.cross_entropy.target=targte", "objective.cross_entropy.target"),
        ("objective.r1.input=inputs", "objective.r1.input"),
    ],
)
def test_a_value_that_nobody_gives_is_told_before_the_run(override, key) -> None:
    more = ["+objective=r1"] if "r1" in override else []
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([*more, override]))
    (fault,) = raised.value.faults
    assert fault.key == key
    assert "which neither network nor batch gives" in fault.got


def test_a_name_that_network_and_batch_both_give_is_told_before_the_run() -> None:
    program = "model={_target_: exp.models.containers.ModuleDictModel, layers: {}, forward: 'return {\"target\": x}'}"
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([*COMMON, program, "data.inputs={x: {shape: [6], dtype: float64}}", "+objective=mse"]))
    assert "objective.mse.target" in [fault.key for fault in raised.value.faults]
    assert "'target', which both network and batch give; expected a name that one of them gives" in str(raised.value)


def test_inputs_beside_output_are_refused() -> None:
    with pytest.raises(ConfigError, match="beside output or target"):
        exp.validate(exp.compose([*COMMON, term("torch.nn.MSELoss", FAMILY["MSELoss"]), "+objective.it.output=mean"]))


@pytest.mark.parametrize(
    "inputs",
    [{"input": "output", "target": "target"}, {"target": "target", "input": "output"}],
    ids=["as is", "turned"],
)
def test_names_of_output_and_target_in_any_order_are_the_loss_by_place(inputs) -> None:
    weights = torch.tensor([1.0, 2.0, 4.0])
    term = Term(loss=nn.CrossEntropyLoss(weight=weights), inputs=inputs)
    target = torch.tensor([0, 1, 2])
    values = {"output": torch.eye(3), "target": target}
    assert term.is_weighed
    assert float(term.divisor(values)) == 7.0
    torch.testing.assert_close(term(values), nn.functional.cross_entropy(torch.eye(3), target, weight=weights))


def test_no_name_of_any_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs: \{\}; expected a name of a value for each parameter"):
        exp.validate(exp.compose([*COMMON, term("torch.nn.MSELoss", "{}")]))
