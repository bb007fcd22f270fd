"""Types that all packages share, and the letters of shapes. Imports no torch at run time.

Shapes are written `[B, T, C]`: B batch, T time steps, C channels or features, H height, W width, V vocabulary or
classes, P parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Stage = Literal["train", "val", "test"]
STAGES: tuple[Stage, ...] = ("train", "val", "test")
Mode = Literal["min", "max"]
# Samplers and pruners of `sweep`.
Sampler = Literal["auto", "grid", "random", "tpe", "gp", "cmaes", "nsga2", "qmc"]
Pruner = Literal["none", "median", "asha", "hyperband"]
# Mean over an epoch's samples. `monitor: loss/train` compares it, because `loss/train` is the loss of a step.
EPOCH_LOSS = "loss/train_epoch"
# Tags of the best value of `monitor`, and of its optimizer step.
BEST_VALUE, BEST_STEP = "monitor/best", "monitor/best_step"
# Dtypes of samples, by torch's names without `torch.`.
SampleDtype = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
# Name of the input of a sample that is a pair or a tensor.
INPUT: tuple[str, ...] = ("input",)
# A time such as 1h30m, in days, hours, minutes and seconds.
SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def span_seconds(span: str) -> float:
    """Return the seconds of a time such as 1h30m. Raise ValueError for other texts."""
    found = SPAN.fullmatch(span.strip()) if span.strip() else None
    if found is None:
        raise ValueError(f"{span!r} is no time such as 1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def split_tag(tag: str) -> tuple[str, str]:
    """Return the name and stage of a tag such as `accuracy/val` or `val/acc`; an empty stage for other tags."""
    name, _, stage = tag.rpartition("/")
    if stage in STAGES:
        return name, stage
    first, _, rest = tag.partition("/") if "/" in tag else tag.partition("_")
    return (rest, first) if rest and first in STAGES else (tag, "")


def compared_tag(monitor: str) -> str:
    """Return the tag whose values a monitor compares."""
    return EPOCH_LOSS if monitor == "loss/train" else monitor


def best_scalars(best: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the best value and its step by tag: the HParams page shows the last point of a tag."""
    return {} if best is None else {BEST_VALUE: float(best["value"]), BEST_STEP: float(best["step"])}


def searched_tags(wanted: object, *, mode: Mode) -> dict[str, Mode]:
    """Return the tags of `sweep.monitor` with their modes.

    Args:
        wanted: A tag, which gets the run's mode, or a mapping of tags to modes. Other values give no tags.
    """
    if isinstance(wanted, str):
        return {wanted: mode}
    entries = wanted.items() if isinstance(wanted, Mapping) else ()
    return {str(tag): "min" if one == "min" else "max" for tag, one in entries if one in ("min", "max")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without `torch.`, such as float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of a sample.

    Attributes:
        shape: Shape without B, such as (1, 8, 8); None for a length that differs between batches.
        dtype: torch's name without `torch.`, such as "float32" or "int64".
    """

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Shapes and dtypes that a data set declares, with which a model is sized and checked before samples are read.

    Attributes:
        inputs: Inputs of a network by name. Default: one entry `input` from the next two.
        input_shape, input_dtype: Those of the entry `input`, or of a single entry that was read from the data.
        num_classes: Number of classes, or of words of a text. None: a regression.
        num_outputs: Numbers that a model returns per sample or token: the classes, or the width of the target. None:
            samples have several targets, and each term declares its own width.
    """

    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    input_dtype: str | None = None
    num_classes: int | None
    num_outputs: int | None

    def __post_init__(self) -> None:
        if not self.inputs and self.input_shape is not None and self.input_dtype is not None:
            only = TensorSpec(shape=self.input_shape, dtype=self.input_dtype)
            object.__setattr__(self, "inputs", {"input": only})

    @property
    def positions(self) -> int:
        """The numbers in the largest input of one sample, without unknown lengths."""
        return max(math.prod(size for size in one.shape if size is not None) for one in self.inputs.values())

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> DataSpec:
        """Return the spec of a plain data node without values that follow from the data."""
        return cls(
            inputs=tensor_specs(data["inputs"] or {}),
            input_shape=None if data["input_shape"] is None else tuple(data["input_shape"]),
            input_dtype=data["input_dtype"],
            num_classes=data["num_classes"],
            num_outputs=data["num_outputs"],
        )


def tensor_specs(inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorSpec]:
    """Return the specs of `data.inputs`, which has a shape and a dtype for each name."""
    return {name: TensorSpec(shape=tuple(one["shape"]), dtype=one["dtype"]) for name, one in inputs.items()}


class StepWeights(NamedTuple):
    """The divisors of an optimizer step over several micro-batches, as means over the micro-batches.

    Attributes:
        micro_batches: Micro-batches of the step.
        size: Samples of one micro-batch over all ranks.
        divisors: Divisor of one micro-batch over all ranks, 0-d, by the name of each term that divides by weights.
    """

    micro_batches: int
    size: float
    divisors: Mapping[str, Tensor]


class Batch(NamedTuple):
    """This rank's share of one global batch.

    Attributes:
        data: A pair (input, target) of tensors `[b, ...]`, or a mapping of names to tensors.
        size: Samples that count, b. 0 if the global batch is smaller than the number of ranks: the rank then has one
            sample that does not count, so that collectives match.
        global_size: Samples of the global batch over all ranks, B.
        world_size: Ranks that share the batch.
        step: Divisors of a step with several micro-batches.
    """

    data: Sequence[Tensor] | Mapping[str, Tensor] | Any
    size: int
    global_size: int
    world_size: int
    step: StepWeights | None = None

    def with_data(self, data: object) -> Batch:
        """Return the same share with other data."""
        return Batch(data, self.size, self.global_size, self.world_size, self.step)

    def with_step(self, step: StepWeights) -> Batch:
        """Return the same share with the divisors of its step."""
        return Batch(self.data, self.size, self.global_size, self.world_size, step)

    @property
    def mean_size(self) -> float:
        """The number of samples by which the step divides the sum over this batch."""
        return self.global_size if self.step is None else self.step.size

    @property
    def weight(self) -> float:
        """Factor on this rank's mean loss: the mean over ranks and micro-batches is then the mean over samples."""
        return self.size * self.world_size / self.mean_size
