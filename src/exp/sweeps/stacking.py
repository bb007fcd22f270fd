"""Which jobs of a sweep can be trained together, in one stack, and what forbids it of the others, in one line each.

Jobs go together where their configs are the same but for what each member of a stack has for itself: the optimizer and
its schedule, clipping, seeds, initial values, dropout rates, weights of terms, label smoothing. Nothing here imports
torch: a sweep asks before its first job. What only the built parts tell is asked by `exp.sweeps.stack`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exp.config.freeze import COMPOSITION, OUTPUT_DIR
from exp.config.plain_tree import is_node, leaves

Plain = Mapping[str, Any]

# What each member has for itself, or what changes nothing of how it is trained.
OWN_KEYS = (
    COMPOSITION, "name", "seed", "monitor", "mode", "tags", "print_config", "optimizer", "scheduler", "initialisation",
    "weights", "sweep", "vars", "hydra",
)  # fmt: skip
OWN_TRAINER_KEYS = ("gradient_clip_val", "gradient_clip_algorithm", "enable_progress_bar", "enable_model_summary")
HOOKS = {f"exp.hooks.{name.lower()}.{name}" for name in ("Gradients", "Memory", "Throughput")}
LOGGERS = {"exp.tensorboard.logger.TensorBoardLogger"}
OBJECTIVE = "exp.objectives.objective.Term"
SMOOTHED = {"exp.objectives.terms.CrossEntropy", "torch.nn.CrossEntropyLoss"}
DROPOUTS = {f"torch.nn.Dropout{dimensions}" for dimensions in ("", "1d", "2d", "3d")}
WORDS = ("fp32", "fp64", "bf16")
# An optimizer that evaluates the loss by itself, and one for gradients that are sparse.
OTHER_OPTIMIZERS = {"torch.optim.LBFGS", "torch.optim.SparseAdam"}
# In the provenance of a job that was begun in a stack.
STACK = "stack"
ONE_RUN = "it acts on one run"
OWN_LOOP = "a stack has a loop of its own"

# Keys with the one value, of several, with which jobs can be stacked, and why others cannot be.
RULES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "module": ((None,), "a LightningModule of your own has steps of its own"),
    "train": ((True,), "it trains nothing"),
    "resume": ((None,), "each member goes on from its own directory alone"),
    "strategy.name": (("auto", "single"), "a stack is one process"),
    "launch.devices": (("auto", 1), "a stack is one process"),
    "launch.nodes": ((1,), "a stack is one process"),
    "launch.accelerator": (("auto", "cpu"), "jobs are stacked on a CPU alone"),
    "launch.max_restarts": ((0,), "a stack is one process"),
    "precision.word": (WORDS, "its numbers have a scale, or a dtype, that is of one run"),
    "precision.keep": (({},), "layers with a dtype of their own are converted for one run"),
    "trainer.accumulate_grad_batches": ((1,), OWN_LOOP),
    "trainer.max_time": ((None,), "members end together by steps or epochs, not by a clock"),
    "trainer.val_check_interval": ((None, 1.0), OWN_LOOP),
    "trainer.limit_train_batches": ((None, 1.0), OWN_LOOP),
    "trainer.limit_val_batches": ((None, 1.0), OWN_LOOP),
    "trainer.limit_test_batches": ((None, 1.0), OWN_LOOP),
    "trainer.overfit_batches": ((0.0, 0), OWN_LOOP),
    "trainer.num_sanity_val_steps": ((0,), OWN_LOOP),
    "trainer.profiler": ((None,), "it looks into Lightning's loop"),
    "trainer.detect_anomaly": ((False,), "it looks at one run's backward"),
    "checkpoint.every_n_steps": ((None,), "a stack saves at the ends of epochs"),
    "checkpoint.every_n_minutes": ((None,), "a stack saves at the ends of epochs"),
    "checkpoint.keep": ((1,), "a stack keeps one best checkpoint of each member"),
    "checkpoint.async": ((None, False), "it is a thread of one run"),
    "sweep.pruner": (("none",), "a pruner compares a job with jobs that ended before it"),
    "runtime.deterministic": ((False,), "it is a switch of one run"),
    "runtime.cuda_blocking": ((False,), "it looks at the steps of one run"),
    "runtime.channels_last": ((False,), "a stack has weights in one layout"),
    "runtime.step_timeout": ((None,), "it watches one run"),
    "runtime.autoresume": ((False,), "it is one run that goes on"),
    "runtime.non_finite": (("stop",), "a stack goes neither back nor on without a step"),
    "runtime.matmul": ((None,), "it is a switch of one run"),
    "freeze.batch_norm": (("train",), "it changes layers in the middle of a run"),
    "freeze.unfreeze": (({},), "parameters begin to learn in the middle of a run"),
    "lora.layers": (([],), "its products replace layers of one run"),
    "data.sampler": ((None,), "a stack takes its batches by index"),
    "data.batch_sampler": ((None,), "a stack takes its batches by index"),
    "data.collate": ((None,), "a stack takes its batches by index"),
    "data.transforms": ((None, [], {}), "they are drawn for each sample of one run"),
    "data.train_transforms": ((None, [], {}), "they are drawn for each sample of one run"),
    "data.eval_transforms": ((None, [], {}), "they are drawn for each sample of one run"),
    "data.batch_transforms": ((None, [], {}), "they are drawn for each batch of one run"),
    "data.train_batch_transforms": ((None, [], {}), "they are drawn for each batch of one run"),
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Jobs by how they can be trained.

    stacked: of each stack its jobs, by their places in what was asked about; two or more.
    reasons: why each other job runs in a process of its own, by its place: the key that forbids it, or that no other
        job is like it.
    """

    stacked: tuple[tuple[int, ...], ...]
    reasons: Mapping[int, str]


def groups(plains: Sequence[Plain], *, most: int | None = None) -> Groups:
    """Divide jobs into stacks, each of jobs that differ in nothing but what a member has for itself.

    plains: of each job the values of its config, interpolations resolved. most: members of a stack; None is no limit.
    """
    found: dict[str, list[int]] = {}
    reasons: dict[int, str] = {}
    for place, plain in enumerate(plains):
        reason = obstacle(plain)
        if reason is None:
            found.setdefault(signature(plain), []).append(place)
        else:
            reasons[place] = reason
    stacked: list[tuple[int, ...]] = []
    for places in found.values():
        if len(places) == 1:
            reasons[places[0]] = "no other job has the same model, data, objective and length"
        else:
            stacked += _parts(places, most=most)
    return Groups(stacked=tuple(stacked), reasons=reasons)


def _parts(places: list[int], *, most: int | None) -> Iterator[tuple[int, ...]]:
    """The places in parts as even as they go, none of one place alone where that can be helped."""
    count = 1 if most is None else math.ceil(len(places) / max(2, most))
    base, extra = divmod(len(places), count)
    start = 0
    for number in range(count):
        stop = start + base + (number < extra)
        yield tuple(places[start:stop])
        start = stop


def is_member(directory: Path) -> bool:
    """Whether the job of a run directory was begun in a stack. It goes on in one, were it alone there: what a stack
    rounds, such as a layer norm, it rounds otherwise than a run, and the same for any number of members."""
    path = directory / "provenance.json"
    return path.is_file() and STACK in json.loads(path.read_text(encoding="utf-8"))


def obstacle(plain: Plain) -> str | None:
    """The key that forbids a job to be stacked, and why, in one line; None where none does."""
    return next(_obstacles(plain), None)


def _obstacles(plain: Plain) -> Iterator[str]:
    for key, (allowed, why) in RULES.items():
        value = _at(plain, key)
        # By type, too: a limit of 1 is one batch, and one of 1.0 all of them.
        if not any(value == one and type(value) is type(one) for one in allowed):
            yield _line(key, why)
    for group in ("phases", "callbacks"):
        if plain[group]:
            yield _line(f"{group}.{next(iter(plain[group]))}", ONE_RUN if group == "callbacks" else OWN_LOOP)
    for group, known, why in (("hooks", HOOKS, "it looks at one run"), ("logger", LOGGERS, "it is told of one run")):
        for name, node in plain[group].items():
            if node["_target_"] not in known:
                yield _line(f"{group}.{name}", why)
    for name, node in plain["hooks"].items():
        if node.get("peak_flops") is not None:
            yield _line(f"hooks.{name}.peak_flops", "the FLOPs of a stack are those of all its members")
    if plain["optimizer"]["_target_"] in OTHER_OPTIMIZERS:
        yield _line("optimizer", "it evaluates the loss by itself, or takes sparse gradients")
    if plain["trainer"]["max_epochs"] is None or plain["trainer"]["max_epochs"] < 1:
        yield _line("trainer.max_epochs", "a stack needs a number of epochs")
    if plain["trainer"]["check_val_every_n_epoch"] is None:
        yield _line("trainer.check_val_every_n_epoch", OWN_LOOP)
    if "train" in plain["metric_stages"]:
        yield _line("metric_stages", "metrics of training batches are those of one run")
    if plain["monitor"] is not None and not isinstance(plain["monitor"], str):
        yield _line("monitor", "a stack compares one value of each member")
    if _steps_on_plateau(plain):
        yield _line("scheduler.interval", "a schedule on plateau moves at epochs in a stack")
    for key, value in leaves(plain):
        if isinstance(value, str) and OUTPUT_DIR in value:
            yield _line(key, "it is in the directory of one run")


def _steps_on_plateau(plain: Plain) -> bool:
    scheduler = plain["scheduler"]
    return str(scheduler["_target_"]).endswith("ReduceLROnPlateau") and scheduler["interval"] == "step"


def _line(key: str, why: str) -> str:
    return f"{key} cannot be stacked: {why}"


def _at(plain: Plain, key: str) -> Any:
    """The value at a dotted key; None where a node on the way, or the last one, is not there."""
    value: Any = plain
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def signature(plain: Plain) -> str:
    """What jobs of one stack have in common, as a text; that of another is another."""
    kept = {key: value for key, value in plain.items() if key not in OWN_KEYS}
    kept["trainer"] = {key: value for key, value in plain["trainer"].items() if key not in OWN_TRAINER_KEYS}
    kept["model"] = _without_rates(plain["model"])
    kept["objective"] = {name: _without_weight(term) for name, term in plain["objective"].items()}
    return json.dumps(kept, sort_keys=True, default=repr)


def _without_rates(node: Any) -> Any:
    """A model's node without the rates of its dropouts, and without initial values."""
    if isinstance(node, list):
        return [_without_rates(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    own = {"p"} if node.get("_target_") in DROPOUTS else set()
    own |= {"initialisation"} if is_node(node) else set()
    found = {name: _without_rates(value) for name, value in node.items() if name not in own}
    if isinstance(found.get("constants"), dict):
        # What no program names is there for interpolations alone, which are resolved.
        programs = f"{node.get('forward')} {node.get('programs')}"
        found["constants"] = {name: value for name, value in found["constants"].items() if name in programs}
    return found


def _without_weight(term: Any) -> Any:
    if not is_node(term):
        return term
    own = {"weight"} if term["_target_"] == OBJECTIVE else set()
    if term["_target_"] in SMOOTHED:
        own = {"label_smoothing"}
    return {name: _without_weight(value) for name, value in term.items() if name not in own}
