"""Every tag of a run has the values that an independent program computes, at the same steps, for random configs.

torch's global hooks record each batch that the network gets, what it returns, and whether the gradients are finite. A
sample's first feature is its index. From that and the config's numbers `Expected` computes losses, metrics, learning
rates and loss scales in float64. tests/tensorboard/test_shown.py does the same for gradients, memory and ranks.
"""

from __future__ import annotations

import copy
import csv
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.lr_scheduler import ReduceLROnPlateau

import exp
from exp.check.plan import plan, resolve
from exp.config.freeze import freeze
from exp.errors import UserCodeError
from exp.models.containers import ProgramModel
from exp.run import run

SAMPLES, CLASSES, NUMBERS, FEATURES = {"train": 140, "val": 30, "test": 30}, 4, 2, 6
LR = 0.02
METRICS = {
    "accuracy": lambda output, target: (output.argmax(1) == target).double().mean(),
    "perplexity": lambda output, target: functional.cross_entropy(output, target).exp(),
    "mae": lambda output, target: (output - target.double()).abs().mean(),
}
LOSSES = {"MSELoss": functional.mse_loss, "L1Loss": functional.l1_loss, "MultiMarginLoss": functional.multi_margin_loss}


class Planned(Exception):
    """Ends a run between two steps."""


def random_settings(seed: int) -> dict[str, Any]:
    """Return the numbers and words of a valid config."""
    draws = random.Random(seed)
    choose = draws.choice
    is_classes = choose([True, True, False])
    accumulate, batch_size = choose([1, 1, 2, 3]), choose([16, 24, 35, 64])
    drop_last, limit = choose([True, False, False, False]), choose([None, None, 3, 5])
    batches = SAMPLES["train"] // batch_size if drop_last else -(-SAMPLES["train"] // batch_size)
    batches, epochs = min(batches, limit or batches), choose([1, 2, 3])
    steps, every, skips = epochs * -(-batches // accumulate), choose([None, None, 1, 2]), choose([True, False, False])
    return {
        "seed": seed,
        "is_classes": is_classes,
        "container": choose(["sequential", "module_list", "module_dict"]),
        "word": choose(["fp64", "fp64", "fp64", "fp32", "bf16", "fp16"]),
        "terms": {
            name: random_term(draws, is_classes) for name in ["first", "second", "third"][: choose([1, 1, 2, 3])]
        },
        "metrics": choose([[], ["accuracy"], ["accuracy"] if skips else ["accuracy", "perplexity"]])
        if is_classes
        else ["mae"],
        "metric_stages": choose([["val", "test"], ["val"], ["train", "val"], ["train", "val", "test"]]),
        "batch_size": batch_size,
        "drop_last": drop_last,
        "limit_train_batches": limit,
        "limit_val_batches": choose([None, 1, 2]),
        "limit_test_batches": choose([None, 1, 2]),
        "accumulate": accumulate,
        "batches": batches,
        "epochs": epochs,
        "optimizer": choose(["sgd", "adam", "adamw"]),
        "has_group": choose([True, False]),
        "scheduler": choose(["constant", *(["cosine"] if steps > 3 else []), "step", "plateau"]),
        "callbacks": choose([[], [], ["ema"]]),
        "monitor": choose(["loss/val", "loss/val", "loss/train", "loss/train_epoch"]),
        "test": choose([True, True, False]),
        "log_every_n_steps": choose([1, 2, 3, 50]),
        "val_check_interval": choose([None, None, *range(1, batches + 1)]),
        "check_val_every_n_epoch": choose([1, 1, 2]) if epochs > 1 else 1,
        "steps_per_execution": choose([None, 1]),
        "checkpoint": every,
        "skips": skips,
        "poisoned": draws.sample(range(epochs * batches), 1) if skips else [],
        "fails_at": draws.randrange(1, epochs * batches) if every and steps > 3 else None,
        "init_scale": choose([2.0**10, 2.0**15]),
        "growth_interval": choose([1, 3]),
    }


def random_term(draws: random.Random, is_classes: bool) -> dict[str, Any]:
    """Return a term of the objective, as the config has it."""
    if not is_classes:
        loss: dict[str, Any] = {"_target_": draws.choice(["torch.nn.MSELoss", "torch.nn.L1Loss"])}
    elif draws.random() < 0.2:
        loss = {"_target_": "torch.nn.MultiMarginLoss"}
    else:
        loss = {"_target_": "exp.objectives.terms.CrossEntropy", "label_smoothing": draws.choice([0.0, 0.1])}
        if draws.random() < 0.4:
            loss["class_weights"] = [draws.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(CLASSES)]
        if draws.random() < 0.3:
            loss["ignore_index"] = draws.randrange(CLASSES)
    weight = draws.choice([1.0, 1.0, 0.3, 2.0])
    return {"_target_": "exp.objectives.objective.Term", "weight": weight, "loss": loss}


def overrides(settings: dict[str, Any], directory: Path) -> list[str]:
    """Return the command line of a config."""
    words = {
        "model": settings["container"],
        "model.layers.hidden.out_features": 5,
        "data": "tensors",
        "data.dataset.path": str(directory / ("classes.pt" if settings["is_classes"] else "numbers.pt")),
        "data.parts": SAMPLES,
        "data.batch_size": settings["batch_size"],
        "data.drop_last": settings["drop_last"],
        "precision": settings["word"],
        "objective": [],
        "metrics": settings["metrics"],
        "metric_stages": settings["metric_stages"],
        "optimizer": settings["optimizer"],
        "optimizer.lr": LR,
        "+optimizer.groups": {"head": {"parameters": "'head.*'", "lr": LR / 4}} if settings["has_group"] else {},
        "scheduler": settings["scheduler"],
        "hooks": [],
        "logger": ["tensorboard", "csv"],
        "callbacks": settings["callbacks"],
        "monitor": settings["monitor"],
        "test": settings["test"],
        "trainer.max_epochs": settings["epochs"],
        "trainer.enable_progress_bar": False,
        "trainer.accumulate_grad_batches": settings["accumulate"],
        **{f"trainer.limit_{stage}_batches": settings[f"limit_{stage}_batches"] for stage in SAMPLES},
        **{
            f"trainer.{name}": settings[name]
            for name in ("log_every_n_steps", "val_check_interval", "check_val_every_n_epoch")
        },
        "runtime.steps_per_execution": settings["steps_per_execution"],
        "runtime.non_finite": "skip" if settings["skips"] else "stop",
        "checkpoint.every_n_steps": settings["checkpoint"],
        "hydra.run.dir": str(directory / "run"),
        **{f"+objective.{name}": term for name, term in settings["terms"].items()},
    }
    if settings["scheduler"] == "cosine":
        words["+scheduler.warmup_steps"] = 2
    if settings["scheduler"] == "step":
        words |= {"scheduler.step_size": 1, "+scheduler.gamma": 0.5}
    if settings["scheduler"] == "plateau":
        words |= {"scheduler.patience": 0, "+scheduler.threshold": 0.5, "scheduler.monitor": "loss/val"}
    if settings["word"] == "fp16":
        words |= {f"precision.scaler.{name}": settings[name] for name in ("init_scale", "growth_interval")}
    return [f"{key}={on_the_command_line(value)}" for key, value in words.items()]


def on_the_command_line(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {on_the_command_line(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(on_the_command_line, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Forward:
    """A batch that the network got. are_finite: the gradients after the batch."""

    indices: Tensor
    output: Tensor
    is_training: bool
    are_finite: bool = True


@dataclass
class Record:
    """The batches of a run, in order. poisoned, fails_at: training batches that return nan, or end the process."""

    poisoned: list[int]
    fails_at: int | None
    forwards: list[Forward] = field(default_factory=list)
    count: int = 0
    seen: list[nn.Module] = field(default_factory=list)

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(module, ProgramModel) or type(output) is not Tensor or output.device.type != "cpu":
            return None
        indices = (inputs[0][:, 0].double() * 256).round().long()
        if len(indices.unique()) < len(indices):
            return None  # exp runs the network once before training, on samples that are not of the data
        if not any(module is one for one in self.seen):
            self.seen.append(module)
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(self.gradient)
        is_training = module.training and torch.is_grad_enabled()
        if is_training and self.count == self.fails_at:
            self.fails_at = None
            raise Planned
        if is_training and self.count in self.poisoned:
            output = output * torch.nan
        self.count += is_training
        self.forwards.append(Forward(indices, output.detach().clone(), is_training))
        return output

    def gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.forwards[-1].are_finite &= bool(parameter.grad.isfinite().all())

    @contextmanager
    def recording(self) -> Iterator[None]:
        handle = register_module_forward_hook(self.forward)
        try:
            yield
        finally:
            handle.remove()


@dataclass
class State:
    """What a checkpoint holds: the loss scale and the schedule's progress."""

    scale: float
    streak: int = 0
    skipped: int = 0
    updates: int = 0
    epochs: int = 0
    validated: float | None = None
    plateau: list[float] = field(default_factory=list)


Points = dict[str, dict[int, float]]
Batches = list[tuple[Tensor, Tensor]]


class Expected:
    """Computes every tag of a run from its recorded batches."""

    def __init__(self, settings: dict[str, Any], targets: Tensor) -> None:
        self.settings, self.targets, self.terms = settings, targets, settings["terms"]
        self.points: Points = {}
        self.state = State(scale=settings["init_scale"])
        self.saved: dict[int, State] = {}
        self.steps: dict[int, list[tuple[int, float, Batches]]] = {}  # of each epoch: step, loss, batches

    def add(self, tag: str, step: int, value: Any) -> None:
        self.points.setdefault(tag, {}).setdefault(step, float(value))

    def replay(self, forwards: list[Forward], *, index: int) -> None:
        """Add the tags of a process that starts after step `index`."""
        settings = self.settings
        self.index = self.first = index
        if index:
            self.state = copy.deepcopy(self.saved[index])
        self.points = {tag: {step: one for step, one in of.items() if step <= index} for tag, of in self.points.items()}
        self.steps = {epoch: [one for one in of if one[0] <= index] for epoch, of in self.steps.items()}
        self.rates: dict[str, float] = {}
        self.epoch, done = divmod(index, -(-settings["batches"] // settings["accumulate"]))
        self.batch = done * settings["accumulate"]
        place, window = 0, list[Forward]()
        while place < len(forwards):
            if not forwards[place].is_training:
                place = self.evaluate(forwards, place)
                continue
            window.append(forwards[place])
            place, self.batch = place + 1, self.batch + 1
            is_last = self.batch == settings["batches"]
            if is_last or self.batch % settings["accumulate"] == 0:
                self.step(window)
                window = []
            every = settings["val_check_interval"] or settings["batches"]
            if self.batch % every == 0 and (self.epoch + 1) % settings["check_val_every_n_epoch"] == 0:
                place = self.evaluate(forwards, place)
            if is_last:
                self.end_epoch()

    def step(self, window: list[Forward]) -> None:
        settings, state = self.settings, self.state
        self.index += 1
        rates = self.learning_rates()
        is_taken = window[-1].are_finite
        state.skipped += not is_taken
        state.streak = state.streak + 1 if is_taken else 0
        if not is_taken:
            state.scale *= 0.5
        elif state.streak == settings["growth_interval"]:
            state.scale, state.streak = state.scale * 2.0, 0
        batches = [self.batch_of(one) for one in window]
        means = {}
        for name in self.terms:
            found = [self.mean(name, *batch) for batch in batches]
            means[name] = sum(value * divisor for value, divisor in found) / (sum(one for _, one in found) or 1.0)
        loss = sum(self.terms[name]["weight"] * mean for name, mean in means.items())
        self.add("loss/train", self.index, loss)
        self.add_terms("train", means, self.index)
        every, done = settings["log_every_n_steps"], self.index - self.first
        is_write = self.index % every == 0 or (done < every and done & (done - 1) == 0)
        if rates != self.rates or is_write:
            self.rates = rates
            for name, rate in rates.items():
                self.add(f"optimizer/lr/{name}", self.index, rate)
        if settings["word"] == "fp16" or settings["skips"]:
            self.add("precision/skipped_steps", self.index, state.skipped)
        if settings["word"] == "fp16":
            self.add("precision/loss_scale", self.index, state.scale)
        state.updates += is_taken
        self.steps.setdefault(self.epoch, []).append((self.index, loss, batches))
        self.saved[self.index] = copy.deepcopy(state)

    def learning_rates(self) -> dict[str, float]:
        state, kind, factor = self.state, self.settings["scheduler"], 1.0
        if kind == "cosine":
            done, total = (
                state.updates,
                self.settings["epochs"] * -(-self.settings["batches"] // self.settings["accumulate"]),
            )
            falling = (1 + math.cos(math.pi * (done - 2) / (total - 2))) / 2 if done < total else 0.0
            factor = (done + 1) / 3 if done < 2 else falling
        elif kind == "step":
            factor = 0.5**state.epochs
        elif kind == "plateau":
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
            schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            for value in state.plateau:
                schedule.step(value)
            factor = optimizer.param_groups[0]["lr"]
        groups = {"head": LR / 4 * factor} if self.settings["has_group"] else {}
        return {**groups, "default": LR * factor}

    def batch_of(self, forward: Forward) -> tuple[Tensor, Tensor]:
        return forward.output.double(), self.targets[forward.indices]

    def mean(self, name: str, output: Tensor, target: Tensor) -> tuple[float, float]:
        """Return a term over samples, and the number that its mean divides by."""
        loss = self.terms[name]["loss"]
        kind = loss["_target_"].rpartition(".")[2]
        if kind in LOSSES:
            target = target if self.settings["is_classes"] else target.double()
            return float(LOSSES[kind](output, target)), float(len(target))
        weights = torch.tensor(loss.get("class_weights", [1.0] * CLASSES), dtype=torch.float64)
        ignored = loss.get("ignore_index", -100)
        weight = float((weights[target] * (target != ignored)).sum())
        if not weight:
            return (math.nan if output.isnan().any() else 0.0), 0.0
        smoothing = loss["label_smoothing"]
        value = functional.cross_entropy(output, target, weights, ignore_index=ignored, label_smoothing=smoothing)
        return float(value), weight

    def means(self, batches: Batches, *, leaves_out: bool = False) -> dict[str, float]:
        """Return each term over all samples. leaves_out: without the batches whose term is not finite."""
        found = {}
        for name in self.terms:
            parts = [self.mean(name, *batch) for batch in batches]
            parts = [one for one in parts if one[1] and (math.isfinite(one[0]) or not leaves_out)]
            if parts:
                found[name] = sum(mean * weight for mean, weight in parts) / sum(weight for _, weight in parts)
        return found

    def end_epoch(self) -> None:
        settings, state = self.settings, self.state
        steps = self.steps[self.epoch]
        batches = [batch for _, _, batches in steps for batch in batches]
        if any({"class_weights", "ignore_index"} & term["loss"].keys() for term in self.terms.values()):
            means = self.means(batches, leaves_out=settings["skips"])
            loss = sum(self.terms[name]["weight"] * mean for name, mean in means.items())
        else:
            sized = [(loss, sum(len(target) for _, target in own)) for _, loss, own in steps]
            sized = [one for one in sized if math.isfinite(one[0]) or not settings["skips"]]
            total = sum(size for _, size in sized)
            loss = sum(loss * size for loss, size in sized) / total if total else math.nan
        self.add("loss/train_epoch", self.index, loss)
        self.add_metrics("train", batches, self.index)
        state.epochs += 1
        if state.epochs % settings["check_val_every_n_epoch"] == 0 and state.validated is not None:
            state.plateau.append(state.validated)
        self.saved[self.index] = copy.deepcopy(state)
        self.epoch, self.batch = self.epoch + 1, 0

    def evaluate(self, forwards: list[Forward], place: int) -> int:
        settings = self.settings
        stage = "test" if self.epoch == settings["epochs"] else "val"
        count = -(-SAMPLES[stage] // settings["batch_size"])
        count = min(count, settings[f"limit_{stage}_batches"] or count)
        assert [one.is_training for one in forwards[place : place + count]] == [False] * count, stage
        batches = [self.batch_of(one) for one in forwards[place : place + count]]
        index = self.best_step() if stage == "test" else self.index
        means = self.means(batches)
        loss = sum(self.terms[name]["weight"] * mean for name, mean in means.items())
        self.add(f"loss/{stage}", index, loss)
        self.add_terms(stage, means, index)
        self.add_metrics(stage, batches, index)
        if stage == "val":
            self.state.validated = loss
        return place + count

    def best_points(self) -> Points:
        """Return each best value when it was found, and its step."""
        monitor = {"loss/train": "loss/train_epoch"}.get(self.settings["monitor"], self.settings["monitor"])
        best: dict[int, float] = {}
        for step, value in sorted(self.points.get(monitor, {}).items()):
            if math.isfinite(value) and value < min(best.values(), default=math.inf):
                best[step] = value
        return {"monitor/best": best, "monitor/best_step": {step: float(step) for step in best}}

    def best_step(self) -> int:
        return max(self.best_points()["monitor/best"], default=self.index)

    def add_terms(self, stage: str, means: dict[str, float], index: int) -> None:
        if len(self.terms) > 1:
            for name, mean in means.items():
                self.add(f"loss/{stage}/{name}", index, mean)

    def add_metrics(self, stage: str, batches: Batches, index: int) -> None:
        output, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        for name in self.settings["metrics"] if stage in self.settings["metric_stages"] else ():
            self.add(f"{name}/{stage}", index, METRICS[name](output, target))


def logged(directory: Path) -> Points:
    """Return the scalars that TensorBoard reads. A tag must not have two points at a step."""
    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    points: Points = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        points[tag] = {event.step: event.value for event in events}
        assert len(points[tag]) == len(events), f"{tag} has two points at a step"
    return points


def in_csv(directory: Path) -> Points:
    points: Points = {}
    with (directory / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for tag, value in row.items():
                if value:
                    points.setdefault(tag, {})[step] = float(value)
    return points


def expected_points(settings: dict[str, Any], place: Path) -> tuple[Path, Expected]:
    """Train, if the config says so in two processes of which the first fails, and compute the tags."""
    generator = torch.Generator().manual_seed(settings["seed"])
    count = sum(SAMPLES.values())
    inputs = torch.randn(count, FEATURES, generator=generator)
    inputs[:, 0] = torch.arange(count) / 256  # exact in bfloat16
    classes = torch.randint(CLASSES, (count,), generator=generator)
    numbers = inputs[:, 1 : 1 + NUMBERS] * 0.5 + torch.randn(count, NUMBERS, generator=generator)
    torch.save({"input": inputs, "target": classes}, place / "classes.pt")
    torch.save({"input": inputs, "target": numbers}, place / "numbers.pt")
    directory = freeze(plan(resolve(exp.compose(overrides(settings, place)))).resolved.config)
    record = Record(poisoned=settings["poisoned"], fails_at=settings["fails_at"])
    expected = Expected(settings, classes if settings["is_classes"] else numbers)
    done = 0
    with record.recording():
        try:
            run(directory)
        except UserCodeError as error:
            if not isinstance(error.__cause__, Planned):
                raise
            first, record.forwards = record.forwards, []
            last = directory / "checkpoints" / "last.ckpt"
            done = torch.load(last, weights_only=True)["global_step"] if last.is_file() else 0
            run(directory, resume=last if done else None)
            if done:
                expected.replay(first, index=0)
    expected.replay(record.forwards, index=done)
    return directory, expected


def assert_tags_are_as_computed(seed: int, place: Path) -> None:
    settings = random_settings(seed)
    directory, expected = expected_points(settings, place)
    shown, computed = logged(directory), {tag: points for tag, points in expected.points.items() if points}
    computed |= {tag: points for tag, points in expected.best_points().items() if points}
    assert shown.keys() == computed.keys(), seed
    is_double = settings["word"] == "fp64"
    for tag, values in computed.items():
        if tag.startswith("precision/"):  # logged at some steps only
            values = {step: values[step] for step in shown[tag]}
        tolerance = {"rel": 1e-6, "abs": 1e-9} if is_double else {"rel": 5e-5, "abs": 2e-6}
        assert shown[tag] == pytest.approx(values, nan_ok=True, **tolerance), (seed, tag)
    report = json.loads((directory / "report.json").read_text())
    last = {tag: points[max(points)] for tag, points in shown.items()}
    assert {tag: float(value) for tag, value in report["metrics"].items()} == pytest.approx(last, rel=1e-6, nan_ok=True)
    assert report["best"] is None or report["best"]["step"] == expected.best_step(), seed
    table = in_csv(directory)
    assert table.keys() == shown.keys(), seed
    for tag, points in shown.items():
        assert table[tag] == pytest.approx(points, rel=1e-6, nan_ok=True), (seed, tag)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [3, 23, 48])
def test_each_tag_is_as_computed(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_tags_are_as_computed(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_tag_of_random_configs_is_as_computed(share: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = share.random()
    for number in range(share.count(200)):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        assert_tags_are_as_computed(draws.randrange(2**32), place)
