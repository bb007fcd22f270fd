"""Settings that exp reads from a config, with the allowed values of each key.

train.yaml declares the same keys. A test compares the keys of both.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Interval, MinLen, Predicate

from exp.config.plain_tree import is_node
from exp.config.reading import UNKNOWN
from exp.config.slots import COLLECTIONS, NODES, PHASES
from exp.files import is_valid_path
from exp.shared_types import SPAN, Mode, Pruner, SampleDtype, Sampler, Stage

UNITS = {"days", "hours", "minutes", "seconds", "weeks"}
PARTS = ("days", "hours", "minutes", "seconds")


def _is_folder(value: object) -> bool:
    """Return whether a value is a valid relative path without `.` and `..`."""
    text = str(value)
    return "\0" not in text and not {"", ".", ".."} & set(text.split("/")) and is_valid_path(text)


def _is_duration(value: object) -> bool:
    """Return whether a value is a duration: `DD:HH:MM:SS`, or a mapping such as {hours: 1}.

    Durations that are too long for timedelta are refused.
    """
    try:
        if isinstance(value, dict):
            return bool(value) and value.keys() <= UNITS and timedelta(**value) >= timedelta()
        if re.fullmatch(r"\d+(:\d+){3}", str(value)) is None:
            return False
        return timedelta(**dict(zip(PARTS, map(int, str(value).split(":")), strict=True))) >= timedelta()
    except (OverflowError, ValueError):  # too large, or nan
        return False


def _is_span(value: str) -> bool:
    return bool(value) and SPAN.fullmatch(value) is not None


# The largest number of elements in a sample. In batches of larger samples, torch's sizes overflow.
MOST_NUMBERS = 10**12


def _are_inputs(inputs: dict[str, dict[str, Any]]) -> bool:
    """Return whether the value of `data.inputs` is valid: each input has a shape and a dtype.

    An input must not have the name `target`, because this name is reserved for the targets.
    """
    sizes = [size for one in inputs.values() if isinstance(one.get("shape"), list) for size in one["shape"]]
    return (
        bool(inputs)
        and "target" not in inputs
        and all(one.keys() == {"shape", "dtype"} and isinstance(one["shape"], list) for one in inputs.values())
        and all(one["dtype"] in get_args(SampleDtype) for one in inputs.values())
        and all(size is None or (type(size) is int and size > 0) for size in sizes)
        and all(math.prod(size or 1 for size in one["shape"]) <= MOST_NUMBERS for one in inputs.values())
    )


Count = Annotated[int, Ge(1)]
# Limited to 1024, because more processes would overload the machine before exp can print a message.
Processes = Annotated[int, "an integer, 1 or more and at most 1024", Predicate(range(1, 1025).__contains__)]
Workers = Annotated[int, Interval(ge=0, le=1024)]
Repeats = Annotated[int, Interval(ge=1, le=10_000)]
Index = Annotated[int, Ge(0)]
Number = Annotated[float, "a finite number", Predicate(math.isfinite)]
Share = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Gt(0)]
# Limited to 366 days, because Python raises an OverflowError for longer waits.
Seconds = Annotated[float, Interval(gt=0, le=366 * 24 * 3600)]
NotNegative = Annotated[float, Ge(0)]
Text = Annotated[str, "text", Predicate(bool)]
# int is allowed because Hydra reads `name=1` as an integer. float is not, because Hydra reads `name=1.10` as 1.1.
Folder = Annotated[
    str | int,
    "text without a leading / or .., which becomes a directory in outputs/, with at most 250 bytes in a name",
    Predicate(_is_folder),
]
# A number of epochs or steps. Lightning accepts both -1 and null for no limit.
Limit = Annotated[
    int | None,
    "an integer, 1 or more; -1 or null for no limit",
    Predicate(lambda value: value in (None, -1) or value >= 1),
]
Duration = Annotated[
    str | dict[str, float],
    "DD:HH:MM:SS in quotes, such as '00:01:30:00', or a mapping such as {hours: 1}",
    Predicate(_is_duration),
]
Span = Annotated[str, "a time such as 90s, 30m or 1h30m", Predicate(_is_span)]
Inputs = Annotated[
    dict[str, dict[str, Any]],
    "a mapping of names to {shape: [3, 32, 32], dtype: float32}, null in a shape for a length that varies",
    Predicate(_are_inputs),
]
Searched = Annotated[
    str | dict[str, Mode] | None,
    "a tag, or tags with a direction each such as {loss/val: min, throughput/step_ms: min}, or null",
    Predicate(lambda wanted: wanted is None or bool(wanted)),
]
Resumed = Annotated[
    str | None, "auto, a sweep's directory, or null", Predicate(lambda wanted: wanted is None or bool(wanted))
]
Node = Annotated[dict[str, Any], "a node with a _target_", Predicate(is_node)]
Sample = Annotated[
    list[Count],
    "a list of integers, 1 or more, with a product of at most 1e12",
    Predicate(lambda shape: math.prod(shape) <= MOST_NUMBERS),
]
Groups = Annotated[dict[str, dict[str, Any]], "a mapping of names to a mapping"]
Unfreezing = Annotated[
    dict[int, list[Text]],
    "a mapping of epochs, counted from 0, to lists of patterns, such as {10: ['encoder.*']}",
    Predicate(lambda by_epoch: all(type(epoch) is int and epoch >= 0 for epoch in by_epoch)),
]


# The options of the group precision.
Word = Literal["fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "fp8"]


@dataclass(frozen=True, kw_only=True)
class ScalerSettings:
    """Settings in the config node `precision.scaler`, for the loss scale of fp16."""

    init_scale: Positive
    growth_factor: Annotated[float, Gt(1)]
    backoff_factor: Share
    growth_interval: Count
    enabled: bool | None


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Settings in the config node `precision`."""

    word: Word
    keep: dict[str, Literal["fp32", "fp64"]]
    scaler: ScalerSettings


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Settings in the config node `checkpoint`: when and which checkpoints are saved."""

    every_n_steps: Count | None
    every_n_minutes: Positive | None
    async_: bool | None
    save_best: bool
    save_last: bool


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Settings in the config node `runtime`: options of the execution, such as threads and compilation."""

    threads: Processes | None
    deterministic: bool
    steps_per_execution: Count | None
    compile: bool
    compile_backend: Text
    compile_mode: Literal["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    channels_last: bool
    step_timeout: Seconds | None
    matmul: Literal["highest", "high", "medium"] | None
    cuda_blocking: bool
    cudnn_benchmark: bool | None
    autoresume: bool
    non_finite: Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """Settings in the config node `weights`: a file of initial weights, and how its names are matched."""

    from_: Text | None
    keys: dict[str, str | None]
    strict: bool
    averaged: bool


@dataclass(frozen=True, kw_only=True)
class FreezeSettings:
    """Settings in the config node `freeze`: parameters that are not trained, and when they are unfrozen."""

    parameters: list[Text]
    batch_norm: Literal["train", "eval"]
    unfreeze: Unfreezing


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Settings in the config node `lora`: layers that are fine-tuned by LoRA."""

    layers: list[Text]
    rank: Count
    alpha: Positive | None
    trained: list[Text]


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings in the config node `sweep`: sampling, pruning and execution of the jobs of a sweep."""

    sampler: Sampler
    trials: Count | None
    pruner: Pruner
    max_failures: Count | None
    timeout: Positive | Span | None
    jobs: Literal["auto"] | Processes
    devices_per_job: Literal["auto"] | Count | Annotated[float, Interval(gt=0, lt=1)]
    stack: Literal["auto"] | bool
    when: dict[str, dict[str, Any]]
    monitor: Searched
    repeat_over: Text | None
    resume: Resumed
    retry_failed: bool
    dry_run: bool
    trial: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Settings in the config node `security`: packages from which classes may be imported."""

    allow: list[Text]


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings in the config node `launch`: devices and processes of a run."""

    devices: Literal["auto"] | Processes | list[Index]
    nodes: Annotated[int, Interval(ge=1, le=100_000)]
    accelerator: Literal["auto", "cpu", "cuda", "mps"]
    max_restarts: Index
    timeout_seconds: Seconds
    grace_seconds: Seconds
    backend: Literal["auto", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Arguments of Lightning's Trainer that exp reads itself. The config node `trainer` may have further arguments."""

    max_epochs: Limit
    max_steps: Limit
    max_time: Positive | Span | Duration | None
    accumulate_grad_batches: Count
    log_every_n_steps: Count
    check_val_every_n_epoch: Count | None
    gradient_clip_val: Positive | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    limit_train_batches: NotNegative | None
    limit_val_batches: NotNegative | None
    limit_test_batches: NotNegative | None
    overfit_batches: Index | Share
    val_check_interval: Count | Annotated[float, Interval(gt=0, le=1)] | Duration | None
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | Node | None
    num_sanity_val_steps: Annotated[int, Ge(-1)]
    enable_progress_bar: bool | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, with a field for each top-level key of the config.

    If a key is a Python keyword, the field ends with `_`: `from_` is the field of the key `from`.

    The fields from `model` to `logger` are plain mappings, because the keys in these nodes depend on the classes in
    their `_target_`. If a value is missing or could not be read, the field is UNKNOWN. Values of a wrong type are not
    converted. If `module` is set, `model`, `optimizer` and `scheduler` are None.
    """

    name: Folder
    seed: Annotated[int, "an integer from 0 to 2**63 - 1", Predicate(range(2**63).__contains__)]
    monitor: Text | None
    mode: Mode
    train: bool
    test: bool
    validate: bool
    predict: bool
    resume: Text | None
    tags: list[Text]
    print_config: bool
    data_dir: Text
    metric_stages: list[Stage]
    module: Node | None
    vars: dict[str, Any]
    resolvers: dict[str, Any]
    precision: PrecisionSettings
    checkpoint: CheckpointSettings
    runtime: RuntimeSettings
    weights: WeightsSettings
    initialisation: dict[str, str | dict[str, Any]]
    freeze: FreezeSettings
    lora: LoraSettings
    sweep: SearchSettings
    security: SecuritySettings
    launch: LaunchSettings
    trainer: TrainerSettings
    model: Node
    data: Node
    optimizer: Node
    scheduler: Node
    strategy: Node
    objective: dict[str, Any]
    phases: dict[str, Any]
    metrics: dict[str, Any]
    hooks: dict[str, Any]
    callbacks: dict[str, Any]
    logger: dict[str, Any]

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch, summed over all ranks. None if the user's data loaders choose the number."""
        size = self.data.get("batch_size")
        return size if isinstance(size, int) else None

    @property
    def has_own_loaders(self) -> bool:
        """Return whether a user's LightningModule is trained with the data loaders of a LightningDataModule."""
        return self.module is not None and not str(self.data["_target_"]).startswith("exp.")


def settings_of(plain: Mapping[str, Any]) -> Settings:
    """Return the settings in the plain values of a config. The values are not checked."""
    made: Settings = _make(Settings, plain)
    return made


def _make(kind: Any, node: object) -> Any:
    found = {}
    for field in dataclasses.fields(kind):
        key = field.name.rstrip("_")
        value = node[key] if isinstance(node, Mapping) and key in node else UNKNOWN
        found[field.name] = _make(field.type, value) if dataclasses.is_dataclass(field.type) else value
    return kind(**found)


def _schema(kind: Any) -> dict[str, Any]:
    found = {field.name.rstrip("_"): field.type for field in dataclasses.fields(kind)}
    return {key: _schema(rule) if dataclasses.is_dataclass(rule) else rule for key, rule in found.items()}


# Annotation of each setting by key. If a value is a mapping, the node may have only the keys in this mapping.
SCHEMA = {key: rule for key, rule in _schema(Settings).items() if key not in (*NODES, *COLLECTIONS, PHASES)}

# Annotations of settings in nodes with a `_target_`, by dotted key. `*` matches one name. A setting is checked only if
# it is set. Other keys of these nodes are parameters of the class.
VALUES: dict[str, Any] = {
    "data.batch_size": Count,
    "data.num_workers": Workers,
    "data.inputs": Inputs | None,
    "data.input_shape": Sample | None,
    "data.num_classes": Count | None,
    "data.num_outputs": Count | None,
    "data.input_mean": Annotated[list[Number], MinLen(1)] | None,
    "data.input_std": Annotated[list[Positive], MinLen(1)] | None,
    "data.split.stratify": bool,
    "data.split.group": Text | None,
    "data.split.column": Text | None,
    "data.split.folds": Annotated[int, Ge(2)] | None,
    "data.split.fold": Index,
    "optimizer.lr": NotNegative,
    "optimizer.groups": Groups,
    "optimizer.exempt_from_decay": list[Text],
    "phases.*.optimizer.lr": NotNegative,
    "phases.*.optimizer.groups": Groups,
    "phases.*.optimizer.exempt_from_decay": list[Text],
    "phases.*.scheduler.interval": Literal["step", "epoch"],
    "phases.*.scheduler.monitor": Text | None,
    "scheduler.interval": Literal["step", "epoch"],
    "scheduler.monitor": Text | None,
    **{f"trainer.{key}": rule for key, rule in _schema(TrainerSettings).items()},
    "strategy.name": Text,
    "strategy.bucket_cap_mb": Positive | None,
    "metrics.*.output": Text,
    "metrics.*.target": Text,
    "metrics.*.inputs": Annotated[dict[str, Text], "a mapping of parameters to names of values"] | None,
    # A number is the weight of a term. A list contains the class weights of a torch loss.
    "objective.*.weight": Number | list[Number],
    "hooks.*.every_n_steps": Literal["auto"] | Count,
    "hooks.*.heat_map_every_n_steps": Literal["auto"] | Count | None,
    "hooks.*.histogram_every_n_steps": Literal["auto"] | Count | None,
    "hooks.*.update_ratio_every_n_steps": Literal["auto"] | Count | None,
}
