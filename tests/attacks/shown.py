"""What a run shows against a program by hand, for configs at random.

    python tests/attacks/shown.py [--configs 200] [--seed 0] [--only SEED ...]

Each config is lived in this process with a network of a few numbers. torch's own global hooks, of modules and of
optimizers, write down what went in, what came out, each gradient and each parameter before and behind a step; a sample
says by its own first feature which it is. From that, and from the config's numbers, the program below computes every
tag in float64 and plain torch, and holds it against what TensorBoard's own reader finds: the same tags, each at the
same steps, once, with the same values; metrics.csv and report.json have the same. Times and memory are held to bounds.
tests/attacks/test_shown.py does the same with a handful.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import exp
from exp.check.plan import plan, resolve
from exp.config.freeze import freeze
from exp.errors import UserCodeError
from exp.models.containers import ProgramModel
from exp.run import run as live

SAMPLES, CLASSES, NUMBERS, FEATURES = {"train": 140, "val": 30, "test": 30}, 4, 2, 6
LR = 0.02
LAYERS = ("hidden", "activation", "hidden2", "activation2", "head")
MIB = 2**20
# What no program computes by hand: held to bounds.
MEASURED = ("throughput/", "memory/host_", "memory/activations_mib")
PANELS = ("gradients/histogram/",)


class Planned(Exception):
    """Ends a run in the middle."""


# --- the configs ---


def drawn(seed: int) -> dict[str, Any]:
    """A legal config."""
    draws = random.Random(seed)
    choose = draws.choice
    rarely = lambda share: draws.random() < share  # noqa: E731
    is_classes = not rarely(0.3)
    word = choose(["fp64", "fp64", "fp64", "fp32", "bf16", "fp16"])
    accumulate, batch_size = choose([1, 1, 2, 3]), choose([16, 24, 35, 64])
    drop_last, limit = rarely(0.2), choose([None, None, 3, 5])
    batches = SAMPLES["train"] // batch_size if drop_last else -(-SAMPLES["train"] // batch_size)
    batches = min(batches, limit or batches)
    terms = _terms(draws, is_classes)
    phases = _phases(draws, list(terms)) if rarely(0.25) else {}
    metrics = draws.sample(
        ["accuracy", "f1", "auroc", "perplexity", "bits_per_character"] if is_classes else ["mae", "rmse", "r2"],
        choose([0, 1, 2, 3]),
    )
    stages = choose([["val", "test"], ["val"], ["train", "val"], ["train", "val", "test"]])
    if phases and metrics and min(phase["every_n_steps"] for phase in phases.values()) > 1:
        stages = ["val", "test"]
    skips = rarely(0.25)
    if skips:
        metrics = [name for name in metrics if name in ("accuracy", "mae")]
    epochs = choose([1, 2, 3])
    steps = epochs * -(-batches // accumulate)
    every = choose([None, None, 1, 2])
    monitors = ["loss/val", "loss/val", "loss/train", "loss/train_epoch"]
    monitors += [f"{name}/val" for name in metrics if name in ("f1", "mae")]
    return {
        "seed": seed,
        "is_classes": is_classes,
        "container": choose(["sequential", "module_list", "module_dict"]),
        "activation": choose(["ReLU", "Tanh", "GELU", "ReLU6", "Sigmoid"]),
        "word": word,
        "terms": terms,
        "phases": phases,
        "metrics": metrics,
        "metric_stages": stages,
        "batch_size": batch_size,
        "drop_last": drop_last,
        "limit_train_batches": limit,
        "limit_val_batches": choose([None, 1, 2]),
        "limit_test_batches": choose([None, 1, 2]),
        "accumulate": accumulate,
        "batches": batches,
        "epochs": epochs,
        "clip": None if phases else choose([None, None, 0.3, 0.02]),
        "clip_algorithm": choose(["norm", "value"]),
        "optimizer": choose(["sgd", "adam", "adamw"]),
        "has_group": not phases and rarely(0.3),
        "scheduler": choose(["constant", *(["warmup", "cosine"] if steps > 3 else []), "step", "one_cycle", "plateau"]),
        "ema": rarely(0.2),
        "monitor": choose(monitors),
        "test": rarely(0.7),
        "log_every_n_steps": choose([1, 2, 3, 50]),
        "val_check_interval": choose([None, None, *range(1, batches + 1)]),
        "check_val_every_n_epoch": choose([1, 1, 2]) if epochs > 1 else 1,
        "steps_per_execution": choose([None, 1]),
        "checkpoint": every,
        "skips": skips,
        "poisoned": draws.sample(range(epochs * batches), 1) if skips and rarely(0.7) else [],
        "fails_at": draws.randrange(1, epochs * batches) if every and steps > 3 and rarely(0.6) else None,
        "hooks": draws.sample(["gradients", "memory", "throughput", "activations"], choose([1, 2, 3, 4])),
        "norms": choose([1, 2, 3]),
        "clipped": choose(["total", "each", None]),
        "histograms": choose([None, 2, 5]),
        "ratios": choose([None, 1, 3]),
        "shares": choose([None, 2, 4]),
        "memory": choose([1, 3, 50]),
        "throughput": choose([1, 2, 4]),
        "activations": choose([1, 2, 3]),
        "scale": {"init_scale": choose([2.0**10, 2.0**15]), "growth_interval": choose([1, 3])},
    }


def _terms(draws: random.Random, is_classes: bool) -> dict[str, dict[str, Any]]:
    """By name: the class, its settings, its weight."""
    found: dict[str, dict[str, Any]] = {}
    for name in draws.sample(["first", "second", "third"], draws.choice([1, 1, 2, 3])):
        if not is_classes:
            kind = draws.choice(["torch.nn.MSELoss", "torch.nn.L1Loss", "torch.nn.HuberLoss"])
            settings: dict[str, Any] = {}
        elif draws.random() < 0.2:
            kind, settings = "torch.nn.MultiMarginLoss", {}
        else:
            kind = "exp.objectives.terms.CrossEntropy"
            settings = {"label_smoothing": draws.choice([0.0, 0.1])}
            if draws.random() < 0.4:
                settings["class_weights"] = [draws.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(CLASSES)]
            if draws.random() < 0.3:
                settings["ignore_index"] = draws.randrange(CLASSES)
        found[name] = {"kind": kind, "settings": settings, "weight": draws.choice([1.0, 1.0, 0.3, 2.0])}
    return found


def _phases(draws: random.Random, terms: list[str]) -> dict[str, dict[str, Any]]:
    """Two: the head, at every step, with all terms; what is below it, with some."""
    some = draws.sample(terms, draws.choice(range(1, len(terms) + 1)))
    own = {"every_n_steps": 1, "repeats": 1, "clip": None}
    return {
        "upper": {**own, "terms": terms, "parameters": ["head.*"], "repeats": draws.choice([1, 1, 2])},
        "lower": {
            **own,
            "terms": some,
            "parameters": ["hidden*.*"],
            "every_n_steps": draws.choice([1, 2]),
            "clip": draws.choice([None, 0.2]),
        },
    }


def command(settings: dict[str, Any], directory: Path) -> list[str]:
    """The overrides of a config."""
    word = {"warmup": "constant"}.get(settings["scheduler"], settings["scheduler"])
    groups = {"head": {"parameters": "head.*", "lr": LR / 4}} if settings["has_group"] else {}
    hooks = [name for name in ("gradients", "memory", "throughput", "activations") if name in settings["hooks"]]
    words = {
        "model": settings["container"],
        "model.layers.hidden.out_features": 5,
        "model.layers.hidden2.out_features": 4,
        "model.layers.activation._target_": f"torch.nn.{settings['activation']}",
        "data": "tensors",
        "data.dataset.path": str(directory / ("classes.pt" if settings["is_classes"] else "numbers.pt")),
        "data.parts": _flow(SAMPLES),
        "data.batch_size": settings["batch_size"],
        "data.drop_last": _flow(settings["drop_last"]),
        "precision": settings["word"],
        "objective": "[]",
        "metrics": f"[{','.join(settings['metrics'])}]",
        "metric_stages": f"[{','.join(settings['metric_stages'])}]",
        "optimizer": settings["optimizer"],
        "optimizer.lr": LR,
        "+optimizer.groups": _flow(groups),
        "scheduler": word,
        "hooks": f"[{','.join(hooks)}]",
        "logger": "[tensorboard,csv]",
        "callbacks": "[ema]" if settings["ema"] else "[]",
        "monitor": settings["monitor"],
        "mode": "max" if settings["monitor"] == "f1/val" else "min",
        "test": _flow(settings["test"]),
        "trainer.max_epochs": settings["epochs"],
        "trainer.enable_progress_bar": "false",
        "trainer.accumulate_grad_batches": settings["accumulate"],
        "trainer.gradient_clip_val": _flow(settings["clip"]),
        "trainer.gradient_clip_algorithm": settings["clip_algorithm"],
        "trainer.log_every_n_steps": settings["log_every_n_steps"],
        "trainer.val_check_interval": _flow(settings["val_check_interval"]),
        "trainer.check_val_every_n_epoch": settings["check_val_every_n_epoch"],
        **{f"trainer.{name}": _flow(settings[name]) for name in settings if name.startswith("limit_")},
        "runtime.steps_per_execution": _flow(settings["steps_per_execution"]),
        "runtime.non_finite": "skip" if settings["skips"] else "stop",
        "checkpoint.every_n_steps": _flow(settings["checkpoint"]),
        "hydra.run.dir": directory / "run",
    }
    if settings["scheduler"] == "warmup":
        words["scheduler.warmup_steps"] = 3
    if settings["scheduler"] == "cosine":
        words["+scheduler.warmup_steps"] = 2
    if settings["scheduler"] == "step":
        words |= {"scheduler.step_size": 1, "+scheduler.gamma": 0.5}
    if settings["scheduler"] == "plateau":
        words |= {"scheduler.patience": 0, "+scheduler.threshold": 0.5, "scheduler.monitor": "loss/val"}
    if settings["word"] == "fp16":
        words |= {f"precision.scaler.{name}": value for name, value in settings["scale"].items()}
    # All that there is, as scalars.
    each = {"gradients": "each_parameter", "memory": "details", "activations": "each_layer", "throughput": "each_part"}
    for name in hooks:
        words[f"+hooks.{name}.{each[name]}"] = True
        if name != "gradients":
            words[f"+hooks.{name}.every_n_steps"] = settings[name]
    if "gradients" in hooks:
        words |= {
            "+hooks.gradients.every_n_steps": settings["norms"],
            "+hooks.gradients.clipped": _flow(settings["clipped"]),
            "+hooks.gradients.histogram_every_n_steps": _flow(settings["histograms"]),
            "+hooks.gradients.update_ratio_every_n_steps": _flow(settings["ratios"]),
            "+hooks.gradients.shares_every_n_steps": _flow(settings["shares"]),
        }
    for name, term in settings["terms"].items():
        loss = _flow({"_target_": term["kind"], **term["settings"]})
        words[f"+objective.{name}"] = (
            f"{{_target_: exp.objectives.objective.Term, weight: {term['weight']}, loss: {loss}}}"
        )
    for name, phase in settings["phases"].items():
        entries = {key: phase[key] for key in ("terms", "parameters", "every_n_steps", "repeats")}
        words[f"+phases.{name}"] = _flow({**entries, "gradient_clip_val": phase["clip"]})
    return [f"{key}={value}" for key, value in words.items()]


def _flow(value: Any) -> str:
    """As YAML in one line, of what Hydra's grammar takes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and "*" in value:
        return f"'{value}'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- what torch's own hooks write down ---


@dataclass
class Record:
    """What happened, in order: (kind, what) of every forward, gradient and optimizer step.

    poisoned, fails_at: the numbers of training forwards that give nan, or end the process.
    """

    poisoned: Sequence[int] = ()
    fails_at: int | None = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seen: list[nn.Module] = field(default_factory=list)
    trained: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    outputs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    forwards: int = 0

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or output.device.type != "cpu" or type(output) is not Tensor:
            return None
        if not isinstance(module, ProgramModel):
            if next(module.children(), None) is None:
                self.outputs.append((module, output.detach().clone()))
            return None
        training = module.training and torch.is_grad_enabled()
        if not any(module is one for one in self.seen):
            self._meet(module)
        if training and not any(module is one for one in self.trained):
            # By now what a checkpoint holds is in it.
            self.trained.append(module)
            named = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            self.events.append(("network", {"parameters": named}))
        if training and self.forwards == self.fails_at:
            self.fails_at = None
            raise Planned
        if training and self.forwards in self.poisoned:
            output = output * torch.nan
        self.forwards += training
        names = {id(one): name for name, one in module.named_modules()}
        layers = [(names[id(one)], value) for one, value in self.outputs if id(one) in names]
        self.outputs.clear()
        event = {"input": inputs[0].detach().clone(), "output": output.detach().clone(), "layers": layers}
        self.events.append(("train" if training else "evaluation", event))
        return output

    def _meet(self, network: nn.Module) -> None:
        self.seen.append(network)
        for name, parameter in network.named_parameters():
            self.names[id(parameter)] = name

            def took(one: Tensor, name: str = name) -> None:
                assert one.grad is not None
                self.events.append(("gradient", {"name": name, "value": one.grad.detach().clone()}))

            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # else torch refuses the hook: another phase may be under way
            parameter.register_post_accumulate_grad_hook(took)
            parameter.requires_grad_(is_trained)

    def step(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        held = {self.names[id(one)]: one.detach().clone() for group in groups for one in group["params"]}
        states = {id(one): one for state in optimizer.state.values() for one in state.values()}
        size = sum(one.nbytes for one in states.values() if isinstance(one, Tensor))
        self.events.append(("step", {"parameters": held, "state": size}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = [
            register_module_forward_hook(self.forward),
            register_optimizer_step_post_hook(lambda one, *_: self.step(one)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# --- the program by hand ---

Points = dict[str, dict[int, float]]


class ByHand:
    """Computes each tag of a run, from what was written down."""

    def __init__(self, settings: dict[str, Any], targets: Tensor) -> None:
        self.settings, self.targets = settings, targets
        self.points: Points = {}
        # The first step of each process: (steps done before it).
        self.index = self.first = 0
        self.epoch = self.batch = 0
        self.scale, self.streak, self.skipped = float(settings["scale"]["init_scale"]), 0, 0
        self.is_bad = False
        self.parameters: dict[str, Tensor] = {}
        self.state: dict[str, int] = {}
        self.epochs: dict[int, list[Any]] = {}
        self.rates = Rates(settings)
        self.rates_then: dict[str, dict[str, float]] = {}
        self.at: dict[int, Any] = {}

    def add(self, tag: str, step: int, value: Any) -> None:
        points = self.points.setdefault(tag, {})
        if step not in points:
            points[step] = float(value)

    # A process begins, or goes on from step `index`, with what the steps before it have left.
    def begin(self, events: list[tuple[str, dict[str, Any]]], *, index: int) -> None:
        settings = self.settings
        self.index = self.first = index
        if index:
            kept = self.at[index]
            self.scale, self.streak, self.skipped, self.state = kept["scale"]
            self.rates = kept["rates"].copy()
            self.points = {tag: {s: v for s, v in p.items() if s <= index} for tag, p in self.points.items()}
            self.points = {tag: points for tag, points in self.points.items() if points}
        self.rates_then = {}
        of_epoch = -(-settings["batches"] // settings["accumulate"])
        self.epoch, done = divmod(index, of_epoch)
        self.batch = done * settings["accumulate"]
        self.epochs = {epoch: [one for one in steps if one["index"] <= index] for epoch, steps in self.epochs.items()}
        self._run(events)

    def _run(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        settings = self.settings
        batches, accumulate = settings["batches"], settings["accumulate"]
        if settings["phases"] and self.batch == batches:
            self.epoch, self.batch = self.epoch + 1, 0
        micro: list[dict[str, Any]] = []
        window: list[tuple[str, dict[str, Any]]] = []
        place = 0
        while place < len(events):
            kind, event = events[place]
            if kind == "network":
                self.parameters = dict(event["parameters"])
            if kind == "network" or (kind == "evaluation" and self._is_trial(event)):
                place += 1
                continue
            if kind == "evaluation":
                place = self._evaluation(events, place)
                continue
            # One micro-batch, or with phases the whole window of them.
            ends = lambda batch: (batch + 1) % accumulate == 0 or batch + 1 == batches  # noqa: E731
            if settings["phases"]:
                count = next(n for n in range(1, accumulate + 1) if ends(self.batch + n - 1))
                due = [(name, phase) for name, phase in settings["phases"].items() if self._is_due(phase)]
                forwards = sum(count * phase["repeats"] for _, phase in due)
            else:
                count = forwards = 1
            end, met = place, 0
            while end < len(events) and not (
                events[end][0] in ("evaluation", "network") or (events[end][0] == "train" and met == forwards)
            ):
                met += events[end][0] == "train"
                end += 1
            if met < forwards:
                return  # the process ended here
            window += events[place:end]
            micro += [event for kind, event in events[place:end] if kind == "train"]
            place = end
            self.batch += count
            if ends(self.batch - 1):
                self._step(window, count=count)
                window, micro = [], []
            if self.batch == batches:
                # A validation at the epoch's end comes before what the epoch gives.
                if self._validates():
                    place = self._evaluation(events, place)
                self._end_epoch()
            elif self._validates():
                place = self._evaluation(events, place)

    def _is_trial(self, event: dict[str, Any]) -> bool:
        """A run tries its network before the first step, on no samples of the data."""
        return len(set(_places(event["input"]).tolist())) < len(event["input"])

    def _is_due(self, phase: dict[str, Any]) -> bool:
        return bool(self.index % phase["every_n_steps"] == 0)

    def _validates(self) -> bool:
        settings = self.settings
        every = settings["val_check_interval"] or settings["batches"]
        return self.batch % every == 0 and (self.epoch + 1) % settings["check_val_every_n_epoch"] == 0

    # --- a step ---

    def _step(self, window: list[tuple[str, dict[str, Any]]], *, count: int) -> None:
        settings = self.settings
        self.index += 1
        index = self.index
        rates = self.rates.now()
        found: dict[str, Any] = {"index": index, "batches": []}
        runs = self._runs(window, count)
        for turn in runs:
            if turn["repeat"]:
                self._update_scale()
            self._turn(turn, found)
        self._update_scale()
        if settings["phases"]:
            self._losses_of_phases(runs, found)
        else:
            self._losses(runs[0], found)
        self._memory_and_activations(window, runs, index)
        self._rates(rates, [turn["phase"] for turn in runs if turn["is_last"]])
        if settings["word"] == "fp16" or settings["skips"]:
            self.add("precision/skipped_steps", index, self.skipped)
            if settings["word"] == "fp16":
                self.add("precision/loss_scale", index, self.scale)
        self.rates.step({turn["phase"]: turn["is_taken"] for turn in runs})
        self.epochs.setdefault(self.epoch, []).append(found)
        self.at[index] = {
            "scale": (self.scale, self.streak, self.skipped, dict(self.state)),
            "rates": self.rates.copy(),
        }

    def _runs(self, window: list[tuple[str, dict[str, Any]]], count: int) -> list[dict[str, Any]]:
        """The passes of a step: one; of phases each repeat of each that is due."""
        phases = {name: one for name, one in self.settings["phases"].items() if self._is_due_at(one, self.index)}
        turns = [(name, r, one["repeats"]) for name, one in phases.items() for r in range(one["repeats"])]
        turns = turns or [(None, 0, 1)]
        found, place = [], 0
        for name, repeat, repeats in turns:
            events: list[tuple[str, dict[str, Any]]] = []
            met = 0
            size = count if name is not None else sum(kind == "train" for kind, _ in window)
            while place < len(window) and not (window[place][0] == "train" and met == size):
                met += window[place][0] == "train"
                events.append(window[place])
                place += 1
            found.append({"phase": name, "repeat": repeat, "is_last": repeat == repeats - 1, "events": events})
        return found

    def _is_due_at(self, phase: dict[str, Any], index: int) -> bool:
        return bool((index - 1) % phase["every_n_steps"] == 0)

    def _turn(self, turn: dict[str, Any], found: dict[str, Any]) -> None:
        settings, index, phase = self.settings, self.index, turn["phase"]
        gradients: dict[str, Tensor] = {}
        behind = None
        for kind, event in turn["events"]:
            if kind == "gradient":
                gradients[event["name"]] = event["value"]
            elif kind == "step":
                behind = event
        before = {name: self.parameters[name] for name in gradients}
        if behind is not None:
            self.parameters |= behind["parameters"]
        turn["is_taken"] = behind is not None
        scale = self.scale if settings["word"] == "fp16" else 1.0
        true = {name: one.double() / scale for name, one in gradients.items()}
        turn["gradients"], turn["before"] = true, before
        turn["bytes"] = sum(one.nbytes for one in gradients.values())
        if settings["word"] == "fp16" or settings["skips"]:
            # A fused optimizer's kernel skips by itself.
            turn["is_taken"] = all(bool(one.isfinite().all()) for one in gradients.values())
            self.skipped += not turn["is_taken"]
            self.is_bad |= not turn["is_taken"]
        # A skipped step of a fused Adam makes its averages; those of SGD are taken back.
        if behind is not None and (turn["is_taken"] or settings["optimizer"] != "sgd"):
            self.state[phase or ""] = behind["state"]
        if turn["is_last"] and "gradients" in settings["hooks"]:
            self._gradients(index, true, phase)

    def _update_scale(self) -> None:
        """As torch.amp.GradScaler has it, once for all optimizers since the last time: twice the scale after so many
        good ones, half after a bad one."""
        is_bad, self.is_bad = self.is_bad, False
        self.streak = 0 if is_bad else self.streak + 1
        if is_bad:
            self.scale *= 0.5
        elif self.streak == self.settings["scale"]["growth_interval"]:
            self.scale, self.streak = self.scale * 2.0, 0

    def _gradients(self, index: int, gradients: dict[str, Tensor], phase: str | None) -> None:
        settings, ending = self.settings, "" if phase is None else f"/{phase}"
        if _has_come(settings["norms"], index):
            for name, one in gradients.items():
                self.add(f"gradients/norm/{name}{ending}", index, size([one]))
            self.add(f"gradients/norm/total{ending}", index, size(gradients.values()))
            value = settings["clip"] if phase is None else settings["phases"][phase]["clip"]
            algorithm = settings["clip_algorithm"] if phase is None else "norm"
            if value and settings["clipped"]:
                clipped = clip(gradients, value, algorithm)
                if settings["clipped"] == "each":
                    for name, one in clipped.items():
                        self.add(f"gradients/norm_clipped/{name}{ending}", index, size([one]))
                self.add(f"gradients/norm_clipped/total{ending}", index, size(clipped.values()))
        if _has_come(settings["shares"], index):
            for name, one in gradients.items():
                self.add(f"gradients/zeros/{name}{ending}", index, (one == 0).double().mean())
                self.add(f"gradients/non_finite/{name}{ending}", index, (~one.isfinite()).double().mean())
        if _has_come(settings["histograms"], index):
            for name, one in gradients.items():
                self.add(f"gradients/histogram/{name}{ending}", index, one.isfinite().sum())

    def _memory_and_activations(self, window: list[Any], runs: list[dict[str, Any]], index: int) -> None:
        settings = self.settings
        if "gradients" in settings["hooks"] and _has_come(settings["ratios"], index):
            starts: dict[str, Tensor] = {}
            for turn in runs:
                if turn["is_last"]:
                    starts = {**turn["before"], **starts}
            for name, start in starts.items():
                change, whole = size([self.parameters[name].double() - start.double()]), size([start])
                self.add(f"gradients/update_ratio/{name}", index, 0.0 if change == 0 else change / (whole or change))
            if starts:
                moved = size([self.parameters[name].double() - start.double() for name, start in starts.items()])
                whole = size(starts.values())
                self.add("gradients/update_ratio/total", index, 0.0 if moved == 0 else moved / (whole or moved))
        if "memory" in settings["hooks"] and _has_come(settings["memory"], index):
            whole = sum(one.nbytes for one in self.parameters.values())
            self.add("memory/parameters_mib", index, whole / MIB)
            self.add("memory/optimizer_mib", index, sum(self.state.values()) / MIB)
            for turn in runs:
                if turn["is_last"]:
                    ending = "" if turn["phase"] is None else f"/{turn['phase']}"
                    self.add(f"memory/gradients_mib{ending}", index, turn["bytes"] / MIB)
        if "activations" in settings["hooks"] and _has_come(settings["activations"], index):
            outputs: dict[str, list[Tensor]] = {}
            for kind, event in window:
                for name, output in event["layers"] if kind == "train" else ():
                    outputs.setdefault(name, []).append(output)
            for name, parts in outputs.items():
                self._activations(name, torch.cat([one.double() for one in parts]), index)

    def _activations(self, name: str, output: Tensor, index: int) -> None:
        self.add(f"activations/mean/{name}", index, output.mean())
        self.add(f"activations/std/{name}", index, output.std(correction=0))
        self.add(f"activations/zeros/{name}", index, (output == 0).double().mean())
        self.add(f"activations/dead_units/{name}", index, (output == 0).all(0).double().mean())
        kind = self.settings["activation"] if name.endswith("activation") else ""
        if kind == "Tanh":
            self.add(f"activations/saturated/{name}", index, (output.abs() >= 0.98).double().mean())
        if kind == "Sigmoid":
            self.add(f"activations/saturated/{name}", index, ((output >= 0.99) | (output <= 0.01)).double().mean())
        if kind == "ReLU6":
            self.add(f"activations/saturated/{name}", index, (output >= 5.94).double().mean())

    def _rates(self, rates: dict[str, dict[str, float]], ran: list[str | None]) -> None:
        for phase in ran:
            now = rates[phase or ""]
            if now != self.rates_then.get(phase or "") or self._is_write(self.index):
                self.rates_then[phase or ""] = now
                for name, rate in now.items():
                    self.add(f"optimizer/lr/{name}", self.index, rate)

    def _is_write(self, index: int) -> bool:
        every, done = self.settings["log_every_n_steps"], index - self.first
        return index % every == 0 or (done < every and done & (done - 1) == 0)

    # --- losses ---

    def _batch(self, event: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """An output, and the targets of the samples that it is of."""
        return event["output"], self.targets[_places(event["input"])]

    def _losses(self, turn: dict[str, Any], found: dict[str, Any]) -> None:
        events = [event for kind, event in turn["events"] if kind == "train"]
        batches = [self._batch(event) for event in events]
        means = {name: self._mean_over_samples(name, batches) for name in self.settings["terms"]}
        loss = sum(self.settings["terms"][name]["weight"] * mean for name, mean in means.items())
        self._add_losses(loss, means, found, batches)

    def _losses_of_phases(self, runs: list[dict[str, Any]], found: dict[str, Any]) -> None:
        loss, means = 0.0, {}
        for turn in runs:
            if turn["is_last"]:
                own = [self._batch(event) for kind, event in turn["events"] if kind == "train"]
                terms = self.settings["phases"][turn["phase"]]["terms"]
                found.setdefault("phases", {})[turn["phase"]] = own
                parts = {name: self._mean_over_samples(name, own) for name in terms}
                loss += sum(self.settings["terms"][name]["weight"] * mean for name, mean in parts.items())
                means |= parts
        # Metrics of training look at the first forward of the step.
        seen = [self._batch(event) for kind, event in runs[0]["events"] if kind == "train"]
        self._add_losses(loss, means, found, seen)

    def _mean_over_samples(self, name: str, batches: list[tuple[Tensor, Tensor]]) -> float:
        counts = [len(target) for _, target in batches]
        parts = [self._mean(name, output, target)[0] for output, target in batches]
        return sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)

    def _add_losses(self, loss: Any, means: dict[str, float], found: dict[str, Any], batches: list[Any]) -> None:
        self.add("loss/train", self.index, loss)
        if len(self.settings["terms"]) > 1:
            for name, mean in means.items():
                self.add(f"loss/train/{name}", self.index, mean)
        found |= {"loss": float(loss), "batches": batches, "size": sum(len(target) for _, target in batches)}

    def _mean(self, name: str, output: Tensor, target: Tensor) -> tuple[float, float]:
        """A term over samples in one call, and by what its mean divides."""
        term, output = self.settings["terms"][name], output.double()
        given = term["settings"]
        if not self.settings["is_classes"]:
            kind = {"MSELoss": functional.mse_loss, "L1Loss": functional.l1_loss, "HuberLoss": functional.huber_loss}
            return float(kind[term["kind"].rpartition(".")[2]](output, target.double())), float(len(target))
        if term["kind"].endswith("MultiMarginLoss"):
            return float(functional.multi_margin_loss(output, target)), float(len(target))
        weights = torch.tensor(given.get("class_weights", [1.0] * CLASSES), dtype=torch.float64)
        ignored = given.get("ignore_index", -100)
        counted = (target != ignored).double()
        weight = float((weights[target] * counted).sum())
        if not weight:
            return (math.nan if output.isnan().any() else 0.0), 0.0
        value = functional.cross_entropy(
            output, target, weight=weights, ignore_index=ignored, label_smoothing=given.get("label_smoothing", 0.0)
        )
        return float(value), weight

    @property
    def _is_weighed(self) -> bool:
        return any({"class_weights", "ignore_index"} & term["settings"].keys() for term in self._terms.values())

    @property
    def _terms(self) -> dict[str, dict[str, Any]]:
        terms: dict[str, dict[str, Any]] = self.settings["terms"]
        return terms

    def _of_stage(self, batches: list[tuple[Tensor, Tensor]], *, leaves_out: bool = False) -> dict[str, float]:
        """Each term over all samples; of those that count by batches without a number that is not finite."""
        found: dict[str, float] = {}
        for name in self._terms:
            total = divided = 0.0
            for output, target in batches:
                mean, divisor = self._mean(name, output, target)
                if leaves_out and not math.isfinite(mean):
                    continue
                total, divided = total + mean * divisor if divisor else total, divided + divisor
            if divided:
                found[name] = total / divided
        return found

    # --- epochs and evaluations ---

    def _end_epoch(self) -> None:
        settings, index = self.settings, self.index
        steps = self.epochs.get(self.epoch, [])
        batches = [batch for step in steps for batch in step["batches"]]
        if self._is_weighed:
            loss = 0.0
            # With phases each term over the batches of the steps in which its phase ran.
            for phase in settings["phases"] or [None]:
                own = batches if phase is None else [one for step in steps for one in step["phases"].get(phase, [])]
                terms = list(self._terms) if phase is None else settings["phases"][phase]["terms"]
                means = self._of_stage(own, leaves_out=settings["skips"])
                loss += sum(self._terms[name]["weight"] * means[name] for name in terms if name in means)
        else:
            counted = [one for one in steps if math.isfinite(one["loss"]) or not settings["skips"]]
            total = sum(one["size"] for one in counted)
            loss = sum(one["loss"] * one["size"] for one in counted) / total if total else math.nan
        self.add("loss/train_epoch", index, loss)
        if "train" in settings["metric_stages"]:
            self._metrics("train", batches, index)
        self.rates.end_epoch()
        self.at[index]["rates"] = self.rates.copy()
        self.epoch, self.batch = self.epoch + 1, 0

    def _evaluation(self, events: list[tuple[str, dict[str, Any]]], place: int) -> int:
        settings = self.settings
        is_test = self.epoch == settings["epochs"]
        stage = "test" if is_test else "val"
        count = -(-SAMPLES[stage] // settings["batch_size"])
        count = min(count, settings[f"limit_{stage}_batches"] or count)
        own = events[place : place + count]
        assert [kind for kind, _ in own] == ["evaluation"] * count, f"{stage}: {[kind for kind, _ in own]}"
        batches = [self._batch(event) for _, event in own]
        means = self._of_stage(batches)
        index = self.tested() if is_test else self.index
        summed = [name for phase in settings["phases"].values() for name in phase["terms"]] or list(self._terms)
        loss = sum(self._terms[name]["weight"] * means[name] for name in summed if name in means)
        self.add(f"loss/{stage}", index, loss)
        if len(self._terms) > 1:
            for name, mean in means.items():
                self.add(f"loss/{stage}/{name}", index, mean)
        if stage in settings["metric_stages"]:
            self._metrics(stage, batches, index)
        if not is_test:
            self.rates.validated = float(loss)
        return place + count

    def tested(self) -> int:
        """The step of the best weights."""
        settings = self.settings
        monitor = {"loss/train": "loss/train_epoch"}.get(settings["monitor"], settings["monitor"])
        sign = -1 if monitor == "f1/val" else 1
        values = {step: value for step, value in self.points.get(monitor, {}).items() if math.isfinite(value)}
        return min(values, key=lambda step: (sign * values[step], step)) if values else self.index

    def _metrics(self, stage: str, batches: list[tuple[Tensor, Tensor]], index: int) -> None:
        output = torch.cat([output.double() for output, _ in batches])
        target = torch.cat([target for _, target in batches])
        for name in self.settings["metrics"]:
            self.add(f"{name}/{stage}", index, METRICS[name](output, target))


class Rates:
    """The learning rates by torch's own schedules, or by the formula, on optimizers that train nothing."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.updates: Counter[str] = Counter()
        self.epochs = 0
        self.validated: float | None = None
        self.plateau: list[float] = []

    def copy(self) -> Rates:
        other = Rates(self.settings)
        other.updates, other.epochs = Counter(self.updates), self.epochs
        other.validated, other.plateau = self.validated, list(self.plateau)
        return other

    def now(self) -> dict[str, dict[str, float]]:
        """By phase, and name."""
        settings = self.settings
        if settings["phases"]:
            return {name: {name: LR * self._factor(name)} for name in settings["phases"]}
        # In the order of the groups.
        found = {"head": LR / 4 * self._factor("")} if settings["has_group"] else {}
        return {"": {**found, "default": LR * self._factor("")}}

    def step(self, taken: dict[str | None, bool]) -> None:
        """A step is done; a schedule counts updates of the weights."""
        names = list(self.settings["phases"]) or [""]
        for name in names:
            is_skipped = (name or None) in taken and not taken[name or None]
            self.updates[name] += not is_skipped

    def end_epoch(self) -> None:
        self.epochs += 1
        validates = self.epochs % self.settings["check_val_every_n_epoch"] == 0
        if validates and self.validated is not None:
            self.plateau.append(self.validated)

    def _factor(self, name: str) -> float:
        settings, done = self.settings, self.updates[name]
        kind = settings["scheduler"]
        total = settings["epochs"] * -(-settings["batches"] // settings["accumulate"])
        if kind == "warmup":
            return min(1.0, (done + 1) / 4)
        if kind == "cosine":
            if done < 2:
                return (done + 1) / 3
            return (1 + math.cos(math.pi * (done - 2) / (total - 2))) / 2 if done < total else 0.0
        one = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        schedule: Any = ConstantLR(one, factor=1.0)
        if kind == "step":
            schedule = StepLR(one, step_size=1, gamma=0.5)
            for _ in range(self.epochs):
                one.step()
                schedule.step()
        elif kind == "one_cycle":
            schedule = OneCycleLR(one, max_lr=1.0, total_steps=total)
            for _ in range(done):
                one.step()
                schedule.step()
        elif kind == "plateau":
            schedule = ReduceLROnPlateau(one, patience=0, threshold=0.5)
            for value in self.plateau:
                schedule.step(value)
        return float(one.param_groups[0]["lr"])


def _places(inputs: Tensor) -> Tensor:
    """Which samples these are."""
    return (inputs[:, 0].double() * 256).round().long()


def size(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def clip(gradients: dict[str, Tensor], value: float, algorithm: str) -> dict[str, Tensor]:
    if algorithm == "value":
        return {name: one.clamp(-value, value) for name, one in gradients.items()}
    total = torch.stack([one.norm() for one in gradients.values()]).norm()
    factor = torch.clamp(value / (total + 1e-6), max=1.0)
    return {name: one * factor for name, one in gradients.items()}


def _has_come(every: int | None, index: int) -> bool:
    return every is not None and (index % every == 0 or index == 1)


def _f1(output: Tensor, target: Tensor) -> float:
    """Macro, over the classes that a target or an answer is of, as torchmetrics has it."""
    answer, scores = output.argmax(1), []
    for one in range(CLASSES):
        hits = int(((answer == one) & (target == one)).sum())
        asked = int((answer == one).sum() + (target == one).sum())
        if asked:
            scores.append(2 * hits / asked)
    return sum(scores) / len(scores)


def _auroc(output: Tensor, target: Tensor) -> float:
    """One class against the rest: how often a sample of it has the larger probability; ties are half."""
    scores, found = output.softmax(1), []
    for one in range(CLASSES):
        own, others = scores[target == one, one], scores[target != one, one]
        if len(own) and len(others):
            pairs = own[:, None] - others[None, :]
            found.append(float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()))
    return sum(found) / len(found)


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": lambda output, target: float((output.argmax(1) == target).double().mean()),
    "f1": _f1,
    "auroc": _auroc,
    "perplexity": lambda output, target: math.exp(float(functional.cross_entropy(output, target))),
    "bits_per_character": lambda output, target: float(functional.cross_entropy(output, target)) / math.log(2),
    "mae": lambda output, target: float((output - target.double()).abs().mean()),
    "rmse": lambda output, target: math.sqrt(float((output - target.double()).square().mean())),
    "r2": lambda output, target: float(
        (1 - (output - target).square().sum(0) / (target - target.mean(0)).square().sum(0)).mean()
    ),
}


# --- what is shown ---


def shown(directory: Path) -> tuple[Points, Points, list[str]]:
    """Scalars, and how many numbers histograms are of, by tag and step, as TensorBoard's reader has them; and what came
    twice at a step."""
    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    reader.Reload()
    scalars: Points = {}
    histograms: Points = {}
    twice = []
    for held, tags, events in (
        (scalars, reader.Tags()["scalars"], reader.Scalars),
        (histograms, reader.Tags()["histograms"], reader.Histograms),
    ):
        for tag in tags:
            points = held.setdefault(tag, {})
            for event in events(tag):
                if event.step in points:
                    twice.append(f"{tag} at step {event.step}")
                points[event.step] = event.value if held is scalars else event.histogram_value.num
    return scalars, histograms, twice


def faults_of(settings: dict[str, Any], place: Path) -> list[str]:
    """What is shown of a run and is not what was."""
    began = time.time()
    generator = torch.Generator().manual_seed(settings["seed"])
    count = sum(SAMPLES.values())
    inputs = torch.randn(count, FEATURES, generator=generator)
    # Exact in bfloat16, too.
    inputs[:, 0] = torch.arange(count) / 256
    classes = torch.randint(CLASSES, (count,), generator=generator)
    numbers = inputs[:, 1 : 1 + NUMBERS] * 0.5 + torch.randn(count, NUMBERS, generator=generator)
    torch.save({"input": inputs, "target": classes}, place / "classes.pt")
    torch.save({"input": inputs, "target": numbers}, place / "numbers.pt")
    targets = classes if settings["is_classes"] else numbers
    config = exp.compose(command(settings, place))
    decided = plan(resolve(config))
    directory = freeze(decided.resolved.config)
    record = Record(poisoned=settings["poisoned"], fails_at=settings["fails_at"])
    by_hand = ByHand(settings, targets)
    with record.recording():
        try:
            live(directory)
        except UserCodeError as error:
            if not isinstance(error.__cause__, Planned):
                raise
            first, record.events = record.events, []
            last = directory / "checkpoints" / "last.ckpt"
            done = torch.load(last, weights_only=True)["global_step"] if last.is_file() else 0
            live(directory, resume=last if done else None)
        else:
            first, done = [], 0
    if done:
        by_hand.begin(first, index=0)
    by_hand.begin(record.events, index=done)
    return list(_differences(settings, directory, by_hand, seconds=time.time() - began))


def _differences(settings: dict[str, Any], directory: Path, by_hand: ByHand, *, seconds: float) -> Iterator[str]:
    scalars, histograms, twice = shown(directory)
    yield from (f"twice: {one}" for one in twice)
    measured = {tag for tag in scalars if tag.startswith(MEASURED)}
    expected = {tag: points for tag, points in by_hand.points.items() if not tag.startswith(PANELS)}
    panels = {tag: points for tag, points in by_hand.points.items() if tag.startswith(PANELS)}
    yield from (f"missing: {tag}" for tag in sorted(expected.keys() - scalars.keys()))
    yield from (f"extra: {tag}" for tag in sorted(scalars.keys() - expected.keys() - measured))
    rel = 1e-6 if settings["word"] == "fp64" else 5e-5
    for tag in sorted(expected.keys() & scalars.keys()):
        values, found = expected[tag], scalars[tag]
        if tag.startswith("precision/"):
            # One point a write: only its value is by hand.
            values = {step: values[step] for step in found if step in values}
        if values.keys() != found.keys():
            yield f"{tag}: steps {sorted(found)}, by hand {sorted(values)}"
            continue
        for step, value in values.items():
            # What torchmetrics sums is float32 under fp64, too, and r2 is a difference of two such.
            if not _is_equal(found[step], value, rel=rel, most=1e-6 if tag.startswith("r2/") else 1e-9):
                yield f"{tag} at step {step}: {found[step]!r}, by hand {value!r}"
                break
    yield from (f"histograms: {tag}" for tag in sorted(panels.keys() ^ histograms.keys()))
    for tag in sorted(panels.keys() & histograms.keys()):
        if histograms[tag] != panels[tag]:
            yield f"{tag}: of {histograms[tag]} numbers, by hand {panels[tag]}"
    report = json.loads((directory / "report.json").read_text())
    yield from _of_report(report, scalars, by_hand)
    yield from _of_measured(settings, {tag: scalars[tag] for tag in measured}, seconds=seconds)
    yield from _of_table(directory, scalars)


def _of_report(report: dict[str, Any], scalars: Points, by_hand: ByHand) -> Iterator[str]:
    if report["metrics"].keys() != scalars.keys():
        yield f"report.json: other tags: {sorted(report['metrics'].keys() ^ scalars.keys())}"
    for tag in report["metrics"].keys() & scalars.keys():
        last = scalars[tag][max(scalars[tag])]
        if not _is_equal(float(report["metrics"][tag]), last, rel=1e-6):
            yield f"report.json: {tag} is {report['metrics'][tag]}, the last point {last}"
    if report["best"] is not None and report["best"]["step"] != by_hand.tested():
        yield f"report.json: best is of step {report['best']['step']}, by hand {by_hand.tested()}"


def _of_table(directory: Path, scalars: Points) -> Iterator[str]:
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: Points = {}
    for row in rows:
        for tag, value in row.items():
            if tag != "step" and value != "":
                points = found.setdefault(tag, {})
                if int(row["step"]) in points:
                    yield f"metrics.csv: {tag} twice at step {row['step']}"
                points[int(row["step"])] = float(value)
    if found.keys() != scalars.keys():
        yield f"metrics.csv: other tags: {sorted(found.keys() ^ scalars.keys())}"
    for tag in found.keys() & scalars.keys():
        same = found[tag].keys() == scalars[tag].keys()
        if not same or not all(_is_equal(scalars[tag][step], value, rel=1e-6) for step, value in found[tag].items()):
            yield f"metrics.csv: {tag} is {found[tag]}, in TensorBoard {scalars[tag]}"


def _of_measured(settings: dict[str, Any], scalars: Points, *, seconds: float) -> Iterator[str]:
    window = settings["accumulate"] * settings["batch_size"]
    for tag, points in scalars.items():
        for step, value in points.items():
            most = 1000 * seconds if tag.endswith("_ms") else math.inf
            most = psutil.virtual_memory().total / MIB if tag.startswith("memory/") else most
            least = 0.0 if tag.endswith("_ms") else 1e-9
            if not least <= value <= most:
                yield f"{tag} at step {step} is {value}; bounds {least} and {most}"
    times, rates = scalars.get("throughput/step_ms", {}), scalars.get("throughput/samples_per_second", {})
    if times.keys() != rates.keys():
        yield f"throughput: times at {sorted(times)}, rates at {sorted(rates)}"
    for step in times.keys() & rates.keys():
        samples = rates[step] * times[step] / 1000
        if not 1 - 1e-5 <= samples <= window * (1 + 1e-5):
            yield f"throughput at step {step}: {samples} samples a step, of a window of {window}"
    resident, peak = scalars.get("memory/host_rss_mib", {}), scalars.get("memory/host_peak_step_mib", {})
    for step in resident.keys() & peak.keys():
        if peak[step] < 0.5 * resident[step]:
            yield f"memory at step {step}: a peak of {peak[step]}, and {resident[step]} resident"


def _is_equal(found: float, value: float, *, rel: float, most: float = 1e-9) -> bool:
    if math.isnan(value) or math.isnan(found):
        return math.isnan(value) and math.isnan(found)
    if math.isinf(value) or math.isinf(found):
        return value == found
    return math.isclose(found, value, rel_tol=rel, abs_tol=most if rel < 1e-5 else 2e-6)


def attack(place: Path, seeds: Sequence[int], *, tell: Callable[[str], None] = lambda _: None) -> dict[int, list[str]]:
    """What was wrong, by seed. place: an empty folder."""
    found: dict[int, list[str]] = {}
    for seed in seeds:
        settings, own = drawn(seed), place / str(seed)
        own.mkdir()
        try:
            faults = faults_of(settings, own)
        except Exception:
            faults = ["\n".join(traceback.format_exc().splitlines()[-12:])]
        if faults:
            found[seed] = faults
            tell(f"\n{seed}: {settings}\n  " + "\n  ".join(faults[:12]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="these seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.seed, arguments.seed + arguments.configs) if arguments.only is None else arguments.only
    with tempfile.TemporaryDirectory(prefix="shown-") as name:
        os.chdir(name)
        found = attack(Path(name), seeds, tell=print)
    print(f"{len(seeds)} configs, {len(found)} with faults: {sorted(found)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
