"""The loss of a stage equals one call of the loss on the whole stage for any batch size."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.engine.phased_module import PhasedModule
from exp.errors import ConfigError, RunError
from exp.extras.debugging.step_trace import run_again
from exp.hooks.hook import Hook
from exp.objectives.loss_inputs import Values
from exp.objectives.objective import Objective, Term
from exp.objectives.term import AbstractTerm
from exp.objectives.terms import NLL, CrossEntropy
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase

pytestmark = pytest.mark.numeric


class Positive(nn.Module):
    """Mean loss over the samples of class 1."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 1].square() * target).sum() / target.sum().clamp(min=1)

    def divisor(self, output: Tensor, target: Tensor) -> Tensor:
        return target.sum()


class Confidence(AbstractTerm):
    """Term that weights each sample by its first input."""

    def forward(self, values: Values, batch: Any = None, passes: Any = None) -> Tensor:
        weights = values["input"][:, 0].exp()
        return (weights * values["output"].square().sum(1)).sum() / weights.sum()

    def divisor(self, values: Values) -> Tensor:
        return values["input"][:, 0].exp().sum()


CASES: dict[str, dict[str, nn.Module]] = {
    "class_weights": {"ce": CrossEntropy(class_weights=[1.0, 5.0])},
    "ignored": {"ce": CrossEntropy(ignore_index=0, label_smoothing=0.1)},
    "both": {"nll": NLL(class_weights=[0.3, 1.0], ignore_index=1)},
    "a_class_of_no_weight": {"ce": CrossEntropy(class_weights=[0.0, 2.0])},
    "torch": {"ce": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]), ignore_index=0)},
    "own_loss": {"positive": Positive()},
    "own_term": {"confidence": Confidence(weight=0.5)},
    "several": {
        "ce": Term(loss=CrossEntropy(ignore_index=1), weight=2.0),
        "smooth": CrossEntropy(label_smoothing=0.3),
        "positive": Term(loss=Positive(), weight=0.25),
    },
}


def in_one_call(small: Any, terms: dict[str, nn.Module], stage: str) -> dict[str, float]:
    """Return the value of each term from one call on the whole stage."""
    batches = [batch.data for batch in small.data.data.loader(stage)]
    inputs, target = (torch.cat(column) for column in zip(*batches, strict=True))
    inputs, network = inputs.double(), small.module.network.double().eval()
    found, total = {}, 0.0
    with torch.no_grad():
        output = network(inputs)
        for name, term in terms.items():
            if isinstance(term, Confidence):
                value = term({"input": inputs, "output": output})
            else:
                value = (term.loss if isinstance(term, Term) else term)(output, target)
            found[f"loss/{stage}/{name}"] = float(value)
            total += float(value) * (term.weight if isinstance(term, AbstractTerm) else 1.0)
    return {f"loss/{stage}": total, **(found if len(found) > 1 else {})}


def fitted(small_run: ModuleType, directory: Path, terms: dict[str, nn.Module], **settings: Any) -> Any:
    """Run one epoch in float64 with learning rate 0, and return the run."""
    small = small_run.Small(
        directory, terms=terms, max_epochs=1, word="fp64", plain_network=True, metrics={}, **settings
    )
    small.module.optimization = Optimization(optimizer_factory=functools.partial(torch.optim.SGD, lr=0.0))
    small.fit()
    return small


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_stage_has_the_loss_of_one_call(tmp_path: Path, small_run: ModuleType, case: str, batch_size: int) -> None:
    terms = copy.deepcopy(CASES[case])
    small = fitted(small_run, tmp_path, terms, batch_size=batch_size)
    torch.nn.Module.double(small.module.objective)
    expected = in_one_call(small, terms, "val")
    metrics = small.recording.metrics
    assert {tag: metrics[tag] for tag in expected} == pytest.approx(expected, rel=1e-12)
    (trained,) = [value for tag, value in in_one_call(small, terms, "train").items() if tag == "loss/train"]
    assert metrics["loss/train"] == pytest.approx(trained, rel=1e-12)


def test_the_loss_of_phases_is_the_sum_of_their_means(tmp_path: Path, small_run: ModuleType) -> None:
    terms: dict[str, nn.Module] = {
        "ce": CrossEntropy(class_weights=[1.0, 5.0]),
        "ignored": CrossEntropy(ignore_index=1),
    }
    still = Optimization(optimizer_factory=functools.partial(torch.optim.SGD, lr=0.0))
    phases = [
        Phase(name="both", terms=["ce", "ignored"], parameters=["weight"], optimization=still, repeats=2),
        Phase(name="one", terms=["ignored"], parameters=["bias"], optimization=still),
    ]
    small = small_run.Small(
        tmp_path, terms=terms, word="fp64", plain_network=True, metrics={}, max_epochs=1, batch_size=7,
        accumulate_grad_batches=3, module=functools.partial(PhasedModule, phases=phases),
    )  # fmt: skip
    small.fit()
    found = in_one_call(small, terms, "train")
    expected = found["loss/train"] + found["loss/train/ignored"]
    assert small.recording.metrics["loss/train"] == pytest.approx(expected, rel=1e-12)
    found = in_one_call(small, terms, "val")
    expected = found["loss/val"] + found["loss/val/ignored"]
    assert small.recording.metrics["loss/val"] == pytest.approx(expected, rel=1e-12)


def trained(small_run: ModuleType, directory: Path, terms: dict[str, nn.Module], **settings: Any) -> Any:
    """Run two epochs in float64, and return the run."""
    small = small_run.Small(
        directory, terms=copy.deepcopy(terms), max_epochs=2, word="fp64", plain_network=True, metrics={},
        limit_val_batches=0, every_n_steps=None, **settings,
    )  # fmt: skip
    torch.nn.Module.double(small.module.objective)
    small.fit()
    return small


# 105 samples are 7 batches. The last step has three of them, and the last batch has 9 samples.
@pytest.mark.parametrize("phased", [False, True])
@pytest.mark.parametrize("case", ["equal", *CASES])
def test_micro_batches_train_as_one_batch(tmp_path: Path, small_run: ModuleType, case: str, phased: bool) -> None:
    terms = {"ce": CrossEntropy()} if case == "equal" else CASES[case]
    settings: dict[str, Any] = {}
    if phased:
        sgd = Optimization(optimizer_factory=functools.partial(torch.optim.SGD, lr=0.1))
        phases = [Phase(name="all", terms=[*terms], parameters=["*"], optimization=sgd)]
        settings["module"] = functools.partial(PhasedModule, phases=phases)
    whole = trained(small_run, tmp_path / "whole", terms, batch_size=64, **settings)
    small = trained(small_run, tmp_path / "small", terms, batch_size=16, accumulate_grad_batches=4, **settings)
    for name, tensor in whole.weights().items():
        torch.testing.assert_close(small.weights()[name], tensor, rtol=1e-12, atol=1e-12)
    assert small.values.seen == pytest.approx(whole.values.seen, rel=1e-12)


def test_a_divisor_of_the_output_is_refused_under_accumulation(tmp_path: Path, small_run: ModuleType) -> None:
    class Sure(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return output.sigmoid().square().sum() / output.sigmoid().sum()

        def divisor(self, output: Tensor, target: Tensor) -> Tensor:
            return output.sigmoid().sum()

    with pytest.raises(ConfigError, match=r"objective.sure: a divisor that needs the network's output .* of the batch"):
        trained(small_run, tmp_path, {"sure": Sure()}, accumulate_grad_batches=2)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_accumulate_as_one_batch_of_one_process(
    tmp_path: Path, elsewhere: Any, logged: Any, world_size: int
) -> None:
    settings = {"plain_network": True, "max_epochs": 1, "loss": {"class_weights": [1.0, 5.0]}}
    whole = elsewhere.ranks(tmp_path / "whole", 1, batch_size=52, word="fp64", **settings)
    small = elsewhere.ranks(
        tmp_path / "small", world_size, batch_size=13, accumulate_grad_batches=4, word="fp64", **settings
    )
    assert [elsewhere.end(rank) for rank in [*whole, *small]] == [0] * (1 + world_size)
    assert logged(tmp_path / "small") == pytest.approx(logged(tmp_path / "whole"), rel=1e-12)


class Again(Hook):
    """Hook that runs each micro-batch of a step a second time before the update."""

    def before_update(self, step: Any, update: Any) -> None:
        tracer = SimpleNamespace(forward=contextlib.nullcontext, backward=lambda loss: None)
        for place in range(len(update.window.batches)):
            run_again(update.module, update.window, place, tracer)


@pytest.mark.parametrize("more", [{"accumulate_grad_batches": 3}, {"phases": True}], ids=str)
def test_a_repeated_step_counts_once(tmp_path: Path, small_run: ModuleType, more: Any) -> None:
    def train(name: str, hooks: dict[str, Hook]) -> Any:
        terms = copy.deepcopy(CASES["several"])
        small = small_run.Small(tmp_path / name, terms=terms, max_epochs=2, hooks=hooks, **more)
        small.fit()
        return small

    once, again = train("once", {}), train("again", {"again": Again()})
    for tag in ("loss/train", "accuracy/train"):
        assert again.recording.metrics[tag] == once.recording.metrics[tag]
    shown = [value for (tag, _), value in once.values.seen.items() if tag == "loss/train"]
    assert [value for (tag, _), value in again.values.seen.items() if tag == "loss/train"] == shown


def test_a_batch_in_which_nothing_counts_has_no_gradient() -> None:
    for loss in (CrossEntropy(ignore_index=0), nn.CrossEntropyLoss(ignore_index=0), NLL(class_weights=[0.0, 1.0])):
        scores = torch.randn(4, 2, requires_grad=True)
        total, _ = Objective({"term": loss})({"output": scores, "target": torch.zeros(4, dtype=torch.int64)})
        total.backward()
        assert total.item() == 0.0
        assert torch.equal(scores.grad, torch.zeros(4, 2))


def test_a_stage_in_which_nothing_counts_is_told(tmp_path: Path, small_run: ModuleType) -> None:
    with pytest.raises(
        RunError,
        match="loss/val has no value, because the objective ignores all targets",
    ):
        fitted(small_run, tmp_path, {"ce": CrossEntropy(class_weights=[0.0, 0.0])})
    # A term in which no sample counts adds nothing, and has no tag.
    terms = {"ce": CrossEntropy(), "none": CrossEntropy(class_weights=[0.0, 0.0])}
    metrics = fitted(small_run, tmp_path / "several", terms).recording.metrics
    assert "loss/val/none" not in metrics
    assert metrics["loss/val"] == metrics["loss/val/ce"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, {"class_weights": [1.0, 5.0]}, {"ignore_index": 0}], ids=str)
@pytest.mark.parametrize("batch_size", [3, 13])
def test_two_ranks_train_and_evaluate_as_one(
    tmp_path: Path, elsewhere: Any, logged: Any, loss: Any, batch_size: int
) -> None:
    """The batch sizes give ranks different numbers of samples, no counted sample, or a copy of the only sample."""
    settings = {"plain_network": True, "max_epochs": 2, "batch_size": batch_size, "loss": loss, "word": "fp64"}
    for world_size in (1, 2):
        ranks = elsewhere.ranks(tmp_path / str(world_size), world_size, **settings)
        assert [elsewhere.end(rank) for rank in ranks] == [0] * world_size
    one, two = logged(tmp_path / "1"), logged(tmp_path / "2")
    assert one == pytest.approx(two, rel=1e-11)
