"""Types that every room shares, and the letters of shapes. Imports no torch at run time.

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
# Of `sweep`: what names the jobs, and what ends one early.
Sampler = Literal["auto", "grid", "random", "tpe", "gp", "cmaes", "nsga2", "qmc"]
Pruner = Literal["none", "median", "asha", "hyperband"]
# The mean over an epoch's samples, which is also what `monitor: loss/train` compares: `loss/train` itself is a step's.
EPOCH_LOSS = "loss/train_epoch"
# The tags of the best value of `monitor`, and of its optimizer step.
BEST_VALUE, BEST_STEP = "monitor/best", "monitor/best_step"
# What samples may be, by torch's names without `torch.`.
SampleDtype = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
# The name of the input of a sample that is a pair, or a tensor alone.
INPUT: tuple[str, ...] = ("input",)
# A time as it is said, 1h30m: days, hours, minutes and seconds, each where it is.
SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def span_seconds(span: str) -> float:
    """The seconds of a time such as 1h30m.

    Raises: ValueError for another text.
    """
    found = SPAN.fullmatch(span.strip()) if span.strip() else None
    if found is None:
        raise ValueError(f"{span!r} is no time such as 1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def split_tag(tag: str) -> tuple[str, str]:
    """The name and the stage of a tag: `accuracy/val`, or `val/acc` as people write it to self.log; else no stage."""
    name, _, stage = tag.rpartition("/")
    if stage in STAGES:
        return name, stage
    first, _, rest = tag.partition("/") if "/" in tag else tag.partition("_")
    return (rest, first) if rest and first in STAGES else (tag, "")


def compared_tag(monitor: str) -> str:
    """The tag whose values a monitor compares."""
    return EPOCH_LOSS if monitor == "loss/train" else monitor


def best_scalars(best: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the best value and its step by tag: the HParams page shows the last point of a tag."""
    return {} if best is None else {BEST_VALUE: float(best["value"]), BEST_STEP: float(best["step"])}


def searched_tags(wanted: object, *, mode: Mode) -> dict[str, Mode]:
    """Return the tags that `sweep.monitor` names, with their directions; none of null.

    wanted: a tag alone, which has the run's mode, or tags with a mode each; of anything else, what can be read.
    """
    if isinstance(wanted, str):
        return {wanted: mode}
    entries = wanted.items() if isinstance(wanted, Mapping) else ()
    return {str(tag): "min" if one == "min" else "max" for tag, one in entries if one in ("min", "max")}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without `torch.`, such as float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a sample.

    shape: without B, such as (1, 8, 8); None where a length differs from batch to batch.
    dtype: torch's name without `torch.`, such as "float32" or "int64".
    """

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a data set declares, so that a model can be sized and checked before any sample is read.

    inputs: what a network may be given, by name; where it is left out, one entry `input` of the next two.
    input_shape, input_dtype: of the entry `input`, or of the only one where it was read from the data; else None.
    num_classes: of a classification (the vocabulary of a text); None for a regression.
    num_outputs: how many numbers a model gives for a sample (or a token): the classes, or the width of the target; None
        of samples with several targets by other names, of which each term says its own.
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
        """Numbers in the largest input of one sample, as far as its lengths are known."""
        return max(math.prod(size for size in one.shape if size is not None) for one in self.inputs.values())

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> DataSpec:
        """Reads the spec of a plain data node that leaves nothing to the data."""
        return cls(
            inputs=tensor_specs(data["inputs"] or {}),
            input_shape=None if data["input_shape"] is None else tuple(data["input_shape"]),
            input_dtype=data["input_dtype"],
            num_classes=data["num_classes"],
            num_outputs=data["num_outputs"],
        )


def tensor_specs(inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorSpec]:
    """Reads data.inputs: a shape and a dtype for each name."""
    return {name: TensorSpec(shape=tuple(one["shape"]), dtype=one["dtype"]) for name, one in inputs.items()}


class StepWeights(NamedTuple):
    """The divisors of an optimizer step over several micro-batches, as means over the micro-batches.

    micro_batches: of the step. size: samples of one micro-batch, over all ranks.
    divisors: by the name of each term that divides by weights: the divisor of one micro-batch, over all ranks; 0-d.
    """

    micro_batches: int
    size: float
    divisors: Mapping[str, Tensor]


class Batch(NamedTuple):
    """This rank's share of one global batch.

    data: what the data set gives: a pair (input, target) of tensors `[b, ...]`, or a mapping of names to tensors.
    size: how many samples of it count, b; 0 where the rank holds one stand-in sample because the global batch is
        smaller than the world, so that collectives still match.
    global_size: samples of the global batch, B, over all ranks.
    world_size: ranks that share it.
    step: the divisors of the step, if the batch is one of its several micro-batches.
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
        """The samples by which the step divides the sum over this batch."""
        return self.global_size if self.step is None else self.step.size

    @property
    def weight(self) -> float:
        """Factor on this rank's mean loss: the mean over ranks and micro-batches is then the mean over samples."""
        return self.size * self.world_size / self.mean_size
