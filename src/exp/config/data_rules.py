"""Rules between the data set and what is done with it: its parts, and losses and metrics that fit its targets."""

from __future__ import annotations

from collections.abc import Iterator

from exp.config.kinds import UNKNOWN, is_node
from exp.config.values import Values
from exp.data.shares import share_faults
from exp.errors import Fault
from exp.spelling import show
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
    """Parts are fractions, or numbers of samples, as the data sets themselves keep it."""
    parts = values["data.parts"]
    if isinstance(parts, dict):
        yield from share_faults({name: size for name, size in parts.items() if size is not UNKNOWN})


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
