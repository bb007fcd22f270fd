"""Rules that hold between keys. Each takes the plain config and gives faults; none imports what a `_target_` names.

A rule whose keys are not there, or could not be read, has nothing to say: the first stage has said it.
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
    phases_watch_what_is_measured,
    readable,
)
from exp.config.freeze import COMPOSITION
from exp.config.habits import cure_of_value
from exp.config.hydra_adapter import packages_allowed_by
from exp.config.module_key import brings_data, has_module, module_stands_alone
from exp.config.plain_tree import is_node
from exp.config.reading import UNKNOWN, Values
from exp.config.slots import nodes_in
from exp.config.targets import resolve
from exp.data.faults import share_faults
from exp.errors import ConfigError, Fault
from exp.shared_types import EPOCH_LOSS, STAGES, Mode, searched_tags
from exp.spelling import among, did_you_mean, show

# Names of losses, the last part of a `_target_`, that need class numbers or numbers as targets.
CLASS_LOSSES = ("CrossEntropy", "CrossEntropyLoss", "NLL", "NLLLoss", "MultiMarginLoss")
NUMBER_LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss")
CLASS_METRICS = ("exp.objectives.metrics.Accuracy", "exp.objectives.metrics.F1", "exp.objectives.metrics.AUROC")
# Of a run directory, the better one first.
CHECKPOINTS = ("checkpoints/best.ckpt", "checkpoints/last.ckpt")
MIXING = (
    "exp.data.batch_transforms.Mixup",
    "exp.data.batch_transforms.CutMix",
    "torchvision.transforms.v2.MixUp",
    "torchvision.transforms.v2.CutMix",
)
# First parts of tags that need no hook and no metric.
OF_EVERY_RUN = ("optimizer", "precision")
CLASSIFICATION = "torchmetrics.classification."
REGRESSION = "torchmetrics.regression."
# What a run may do behind its training, or without it.
AFTER = ("test", "validate", "predict")


def rule_faults(plain: dict[str, Any]) -> list[Fault]:
    """The faults of all rules."""
    values = Values(plain)
    rules = RULES_OF_A_MODULE if has_module(plain) else RULES
    return [fault for rule in rules for fault in rule(values)]


def something_to_do(values: Values) -> Iterator[Fault]:
    """train=false alone leaves nothing, and test alone needs weights."""
    if all(values[key] is False for key in ("train", *AFTER)):
        got, expected = f"false, and so are {', '.join(AFTER)}", "one of them to be true"
        yield Fault(key="train", got=got, expected=expected)
    elif values["train"] is True:
        cures = {
            "validate": "Leave it out: each epoch validates, and report.json has the values of the best",
            "predict": "Train first: python -m exp.predict run=DIR input=FILE output=FILE takes what the run saved",
        }
        for key, cure in cures.items():
            if values[key] is True:
                yield Fault(key=key, got="true with train=true", expected="false, but with train=false", cure=cure)
    elif values["train"] is False and values["resume"] is None and values["weights.from"] is None:
        yield Fault(
            key="resume", got="null with train=false", expected="the checkpoint to evaluate", cure="Add resume=PATH"
        )


def resume_is_there(values: Values) -> Iterator[Fault]:
    """A checkpoint is a file on this machine."""
    path = values["resume"]
    if not isinstance(path, str) or path in ("", "auto"):
        return
    if "://" in path:
        yield Fault(key="resume", got=show(path), expected="a file on this machine", cure="Download it first")
    # Path.is_file raises for a name that is too long.
    elif not os.path.isfile(path):
        cure = "Write resume=null" if path.lower() == "none" else cure_of_value("resume", path) or _near_file(path)
        yield Fault(key="resume", got=show(path), expected="a checkpoint file that is there", cure=cure)


def weights_are_there(values: Values) -> Iterator[Fault]:
    """A file, or a run directory with a checkpoint, on this machine; a run that goes on has its own."""
    path = values["weights.from"]
    if not isinstance(path, str) or path == "" or values["resume"] is not None:
        return
    if "://" in path:
        yield Fault(key="weights.from", got=show(path), expected="a file on this machine", cure="Download it first")
    elif not os.path.exists(path):
        expected = "a run directory, a checkpoint, a state dict or a safetensors file that is there"
        yield Fault(key="weights.from", got=show(path), expected=expected, cure=_near_file(path))
    elif os.path.isdir(path) and weights_of_run(Path(path)) is None:
        expected = f"a run directory, with {among(CHECKPOINTS)}"
        yield Fault(key="weights.from", got=f"{path}, a directory without weights", expected=expected)


def lora_freezes_by_itself(values: Values) -> Iterator[Fault]:
    """All but its own parameters and what it names; a second word on it would contradict that."""
    layers = values["lora.layers"]
    for key in ("freeze.parameters", "freeze.unfreeze"):
        if isinstance(layers, list) and layers and values[key] not in ([], {}, UNKNOWN):
            got, cure = f"{show(values[key])} with lora.layers", "What learns whole beside it is lora.trained"
            yield Fault(key=key, got=got, expected="nothing: LoRA freezes all other parameters", cure=cure)


def weights_of_run(directory: Path) -> Path | None:
    """The best checkpoint of a run directory, or else its last; None where it has neither."""
    return next((directory / name for name in CHECKPOINTS if (directory / name).is_file()), None)


def the_run_ends(values: Values) -> Iterator[Fault]:
    """Lightning reads "no limit" in two ways and trains on in silence."""
    unlimited = values["trainer.max_epochs"] in (None, -1) and values["trainer.max_steps"] in (None, -1)
    if values["train"] is True and unlimited and values["trainer.max_time"] is None:
        yield Fault(
            key="trainer.max_epochs",
            got=f"{show(values['trainer.max_epochs'])}, with no max_steps and no max_time",
            expected="a limit: max_epochs, max_steps or max_time",
        )
    lowest, highest = values["trainer.min_epochs"], values["trainer.max_epochs"]
    if isinstance(lowest, int) and isinstance(highest, int) and 0 < highest < lowest:
        yield Fault(key="trainer.min_epochs", got=show(lowest), expected=f"at most max_epochs, {highest}")


def limits_leave_batches(values: Values) -> Iterator[Fault]:
    """A limit of 0 batches trains, validates or tests nothing, and exits 0."""
    uses = {
        "train": values["train"] is True,
        "val": values["validate"] is True
        or (values["train"] is True and _stage(values["monitor"]) == "val" and not has_module(values.plain)),
        "test": values["test"] is True,
    }
    cures = {
        "train": "To only test, write train=false",
        "val": "Or monitor something of training: monitor=loss/train",
        "test": "To leave the test out, write test=false",
    }
    for stage, used in uses.items():
        key = f"trainer.limit_{stage}_batches"
        if used and values[key] is not UNKNOWN and values[key] is not None and values[key] == 0:
            yield Fault(key=key, got=show(values[key]), expected="null for all, or more than 0", cure=cures[stage])
        elif isinstance(values[key], float) and 1 < values[key] < math.inf:
            yield Fault(
                key=key,
                got=show(values[key]),
                expected="an integer number of batches, or a share between 0.0 and 1.0",
                cure=f"Write {round(values[key])}",
            )


def objective_is_not_empty(values: Values) -> Iterator[Fault]:
    if values["objective"] != {}:
        return
    overrides = values[f"{COMPOSITION}.overrides"]
    removals = [] if overrides is UNKNOWN else [text for text in map(str, overrides) if text.startswith("~objective.")]
    if removals:
        got, cure = f"its only term is taken out by {removals[-1]}", f"Leave {removals[-1]} out of the command"
    else:
        got, cure = "no term", "Add objective=[cross_entropy]"
    yield Fault(key="objective", got=got, expected="at least one", cure=cure)


def names_make_tags_of_their_own(values: Values) -> Iterator[Fault]:
    """A metric's tags are `<metric>/<stage>`, a term's `loss/<stage>/<term>`; a hook's often begin with its name."""
    hooks = values["hooks"] if isinstance(values["hooks"], dict) else {}
    for group in ("objective", "metrics"):
        for name in map(str, values[group] if isinstance(values[group], dict) else {}):
            got = None
            if "/" in name:
                got = "a name with a slash, which parts a tag"
            elif name in STAGES:
                got = "the name of a stage, with which its tags are read wrongly"
            elif group == "metrics" and name == "loss":
                got = "a metric whose tag is loss/val, the objective's"
            elif group == "metrics" and name in hooks:
                got = f"a metric of the same name as hooks.{name}, whose tags may be the same"
            if got is not None:
                yield Fault(key=f"{group}.{name}", got=got, expected="a tag of its own", cure="Give it another name")


def mixed_targets_are_no_classes(values: Values) -> Iterator[Fault]:
    """Mixup and CutMix turn the class numbers of a training batch into probabilities, which no metric compares."""
    stages = values["metric_stages"]
    if not isinstance(stages, list) or "train" not in stages or not values.entries("metrics"):
        return
    for _, node in nodes_in(values["data.train_batch_transforms"]):
        if node["_target_"] in MIXING and node.get("num_classes") is not None:
            name = str(node["_target_"]).rpartition(".")[2]
            got = f"{show(stages)}, and {name} makes probabilities of the classes of training batches"
            yield Fault(key="metric_stages", got=got, expected="stages without train", cure="Write [val, test]")


def monitors_are_logged(values: Values) -> Iterator[Fault]:
    """What picks the best checkpoint, stops a run or steps a schedule is a tag that the run gives before it ends."""
    yield from _monitor_faults(values, "monitor", values["monitor"])
    # Hooks and callbacks of one's own may give tags of their own.
    own = [node for kind in ("hooks", "callbacks") for node in values.entries(kind).values()]
    if not all(str(node.get("_target_")).startswith(("exp.", "lightning.")) for node in own):
        return
    without = _no_validation(values)
    for key, monitor in _monitored(values).items():
        if key != "monitor":
            yield from _monitor_faults(values, key, monitor, without=without)
    yield from _searched_faults(values, without=without)


def _searched_faults(values: Values, *, without: str | None) -> Iterator[Fault]:
    """Of what a search looks for. Its jobs have ended when it looks: hooks and the test have given their tags, too."""
    callbacks, hooks = (
        [str(node.get("_target_")) for node in values.entries(kind).values()] for kind in ("callbacks", "hooks")
    )
    if any(target.endswith("Monitor") for target in callbacks):
        return  # Lightning's log tags of their own
    measured = [*OF_EVERY_RUN, *(target.split(".")[-2] for target in hooks)]
    metrics = list(values["metrics"]) if isinstance(values["metrics"], dict) else []
    stages = values["metric_stages"] if isinstance(values["metric_stages"], list) else []
    for tag, mode in searched_tags(values["sweep.monitor"], mode="max" if values["mode"] == "max" else "min").items():
        name, _, rest = tag.partition("/")
        if name == "loss" and mode == "max":
            expected, cure = f"min: {tag} is a loss, lower is better", f"Write 'sweep.monitor={{{tag}: min}}'"
            yield Fault(key="sweep.monitor", got=f"{tag}: max", expected=expected, cure=cure)
        is_metrics = name == "loss" or name in metrics
        is_tested = is_metrics and values["test"] is True and (name == "loss" or "test" in stages)
        if not (rest.partition("/")[0] == "test" if is_tested else name in measured and rest and not is_metrics):
            yield from _monitor_faults(values, "sweep.monitor", tag, without=without)


def _monitored(values: Values) -> dict[str, Any]:
    """What the config monitors, by key; of a part that monitors what the run does, the run's alone."""
    nodes = {"scheduler": values["scheduler"]}
    nodes |= {f"callbacks.{name}": node for name, node in values.entries("callbacks").items()}
    nodes |= {f"phases.{name}.scheduler": phase["scheduler"] for name, phase in readable(values).items()}
    found = {f"{key}.monitor": node.get("monitor") for key, node in nodes.items() if isinstance(node, dict)}
    return {"monitor": values["monitor"]} | {key: tag for key, tag in found.items() if tag != values["monitor"]}


def _no_validation(values: Values) -> str | None:
    """The setting by which a run never validates; None where it does."""
    limit = values["trainer.limit_val_batches"]
    if isinstance(limit, int | float) and limit == 0:
        return "trainer.limit_val_batches=0"
    parts, data = values["data.parts"], values["data"]
    has_val = isinstance(data, dict) and (data.get("val") is not None or data.get("dataset") is None)
    return "data.parts.val=0" if isinstance(parts, dict) and parts.get("val", 0) == 0 and not has_val else None


def _monitor_faults(values: Values, key: str, monitor: Any, *, without: str | None = None) -> Iterator[Fault]:
    """without: what keeps the run from validating."""
    stages = values["metric_stages"]
    if not isinstance(monitor, str) or not isinstance(stages, list) or values["train"] is not True:
        return
    terms = list(values["objective"]) if isinstance(values["objective"], dict) else []
    metrics = list(values["metrics"]) if isinstance(values["metrics"], dict) else []
    of_metrics = {stage: [f"{name}/{stage}" for name in metrics if stage in stages] for stage in ("val", "train")}
    # The only term is the loss.
    of_terms = [f"loss/val/{term}" for term in terms if len(terms) > 1]
    of_val = [] if without else ["loss/val", *of_metrics["val"], *of_terms]
    of_training = ["loss/train", EPOCH_LOSS, *of_metrics["train"]]
    tags = [*of_val, *of_training]
    # A metric that gives several values adds their names behind its own tag.
    several = [f"{tag}/" for found in of_metrics.values() for tag in found if tag in tags]
    if monitor in tags or any(monitor.startswith(tag) and monitor != tag for tag in several):
        return
    name, _, stage = monitor.rpartition("/")
    cure = did_you_mean(monitor, tags)
    if stage == "test":
        cure = "The test comes after the best checkpoint was picked: monitor a value of val"
    elif without and _stage(monitor) == "val":
        cure = f"It never validates: {without}"
    elif name in metrics and stage in ("val", "train"):
        cure = f"Add {stage} to metric_stages"
    elif name in ("loss/val", "loss/train") and stage in terms:
        kept = "val" if name == "loss/val" or len(terms) > 1 else "train"
        cure = f"Write loss/val/{stage}" if len(terms) > 1 else f"It is the only term: write loss/{kept}"
    elif f"{monitor}/val" in tags:
        cure = f"Did you mean {monitor}/val?"
    yield Fault(key=key, got=show(monitor), expected=f"a tag of this run: {among(tags, word=monitor)}", cure=cure)


def monitors(plain: dict[str, Any]) -> dict[str, str]:
    """The tags that a config monitors, by the keys where they stand."""
    return {key: tag for key, tag in _monitored(Values(plain)).items() if isinstance(tag, str)}


def mode_fits_a_loss(values: Values) -> Iterator[Fault]:
    monitor = values["monitor"]
    if isinstance(monitor, str) and monitor.startswith("loss/") and values["mode"] == "max":
        yield Fault(key="mode", got="'max'", expected=f"min: {monitor} is a loss, lower is better")


def plateau_is_watched(values: Values) -> Iterator[Fault]:
    target = values["scheduler._target_"]
    if not isinstance(target, str) or not target.endswith(".ReduceLROnPlateau"):
        return
    if values["scheduler.monitor"] is None:
        yield Fault(
            key="scheduler.monitor",
            got="null",
            expected="the tag to watch",
            cure="Write scheduler.monitor='${monitor}'",
        )
    if values["scheduler.interval"] == "step":
        yield Fault(
            key="scheduler.interval", got="'step'", expected="epoch: the watched value is measured once a validation"
        )


def validation_comes_in_time(values: Values) -> Iterator[Fault]:
    """Lightning raises on these as the training begins, or at the end of the first epoch."""
    every, interval = values["trainer.check_val_every_n_epoch"], values["trainer.val_check_interval"]
    target, monitor = values["scheduler._target_"], values["scheduler.monitor"]
    if values["train"] is not True:
        return
    if every is None and str(target).endswith(".ReduceLROnPlateau") and _stage(monitor) == "val":
        yield Fault(
            key="trainer.check_val_every_n_epoch",
            got="null: validation does not follow the epochs",
            expected=f"an integer: the schedule reads {monitor} at the end of an epoch",
            cure="Write trainer.check_val_every_n_epoch=1",
        )
    if every is None and isinstance(interval, float):
        yield Fault(
            key="trainer.val_check_interval",
            got=f"{show(interval)}, a share of an epoch, with trainer.check_val_every_n_epoch=null",
            expected="an integer number of batches, for they are counted over all epochs",
        )
    limit = values["trainer.limit_train_batches"]
    counts = all(isinstance(value, int) and not isinstance(value, bool) for value in (interval, limit))
    if every not in (None, UNKNOWN) and counts and 0 < limit < interval:
        yield Fault(
            key="trainer.val_check_interval",
            got=f"{interval}, more than the {limit} batches of an epoch that trainer.limit_train_batches leaves",
            expected=f"at most {limit}",
            cure="Add trainer.check_val_every_n_epoch=null to count the batches over all epochs",
        )


def stages_at_work_have_data(values: Values) -> Iterator[Fault]:
    """Training needs a train part, and a monitor of val a val part."""
    parts, data = values["data.parts"], values["data"]
    if values["train"] is not True or not isinstance(data, dict) or not isinstance(parts, dict) or not parts:
        return
    reasons = {"train": ("train=true", "this part is trained on", "Or write train=false")}
    if _stage(values["monitor"]) == "val":
        monitor = f"monitor={values['monitor']}"
        reasons["val"] = (monitor, "what is monitored is measured on this part", "Or write monitor=loss/train")
    for stage, (asked, why, cure) in reasons.items():
        size = parts.get(stage, 0)
        is_left_out = isinstance(size, int | float) and not isinstance(size, bool) and size == 0
        if is_left_out and data.get(stage) is None and data.get("dataset") is not None:
            yield Fault(
                key=f"data.parts.{stage}", got=f"{show(size)}, and {asked}", expected=f"more than 0: {why}", cure=cure
            )


def allow_is_from_the_command_line(values: Values) -> Iterator[Fault]:
    """A config file that came with a download may not open the wall for its own code."""
    overrides = values[f"{COMPOSITION}.overrides"]
    if not values["security.allow"] or not isinstance(values["security.allow"], list) or overrides is UNKNOWN:
        return
    typed = packages_allowed_by(str(override) for override in overrides)
    others = [str(package) for package in values["security.allow"] if str(package) not in typed]
    if others:
        allow = ",".join(map(str, values["security.allow"]))
        yield Fault(
            key="security.allow",
            got=f"[{','.join(others)}] in a file",
            expected="[] in files: packages are allowed on the command line alone",
            cure=f"If you trust it, add 'security.allow=[{allow}]' to the command",
        )


def the_test_has_weights(values: Values) -> Iterator[Fault]:
    """The test loads the best checkpoint, or the last."""
    if values["checkpoint.save_best"] is False and values["checkpoint.save_last"] is False and values["test"] is True:
        yield Fault(
            key="checkpoint.save_best",
            got="false, and save_last is false, too",
            expected="a checkpoint for the test to load",
            cure="Or write test=false",
        )


def data_names_its_sets(values: Values) -> Iterator[Fault]:
    """One data set to divide, or one for each part; each is a node."""
    data, target = values["data"], values["data._target_"]
    # A class that is not exp's may be a LightningDataModule, which is told where it is imported.
    is_exps = isinstance(target, str) and target.startswith("exp.")
    if not isinstance(data, dict) or brings_data(values.plain) or not is_exps:
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
    """Classes need class numbers; numbers need numbers. Only where the data set has said which it is, of its target.

    What another target is nobody says: terms and metrics of one are held against the first samples.
    """
    classes = values["data.num_classes"]
    is_regression = classes is None and values["data.num_outputs"] not in (None, UNKNOWN)
    is_classification = isinstance(classes, int)
    for name, term in values.entries("objective").items():
        if not _reads_target(term):
            continue
        key = f"objective.{name}.loss" if "loss" in term else f"objective.{name}"
        loss = term.get("loss", term)
        target = str(loss.get("_target_")) if isinstance(loss, dict) else ""
        last = target.rpartition(".")[2]
        if is_regression and last in CLASS_LOSSES:
            yield _misfit(key, target, "a loss of numbers", "objective=[mse]")
        elif is_classification and last in NUMBER_LOSSES:
            yield _misfit(key, target, f"a loss of {classes} classes", "objective=[cross_entropy]")
    for name, metric in values.entries("metrics").items():
        if not _reads_target(metric):
            continue
        target = str(metric["_target_"])
        # Answers of yes and no, of which a sample may have several, are no classes that a data set counts.
        is_of_classes = target.startswith(CLASSIFICATION) and target.rpartition(".")[2].startswith("Multiclass")
        if is_regression and (target in CLASS_METRICS or is_of_classes):
            yield _misfit(f"metrics.{name}", target, "a metric of numbers", "metrics=[mae]")
        elif is_classification and target.startswith(REGRESSION):
            yield _misfit(f"metrics.{name}", target, f"a metric of {classes} classes", "metrics=[accuracy]")
        elif is_classification and isinstance(metric.get("num_classes"), int) and metric["num_classes"] != classes:
            yield Fault(
                key=f"metrics.{name}.num_classes",
                got=show(metric["num_classes"]),
                expected=f"{classes}, data.num_classes",
                cure="Write num_classes: ${data.num_classes}",
            )


def _reads_target(node: Mapping[str, Any]) -> bool:
    """Whether a term or a metric looks at the data's own target, rather than at others by their names."""
    inputs = node.get("inputs")
    return "target" in inputs.values() if isinstance(inputs, dict) else node.get("target", "target") == "target"


def _misfit(node: str, target: str, expected: str, choice: str) -> Fault:
    kind = "class numbers" if "classes" in expected else "numbers, because data.num_classes is null"
    return Fault(
        key=f"{node}._target_",
        got=target,
        expected=f"{expected}: the targets of this data set are {kind}",
        cure=f"Write {choice}",
    )


def switches_agree(values: Values) -> Iterator[Fault]:
    """What one switch asks for, another may not take away in silence."""
    if values["runtime.deterministic"] is True and values["runtime.cudnn_benchmark"] is True:
        yield Fault(
            key="runtime.cudnn_benchmark",
            got="true with runtime.deterministic=true",
            expected="one of the two: the fastest algorithm of one run need not be that of the next",
            cure="Leave runtime.cudnn_benchmark out",
        )
    mode = values["runtime.compile_mode"]
    if isinstance(mode, str) and values["runtime.compile"] is False:
        yield Fault(
            key="runtime.compile_mode",
            got=f"{mode} without runtime.compile=true",
            expected="null, or a network that is compiled",
            cure=f"Write runtime.compile=true runtime.compile_mode={mode}",
        )
    keep = values["checkpoint.keep"]
    if values["checkpoint.save_best"] is False and isinstance(keep, int) and keep > 1:
        yield Fault(
            key="checkpoint.keep",
            got=f"{keep} with checkpoint.save_best=false, which keeps none of the best",
            expected="1, or checkpoint.save_best=true",
            cure="Leave one of the two out",
        )
    if values["runtime.matmul"] == "highest" and values["precision.word"] == "tf32":
        yield Fault(
            key="runtime.matmul",
            got="highest with precision=tf32",
            expected="high or medium, or null: tf32 is for matrix products that are less exact",
            cure="Leave runtime.matmul out, or choose precision=fp32",
        )


def direction_faults(plain: dict[str, Any], *, allow: Sequence[str]) -> list[Fault]:
    """The fault of a best checkpoint that would be the worst; none where the metric does not say."""
    monitor, mode, sweep = plain.get("monitor"), plain.get("mode"), plain.get("sweep")
    if mode not in ("min", "max"):
        return []
    wanted = {"mode": {str(monitor): mode}}
    if isinstance(sweep, dict):
        wanted["sweep.monitor"] = dict(searched_tags(sweep.get("monitor"), mode=mode))
    faults = []
    for key, tags in wanted.items():
        for tag, direction in tags.items():
            better = better_mode(plain, tag, allow=allow)
            # Of a loss mode_fits_a_loss says it.
            if better in (None, direction) or tag.startswith("loss/"):
                continue
            side = "higher" if better == "max" else "lower"
            got, cure = repr(direction), f"Add mode={better}"
            if key != "mode":
                got, cure = f"{tag}: {direction}", f"Write 'sweep.monitor={{{tag}: {better}}}'"
            faults.append(Fault(key=key, got=got, expected=f"{better}: a {side} {tag} is better", cure=cure))
    return faults


def better_mode(plain: Mapping[str, Any], monitor: object, *, allow: Sequence[str]) -> Mode | None:
    """Whether a loss or a metric is better where it is lower (min) or higher (max); None where it does not say."""
    metrics = plain.get("metrics")
    if not isinstance(monitor, str) or not isinstance(metrics, dict):
        return None
    if monitor.startswith("loss/"):
        return "min"
    node = metrics.get(monitor.partition("/")[0])
    if not isinstance(node, dict) or not is_node(node):
        return None
    try:
        metric = resolve(node["_target_"], base="torchmetrics.Metric", allow=allow)
    except ConfigError:
        return None  # told as the target's own fault
    better: dict[bool | None, Mode | None] = {True: "max", False: "min", None: None}
    return better[_higher_is_better(metric)]


def _higher_is_better(metric: Any) -> bool | None:
    said = next((vars(base)["higher_is_better"] for base in metric.__mro__ if "higher_is_better" in vars(base)), None)
    # A property says it of an instance alone.
    return said if isinstance(said, bool) else None


RULES: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    something_to_do,
    resume_is_there,
    weights_are_there,
    lora_freezes_by_itself,
    the_run_ends,
    limits_leave_batches,
    data_names_its_sets,
    parts_are_shares,
    objective_is_not_empty,
    names_make_tags_of_their_own,
    mixed_targets_are_no_classes,
    monitors_are_logged,
    mode_fits_a_loss,
    task_fits_data,
    plateau_is_watched,
    validation_comes_in_time,
    stages_at_work_have_data,
    allow_is_from_the_command_line,
    the_test_has_weights,
    phases_are_readable,
    phases_share_the_objective,
    phases_are_simultaneous_with_others,
    phases_go_with_the_trainer,
    phases_watch_what_is_measured,
    switches_agree,
)
# Those that are about what a module brings are left out, for it may bring anything.
RULES_OF_A_MODULE: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    module_stands_alone,
    something_to_do,
    resume_is_there,
    the_run_ends,
    limits_leave_batches,
    data_names_its_sets,
    parts_are_shares,
    validation_comes_in_time,
    allow_is_from_the_command_line,
    the_test_has_weights,
    switches_agree,
)


def _stage(tag: Any) -> str:
    parts = tag.split("/") if isinstance(tag, str) else []
    return next((part for part in parts if part in ("train", "val", "test")), "")


def _near_file(path: str) -> str | None:
    directory = Path(path).parent
    if not directory.is_dir():
        return None
    return did_you_mean(Path(path).name, sorted(item.name for item in directory.iterdir() if item.suffix == ".ckpt"))
