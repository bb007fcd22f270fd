"""python -m exp.plan: output, errors, FLOPs, largest batch and the search for the fastest run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.cli.command_line import parse_arguments
from exp.cli.plan import OPTIONS, Planner, main, read_words
from exp.plan.device_peaks import listed_device
from exp.plan.estimate import Estimate, Estimator
from exp.plan.fastest import Candidate, rank_candidates, search
from exp.plan.layer_table import layer_rows, merge_repeated
from exp.plan.step_time import step_time

TEXT = ("data=text", "data.dataset.files=text.txt")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be, that is the question. " * 200)


def planner(*words: str) -> Planner:
    own = [word for word in words if word.partition("=")[0] in OPTIONS]
    return Planner(parse_arguments([word for word in words if word not in own]), read_words(own))


def planned(*words: str) -> Estimate:
    made = planner(*words)
    return made.estimator(made.plan()).estimate()


def estimator(*overrides: str) -> Estimator:
    return Estimator(plan(resolve(exp.compose(list(overrides)))), device=listed_device("H100 SXM"))


OF_MODELS = [
    "model=resnet",
    "model=rnn",
    "model=rnn model.layers.recurrent._target_=torch.nn.LSTM",
    "model=gpt data=text data.dataset.files=text.txt",
    "model=transformer",
]


@pytest.mark.parametrize(
    "overrides",
    ["model=lenet", "experiment=wgan_gp", *(pytest.param(words, marks=pytest.mark.slow) for words in OF_MODELS)],
)
def test_flops_are_those_of_throughput_mfu(overrides: str) -> None:
    found = estimator(*overrides.split(), "strategy=single")
    decided = found.plan
    batch = decided.data.first_samples("train", seconds=1)
    counted = decided._flops(batch)
    per_sample = found.estimate().figures.flops() / decided.plain["data"]["batch_size"]
    # oneDNN's LSTM also computes the gradients of the input and of the initial state.
    assert per_sample == pytest.approx(counted.total, rel=0.1 if "torch.nn.LSTM" in overrides else 1e-6)


def test_each_layer_has_its_own_share() -> None:
    estimate = estimator("model=gpt", *TEXT, "model.layers.blocks.repeat=3", "precision=bf16").estimate()
    rows = {row.path: row for row in layer_rows(estimate)}
    # A linear layer computes the output and the gradients of input and weight, for 64 samples of 64 tokens.
    assert rows["blocks.1.expand"].flops == 3 * 2 * 64 * 64 * 64 * 256
    # Attention has two matrix products, and four in the backward.
    assert rows["blocks.1"].flops == 3 * 2 * 2 * 64 * 64 * 64 * 64
    assert sum(row.parameters for row in rows.values()) == sum(p.numel() for p in estimate.network.parameters())
    assert sum(row.activations for row in rows.values()) == estimate.figures.activations
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    few = {row.path: row for row in merge_repeated(list(rows.values()))}
    assert few["blocks.*.expand"].times == 3
    assert "blocks.1.expand" not in few
    assert rows["blocks.1.expand"].output.endswith("bfloat16")


def test_the_largest_batch_fits_and_a_larger_does_not() -> None:
    found = estimator("model=lenet", "strategy=single")
    limit = 8 * 2**20
    largest = found.largest_batch(limit)
    assert found.estimate(batch=largest).total <= limit < found.estimate(batch=largest + 1).total
    assert estimator("model=lenet", "strategy=single").largest_batch(2**17) is None


def test_a_step_bound_by_arithmetic_takes_flops_over_peak() -> None:
    # Large matrix products, which are limited by arithmetic.
    overrides = ("model=sequential", "strategy=single", "data.batch_size=4096")
    found = estimator(*overrides, "model.layers.hidden.out_features=8192", "model.layers.hidden2.out_features=8192")
    estimate = found.estimate()
    assert estimate.time.bound == "compute"
    large = [one for one in estimate.figures.operators if one.flops > 1e11]
    assert sum(one.flops for one in large) / 67e12 == pytest.approx(estimate.time.compute, rel=0.05)
    twice = step_time(estimate.figures, estimate.footprint, estimate.places, device=found.device, micro_batches=2)
    assert twice.compute == pytest.approx(2 * estimate.time.compute)


def test_a_run_of_a_cluster_is_planned_on_a_laptop() -> None:
    made = planner("model=mlp", "strategy=fsdp", "device=64xA100")
    plan = made.plan()
    found = made.estimator(plan).estimate()
    assert sum(len(place.ranks) for place in found.places) == 64
    assert made.limit(plan) == 80 * 2**30
    transfers = found.footprint.transfers
    assert [one.over for one in transfers] == [64, 64, 64]
    whole = 4 * sum(one.count for one in found.figures.parameters.values())
    assert transfers[0].sent == pytest.approx(whole * 63 / 64)


@pytest.mark.slow
def test_only_layers_in_parts_are_less_work() -> None:
    run = ("model=lenet", "device=8xA100", "data.batch_size=64")
    alone = planned(*run[:1], "device=1xA100", *run[2:], "strategy=single").time
    cut = planned(*run, "strategy=tensor_parallel")
    assert cut.time.overhead == pytest.approx(alone.overhead)
    rows = {row.path: row for row in layer_rows(cut)}
    parts = sum(rows[name].flops for name in ("linear1", "linear2"))
    whole = sum(row.flops for row in rows.values()) - parts
    assert rows["conv2"].flops > 0
    assert cut.time.flops == pytest.approx(whole + parts / 8)


def test_a_rank_of_a_pipeline_calls_its_own_operators() -> None:
    run = ("model=lenet", "data.batch_size=64")
    alone = planned(*run, "device=1xA100", "strategy=single").time
    piped = planned(*run, "device=2xA100", "strategy=pipeline", "strategy.microbatches=8").time
    # A rank calls half of the operators for each of 8 micro-batches, and waits for the time of one micro-batch.
    assert piped.overhead == pytest.approx(alone.overhead / 2 * 9)
    assert piped.flops == pytest.approx(alone.flops / 2)


def test_a_small_network_is_not_faster_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("model=lenet", "device=8xA100", "strategy=ddp")
    made = planner(*run)
    plan = made.plan()
    found = search(plan, limit=made.limit(plan), other=made.other)
    seconds = {one.overrides[0]: one.seconds for one in found.fitting if "precision=fp32" in one.overrides}
    assert seconds["strategy=tensor_parallel"] > 0.9 * seconds["strategy=ddp"]
    assert main([*run, "search=true"]) == 0
    assert "strategy=ddp" in capsys.readouterr().out.splitlines()[-1]


def test_the_text_tells_layers_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt", *TEXT, "memory=1GiB", "model.layers.blocks.repeat=4")
    assert main([*words, "device=1xH100"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"blocks\.\*\.query x4 +Linear +\[B, 64, 64\] float32 +4,160", text)
    assert "fits: " in text
    assert "a step takes" in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [(words, parts) for words, *parts in yaml.safe_load(Path(__file__).with_name("plan_errors.yaml").read_text())],
)
def test_an_error_names_key_and_fix(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_no_option_is_a_key_of_a_config() -> None:
    assert not set(OPTIONS) & set(exp.compose([]))


MODULE = '''
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.head(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branching(nn.Module):
    """Branches on the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.scale = torch.ones(1)

    def forward(self, x):
        y = self.head(x.flatten(1)) * self.scale
        return y * 2 if y.sum() > 0 else y


class Numbers(Branching):
    """Cannot run without numbers."""

    def forward(self, x):
        return super().forward(x)[x.sum((1, 2, 3)).numpy() > 0]
'''


def test_unknown_figures_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/module").mkdir()
    Path("planned_nets.py").write_text(MODULE)
    Path("conf/module/lit.yaml").write_text("# Mine: module=lit\n_target_: planned_nets.Lit\n")
    for name in ("Branching", "Numbers"):
        Path(f"conf/model/{name.lower()}.yaml").write_text(f"# Mine\n_target_: planned_nets.{name}\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    lit = planned("module=lit", "launch.accelerator=cpu", "monitor=null")
    assert lit.places[0].parameters == 4 * (64 * 10 + 10)
    assert lit.places[0].activations is None
    assert any("your training_step" in note for note in lit.notes)
    branching = planned("model=branching", "launch.accelerator=cpu")
    assert any("assumes 1" in note for note in branching.notes)
    # The layer keeps its input, and the product keeps the output of the layer.
    assert branching.places[0].activations >= 4 * 64 * (64 + 10)
    numbers = planned("model=numbers", "launch.accelerator=cpu")
    assert numbers.places[0].activations is None
    assert numbers.places[0].optimizer == 2 * 4 * 650 + 2 * 4
    assert any(note.startswith("activations and FLOPs are not known") for note in numbers.notes)


def candidate(seconds: float, *overrides: str) -> Candidate:
    return Candidate(overrides=overrides, total=1, seconds=seconds, bound="compute")


def test_the_simpler_of_similar_runs_comes_first() -> None:
    own = "precision=fp32"
    found = rank_candidates(
        [candidate(1.02, "ddp", own), candidate(1.0, "fsdp", own), candidate(2.0, "pipeline", own)], word="fp32"
    )
    assert [one.overrides[0] for one in found] == ["ddp", "fsdp", "pipeline"]
    assert rank_candidates([], word="fp32") == []


def test_another_precision_must_be_clearly_faster() -> None:
    for seconds, first in ((0.9, "precision=fp32"), (0.7, "precision=bf16")):
        ways = [candidate(1.0, "ddp", "precision=fp32"), candidate(seconds, "ddp", "precision=bf16")]
        assert rank_candidates(ways, word="fp32")[0].overrides[1] == first


@pytest.mark.slow
def test_a_search_takes_the_fewest_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    run, limit = ("model=resnet", "device=2xH100", "strategy=ddp"), 1500 * 2**10
    made = planner(*run)
    fitting = search(made.plan(), limit=limit, other=made.other).fitting
    assert all(one.total <= limit for one in fitting)
    ways = {one.overrides[0]: dict(text.split("=", 1) for text in one.overrides) for one in fitting}
    batch, count = (int(ways["strategy=ddp"][key]) for key in ("data.batch_size", "trainer.accumulate_grad_batches"))
    assert batch * count == 64
    assert main([*run, "search=true", "memory=1500KiB"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith("python -m exp.train model=resnet strategy=")
    assert planned(*shlex.split(command)[3:], "device=2xH100").places[0].total == fitting[0].total
    # With ddp, a batch twice as large does not fit.
    precision = f"precision={ways['strategy=ddp']['precision']}"
    words = ["model=resnet", "device=2xH100", "strategy=ddp", precision, f"data.batch_size={2 * batch}"]
    assert planned(*words).places[0].total > limit


@pytest.mark.slow
def test_a_search_without_room_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=mlp", "device=2xH100", "strategy=ddp", "search=true", "memory=100KiB"]) == 1
    assert "no configuration fits" in capsys.readouterr().err
