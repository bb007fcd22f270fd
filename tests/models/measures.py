"""Tests of every metric of torchmetrics.classification and .regression, for test_against_torch.py.

Each class becomes a node in `metrics` with its required parameters, and one more node for each other value of a
parameter that changes the metric. The node is checked, with first samples, and built as in a run. Its value over
batches of different sizes must equal one call of the class on all outputs: in one process, after a resume from a
checkpoint in the middle, and over all ranks.
"""

from __future__ import annotations

import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from exp.check.metric_errors import call_errors, fit_errors
from exp.check.parameters import target_errors
from exp.check.signature import signature_of
from exp.config.settings import settings_of
from exp.construct import build_measures
from exp.engine.buffer import EpochValues
from exp.errors import ConfigError, RunError
from exp.objectives.measures import as_scored
from exp.objectives.objective import Objective
from exp.objectives.terms import CrossEntropy

HERE = Path(__file__).parent
CLASSES, LABELS, WIDTH = 4, 3, 5
SIZES = (16, 16, 1, 9, 3)
CLOSE = 1e-6
# Values of required parameters, and other parameters that change the value of a metric.
NEEDED = {
    "num_classes": CLASSES, "num_labels": LABELS, "num_groups": 2, "beta": 2.0, "p": 3.0, "min_precision": 0.3,
    "min_recall": 0.3, "min_sensitivity": 0.3, "min_specificity": 0.3, "threshold": 0.5,
}  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "average": ("micro", "macro", "weighted", "none", None),
    "multidim_average": ("samplewise",),
    "thresholds": (5, [0.2, 0.5, 0.8]),
    "top_k": (2,),
    "ignore_index": (1,),
    "threshold": (0.7,),
    "normalize": ("true", "all"),
    "norm": ("l2", "max"),
    "weights": ("linear", "quadratic"),
    "squared": (True, False),
    "multiclass_mode": ("one-vs-all",),
    "reduction": ("mean", "sum", "none"),
    "multioutput": ("raw_values", "variance_weighted"),
    "num_outputs": (2,),
    "power": (1.0, 1.5, 2.0),
    "alpha": (0.3,),
    "variant": ("a", "c"),
    "t_test": (True,),
    "normalization": ("range", "std", "l2"),
    "log_prob": (True,),
    "adjusted": (2,),
    "beta": (2.0,),
    "max_fpr": (0.4,),
    "zero_division": (1.0,),
}
# Parts of error messages, and shorter texts for the table.
REASONS = {
    "a tensor of shape": "it gives a matrix",
    "of twice as many samples": "it gives more numbers the more samples there are",
    "a batch without a group": "counts samples under wrong groups",
}
SCORES = {"Binary": nn.BCEWithLogitsLoss, "Multiclass": CrossEntropy, "Multilabel": nn.BCEWithLogitsLoss}


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


operators = load("operators")


def nodes(kind: type, name: str) -> Iterator[dict[str, Any]]:
    """Yield each form of a metric in a config."""
    parameters = signature_of(kind).parameters
    tasks = ("binary", "multiclass", "multilabel") if "task" in parameters and parameters["task"].required else (None,)
    if name in ("CohenKappa", "ExactMatch", "HingeLoss", "CalibrationError"):
        tasks = ("multiclass", "multilabel") if name == "ExactMatch" else ("binary", "multiclass")
    for task in tasks:
        sizes = {"binary": (), "multiclass": ("num_classes",), "multilabel": ("num_labels",), None: ()}[task]
        base = {} if task is None else {"task": task, **{size: NEEDED[size] for size in sizes}}
        needed = [one for one in NEEDED if one in parameters and parameters[one].required]
        base |= {one: NEEDED[one] for one in needed if task is None or one not in ("num_classes", "num_labels")}
        if task is not None:  # classes with a task have None as the default of values that the task requires
            base |= {one: NEEDED[one] for one in NEEDED if one.startswith("min_") and one in parameters}
        if "num_groups" in parameters:
            base["inputs"] = {"preds": "output", "target": "target", "groups": "groups"}
        yield base
        for word, values in OTHERS.items():
            # "normalization" of other classes has other values.
            if word in parameters and (word != "normalization" or name == "NormalizedRootMeanSquaredError"):
                yield from ({**base, word: value} for value in values)


def family(name: str, node: Mapping[str, Any]) -> str:
    """Return the kind of outputs and targets of a metric."""
    task = node.get("task")
    if task is not None:
        return str(task).capitalize()
    kinds = [kind for kind in ("Binary", "Multiclass", "Multilabel") if name.startswith(kind)]
    if kinds:
        return kinds[0]
    special = {
        "CosineSimilarity": "Vectors", "KLDivergence": "Shares", "JensenShannonDivergence": "Shares",
        "ContinuousRankedProbabilityScore": "Ensemble",
    }  # fmt: skip
    return special.get(name, "Pairs" if node.get("num_outputs") == 2 or "multioutput" in node else "Numbers")


def values_of(kind: str, *, are_scores: bool) -> dict[str, Tensor]:
    """Return outputs, targets and groups; the third batch has one sample with scores between 0 and 1."""
    draw, count = torch.Generator().manual_seed(5), sum(SIZES)
    shapes = {"Binary": (), "Multiclass": (CLASSES,), "Multilabel": (LABELS,), "Vectors": (WIDTH,), "Shares": (WIDTH,)}
    shape = shapes.get(kind, {"Ensemble": (6,), "Pairs": (2,)}.get(kind, ()))
    scores = 2 * torch.randn(count, *shape, generator=draw)
    place = sum(SIZES[:2])
    scores[place] = 0.2 + 0.3 * torch.rand(shape, generator=draw)
    groups = torch.randint(2, (count,), generator=draw)
    if kind == "Multiclass":
        output = scores if are_scores else scores.softmax(-1)
        return {"output": output, "target": torch.randint(CLASSES, (count,), generator=draw), "groups": groups}
    if kind in SCORES:
        target = torch.randint(2, (count, *shape), generator=draw)
        return {"output": scores if are_scores else scores.sigmoid(), "target": target, "groups": groups}
    other = 2 * torch.randn(count, *(() if kind == "Ensemble" else shape), generator=draw)
    if kind == "Shares":
        return {"output": scores.softmax(-1), "target": other.softmax(-1)}
    # Deviances and logarithms need positive values.
    return {"output": scores.abs() + 0.1, "target": (scores if kind != "Ensemble" else other).abs() + other.abs() + 0.1}


def drive(kind: type, rows: dict[tuple[str, str], Any], *, most: int | None) -> None:
    """Compare all forms of a metric, with scores and with probabilities, and add the results to `rows`."""
    room = "classification" if kind.__name__ in torchmetrics.classification.__all__ else "regression"
    name = f"torchmetrics.{room}.{kind.__name__}"
    for node in [*nodes(kind, kind.__name__)][:most]:
        of = family(kind.__name__, node)
        for are_scores in (True, False) if of in SCORES else (False,):
            form = "scores" if are_scores else "probabilities" if of in SCORES else "numbers"
            row = rows.setdefault((name, form), operators.Row(name=name, form=form))
            objective = Objective({"it": SCORES[of]() if are_scores else nn.MSELoss()})
            _try(row, kind, {"_target_": name, **node}, values_of(of, are_scores=are_scores), objective)


def _try(row: Any, kind: type, node: dict[str, Any], values: Mapping[str, Tensor], objective: Objective) -> None:
    given = {"_target_", "inputs"}
    by_hand = _by_hand(kind, {word: one for word, one in node.items() if word not in given}, node.get("inputs"), values)
    try:
        measure = _built(node, values)
    except ConfigError as error:
        got = error.errors[0].got
        said = [reason for words, reason in REASONS.items() if words in got]
        if isinstance(by_hand, Exception):
            row.by_torch[f"{type(by_hand).__name__}, reported before the run"] += 1
        else:
            row.refused[said[0] if said else got] += 1
        return
    if isinstance(by_hand, Exception):
        row.wrong.append(f"{node}: no error, by hand {by_hand!r}")
        return
    for way in ("whole", "gone on", *(["on one rank"] if dist.is_initialized() else [])):
        try:
            found = _measured(as_scored(measure, objective), values, objective, way=way)
        except RunError as error:
            row.wrong.append(f"{node}, {way}: {error}")
            return
        if found.keys() != by_hand.keys():
            row.wrong.append(f"{node}, {way}: {sorted(found)}, by hand {sorted(by_hand)}")
            return
        off = [tag for tag in found if not _close(found[tag], by_hand[tag])]
        if off:
            row.wrong.append(f"{node}, {way}: {off[0]} is {found[off[0]]}, by hand {by_hand[off[0]]}")
            return
    row.equal += 1


def _built(node: dict[str, Any], values: Mapping[str, Tensor]) -> Any:
    """Check and build a metric, or raise ConfigError."""
    if errors := list(target_errors({"metrics": {"it": node}}, allow=())):
        raise ConfigError(errors)
    (measure,) = build_measures(settings_of({"metrics": {"it": node}, "security": {"allow": []}})).values()
    if errors := list(call_errors([measure])):
        raise ConfigError(errors)

    def drawn(seed: int) -> dict[str, Tensor]:
        draw, output = torch.Generator().manual_seed(seed), values["output"]
        return {**values, "output": 0.05 + 0.9 * torch.rand(output.shape, generator=draw)}

    if errors := list(fit_errors([measure], drawn, "val", {})):
        raise ConfigError(errors)
    return measure


def _by_hand(
    kind: type, given: Mapping[str, Any], names: Mapping[str, str] | None, values: Mapping[str, Tensor]
) -> dict[str, float] | Exception:
    """Return the numbers of one call on all outputs by tag, or the exception of the call."""
    try:
        metric = kind(**given, sync_on_compute=False)
        if names is None:
            metric.update(values["output"], values["target"])
        else:
            metric.update(**{parameter: values[name] for parameter, name in names.items()})
        value = metric.compute()
    except Exception as error:
        return error
    return {f"it/val{tag}": number for tag, number in _flat(value)}


def _flat(value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list | tuple):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((f"/{name}{tag}", number) for tag, number in _flat(one))
    elif value.numel() == 1:
        yield "", float(value)
    else:
        yield from ((f"/{place}", float(one)) for place, one in enumerate(value.flatten()))


def _measured(measure: Any, values: Mapping[str, Tensor], objective: Objective, *, way: str) -> dict[str, float]:
    """Return the values of a stage with batches of different sizes, divided over the ranks or all on rank 0."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    strategy = SingleDeviceStrategy(device=torch.device("cpu"))
    epoch = EpochValues(stage="val", terms=objective.terms, measures=[measure.clone()])
    starts = [sum(SIZES[:place]) for place in range(len(SIZES))]
    for place, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        if way == "gone on" and place == 3:
            held = io.BytesIO()
            torch.save(epoch.state(strategy, with_losses=False), held)
            held.seek(0)
            epoch = EpochValues(stage="val", terms=objective.terms, measures=[measure.clone()])
            state = torch.load(held, weights_only=True)
            epoch.restore(state, device=torch.device("cpu"), rank=rank, ranks=ranks)
        share = slice(start + rank * size // ranks, start + (rank + 1) * size // ranks)
        if way == "on one rank":
            share = slice(start, start + size if rank == 0 else start)
        if share.stop > share.start:
            epoch.update_metrics(epoch.read({name: one[share] for name, one in values.items()}))
    return epoch.finish(strategy)


def _close(one: float, other: float) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=CLOSE, atol=CLOSE, equal_nan=True)


def seen(*, most: int | None = None, only: Sequence[str] = ()) -> list[Any]:
    """Return the results for all metrics, or for those in `only`, with at most `most` forms each."""
    rows: dict[tuple[str, str], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for room in (torchmetrics.classification, torchmetrics.regression):
            for name in room.__all__:
                if not only or name in only:
                    drive(getattr(room, name), rows, most=most)
    return list(rows.values())
