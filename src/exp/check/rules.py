"""The rules about combinations of config values.

A rule is a function of the config as plain values, and yields errors. Rules do not import any target. They ignore a key
that is missing or has an error, because another check reports this error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exp.check.phase_rules import (
    phases_are_readable,
    phases_are_simultaneous_with_others,
    phases_go_with_the_trainer,
    phases_share_the_objective,
    readable,
)
from exp.config.frozen import ALLOWED, COMPOSITION
from exp.config.module_key import brings_data, has_module, module_errors
from exp.config.plain_tree import is_node
from exp.config.reading import UNKNOWN, Values
from exp.config.slots import nodes_in
from exp.data.data_errors import share_errors
from exp.errors import ErrorDetails, invalid_value, missing_value, not_supported_with, unsuitable
from exp.shared_types import EPOCH_LOSS, STAGES, searched_tags
from exp.spelling import among, did_you_mean, fix_of_value, show

# Losses that need class numbers as targets, and losses for regression. The words are the ends of a `_target_`.
CLASS_LOSSES = ("CrossEntropy", "CrossEntropyLoss", "NLL", "NLLLoss", "MultiMarginLoss")
NUMBER_LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss")
CLASS_METRICS = (
    "exp.objectives.metrics.Accuracy",
    "exp.objectives.metrics.F1",
    "exp.objectives.metrics.AUROC",
    "torchmetrics.classification.Multiclass",
)
REGRESSION = "torchmetrics.regression."
# Checkpoints of a run directory. The first existing file is used.
CHECKPOINTS = ("checkpoints/best.ckpt", "checkpoints/last.ckpt")
MIXING = ("torchvision.transforms.v2.MixUp", "torchvision.transforms.v2.CutMix")
# First parts of tags that every run logs, even without hooks and metrics.
OF_EVERY_RUN = ("optimizer", "precision")
# Keys of the stages that run after the training or without a training.
AFTER = ("test", "validate", "predict")
# Defaults of the keys that the node of a schedule may leave out.
SCHEDULER_DEFAULTS: Mapping[str, object] = {"interval": "step", "monitor": None}
# Pairs of values that exclude each other. An entry has two keys with a value each, the expected value, and the fix.
EXCLUSIVE: Sequence[tuple[str, Any, str, Any, str, str]] = (
    ("runtime.cudnn_benchmark", True, "runtime.deterministic", True,
     "only one of the two: the fastest algorithm may differ between runs",
     "Leave runtime.cudnn_benchmark out"),
    ("runtime.matmul", "highest", "precision.word", "tf32",
     "high, medium or null, because tf32 lowers the precision of matrix products",
     "Leave runtime.matmul out, or choose precision=fp32"),
)  # fmt: skip


def rule_errors(plain: dict[str, object]) -> list[ErrorDetails]:
    """Return the errors of all rules for a config, given as plain values."""
    values = Values(plain)
    rules = RULES_OF_A_MODULE if has_module(plain) else RULES
    return [error for rule in rules for error in rule(values)]


def something_to_do(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of a run that neither trains nor evaluates, or that combines both wrongly.

    A run that trains must not set `validate` or `predict`. A run that only evaluates needs `resume` or `weights.from`.
    """
    if all(values[key] is False for key in ("train", *AFTER)):
        yield ErrorDetails("train", f"false, and so are {', '.join(AFTER)}", "true for at least one of these keys")
    elif values["train"] is True:
        fixes = {
            "validate": "Leave it out: a run that trains validates in each epoch",
            "predict": "Train first, and then run python -m exp.predict run=DIR input=FILE output=FILE",
        }
        for key, fix in fixes.items():
            if values[key] is True:
                yield ErrorDetails(key, "true with train=true", "false in a run that trains", fix)
    elif values["train"] is False and values["resume"] is None and values["weights.from"] is None:
        yield ErrorDetails(
            "resume", "null with train=false", "the path of the checkpoint to evaluate", "Add resume=PATH"
        )


def files_are_there(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of `resume` and `weights.from` if the named file is not on this machine."""
    path, weights = values["resume"], values["weights.from"]
    if _is_url(path):
        yield invalid_value("resume", path, "a file on this machine", "Download it first")
    # os.path.isfile, because Path.is_file raises an exception for a name that is too long.
    elif isinstance(path, str) and path not in ("", "auto") and not os.path.isfile(path):
        fix = "Write resume=null" if path.lower() == "none" else fix_of_value("resume", path) or _near_file(path)
        yield invalid_value("resume", path, "the path of an existing checkpoint file", fix)
    if not isinstance(weights, str) or weights == "" or path is not None:
        return
    if _is_url(weights):
        yield invalid_value("weights.from", weights, "a file on this machine", "Download it first")
    elif not os.path.exists(weights):
        expected = "an existing run directory, checkpoint, state dict or safetensors file"
        yield invalid_value("weights.from", weights, expected, _near_file(weights))
    elif os.path.isdir(weights) and weights_of_run(Path(weights)) is None:
        expected = f"a run directory, with {among(CHECKPOINTS)}"
        yield unsuitable("weights.from", weights, "which contains no checkpoint", expected)


def _is_url(path: object) -> bool:
    return isinstance(path, str) and "://" in path


def lora_freezes_the_rest(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of `freeze` in a run with LoRA.

    LoRA freezes all parameters of the model except those of the layers in lora.trained.
    """
    layers = values["lora.layers"]
    for key in ("freeze.parameters", "freeze.unfreeze"):
        if isinstance(layers, list) and layers and values[key] not in ([], {}, UNKNOWN):
            expected = "an empty value, because LoRA freezes all other parameters"
            fix = "To train the weights of other layers, name these layers in lora.trained"
            yield not_supported_with(key, values[key], "lora.layers", expected, fix)


def weights_of_run(directory: Path) -> Path | None:
    """Return best.ckpt of a run directory, or last.ckpt if best.ckpt is missing.

    Return None if both files are missing.
    """
    return next((directory / name for name in CHECKPOINTS if (directory / name).is_file()), None)


def the_run_ends(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of a training without a limit, and of min_epochs above max_epochs."""
    lowest, highest = values["trainer.min_epochs"], values["trainer.max_epochs"]
    unlimited = highest in (None, -1) and values["trainer.max_steps"] in (None, -1)
    if values["train"] is True and unlimited and values["trainer.max_time"] is None:
        expected = "a limit of the run: trainer.max_epochs, trainer.max_steps or trainer.max_time"
        yield invalid_value("trainer.max_epochs", highest, expected, because="without max_steps and max_time")
    if isinstance(lowest, int) and isinstance(highest, int) and 0 < highest < lowest:
        yield invalid_value("trainer.min_epochs", lowest, f"at most {highest}, the value of trainer.max_epochs")


def limits_leave_batches(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of batch limits: 0 for a stage that the run needs, and a fraction above 1."""
    monitors_val = values["train"] is True and _stage(values["monitor"]) == "val" and not has_module(values.plain)
    uses = {
        "train": (values["train"] is True, "To only test, write train=false"),
        "val": (values["validate"] is True or monitors_val, "Or monitor the training loss: monitor=loss/train"),
        "test": (values["test"] is True, "To leave the test out, write test=false"),
    }
    for stage, (is_used, fix) in uses.items():
        key = f"trainer.limit_{stage}_batches"
        limit = values[key]
        if is_used and limit is not UNKNOWN and limit is not None and limit == 0:
            yield invalid_value(key, limit, "null for all batches, or more than 0", fix)
        elif isinstance(limit, float) and 1 < limit < math.inf:
            expected = "an integer number of batches, or a fraction of the batches between 0.0 and 1.0"
            yield invalid_value(key, limit, expected, f"Write {round(limit)}")


def objective_is_not_empty(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of an objective without a term."""
    if values["objective"] == {}:
        overrides = values[f"{COMPOSITION}.overrides"]
        typed = () if overrides is UNKNOWN else map(str, overrides)
        removals = [text for text in typed if text.startswith("~objective.")]
        got, fix = "no term", "Add objective=[cross_entropy]"
        if removals:
            got, fix = f"no term, because of {removals[-1]}", f"Leave {removals[-1]} out of the command"
        yield ErrorDetails("objective", got, "at least one term", fix)


def names_make_distinct_tags(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of names of metrics and terms that lead to ambiguous TensorBoard tags."""
    hooks = values["hooks"] if isinstance(values["hooks"], dict) else {}
    for group in ("objective", "metrics"):
        for name in map(str, values[group] if isinstance(values[group], dict) else {}):
            reasons = {
                "a name with a slash, which separates the parts of a tag": "/" in name,
                "the name of a stage, so that its tags would be ambiguous": name in STAGES,
                "a metric with the tag loss/val, which is the tag of the objective": (group, name)
                == ("metrics", "loss"),
                f"a metric with the name of hooks.{name}, so that both may write the same tag": (
                    group == "metrics" and name in hooks
                ),
            }
            for got in [reason for reason, is_so in reasons.items() if is_so][:1]:
                yield ErrorDetails(f"{group}.{name}", got, "a name that leads to distinct tags", "Give it another name")


def mixed_targets_are_no_classes(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of metrics on training batches with MixUp or CutMix, where targets are probabilities."""
    stages = values["metric_stages"]
    if not isinstance(stages, list) or "train" not in stages or not values.entries("metrics"):
        return
    for _, node in nodes_in(values["data.train_batch_transforms"]):
        if node["_target_"] in MIXING and node.get("num_classes") is not None:
            name = str(node["_target_"]).rpartition(".")[2]
            because = f"but {name} turns the classes of training batches into probabilities"
            yield invalid_value("metric_stages", stages, "stages without train", "Write [val, test]", because=because)


def monitors_are_logged(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of checkpoints, callbacks and schedules that monitor a tag that the run does not log."""
    yield from _monitor_errors(values, "monitor", values["monitor"])
    # Hooks and callbacks of users may log any tag. If there are any, only the key `monitor` is checked.
    own = [node for kind in ("hooks", "callbacks") for node in values.entries(kind).values()]
    if not all(str(node.get("_target_")).startswith(("exp.", "lightning.")) for node in own):
        return
    without = _no_validation(values)
    for key, monitor in _monitored_keys(values).items():
        if key != "monitor":
            yield from _monitor_errors(values, key, monitor, without=without)
    yield from _searched_errors(values, without=without)


def _searched_errors(values: Values, *, without: str | None) -> Iterator[ErrorDetails]:
    """Yield the errors of tags in sweep.monitor that the jobs do not log.

    A hyperparameter search reads the tags after a job has ended, so tags of hooks and of the test stage are allowed.

    Args:
        values: Values of the config.
        without: Setting that disables validation. None if the jobs validate.
    """
    callbacks, hooks = (
        [str(node.get("_target_")) for node in values.entries(kind).values()] for kind in ("callbacks", "hooks")
    )
    if any(target.endswith("Monitor") for target in callbacks):
        return  # Lightning's monitors log their own tags
    measured = [*OF_EVERY_RUN, *(target.split(".")[-2] for target in hooks)]
    metrics = list(values["metrics"]) if isinstance(values["metrics"], dict) else []
    stages = values["metric_stages"] if isinstance(values["metric_stages"], list) else []
    for tag in searched_tags(values["sweep.monitor"], mode="min"):
        name, _, rest = tag.partition("/")
        is_metric = name == "loss" or name in metrics
        is_tested = is_metric and values["test"] is True and (name == "loss" or "test" in stages)
        if not (rest.partition("/")[0] == "test" if is_tested else name in measured and rest and not is_metric):
            yield from _monitor_errors(values, "sweep.monitor", tag, without=without)


def _monitored_keys(values: Values) -> dict[str, object]:
    """Return the monitored tags, by the config key that sets the tag.

    Schedules and callbacks are left out if they monitor the same tag as the key `monitor`.
    """
    nodes = {"scheduler": values["scheduler"]}
    nodes |= {f"callbacks.{name}": node for name, node in values.entries("callbacks").items()}
    nodes |= {f"phases.{name}.scheduler": phase["scheduler"] for name, phase in readable(values).items()}
    found = {f"{key}.monitor": node.get("monitor") for key, node in nodes.items() if isinstance(node, dict)}
    return {"monitor": values["monitor"]} | {key: tag for key, tag in found.items() if tag != values["monitor"]}


def _no_validation(values: Values) -> str | None:
    """Return the setting that disables validation. Return None if the run validates."""
    limit = values["trainer.limit_val_batches"]
    if isinstance(limit, int | float) and limit == 0:
        return "trainer.limit_val_batches=0"
    parts, data = values["data.parts"], values["data"]
    has_val = isinstance(data, dict) and (data.get("val") is not None or data.get("dataset") is None)
    return "data.parts.val=0" if isinstance(parts, dict) and parts.get("val", 0) == 0 and not has_val else None


def _monitor_errors(values: Values, key: str, monitor: object, *, without: str | None = None) -> Iterator[ErrorDetails]:
    """Yield the error of a monitored tag that the run does not log.

    Args:
        values: Values of the config.
        key: Config key that sets the tag.
        monitor: The tag.
        without: Setting that disables validation. None (default) if the run validates.
    """
    stages = values["metric_stages"]
    if not isinstance(monitor, str) or not isinstance(stages, list) or values["train"] is not True:
        return
    terms = list(values["objective"]) if isinstance(values["objective"], dict) else []
    metrics = list(values["metrics"]) if isinstance(values["metrics"], dict) else []
    of_metrics = {stage: [f"{name}/{stage}" for name in metrics if stage in stages] for stage in ("val", "train")}
    # An objective with a single term logs no tag for the term, because the term equals the loss.
    of_terms = [f"loss/val/{term}" for term in terms if len(terms) > 1]
    of_val = [] if without else ["loss/val", *of_metrics["val"], *of_terms]
    tags = [*of_val, "loss/train", EPOCH_LOSS, *of_metrics["train"]]
    # A metric with several values logs one tag per value. The tag of the metric is followed by the name of the value.
    several = [f"{tag}/" for found in of_metrics.values() for tag in found if tag in tags]
    if monitor in tags or any(monitor.startswith(tag) and monitor != tag for tag in several):
        return
    name, _, stage = monitor.rpartition("/")
    fix = did_you_mean(monitor, tags)
    if stage == "test":
        fix = "The test runs after the best checkpoint is chosen. Monitor a tag of the validation instead"
    elif without and _stage(monitor) == "val":
        fix = f"The run has no validation because of {without}"
    elif name in metrics and stage in ("val", "train"):
        fix = f"Add {stage} to metric_stages"
    elif name in ("loss/val", "loss/train") and stage in terms:
        fix = f"Write loss/val/{stage}" if len(terms) > 1 else f"The objective has only this term: write {name}"
    elif f"{monitor}/val" in tags:
        fix = f"Did you mean {monitor}/val?"
    yield invalid_value(key, monitor, f"a tag of this run: {among(tags, word=monitor)}", fix)


def monitored_tags(plain: dict[str, object]) -> dict[str, str]:
    """Return the tags that a config monitors, by the config key that sets the tag."""
    return {key: tag for key, tag in _monitored_keys(Values(plain)).items() if isinstance(tag, str)}


def plateau_is_watched(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of a ReduceLROnPlateau schedule without `monitor`, or with interval=step."""
    nodes = {"scheduler": values["scheduler"]}
    nodes |= {f"phases.{name}.scheduler": phase["scheduler"] for name, phase in readable(values).items()}
    for key, node in nodes.items():
        if not is_node(node) or not str(node["_target_"]).endswith(".ReduceLROnPlateau"):
            continue
        given = {**SCHEDULER_DEFAULTS, **node}
        if given["monitor"] is None:
            yield missing_value(
                f"{key}.monitor", "the tag of the value to monitor", f"Write {key}.monitor='${{monitor}}'"
            )
        if given["interval"] == "step":
            expected = "epoch, because the monitored value is measured once per validation"
            yield ErrorDetails(f"{key}.interval", "'step'", expected)


def validation_comes_in_time(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of validation intervals for which Lightning raises an exception in the first epoch."""
    every, interval = values["trainer.check_val_every_n_epoch"], values["trainer.val_check_interval"]
    target, monitor = values["scheduler._target_"], values["scheduler.monitor"]
    if values["train"] is not True:
        return
    if every is None and str(target).endswith(".ReduceLROnPlateau") and _stage(monitor) == "val":
        expected = f"an integer, because the schedule reads {monitor} at the end of an epoch"
        fix = "Write trainer.check_val_every_n_epoch=1"
        key = "trainer.check_val_every_n_epoch"
        yield ErrorDetails(key, "null, so that validations are independent of epochs", expected, fix)
    if every is None and isinstance(interval, float):
        expected = "an integer number of batches, counted over all epochs"
        because = "a fraction of an epoch, with trainer.check_val_every_n_epoch=null"
        yield invalid_value("trainer.val_check_interval", interval, expected, because=because)


def stages_at_work_have_data(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of an empty training split, and of an empty validation split that `monitor` needs."""
    parts, data, monitor = values["data.parts"], values["data"], values["monitor"]
    if values["train"] is not True or not isinstance(data, dict) or not isinstance(parts, dict) or not parts:
        return
    reasons = {"train": ("train=true", "the run trains on this split", "Or write train=false")}
    if _stage(monitor) == "val":
        reasons["val"] = (
            f"monitor={monitor}",
            "the monitored value is measured on this split",
            "Or write monitor=loss/train",
        )
    for stage, (asked, why, fix) in reasons.items():
        size = parts.get(stage, 0)
        is_left_out = isinstance(size, int | float) and not isinstance(size, bool) and size == 0
        if is_left_out and data.get(stage) is None and data.get("dataset") is not None:
            yield invalid_value(
                f"data.parts.{stage}", size, f"more than 0, because {why}", fix, because=f"with {asked}"
            )


def allow_is_from_the_command_line(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of packages that a config file allows, but not the command line.

    Otherwise, a downloaded config file could allow the import of downloaded code.
    """
    typed, allowed = values[f"{COMPOSITION}.{ALLOWED}"], values["security.allow"]
    if not allowed or not isinstance(allowed, list) or typed is UNKNOWN:
        return
    others = [str(package) for package in allowed if str(package) not in typed]
    if others:
        expected = "[] in files, because packages can be allowed only on the command line"
        fix = f"If you trust the file, add 'security.allow=[{','.join(map(str, allowed))}]' to the command"
        yield ErrorDetails("security.allow", f"[{','.join(others)}] in a file", expected, fix)


def data_names_its_sets(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of data without a data set, or with a data set that is not a node."""
    data, target = values["data"], values["data._target_"]
    # A class outside of exp may be a LightningDataModule. The check of targets reports such a class after its import.
    is_exps = isinstance(target, str) and target.startswith("exp.")
    if not isinstance(data, dict) or brings_data(values.plain) or not is_exps:
        return
    sets = {name: data[name] for name in ("dataset", *STAGES) if data.get(name) is not None}
    if not sets:
        expected = "a data set, unless data.train, data.val and data.test each have one"
        yield missing_value("data.dataset", expected, got="nothing")
    for name, node in sets.items():
        if node is not UNKNOWN and not is_node(node):
            yield invalid_value(f"data.{name}", node, "a data set: a node with a _target_")


def parts_are_shares(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of split sizes that are neither fractions nor numbers of samples."""
    parts = values["data.parts"]
    if isinstance(parts, dict):
        yield from share_errors({name: size for name, size in parts.items() if size is not UNKNOWN})


def task_fits_data(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of losses and metrics that do not match the kind of the targets.

    Classification needs class numbers as targets, and regression needs measured numbers. This rule checks losses and
    metrics that read the entry `target`. Other targets are checked when the first samples are read.
    """
    classes = values["data.num_classes"]
    is_regression = classes is None and values["data.num_outputs"] not in (None, UNKNOWN)
    is_classification = isinstance(classes, int)
    nodes = {f"objective.{name}": node for name, node in values.entries("objective").items()}
    nodes |= {f"metrics.{name}": node for name, node in values.entries("metrics").items()}
    for key, node in nodes.items():
        if not _reads_target(node):
            continue
        if "loss" in node:
            key, node = f"{key}.loss", node["loss"]
        target = str(node.get("_target_")) if isinstance(node, dict) else ""
        last, kind = target.rpartition(".")[2], "metric" if key.startswith("metrics.") else "loss"
        if is_regression and (last in CLASS_LOSSES or target.startswith(CLASS_METRICS)):
            fix = "Write metrics=[mae]" if kind == "metric" else "Write objective=[mse]"
            why = "the targets of this data set are numbers (data.num_classes is null)"
            yield ErrorDetails(f"{key}._target_", target, f"a {kind} for numbers, because {why}", fix)
        elif is_classification and (last in NUMBER_LOSSES or target.startswith(REGRESSION)):
            fix = "Write metrics=[accuracy]" if kind == "metric" else "Write objective=[cross_entropy]"
            expected = f"a {kind} for {classes} classes, because the targets of this data set are class numbers"
            yield ErrorDetails(f"{key}._target_", target, expected, fix)


def _reads_target(node: Mapping[str, object]) -> bool:
    """Return whether a term or a metric reads the entry `target` of the data."""
    inputs = node.get("inputs")
    return "target" in inputs.values() if isinstance(inputs, dict) else node.get("target", "target") == "target"


def the_test_has_weights(values: Values) -> Iterator[ErrorDetails]:
    """Yield the error of a test stage in a run that saves no checkpoint."""
    if values["checkpoint.save_best"] is False and values["checkpoint.save_last"] is False and values["test"] is True:
        got = "false with checkpoint.save_last=false and test=true"
        yield ErrorDetails(
            "checkpoint.save_best", got, "true, so that the test can load a checkpoint", "Or write test=false"
        )


def switches_agree(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of values that exclude each other, such as those in EXCLUSIVE."""
    for key, value, other, excluded, expected, fix in EXCLUSIVE:
        if values[key] == value and values[other] == excluded:
            yield not_supported_with(key, value, f"{other}={show(excluded)}", expected, fix)
    mode = values["runtime.compile_mode"]
    if isinstance(mode, str) and values["runtime.compile"] is False:
        fix = f"Write runtime.compile=true runtime.compile_mode={mode}"
        got = f"{mode} without runtime.compile=true"
        yield ErrorDetails("runtime.compile_mode", got, "null for a network that is not compiled", fix)


RULES_OF_A_MODULE: tuple[Callable[[Values], Iterator[ErrorDetails]], ...] = (
    module_errors,
    something_to_do,
    files_are_there,
    the_run_ends,
    limits_leave_batches,
    data_names_its_sets,
    parts_are_shares,
    validation_comes_in_time,
    allow_is_from_the_command_line,
    the_test_has_weights,
    switches_agree,
)
# A user's module replaces the parts of the config that the other rules check.
RULES: tuple[Callable[[Values], Iterator[ErrorDetails]], ...] = (
    *RULES_OF_A_MODULE[1:],
    lora_freezes_the_rest,
    objective_is_not_empty,
    names_make_distinct_tags,
    mixed_targets_are_no_classes,
    monitors_are_logged,
    task_fits_data,
    plateau_is_watched,
    stages_at_work_have_data,
    phases_are_readable,
    phases_share_the_objective,
    phases_are_simultaneous_with_others,
    phases_go_with_the_trainer,
)


def _stage(tag: object) -> str:
    parts = tag.split("/") if isinstance(tag, str) else []
    return next((part for part in parts if part in ("train", "val", "test")), "")


def _near_file(path: str) -> str | None:
    directory = Path(path).parent
    if not directory.is_dir():
        return None
    return did_you_mean(Path(path).name, sorted(item.name for item in directory.iterdir() if item.suffix == ".ckpt"))
