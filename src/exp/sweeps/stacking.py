"""The rules that decide which jobs of a sweep are trained together in one process, as a stack.

Jobs of a stack have equal configs, except for values that may differ between members: optimizer, schedule, gradient
clipping, seed, initial values and dropout rates. For each job outside of a stack, a message names the config key that
prevents stacking.

This module does not import torch, because a sweep uses the module before the first job starts. `exp.sweeps.stack` makes
further checks on the network and the data after they are built.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exp.config.frozen import COMPOSITION, OUTPUT_DIR
from exp.config.plain_tree import are_same, is_node, leaves
from exp.config.reading import UNKNOWN, Values
from exp.shared_types import EPOCH_LOSS
from exp.spelling import show
from exp.sweeps.jobs import Job, Plain

# Keys that may differ within a stack. Each member uses the value in its config, or the value does not affect training.
OWN_KEYS = (
    COMPOSITION, "name", "seed", "monitor", "mode", "tags", "print_config", "optimizer", "scheduler", "initialisation",
    "weights", "sweep", "vars", "hydra",
)  # fmt: skip
OWN_TRAINER_KEYS = ("gradient_clip_val", "gradient_clip_algorithm", "enable_progress_bar", "enable_model_summary")
HOOKS = {f"exp.hooks.{name.lower()}.{name}" for name in ("Gradients", "Memory", "Throughput")}
# Settings of hooks that a stack does not support. If a period is `auto`, a stack does not log the value.
OF_SINGLE_RUNS = (
    *("peak_flops", "clipped", "heat_map_every_n_steps", "histogram_every_n_steps", "update_ratio_every_n_steps"),
)
LOGGERS = {"exp.tensorboard.logger.TensorBoardLogger"}
DROPOUTS = {f"torch.nn.Dropout{dimensions}" for dimensions in ("", "1d", "2d", "3d")}
# LBFGS calls the loss several times, and SparseAdam needs sparse gradients. A stack supports neither.
OTHER_OPTIMIZERS = {"torch.optim.LBFGS", "torch.optim.SparseAdam"}

# Pairs of allowed values and config keys. In a stack, each key must have one of these values, or be missing.
REQUIRED: Sequence[tuple[tuple[object, ...], tuple[str, ...]]] = (
    ((None,), ("module", "resume", "trainer.max_time", "trainer.profiler", "runtime.step_timeout", "runtime.matmul")),
    ((None,), ("checkpoint.every_n_steps", "checkpoint.every_n_minutes")),
    ((None,), ("data.sampler", "data.batch_sampler", "data.collate")),
    ((None, -1), ("trainer.max_steps",)),
    ((None, [], {}), ("data.transforms", "data.train_transforms", "data.eval_transforms")),
    ((None, [], {}), ("data.batch_transforms", "data.train_batch_transforms")),
    ((None, False), ("checkpoint.async",)),
    ((False,), ("trainer.detect_anomaly", "runtime.deterministic", "runtime.cuda_blocking")),
    ((False,), ("runtime.channels_last", "runtime.autoresume", "runtime.compile")),
    ((True,), ("train", "checkpoint.save_last", "checkpoint.save_best")),
    ((0,), ("launch.max_restarts", "trainer.num_sanity_val_steps")),
    ((0, 0.0), ("trainer.overfit_batches",)),
    ((1,), ("launch.nodes", "trainer.accumulate_grad_batches")),
    ((1,), ("trainer.check_val_every_n_epoch",)),
    ((1, "auto"), ("launch.devices",)),
    # 1.0 means all batches, but the integer 1 means one batch.
    ((None, 1.0), ("trainer.val_check_interval", "trainer.limit_train_batches")),
    ((None, 1.0), ("trainer.limit_val_batches", "trainer.limit_test_batches")),
    (("auto", "cpu"), ("launch.accelerator",)),
    (("auto", "single"), ("strategy.name",)),
    (("fp32", "fp64", "bf16"), ("precision.word",)),
    (("stop",), ("runtime.non_finite",)),
    (("none",), ("sweep.pruner",)),
    (("train",), ("freeze.batch_norm",)),
    (({},), ("precision.keep", "freeze.unfreeze")),
    (([],), ("lora.layers",)),
)


def groups(plains: Sequence[Plain], *, most: int | None = None) -> tuple[list[tuple[int, ...]], dict[int, str]]:
    """Return the jobs of each stack, and the reason why each other job runs alone.

    Args:
        plains: Config of each job as plain values, interpolations resolved.
        most: Largest number of jobs in a stack. None is no limit.

    Returns:
        The first value is a list of stacks. Each stack is a tuple with the indices of at least two jobs. The second
        value maps the index of each other job to the reason.
    """
    alike: dict[str, list[int]] = {}
    reasons: dict[int, str] = {}
    for place, plain in enumerate(plains):
        if reason := obstacle(plain):
            reasons[place] = reason
        else:
            alike.setdefault(signature(plain), []).append(place)
    stacked: list[tuple[int, ...]] = []
    for places in alike.values():
        count = 1 if most is None else math.ceil(len(places) / max(2, most))
        if len(places) == 1:
            reasons[places[0]] = "no other job has the same model, data, objective and length"
        else:
            stacked += [tuple(places[first::count]) for first in range(count)]
    return stacked, reasons


def group_jobs(jobs: Sequence[Job], *, is_left: Callable[[Job], bool], slots: int) -> list[list[Job]]:
    """Return a list of jobs for each process, and print the reasons why jobs are not stacked.

    Args:
        jobs: Checked jobs. Jobs that have ended must be included, so that a resumed sweep forms the same stacks.
        is_left: Function that returns whether a job still has to run.
        slots: Number of processes that run at the same time.
    """
    whole = [job for job in jobs if job.error is None]
    left = {place for place, job in enumerate(whole) if is_left(job)}
    stacked, reasons = groups([job.plain for job in whole], most=math.ceil(len(whole) / slots))
    for reason, count in Counter(reason for place, reason in reasons.items() if place in left).items():
        print(f"{count} job{'s run in separate processes' if count > 1 else ' runs in a separate process'}: {reason}")
    found = [[replace(whole[place], is_stacked=True) for place in places if place in left] for places in stacked]
    together = {job.number for members in found for job in members}
    return [*filter(None, found), *([job] for job in jobs if job.number not in together)]


def obstacle(plain: Plain) -> str | None:
    """Return the reason why a job cannot be stacked, with the config key. Return None if the job can be stacked."""
    found = next(_obstacles(plain), None)
    return None if found is None else "{} cannot be stacked: {}".format(*found)


def _obstacles(plain: Plain) -> Iterator[tuple[str, str]]:
    values = Values(dict(plain))
    for allowed, keys in REQUIRED:
        for key in keys:
            value = values[key]
            if value is not UNKNOWN and not any(are_same(value, one) for one in allowed):
                yield key, f"stacked jobs need {key}={' or '.join(map(show, allowed))}"
    for group in ("phases", "callbacks"):
        if plain[group]:
            yield f"{group}.{next(iter(plain[group]))}", f"a {group.rstrip('s')} acts on a single run"
    names = "gradients, memory and throughput"
    for group, known, supported in (("hooks", HOOKS, names), ("logger", LOGGERS, "tensorboard")):
        for name, node in plain[group].items():
            if node["_target_"] not in known:
                yield f"{group}.{name}", f"a stack supports no {group} except {supported}"
    for name, node in plain["hooks"].items():
        for setting in OF_SINGLE_RUNS:
            if node.get(setting) not in (None, "auto"):
                yield f"hooks.{name}.{setting}", "a stack logs no FLOPs, and no values of gradients except norms"
    if plain["optimizer"]["_target_"] in OTHER_OPTIMIZERS:
        yield "optimizer", "a stack does not support LBFGS and SparseAdam"
    epochs = plain["trainer"]["max_epochs"]
    if epochs is None or epochs < 1:
        yield "trainer.max_epochs", "the length of stacked jobs is a number of epochs, 1 or more"
    if "train" in plain["metric_stages"]:
        yield "metric_stages", "a stack computes no metrics on training batches"
    monitor = plain["monitor"]
    if monitor is not None and (monitor == EPOCH_LOSS or monitor.endswith("/train")):
        yield "monitor", "a stack compares only values of the validation split"
    if str(plain["scheduler"]["_target_"]).endswith("ReduceLROnPlateau"):
        yield "scheduler", "ReduceLROnPlateau reads a value of a single run"
    for key, value in leaves(plain):
        if isinstance(value, str) and OUTPUT_DIR in value:
            yield key, "the value contains the run directory, which differs between jobs"


def signature(plain: Plain) -> str:
    """Return a text for comparing jobs. Two jobs can be in the same stack if their texts are equal."""
    kept = {key: value for key, value in plain.items() if key not in OWN_KEYS}
    kept["trainer"] = {key: value for key, value in plain["trainer"].items() if key not in OWN_TRAINER_KEYS}
    kept["model"] = _without_own_values(plain["model"])
    return json.dumps(kept, sort_keys=True, default=repr)


def _without_own_values(node: Any) -> Any:
    """Return a node of a model without initial values and dropout rates, which may differ within a stack."""
    if isinstance(node, list):
        return [_without_own_values(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    own = {"p"} if node.get("_target_") in DROPOUTS else set()
    own |= {"initialisation"} if is_node(node) else set()
    found = {name: _without_own_values(value) for name, value in node.items() if name not in own}
    if isinstance(found.get("constants"), dict):
        # Ignore a constant that no forward program uses. Only interpolations used it, and these are already resolved.
        programs = f"{node.get('forward')} {node.get('programs')}"
        found["constants"] = {name: value for name, value in found["constants"].items() if name in programs}
    return found
