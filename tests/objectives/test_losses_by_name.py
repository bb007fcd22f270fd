"""Tests of losses with several named values, compared with a training loop by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.errors import ConfigError
from exp.objectives.objective import Term

FAMILY = {
    "GaussianNLLLoss": "{input: mean, target: target, var: variance}",
    "CTCLoss": "{log_probs: frames, targets: words, input_lengths: frame_lengths, target_lengths: word_lengths}",
    "CosineEmbeddingLoss": "{input1: anchor, input2: like, target: side}",
    "TripletMarginLoss": "{anchor: anchor, positive: like, negative: unlike}",
    "MarginRankingLoss": "{input1: score, input2: other, target: side}",
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


DDP = ("strategy=ddp", "strategy.find_unused_parameters=true", "launch.devices=2", "launch.accelerator=cpu")


def term(loss: str, inputs: str) -> str:
    return f"+objective.it={{_target_: exp.objectives.objective.Term, loss: {{_target_: {loss}}}, inputs: {inputs}}}"


@pytest.fixture(autouse=True)
def importable(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


@pytest.mark.numeric
@pytest.mark.any_processor
@pytest.mark.parametrize("name", [*FAMILY, "own"])
def test_a_run_equals_a_training_loop(name) -> None:
    # One batch has all samples, so that their order changes the sum only by rounding.
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
        torch.testing.assert_close(found[f"network.{key}"], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.numeric
def test_ranks_with_uneven_shares_equal_one_process(ranks) -> None:
    lines = [*COMMON, term("by_name.Quantile", OWN), "data.batch_size=7"]
    alone = ranks.train(*lines)
    both = ranks.train(*lines, *DDP, ranks=2)
    assert both.losses == pytest.approx(alone.losses, rel=1e-10)
    assert both.values["loss/val"] == pytest.approx(alone.values["loss/val"], rel=1e-10)


@pytest.mark.parametrize(
    ("loss", "inputs", "key", "message"),
    [
        ("GaussianNLLLoss", "{input: mean, target: target, variance: variance}", "inputs.variance", "one of input"),
        ("GaussianNLLLoss", "{input: mean, target: target, var: varianze}", "inputs.var", "Did you mean variance?"),
        ("TripletMarginLoss", "{anchor: anchor, positive: like}", "inputs", "missing a required argument: 'negative'"),
        ("GaussianNLLLoss", "{input: score, target: target, var: variance}", "", "needs equal shapes"),
        ("CosineEmbeddingLoss", "{input1: anchor, input2: mean, target: side}", "", "rejects"),
        ("MSELoss", "{}", "inputs", "{}; expected null, or the name of a value"),
    ],
)  # fmt: skip
def test_the_check_refuses_wrong_names_and_shapes(loss, inputs, key, message) -> None:
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([*COMMON, term(f"torch.nn.{loss}", inputs)]))
    (error,) = raised.value.errors
    assert error.key.startswith(f"objective.it.{key}" if key else "objective.it")
    assert message in str(error)


CLASH = "model={_target_: exp.models.containers.ModuleDictModel, layers: {}, forward: 'return {\"target\": x}'}"
BESIDE = term("torch.nn.MSELoss", FAMILY["MSELoss"])


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["objective.cross_entropy.output=nothing"], "objective.cross_entropy.output", "neither network nor batch"),
        (["objective.cross_entropy.target=targte"], "objective.cross_entropy.target", "neither network nor batch"),
        (["+objective=r1", "objective.r1.input=inputs"], "objective.r1.input", "neither network nor batch returns"),
        ([*COMMON, CLASH, f"data.inputs={{x: {SIX}}}", "+objective=mse"], "objective.mse.target", "that both"),
        ([*COMMON, BESIDE, "+objective.it.output=mean"], "objective.it.inputs", "next to output or target"),
        # The same wrong name in several keys is one error.
        (["objective.cross_entropy.target=goal", "+metrics.accuracy.target=goal"], "objective.cross_entropy.target",
         "neither network nor batch returns, read by objective.cross_entropy.target, metrics.accuracy.target"),
        ([*COMMON, CLASH, f"data.inputs={{x: {SIX}}}", "+objective=mse", "metrics=[mae]"], "objective.mse.target",
         "'target', a name that both network and batch return, read by objective.mse.target, metrics.mae.target"),
    ],
)  # fmt: skip
def test_the_check_refuses_unknown_and_ambiguous_values(overrides, key, message) -> None:
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose(overrides))
    assert [(error.key, message in str(error)) for error in raised.value.errors] == [(key, True)], raised.value


class NamedTruth(nn.Module):
    def forward(self, guess: Tensor, *, truth: Tensor) -> Tensor:
        return (guess - truth).abs().mean()


def test_inputs_of_keyword_only_parameters_are_passed_by_name() -> None:
    term = Term(loss=NamedTruth(), inputs={"guess": "output", "truth": "target"})
    assert float(term({"output": torch.tensor([1.0, 4.0]), "target": torch.ones(2)})) == 1.5


def test_inputs_in_any_order_are_passed_by_position() -> None:
    weights, target = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 2])
    term = Term(loss=nn.CrossEntropyLoss(weight=weights), inputs={"target": "target", "input": "output"})
    values = {"output": torch.eye(3), "target": target}
    assert term.is_weighed
    assert float(term.divisor(values)) == 7.0
    torch.testing.assert_close(term(values), nn.functional.cross_entropy(torch.eye(3), target, weight=weights))
