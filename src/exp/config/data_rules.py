"""Rules between the data set and what is done with it: its parts, and losses and metrics that fit its targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from exp.config.kinds import UNKNOWN, is_node
from exp.config.structure import show
from exp.config.values import Values
from exp.errors import Fault
from exp.spelling import did_you_mean
from exp.types import STAGES

# Names of losses, the last part of a `_target_`, that need class numbers or numbers as targets.
CLASS_LOSSES = ("CrossEntropy", "CrossEntropyLoss", "NLL", "NLLLoss", "MultiMarginLoss")
NUMBER_LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss")
CLASS_METRICS = ("exp.objectives.metrics.Accuracy", "exp.objectives.metrics.F1", "exp.objectives.metrics.AUROC")
CLASSIFICATION = "torchmetrics.classification."
REGRESSION = "torchmetrics.regression."


def data_names_its_sets(values: Values) -> Iterator[Fault]:
    """One data set to divide, or one for each part; each is a node."""
    data = values["data"]
    if not isinstance(data, dict):
        return
    sets = {name: data[name] for name in ("dataset", *STAGES) if data.get(name) is not None}
    if not sets:
        yield Fault(
            key="data.dataset",
            got="nothing",
            expected="a data set here, or one each in data.train, data.val, data.test",
        )
    for name, node in sets.items():
        if node is not UNKNOWN and not is_node(node):
            yield Fault(key=f"data.{name}", got=show(node), expected="a data set: a node with a _target_")


def parts_are_shares(values: Values) -> Iterator[Fault]:
    """Parts are fractions, or numbers of samples; fractions leave nothing over, or something."""
    parts = values["data.parts"]
    if not isinstance(parts, dict):
        return
    fractions = 0.0
    for name, size in parts.items():
        key = f"data.parts.{name}"
        if name not in ("train", "val", "test"):
            yield Fault(key=key, got="no part", expected="train, val or test", cure=did_you_mean(str(name), STAGES))
        elif not is_share(size):
            yield Fault(key=key, got=show(size), expected="a fraction from 0 to 1, or a whole number of samples")
        elif isinstance(size, float) and size <= 1:
            fractions += size
    if fractions > 1 + 1e-9:
        yield Fault(key="data.parts", got=f"fractions that add up to {fractions:g}", expected="1 at most")


def is_share(size: Any) -> bool:
    if size is UNKNOWN:
        return True
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    return is_number and math.isfinite(size) and size >= 0 and (size <= 1 or size == int(size))


def task_fits_data(values: Values) -> Iterator[Fault]:
    """Classes need class numbers; numbers need numbers. Only where the data set has said which it is."""
    classes = values["data.num_classes"]
    is_regression = classes is None and values["data.num_outputs"] not in (None, UNKNOWN)
    is_classification = isinstance(classes, int)
    for name, term in values.entries("objective").items():
        loss = term.get("loss", term)
        target = str(loss.get("_target_")) if isinstance(loss, dict) else ""
        last = target.rpartition(".")[2]
        if is_regression and last in CLASS_LOSSES:
            yield _misfit(f"objective.{name}", target, "a loss of numbers", "objective=[mse]")
        elif is_classification and last in NUMBER_LOSSES and term.get("target", "target") == "target":
            yield _misfit(f"objective.{name}", target, f"a loss of {classes} classes", "objective=[cross_entropy]")
    for name, metric in values.entries("metrics").items():
        target = str(metric["_target_"])
        if is_regression and (target in CLASS_METRICS or target.startswith(CLASSIFICATION)):
            yield _misfit(f"metrics.{name}", target, "a metric of numbers", "metrics=[mae]")
        elif is_classification and target.startswith(REGRESSION):
            yield _misfit(f"metrics.{name}", target, f"a metric of {classes} classes", "metrics=[accuracy]")


def _misfit(key: str, target: str, expected: str, choice: str) -> Fault:
    kind = "class numbers" if "classes" in expected else "numbers"
    return Fault(
        key=key, got=target, expected=f"{expected}: the targets of this data set are {kind}", cure=f"Write {choice}"
    )
