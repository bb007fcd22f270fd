"""What TensorBoard shows is what was: each tag of a run, read back, against a program by hand over dumped tensors."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import Tensor
from torch.nn import functional

from exp.errors import UserCodeError
from exp.run import run as live

# Times and what a system measures have no value by hand: they are held to their steps alone.
MEASURED = ("throughput/", "memory/host_", "memory/activations_mib")

DUMP = """
import torch
from exp.hooks.hook import Hook


class Dump(Hook):
    def setup(self, network):
        # Once a stage: what the fit saw stays for the test.
        if not hasattr(self, "steps"):
            self.steps, self.stages, self.open = {}, [], {}

    def now(self, step):
        return self.steps.setdefault(step.index, {"batches": [], "epoch": step.epoch})

    def after_forward(self, step, values):
        batch = [values["output"].detach().clone(), values["target"].clone(), step.weight]
        self.now(step)["batches"].append(batch)

    def after_backward(self, step):
        own = self.now(step)
        named = dict(step.network.named_parameters())
        own["gradients"] = {name: one.grad.clone() for name, one in named.items()}
        own["before"] = {name: one.detach().clone() for name, one in named.items()}
        own["rates"] = [group["lr"] for optimizer in step.optimizers for group in optimizer.param_groups]

    def after_clipping(self, step):
        named = dict(step.network.named_parameters())
        self.now(step)["clipped"] = {name: one.grad.clone() for name, one in named.items()}

    def after_step(self, step):
        own = self.now(step)
        own["after"] = {name: one.detach().clone() for name, one in step.network.named_parameters()}
        states = [one for optimizer in step.optimizers for state in optimizer.state.values() for one in state.values()]
        own["state"] = sum(one.nbytes for one in states)
        own["rank"] = step.rank

    def evaluated(self, stage, values):
        batch = [values["output"].detach().clone(), values["target"].clone(), 1.0]
        self.open.setdefault(stage, []).append(batch)

    def after_evaluation(self, stage, gather):
        done = [index for index, step in self.steps.items() if "after" in step]
        self.stages.append((stage, max(done, default=0), self.open.pop(stage, [])))
        self.save()

    def ended(self):
        self.save()

    def save(self):
        # Of every rank, by a file of its own.
        rank = max((step.get("rank", 0) for step in self.steps.values()), default=0)
        torch.save({"steps": self.steps, "stages": self.stages}, self.directory / f"dump{rank}.pt")
"""
BASE = [
    "+hooks.dump={_target_: dump.Dump}",
    "security.allow=[dump]",
    "trainer.max_epochs=2",
    "trainer.limit_val_batches=3",
    "trainer.limit_test_batches=2",
]


def points(directory: Path) -> dict[str, dict[int, float]]:
    """The scalars of a run by tag and step, from the records themselves: none of a tag may come twice at a step."""
    found: dict[str, dict[int, float]] = {}
    for tag, step, value in records(directory):
        assert step not in found.setdefault(tag, {}), f"{tag} has two points at step {step}"
        found[tag][step] = value
    return found


def records(directory: Path) -> Iterator[tuple[str, int, float]]:
    """Every value that TensorBoard keeps: a start of a session voids what came before from its step on."""
    kept: list[tuple[str, int, float]] = []
    seen: Counter[tuple[str, int]] = Counter()
    for path in sorted((directory / "tensorboard").glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                kept = [one for one in kept if one[1] < event.step]
                seen = Counter({key: count for key, count in seen.items() if key[1] < event.step})
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    kept.append((value.tag, event.step, float(value.tensor.float_val[0])))
                elif value.metadata.plugin_data.plugin_name not in ("hparams", "custom_scalars"):
                    # Of a picture, a histogram or a text there is one a step, too.
                    seen[value.tag, event.step] += 1
    assert [key for key, count in seen.items() if count > 1] == []
    yield from kept


def by_hand(dumps: list[dict[str, Any]], settings: dict[str, Any], *, tested: int) -> dict[str, dict[int, float]]:
    """Every tag of a run of one objective, from what its ranks dumped. tested: the step of the weights that were."""
    found: dict[str, dict[int, float]] = {}

    def add(tag: str, step: int, value: Any) -> None:
        found.setdefault(tag, {})[step] = float(value)

    steps, epochs, rates = dumps[0]["steps"], {}, None
    for index, step in steps.items():
        batches = [batch for dump in dumps for batch in dump["steps"][index]["batches"] if batch[2]]
        add("loss/train", index, loss(batches))
        epochs.setdefault(step["epoch"], []).append((index, batches))
        if step["rates"] != rates or is_write(index, settings["log_every_n_steps"]):
            rates = step["rates"]
            add("optimizer/lr/default", index, rates[0])
        gradients(add, index, step, settings)
    for of_epoch in epochs.values():
        last = of_epoch[-1][0]
        batches = [batch for _, batches in of_epoch for batch in batches]
        add("loss/train_epoch", last, loss(batches))
        if "train" in settings["metric_stages"]:
            add("accuracy/train", last, accuracy(batches))
    for place, (stage, index, _) in enumerate(dumps[0]["stages"]):
        batches = [batch for dump in dumps for batch in dump["stages"][place][2]]
        index = tested if stage == "test" else index
        if index in found.get(f"loss/{stage}", {}):
            continue  # a second validation at one optimizer step
        add(f"loss/{stage}", index, loss(batches))
        if stage in settings["metric_stages"]:
            add(f"accuracy/{stage}", index, accuracy(batches))
    return found


def gradients(add: Any, index: int, step: dict[str, Any], settings: dict[str, Any]) -> None:
    every = settings["every_n_steps"]
    if index % every == 0 or index == 1:
        for name, one in step["gradients"].items():
            add(f"gradients/norm/{name}", index, size([one]))
        add("gradients/norm/total", index, size(step["gradients"].values()))
        if settings["gradient_clip_val"]:
            add("gradients/norm_clipped/total", index, size(step["clipped"].values()))
    if index % settings["shares_every_n_steps"] == 0 or index == 1:
        for name, one in step["gradients"].items():
            add(f"gradients/zeros/{name}", index, (one == 0).double().mean())
            add(f"gradients/non_finite/{name}", index, (~one.isfinite()).double().mean())
            changed = step["after"][name].double() - step["before"][name].double()
            add(f"gradients/update_ratio/{name}", index, size([changed]) / size([step["before"][name]]))
        before = step["before"]
        moved = [step["after"][name].double() - one.double() for name, one in before.items()]
        add("gradients/update_ratio/total", index, size(moved) / size(before.values()))
    if index % settings["memory"] == 0 or index == 1:
        add("memory/parameters_mib", index, sum(one.nbytes for one in step["after"].values()) / 2**20)
        add("memory/gradients_mib", index, sum(one.nbytes for one in step["gradients"].values()) / 2**20)
        add("memory/optimizer_mib", index, step["state"] / 2**20)


def loss(batches: list[Any]) -> Tensor:
    outputs, targets = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
    return functional.cross_entropy(outputs.double(), targets)


def accuracy(batches: list[Any]) -> Tensor:
    outputs, targets = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
    return (outputs.argmax(1) == targets).double().mean()


def size(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def is_write(index: int, every: int) -> bool:
    return index % every == 0 or (index < every and index & (index - 1) == 0)


def drawn(seed: int) -> dict[str, Any]:
    """A config at random."""
    choose = random.Random(seed).choice
    accumulate = choose([1, 1, 2, 3])
    return {
        "batch_size": choose([24, 50, 64]),
        "limit_train_batches": choose([7, 8]),
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": choose([None, 0.5]),
        "log_every_n_steps": choose([1, 3, 50]),
        "val_check_interval": choose([None, 1, 4]),
        "metric_stages": choose([["val", "test"], ["train", "val"], ["train", "val", "test"]]),
        "every_n_steps": choose([1, 2]),
        "shares_every_n_steps": choose([2, 5]),
        "memory": choose([3, 50]),
        "scheduler": choose(["constant", "cosine"]),
        "steps_per_execution": choose([None, 1]),
    }


def command(settings: dict[str, Any]) -> list[str]:
    trainer = ("limit_train_batches", "accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps")
    return [
        *BASE,
        f"data.batch_size={settings['batch_size']}",
        *(f"trainer.{name}={_word(settings[name])}" for name in (*trainer, "val_check_interval")),
        f"metric_stages=[{','.join(settings['metric_stages'])}]",
        f"scheduler={settings['scheduler']}",
        f"runtime.steps_per_execution={_word(settings['steps_per_execution'])}",
        *("hooks.gradients.each_parameter=true", "hooks.gradients.clipped=total", "hooks.memory.details=true"),
        f"hooks.gradients.every_n_steps={settings['every_n_steps']}",
        f"hooks.gradients.shares_every_n_steps={settings['shares_every_n_steps']}",
        f"hooks.gradients.update_ratio_every_n_steps={settings['shares_every_n_steps']}",
        f"hooks.memory.every_n_steps={settings['memory']}",
        "hooks.throughput.every_n_steps=4",
    ]


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


@pytest.fixture(autouse=True)
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.numeric
@pytest.mark.parametrize(("seed", "count"), [(1, 1), (11, 2)])
def test_each_tag_is_what_a_program_by_hand_computes_at_each_step_once(ranks, seed: int, count: int) -> None:
    settings = drawn(seed)
    run = ranks.train(*command(settings), *(["strategy=ddp"] if count > 1 else []), ranks=count)
    shown = points(run.directory)
    dumps = [torch.load(path) for path in sorted(run.directory.glob("dump*.pt"))]
    assert len(dumps) == count
    report = json.loads((run.directory / "report.json").read_text())
    expected = by_hand(dumps, settings, tested=report["best"]["step"])
    of_ranks = {tag for tag in shown if tag.startswith("memory/") and tag.rpartition("/")[2] in ("min", "mean", "max")}
    measured = {tag for tag in shown if tag.startswith(MEASURED)}
    assert shown.keys() - of_ranks - measured == expected.keys()
    for tag, values in expected.items():
        assert list(shown[tag]) == sorted(values), tag
        assert shown[tag] == pytest.approx(values, rel=2e-5, abs=1e-7), tag
    assert report["metrics"].keys() == shown.keys()
    for tag, values in shown.items():
        last = values[max(values)]
        assert report["metrics"][tag] == pytest.approx(last, rel=1e-6, nan_ok=True), tag
        # What Lightning's other loggers were given is the same, at the same steps.
        assert run.values[tag] == pytest.approx(values, rel=1e-6, nan_ok=True), tag


UNEQUAL = """
import time
from types import SimpleNamespace

import psutil
import torch.distributed as dist
from exp.hooks.hook import Hook


class Unequal(Hook):
    def setup(self, *given, **named):
        # In a rank alone: the test's own process makes a hook, too, for the check.
        psutil.Process.memory_info = lambda self: SimpleNamespace(rss=(100 + 50 * dist.get_rank()) * 2**20)
        return super().setup(*given, **named)

    def after_forward(self, step, values):
        time.sleep(0.05 * dist.get_rank())
"""


def test_memory_and_times_are_those_of_all_ranks(ranks, tmp_path: Path) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    run = ranks.train(
        "strategy=ddp", "hooks=[memory,throughput]", "+hooks.unequal={_target_: unequal.Unequal}",
        "security.allow=[unequal]", "hooks.memory.details=true", "hooks.memory.every_n_steps=4",
        "hooks.throughput.every_n_steps=4",
        "trainer.max_epochs=1", "trainer.limit_train_batches=8", "data.batch_size=32", "test=false", ranks=2,
    )  # fmt: skip
    shown = points(run.directory)
    held = {word: shown[f"memory/host_rss_mib{word}"] for word in ("", "/min", "/mean", "/max")}
    assert held == {
        word: dict.fromkeys((1, 4, 8), size) for word, size in {"": 100, "/min": 100, "/mean": 125, "/max": 150}.items()
    }
    for tag, values in shown.items():
        if tag.endswith("/max"):
            own, least, mean = (shown[tag[:-4] + word] for word in ("", "/min", "/mean"))
            assert all(least[step] <= mean[step] <= most for step, most in values.items()), tag
            assert all(least[step] <= own[step] <= most for step, most in values.items()), tag
    # A step is over when the slower rank is through with it, and its samples are those of both.
    for step, taken in shown["throughput/step_ms"].items():
        assert taken >= 40
        assert shown["throughput/samples_per_second"][step] * taken / 1000 == pytest.approx(32, rel=1e-5)


def consistent(run: Any) -> dict[str, dict[int, float]]:
    """The points of a run, of which none comes twice; report.json has the last one of each tag."""
    shown = points(run.directory)
    assert run.report["metrics"].keys() == shown.keys()
    for tag, values in shown.items():
        assert run.report["metrics"][tag] == pytest.approx(values[max(values)], rel=1e-6, nan_ok=True), tag
    return shown


EVERY = ("activations,confusion,dtypes,features,gradients,landscape,memory,nan_guard,operators,per_sample_gradients,"
         "pr_curve,profile,retain_gradients,samples,throughput")  # fmt: skip
SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=6", "trainer.limit_val_batches=2", "data.batch_size=16"]
TRAIN_TOO = "metric_stages=[train,val,test]"
RUNS = {
    "every hook": (
        [f"hooks=[{EVERY}]", "model=lenet", TRAIN_TOO, "trainer.log_every_n_steps=4", "hooks.profile.start_step=4",
         "hooks.samples.stages=[train,val,test]", "hooks.samples.every_n_steps=3"],
        2,
    ),
    "fp16, two terms": (
        ["precision=fp16", TRAIN_TOO, "+objective.second={_target_: torch.nn.MultiMarginLoss}",
         "trainer.accumulate_grad_batches=4", "trainer.val_check_interval=1", "trainer.log_every_n_steps=5"],
        1,
    ),
    "phases": (["experiment=gan", "hooks=[gradients,memory,throughput]"], 1),
    "monitor of training": (["monitor=loss/train", TRAIN_TOO, "checkpoint.save_best=false"], 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_no_tag_has_two_points_at_one_step_and_the_report_has_the_last(ranks, kind: str) -> None:
    overrides, count = RUNS[kind]
    run = ranks.train(*SHORT, *overrides, *(["strategy=ddp"] if count > 1 else []), ranks=count)
    shown = consistent(run)
    assert {"loss/train", "loss/train_epoch"} <= shown.keys()


FAILS = """
from pathlib import Path
from exp.hooks.hook import Hook


class Fails(Hook):
    def __init__(self, *, at):
        super().__init__()
        self.at = at

    def after_step(self, step):
        if step.index == self.at:
            self.fail()

    def after_evaluation(self, stage, gather):
        self.tested = stage == "test"

    def teardown(self):
        if self.at == 0 and getattr(self, "tested", False):
            self.fail()

    def fail(self):
        flag = Path("failed")
        if not flag.exists():
            flag.touch()
            raise RuntimeError("failed once")
"""


@pytest.mark.parametrize("at", [8, 0], ids=["in a step", "behind the test"])
def test_a_run_that_is_started_again_shows_what_an_unbroken_one_does(ranks, tmp_path: Path, at: int) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    settings = [*SHORT, TRAIN_TOO, "checkpoint.every_n_steps=2", "hooks=[gradients]", "trainer.log_every_n_steps=3"]
    settings += ["security.allow=[fails]", f"+hooks.fails={{_target_: fails.Fails, at: {at}}}"]
    directory = ranks.freeze(*settings)
    with pytest.raises(UserCodeError, match="failed once"):
        live(directory)
    live(directory, resume=directory / "checkpoints" / "last.ckpt")
    shown, unbroken = points(directory), points(ranks.train(*settings).directory)
    assert shown.keys() == unbroken.keys()
    for tag, values in unbroken.items():
        if tag != "optimizer/lr/default":  # where it stands still it is shown at each write, and a start writes oftener
            assert shown[tag] == pytest.approx(values, rel=1e-6), tag
