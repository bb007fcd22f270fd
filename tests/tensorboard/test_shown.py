"""All tags in the event file of a run equal values computed by hand from dumped tensors."""

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

# Times and figures of the system cannot be computed by hand.
MEASURED = ("throughput/", "memory/host_", "memory/activations_mib")

DUMP = """
import torch
from exp.hooks.hook import Hook


class Dump(Hook):
    def setup(self, network):
        # Called for each stage; the test keeps what the fit saw.
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
        rank = max((step.get("rank", 0) for step in self.steps.values()), default=0)
        torch.save({"steps": self.steps, "stages": self.stages}, self.directory / f"dump{rank}.pt")
"""
BASE = [
    *("hooks.gradients.each_parameter=true", "hooks.gradients.clipped=total", "hooks.memory.details=true"),
    "hooks.throughput.every_n_steps=4",
    "+hooks.dump={_target_: dump.Dump}",
    "security.allow=[dump]",
    "trainer.max_epochs=2",
    "trainer.limit_val_batches=3",
    "trainer.limit_test_batches=2",
]


def points(directory: Path) -> dict[str, dict[int, float]]:
    """Return the scalars of a run by tag and step, and assert that a tag has one point per step."""
    found: dict[str, dict[int, float]] = {}
    for tag, step, value in records(directory):
        assert step not in found.setdefault(tag, {}), f"{tag} has two points at step {step}"
        found[tag][step] = value
    return found


def records(directory: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the values that TensorBoard shows; a session removes earlier values at and after its first step."""
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
                    # Pictures, histograms and texts also have at most one value per step.
                    seen[value.tag, event.step] += 1
    assert [key for key, count in seen.items() if count > 1] == []
    yield from kept


def by_hand(dumps: list[dict[str, Any]], settings: dict[str, Any], *, tested: int) -> dict[str, dict[int, float]]:
    """Return all tags of a run, computed from the dumps of its ranks; `tested` is the step of the tested weights."""
    found: dict[str, dict[int, float]] = {}

    def add(tag: str, step: int, value: Any) -> None:
        found.setdefault(tag, {})[step] = float(value)

    steps, epochs, rates = dumps[0]["steps"], {}, None
    for index, step in steps.items():
        batches = [batch for dump in dumps for batch in dump["steps"][index]["batches"] if batch[2]]
        add("loss/train", index, loss(batches))
        epochs.setdefault(step["epoch"], []).append((index, batches))
        if step["rates"] != rates or is_write(index, settings["trainer.log_every_n_steps"]):
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
            continue  # a second validation at the same step
        add(f"loss/{stage}", index, loss(batches))
        if stage in settings["metric_stages"]:
            add(f"accuracy/{stage}", index, accuracy(batches))
    best = math.inf
    for index, value in sorted(found["loss/val"].items()):
        if value < best:
            best = value
            add("monitor/best", index, value)
            add("monitor/best_step", index, index)
    return found


def gradients(add: Any, index: int, step: dict[str, Any], settings: dict[str, Any]) -> None:
    every = settings["hooks.gradients.every_n_steps"]
    if index % every == 0 or index == 1:
        for name, one in step["gradients"].items():
            add(f"gradients/norm/{name}", index, size([one]))
        add("gradients/norm/total", index, size(step["gradients"].values()))
        if settings["trainer.gradient_clip_val"] != "null":
            add("gradients/norm_clipped/total", index, size(step["clipped"].values()))
    if index % settings["hooks.gradients.update_ratio_every_n_steps"] == 0 or index == 1:
        for name in step["gradients"]:
            changed = step["after"][name].double() - step["before"][name].double()
            add(f"gradients/update_ratio/{name}", index, size([changed]) / size([step["before"][name]]))
        before = step["before"]
        moved = [step["after"][name].double() - one.double() for name, one in before.items()]
        add("gradients/update_ratio/total", index, size(moved) / size(before.values()))
    if index % settings["hooks.memory.every_n_steps"] == 0 or index == 1:
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


CHOICES = {
    "data.batch_size": [24, 50, 64],
    "trainer.limit_train_batches": [7, 8],
    "trainer.accumulate_grad_batches": [1, 1, 2, 3],
    "trainer.gradient_clip_val": ["null", 0.5],
    "trainer.log_every_n_steps": [1, 3, 50],
    "trainer.val_check_interval": ["null", 1, 4],
    "metric_stages": ["[val,test]", "[train,val]", "[train,val,test]"],
    "hooks.gradients.every_n_steps": [1, 2],
    "hooks.gradients.update_ratio_every_n_steps": [2, 5],
    "hooks.memory.every_n_steps": [3, 50],
    "scheduler": ["constant", "cosine"],
    "runtime.steps_per_execution": ["null", 1],
}


@pytest.fixture(autouse=True)
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.numeric
def test_each_tag_has_the_value_computed_by_hand(ranks) -> None:
    require_values_by_hand(ranks, seed=11, count=2)


@pytest.mark.slow
def test_each_tag_of_random_configs_has_its_value(ranks, share: Any) -> None:
    draw = share.random()
    for _ in range(share.count(40)):
        require_values_by_hand(ranks, seed=draw.randrange(10**6), count=draw.choice([1, 2]))


def require_values_by_hand(ranks, *, seed: int, count: int) -> None:
    print(f"seed={seed}, count={count}")
    choose = random.Random(seed).choice
    settings = {key: choose(values) for key, values in CHOICES.items()}
    words = [f"{key}={value}" for key, value in settings.items()]
    run = ranks.train(*BASE, *words, *(["strategy=ddp"] if count > 1 else []), ranks=count)
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
        # Other loggers of Lightning get the same values at the same steps.
        assert run.values[tag] == pytest.approx(values, rel=1e-6, nan_ok=True), tag


UNEQUAL = """
import time
from types import SimpleNamespace

import psutil
import torch.distributed as dist
from exp.hooks.hook import Hook


class Unequal(Hook):
    def setup(self, *given, **named):
        # Only in a rank: the check in the process of the test also creates the hook.
        psutil.Process.memory_info = lambda self: SimpleNamespace(rss=(100 + 50 * dist.get_rank()) * 2**20)
        return super().setup(*given, **named)

    def after_forward(self, step, values):
        time.sleep(0.05 * dist.get_rank())
"""


def test_memory_and_times_are_of_all_ranks(ranks, tmp_path: Path) -> None:
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
    # The time of a step is that of the slower rank, and its samples are those of both.
    for step, taken in shown["throughput/step_ms"].items():
        assert taken >= 40
        assert shown["throughput/samples_per_second"][step] * taken / 1000 == pytest.approx(32, rel=1e-5)


SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=6", "trainer.limit_val_batches=2", "data.batch_size=16"]
TRAIN_TOO = "metric_stages=[train,val,test]"
FAILS = """
from pathlib import Path
from exp.hooks.hook import Hook


class Fails(Hook):
    def after_step(self, step):
        flag = Path("failed")
        if step.index == 8 and not flag.exists():
            flag.touch()
            raise RuntimeError("failed once")
"""


def test_a_restarted_run_shows_what_an_unbroken_one_does(ranks, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    settings = [*SHORT, TRAIN_TOO, "checkpoint.every_n_steps=2", "hooks=[gradients]", "trainer.log_every_n_steps=3"]
    settings += ["security.allow=[fails]", "+hooks.fails={_target_: fails.Fails}"]
    directory = ranks.freeze(*settings)
    with pytest.raises(UserCodeError, match="failed once"):
        live(directory)
    live(directory, resume=directory / "checkpoints" / "last.ckpt")
    shown, unbroken = points(directory), points(ranks.train(*settings).directory)
    assert shown.keys() == unbroken.keys()
    for tag, values in unbroken.items():
        if tag != "optimizer/lr/default":  # a restart adds points of the learning rate
            assert shown[tag] == pytest.approx(values, rel=1e-6), tag
