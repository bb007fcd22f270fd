"""The keys that exp itself reads, and what each may hold. train.yaml declares the same; a test compares the two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exp.config.reading import UNKNOWN, is_node
from exp.types import SPAN, STAGES

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one value must be, in words and as a test; words are the spellings that a typo is compared with."""

    expected: str
    accepts: Callable[[Any], bool]
    words: tuple[str, ...] = ()

    def fits(self, value: Any) -> bool:
        return value is UNKNOWN or self.accepts(value)


def _between(value: float, minimum: float | None, maximum: float | None) -> bool:
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" between {minimum:g} and {maximum:g}" if maximum != LARGEST_SEED else f" from {minimum} to 2**63 - 1"
    return f", {minimum:g} or more" if minimum is not None else ""


def integer(minimum: int | None = None, maximum: int | None = None) -> Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and _between(value, minimum, maximum)

    return Rule(expected="an integer" + _range(minimum, maximum), accepts=accepts)


def number(minimum: float | None = None, maximum: float | None = None, *, above: float | None = None) -> Rule:
    def accepts(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and _between(value, minimum, maximum) and (above is None or value > above)

    words = f" above {above:g}" if above is not None else _range(minimum, maximum)
    return Rule(expected="a number" + words, accepts=accepts)


def boolean() -> Rule:
    return Rule(expected="true or false", accepts=lambda value: isinstance(value, bool), words=("true", "false"))


def text() -> Rule:
    return Rule(expected="text", accepts=lambda value: isinstance(value, str) and value != "")


def label() -> Rule:
    """Text, or a number that a command line makes of `name=1`."""
    return Rule(
        expected="text",
        accepts=lambda value: isinstance(value, str | int | float) and not isinstance(value, bool) and value != "",
    )


def folder() -> Rule:
    """A name that becomes a part of a path: it may not leave its directory."""

    def accepts(value: Any) -> bool:
        parts = str(value).split("/")
        return label().fits(value) and "\0" not in str(value) and not {"", ".", ".."} & set(parts)

    return Rule(expected="a name for a directory in outputs/, without a leading / or ..", accepts=accepts)


def one_of(*words: Any) -> Rule:
    spelled = tuple(str(word) for word in words)
    return Rule(
        expected=f"one of {', '.join(spelled)}" if len(words) > 1 else spelled[0],
        accepts=lambda value: any(value == word and type(value) is type(word) for word in words),
        words=spelled,
    )


def maybe(rule: Rule) -> Rule:
    return Rule(
        expected=f"{rule.expected}, or null",
        accepts=lambda value: value is None or rule.accepts(value),
        words=rule.words,
    )


def either(*rules: Rule) -> Rule:
    return Rule(
        expected=" or ".join(rule.expected for rule in rules),
        accepts=lambda value: any(rule.accepts(value) for rule in rules),
        words=tuple(word for rule in rules for word in rule.words),
    )


def list_of(rule: Rule) -> Rule:
    return Rule(
        expected=f"a list, each {rule.expected}",
        accepts=lambda value: isinstance(value, list) and all(rule.fits(item) for item in value),
        words=rule.words,
    )


def mapping_of(rule: Rule) -> Rule:
    return Rule(
        expected=f"a mapping of names to {rule.expected}",
        accepts=lambda value: isinstance(value, dict) and all(rule.fits(item) for item in value.values()),
    )


def limit() -> Rule:
    """A number of epochs or steps, or one of Lightning's two ways to say none."""
    counts = integer(1)
    return Rule(
        expected="an integer, 1 or more; -1 or null for no limit",
        accepts=lambda value: value is None or counts.accepts(value) or (value == -1 and isinstance(value, int)),
    )


def duration() -> Rule:
    """Lightning's two ways to write one."""
    units = {"days", "hours", "minutes", "seconds", "weeks"}

    def accepts(value: Any) -> bool:
        if isinstance(value, dict):
            return bool(value) and set(value) <= units and all(isinstance(part, int | float) for part in value.values())
        return isinstance(value, str) and re.fullmatch(r"\d+(:\d+){3}", value) is not None

    return Rule(
        expected="DD:HH:MM:SS in quotes, such as '00:01:30:00', or a mapping such as {hours: 1}", accepts=accepts
    )


def span() -> Rule:
    """As it is said: 90s, 1h30m."""
    return Rule(
        expected="a time such as 90s, 30m or 1h30m",
        accepts=lambda value: isinstance(value, str) and bool(value) and SPAN.fullmatch(value) is not None,
    )


def node(otherwise: Rule) -> Rule:
    """A node with a `_target_`, or what stands for one."""
    return Rule(
        expected=f"{otherwise.expected}, or a node with a _target_",
        accepts=lambda value: is_node(value) or otherwise.accepts(value),
        words=otherwise.words,
    )


# A mapping here is a fixed node: it holds these keys and no others.
SCHEMA: dict[str, Any] = {
    "name": folder(),
    "seed": integer(0, LARGEST_SEED),
    "monitor": text(),
    "mode": one_of("min", "max"),
    "train": boolean(),
    "test": boolean(),
    "resume": maybe(text()),
    "tags": list_of(label()),
    "print_config": boolean(),
    "data_dir": text(),
    "metric_stages": list_of(one_of(*STAGES)),
    "precision": {
        "word": one_of("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "fp8"),
        "keep": mapping_of(one_of("fp32", "fp64")),
        "report": boolean(),
        "scaler": {
            "init_scale": number(above=0.0),
            "growth_factor": number(above=1.0),
            "backoff_factor": number(0.0, 1.0),
            "growth_interval": integer(1),
            "enabled": maybe(boolean()),
        },
    },
    "checkpoint": {"every_n_steps": maybe(integer(1)), "save_best": boolean(), "save_last": boolean()},
    "runtime": {
        "threads": maybe(integer(1)),
        "deterministic": boolean(),
        "steps_per_execution": maybe(integer(1)),
        "compile": boolean(),
        "compile_backend": text(),
        "cuda_graph": boolean(),
        "channels_last": boolean(),
        "matmul": maybe(one_of("highest", "high", "medium")),
        "cudnn_benchmark": maybe(boolean()),
    },
    "security": {"allow": list_of(text())},
    "launch": {
        "devices": either(one_of("auto"), integer(1), list_of(integer(0))),
        "nodes": integer(1),
        "accelerator": one_of("auto", "cpu", "cuda", "mps"),
        "max_restarts": integer(0),
        "timeout_seconds": number(above=0.0),
        "grace_seconds": number(above=0.0),
        "backend": one_of("auto", "gloo", "nccl"),
        "network_interface": maybe(text()),
        "high_priority_stream": boolean(),
    },
}

# Below nodes whose other keys are their target's: checked where they are there. `*` is one name.
VALUES: dict[str, Rule] = {
    "data.batch_size": integer(1),
    "data.num_workers": integer(0),
    "data.input_shape": maybe(list_of(integer(1))),
    "data.num_classes": maybe(integer(1)),
    "data.num_outputs": maybe(integer(1)),
    "data.input_mean": maybe(list_of(number())),
    "data.input_std": maybe(list_of(number(above=0.0))),
    "optimizer.lr": number(0.0),
    "optimizer.groups": mapping_of(Rule(expected="a mapping", accepts=lambda value: isinstance(value, dict))),
    "optimizer.exempt_from_decay": list_of(text()),
    "phases.*.optimizer.lr": number(0.0),
    "phases.*.optimizer.groups": mapping_of(Rule(expected="a mapping", accepts=lambda value: isinstance(value, dict))),
    "phases.*.optimizer.exempt_from_decay": list_of(text()),
    "phases.*.scheduler.interval": one_of("step", "epoch"),
    "phases.*.scheduler.monitor": maybe(text()),
    "scheduler.interval": one_of("step", "epoch"),
    "scheduler.monitor": maybe(text()),
    "trainer.max_epochs": limit(),
    "trainer.max_steps": limit(),
    "trainer.max_time": maybe(either(number(above=0.0), span(), duration())),
    "trainer.accumulate_grad_batches": integer(1),
    "trainer.log_every_n_steps": integer(1),
    "trainer.check_val_every_n_epoch": maybe(integer(1)),
    "trainer.gradient_clip_val": maybe(number(above=0.0)),
    "trainer.gradient_clip_algorithm": maybe(one_of("norm", "value")),
    "trainer.limit_train_batches": maybe(number(0.0)),
    "trainer.limit_val_batches": maybe(number(0.0)),
    "trainer.limit_test_batches": maybe(number(0.0)),
    "trainer.overfit_batches": either(integer(0), number(0.0, 1.0)),
    "trainer.val_check_interval": maybe(either(integer(1), number(0.0, 1.0), duration())),
    "trainer.profiler": maybe(node(one_of("simple", "advanced", "pytorch", "xla"))),
    "trainer.num_sanity_val_steps": integer(-1),
    "strategy.name": text(),
    "strategy.bucket_cap_mb": maybe(number(above=0.0)),
    "strategy.powersgd.rank": integer(1),
    "strategy.powersgd.start_step": integer(0),
    "strategy.powersgd.min_compression_rate": number(above=0.0),
    "strategy.local_sgd.every_n_steps": maybe(integer(1)),
    "strategy.local_sgd.start_step": integer(0),
    "objective.*.weight": number(),
    "hooks.*.every_n_steps": integer(1),
    "hooks.*.histogram_every_n_steps": maybe(integer(1)),
    "hooks.*.update_ratio_every_n_steps": maybe(integer(1)),
    "hooks.*.shares_every_n_steps": maybe(integer(1)),
}

# Below the same nodes: what exp reads itself, so that it must be there, and what to write for "nothing special".
PRESENT: dict[str, str] = {
    "data.batch_size": "64",
    "data.input_shape": "null",
    "data.input_dtype": "null",
    "data.num_classes": "null",
    "data.num_outputs": "null",
    "data.input_mean": "null",
    "data.input_std": "null",
    "optimizer.groups": "{}",
    "optimizer.exempt_from_decay": "[]",
    "scheduler.interval": "step",
    "scheduler.monitor": "null",
    "strategy.name": "ddp",
    "trainer.enable_progress_bar": "true",
}
