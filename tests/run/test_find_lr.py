"""Losses and suggestion of python -m exp.find_lr equal those of a loop by hand."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import exp
from exp.check.examination import plan
from exp.check.plan import Plan
from exp.check.resolution import resolve
from exp.cli.check import main as check
from exp.construct import build_starting_network
from exp.data.randomness import reseed
from exp.extras.finders.find_lr import main
from exp.extras.finders.range_test import rising_rates, suggestion
from exp.shared_types import Batch

pytestmark = pytest.mark.numeric
SHORT = ["data=wine", "model=mlp", "model.constants.width=4", "data.batch_size=16", "launch.accelerator=cpu"]
# Only full batches, in float64.
EXACT = [*SHORT, "precision=fp64", "data.drop_last=true", "optimizer=sgd", "optimizer.momentum=0.9"]
GROUPS = ["optimizer.lr=0.2", "+optimizer.groups={head: {parameters: 'head.*', lr: 0.05}}"]


def found() -> tuple[Path, dict[str, Any], dict[str, list[float]]]:
    """Return the directory of the only range test, its lr.json, and the columns of its lr.csv."""
    (directory,) = Path("outputs/train/find_lr").glob("*/*")
    rows = list(csv.reader((directory / "lr.csv").read_text().splitlines()))
    columns = {name: [float(row[place]) for row in rows[1:]] for place, name in enumerate(rows[0])}
    return directory, json.loads((directory / "lr.json").read_text()), columns


def decided(*overrides: str) -> Plan:
    return plan(resolve(exp.compose(overrides)))


def batches_of(run: Plan) -> Iterator[tuple[int, int, bool, Batch]]:
    """Yield epoch, position, is it the last batch of its epoch, and batch."""
    loader = run.data.loader("train")
    for epoch in itertools.count():
        loader.set_position(epoch, 0)
        batches = list(loader)
        for place, batch in enumerate(batches):
            yield epoch, place, place == len(batches) - 1, batch


def by_hand(run: Plan, rates: Sequence[float], *, window: int, clip: float) -> list[float]:
    """Train with momentum and a quarter of the rate for the head, and return the loss of each step."""
    network = build_starting_network(run.settings, run.spec).double()
    head = list(network.get_submodule("head").parameters())
    others = [one for one in network.parameters() if all(one is not other for other in head)]
    optimizer = torch.optim.SGD([{"params": others}, {"params": head}], lr=1.0, momentum=0.9)
    losses: list[float] = []
    seen: list[Tensor] = []
    for epoch, place, is_last, batch in batches_of(run):
        inputs, target = batch.data
        reseed(seed=0, rank=0, epoch=epoch, batch=place)
        seen.append(cross_entropy(network(inputs.double()), target))
        if not is_last and (place + 1) % window:
            continue
        loss = sum(seen) / len(seen)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rates[len(losses)], rates[len(losses)] / 4
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        seen.clear()
        if len(losses) == len(rates):
            return losses
    raise AssertionError("epochs do not end")


def smoothed_by_hand(losses: Sequence[float]) -> list[float]:
    """Return running means in which the weight of each loss is 0.98 times that of the next loss."""
    found = []
    for count in range(1, len(losses) + 1):
        weights = 0.98 ** np.arange(count)[::-1]
        found.append(float(weights @ np.array(losses[:count]) / weights.sum()))
    return found


def test_losses_and_suggestion_equal_a_loop_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["trainer.accumulate_grad_batches=4", "trainer.gradient_clip_val=0.5"]
    overrides = [*EXACT, *GROUPS, *step]
    assert main([*overrides, "--min", "1e-4", "--max", "30", "--steps", "40", "scheduler=cosine"]) == 0
    _, summary, columns = found()
    rates = [1e-4 * 3e5 ** (place / 39) for place in range(40)][: summary["steps"]]
    losses = by_hand(decided(*overrides), rates, window=4, clip=0.5)
    smoothed = smoothed_by_hand(losses)
    assert columns["lr"] == pytest.approx(rates, rel=1e-12)
    assert columns["loss"] == pytest.approx(losses, rel=1e-9)
    assert columns["smoothed_loss"] == pytest.approx(smoothed, rel=1e-9)
    # The test ends at the first loss above four times the lowest earlier loss, or at the last step.
    high = [place for place in range(1, len(rates)) if smoothed[place] > 4 * min(smoothed[:place])]
    assert high in ([], [len(rates) - 1])
    assert summary["end"] == ("loss_rose" if high else "steps")
    rate = summary["suggestion"]
    assert rate == pytest.approx(suggestion(rates, losses), rel=1e-12)
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith("python -m exp.train ")
    assert command.endswith(f" optimizer.lr={rate:.3g} optimizer.groups.head.lr={rate / 4:.3g}")
    assert check(shlex.split(command)[3:]) == 0
    assert shlex.split(command)[3:].count("scheduler=cosine") == 1


def test_nothing_after_the_first_divergence_is_suggested() -> None:
    rates = rising_rates(1e-6, 1.0, 40)
    assert (rates[0], rates[-1]) == (1e-6, 1.0)
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e6) / 39)
    # The losses have noise, a fall from 2 to 1 around step 20, a divergence at step 30, and a steeper fall after it.
    noise = [0.01 * (-1) ** step for step in range(40)]
    falling = [2.0] * 15 + [2.0 - step / 10 for step in range(10)] + [1.0] * 5
    exploding = np.add([*falling, 50.0, *[40.0 - 4 * step for step in range(9)]], noise)
    found = suggestion(rates, exploding)
    assert found in rates[18:21]
    assert suggestion(rates, np.add([*falling, *[1.0] * 10], noise)) in rates[18:21]
    assert suggestion(rates, [*exploding[:30], math.nan]) == found
    assert suggestion(rates, [1.0 + place for place in range(40)]) is None
    assert suggestion(rates, np.add(2.0, noise)) is None
    assert suggestion(rates[:8], [5.0 - place for place in range(8)]) is None
    assert suggestion(rates, []) is None
    assert suggestion(rates, [math.nan] * 3) is None
    # The suggestion is at most a tenth of the rate of the divergence.
    late = suggestion(rates, [2.0] * 26 + [1.5, 1.0, 0.9, 0.8, 99.0])
    assert late == pytest.approx(rates[30] / 10)


def test_the_directory_holds_the_curve_and_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "30", "--max", "1e4"]
    assert main([*SHORT, "callbacks=[early_stopping]", "optimizer.lr=0.5", "tags=[a]", *flags]) == 0
    directory, summary, columns = found()
    assert summary["end"] == "loss_rose"
    assert summary["steps"] == len(columns["step"]) < 30
    assert not (directory / "checkpoints").exists()
    assert (directory / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((directory / "report.json").read_text())["status"] == "completed"
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert [one.value for one in events.Scalars("loss/train")] == pytest.approx(columns["loss"], rel=1e-6)
    assert [one.value for one in events.Scalars("optimizer/lr/default")] == pytest.approx(columns["lr"], rel=1e-6)
    printed = capsys.readouterr().out
    assert "left out: schedule, callbacks.early_stopping\n" in printed
    assert "the smoothed loss rose above 4 times its lowest" in printed
    typed = shlex.split(printed.splitlines()[-1])[3:]
    rate = f"optimizer.lr={summary['suggestion']:.3g}"
    assert typed == [*SHORT, "callbacks=[early_stopping]", "tags=[a]", rate]
    # A range test is no run, so resume=auto does not find it.
    assert exp.compose([*SHORT, "resume=auto"]).resume == "auto"
    assert decided(*SHORT, "resume=auto").plain["resume"] is None


def test_an_infinite_loss_ends_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--min", "1e-3", "--max", "1e300", "--steps", "20"]
    # The squares of the outputs overflow.
    assert main([*SHORT, "data=diabetes", "optimizer=sgd", "runtime.non_finite=skip", *flags]) in (0, 1)
    directory, summary, columns = found()
    assert summary["end"] == "not_finite"
    assert [math.isfinite(loss) for loss in columns["loss"]] == [True] * (summary["steps"] - 1) + [False]
    assert summary["steps"] < 20
    assert json.loads((directory / "report.json").read_text())["status"] == "completed"
    streams = capsys.readouterr()
    assert "the loss was not finite" in streams.out + streams.err


def test_two_ranks_find_the_rate_of_one_process(commands, tmp_path: Path) -> None:
    tables, rates = [], []
    for name, more in (("one", ["strategy=single"]), ("two", ["strategy=ddp", "launch.devices=2"])):
        flags = ["--min", "1e-4", "--max", "10", "--steps", "30", "model.constants.dropout=0.0"]
        place = tmp_path / name
        place.mkdir()
        done = commands.run(*EXACT, *more, *flags, module="exp.find_lr", cwd=place)
        assert done.returncode == 0, done.stderr
        rates.append(done.stdout.splitlines()[-1].rpartition(" ")[2])
        (path,) = place.glob("outputs/train/find_lr/*/*/lr.csv")
        tables.append([[float(value) for value in row] for row in list(csv.reader(path.read_text().splitlines()))[1:]])
    assert np.array(tables[0]) == pytest.approx(np.array(tables[1]), rel=1e-9)
    assert rates[0] == rates[1]


def test_a_test_without_a_suggestion_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    # The rates are too small to change a weight, and every step has all samples.
    flags = ["--min", "1e-30", "--max", "1e-29", "--steps", "20"]
    whole = ["data.batch_size=1000", "model.constants.dropout=0.0", "optimizer=sgd"]
    assert main([*SHORT, "precision=fp64", *whole, *flags]) == 1
    assert "suggests no rate" in capsys.readouterr().err


ERRORS: Mapping[str, tuple[list[str], str]] = {
    "a rate of 0": (["--min", "0"], "--min: 0; expected a number above 0"),
    "rates that fall": (["--max", "1e-9"], "--max: 1e-09; expected a rate above --min, 1e-08"),
    "few steps": (["--steps", "5"], "--steps: 5; expected a number above 19"),
    "a sweep": (["-m", "seed=0,1"], "--multirun: several runs; expected one"),
    "a rate of the config": (["optimizer.lr=0"], "optimizer.lr: 0 with exp.find_lr; expected "),
    "phases": (["phases=[body_and_head]"], "phases: head, body with exp.find_lr; expected none"),
    "a schedule that is none": (["scheduler=cosine", "scheduler.end_factor=x"], "scheduler.end_factor"),
    "two machines": (["strategy=ddp", "launch.nodes=2"], "launch.nodes: 2; expected 1"),
    "torchrun": ([], "expected exp.find_lr without torchrun"),
}


@pytest.mark.any_processor
@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_command_is_refused_before_anything_is_written(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more, said = ERRORS[name]
    if name == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main([*(SHORT if name != "phases" else SHORT[-1:]), *more]) == 2
    assert said in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_test_starts_from_given_weights_but_not_from_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    exp.fit(exp.compose([*SHORT, "trainer.max_epochs=1", "hydra.run.dir=first"]))
    assert main([*SHORT, "resume=first/checkpoints/last.ckpt"]) == 2
    assert "resume: 'first/checkpoints/last.ckpt'; expected null" in capsys.readouterr().err
    assert main([*SHORT, "train=false", "weights.from=first"]) == 2
    assert "train: false; expected true" in capsys.readouterr().err
    # With the weights of the run, the first loss is lower.
    flags = ["--steps", "20", "data.batch_size=1000", "model.constants.dropout=0.0"]
    assert main([*SHORT, "weights.from=first", *flags]) in (0, 1)
    learnt = found()[2]["loss"][0]
    shutil.rmtree("outputs/train/find_lr")
    assert main([*SHORT, *flags]) in (0, 1)
    assert learnt < found()[2]["loss"][0] - 0.01


UNCHECKED = ["monitor=loss/train", "test=false", "trainer.limit_val_batches=0", "checkpoint.save_best=false"]
OWN = """
import os, signal
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from exp.strategies.single import Single

class Fixed(torch.optim.SGD):
    def __init__(self, params, momentum=0.0):
        super().__init__(params, lr=0.1, momentum=momentum)

class Lit(LightningModule):
    def training_step(self, batch, batch_idx):
        return batch[0].sum()

    def configure_optimizers(self):
        return None

class Owner(Single):
    # As the engine of DeepSpeed, which is not installed everywhere.
    owns_step = True

class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(13, 3), 0

    def forward(self, x):
        self.calls += x.device.type == "cpu" and self.training
        if self.calls == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return self.head(x)
"""


@pytest.fixture
def own(write: Any) -> None:
    write("mine.py", OWN)
    write("conf/optimizer/fixed.yaml", "# optimizer=fixed\n_target_: mine.Fixed\n")
    groups = 'groups: {head: {parameters: "head.*", lr: 0.01}}'
    write("conf/optimizer/plain.yaml", f"# optimizer=plain\n_target_: torch.optim.Adam\n{groups}\n")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer=fixed"], "Fixed with exp.find_lr; expected an optimizer with the parameter lr"),
        (["strategy={_target_: mine.Owner, name: owner}"], "strategy: owner with exp.find_lr"),
        (
            [*UNCHECKED, "module={_target_: mine.Lit}"],
            "only exp's own training can be shortened",
        ),
    ],
)
def test_a_run_without_one_rate_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data=wine", "launch.accelerator=cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own")
def test_the_rate_may_be_the_default_of_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "optimizer=plain", "--steps", "20"]) == 0
    rates = dict(word.split("=") for word in shlex.split(capsys.readouterr().out.splitlines()[-1])[-2:])
    assert list(rates) == ["+optimizer.lr", "optimizer.groups.head.lr"]
    # Adam's default learning rate is 0.001.
    assert float(rates["optimizer.groups.head.lr"]) == pytest.approx(10 * float(rates["+optimizer.lr"]), rel=0.01)


@pytest.mark.usefixtures("own")
def test_ctrl_c_exits_130_and_saves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data=wine", "launch.accelerator=cpu", "model={_target_: mine.Interrupted}"]
    assert main(words) == 128 + signal.SIGINT
    error = capsys.readouterr().err
    assert "interrupted by signal 2; an incomplete test has no result and saves no state" in error
    assert "Resume with" not in error
    assert list(place.glob("outputs/**/*.ckpt")) == []
