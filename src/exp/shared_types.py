"""Types that all packages of exp use. This module does not import torch at run time.

Letters in shapes such as `[B, T, C]`: B batch, T time steps, C channels or features, H height, W width, V vocabulary or
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
# Allowed values of sweep.sampler and sweep.pruner.
Sampler = Literal["auto", "grid", "random", "tpe", "gp", "cmaes", "nsga2", "qmc"]
Pruner = Literal["none", "median", "asha", "hyperband"]
# Tag of the training loss averaged over the samples of an epoch. With `monitor: loss/train`, checkpoints are compared
# by this tag, because the values of the tag `loss/train` are losses of single steps.
EPOCH_LOSS = "loss/train_epoch"
# Tags of the best value of the monitored metric, and of the optimizer step at which it was measured.
BEST_VALUE, BEST_STEP = "monitor/best", "monitor/best_step"
# Allowed dtypes of samples: torch's names without `torch.`.
SampleDtype = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
# Names of the network's inputs if a sample is a pair (input, target) or a single tensor.
INPUT: tuple[str, ...] = ("input",)
# A duration such as 1h30m, in days, hours, minutes and seconds.
SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def span_seconds(span: str) -> float:
    """Return the number of seconds in a duration such as 1h30m.

    Raises:
        ValueError: The text is not a duration.
    """
    found = SPAN.fullmatch(span.strip()) if span.strip() else None
    if found is None:
        raise ValueError(f"{span!r} is not a duration such as 1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def split_tag(tag: str) -> tuple[str, str]:
    """Return the name and the stage of a tag: `acc` and `val` for `acc/val`, `val/acc` and `val_acc`.

    If the tag contains no stage, return the tag and "".
    """
    name, _, stage = tag.rpartition("/")
    if stage in STAGES:
        return name, stage
    first, _, rest = tag.partition("/") if "/" in tag else tag.partition("_")
    return (rest, first) if rest and first in STAGES else (tag, "")


def compared_tag(monitor: str) -> str:
    """Return the tag by which checkpoints are compared.

    Args:
        monitor: Value of the config key `monitor`, such as "loss/val".

    Returns:
        `loss/train_epoch` for the monitor `loss/train`. For any other monitor, the monitor itself.
    """
    return EPOCH_LOSS if monitor == "loss/train" else monitor


def best_scalars(best: Mapping[str, Any] | None) -> dict[str, float]:
    """Return two scalars by tag: the best value of the monitored metric, and the step of this value.

    They are logged under separate tags, because TensorBoard's HParams page shows only the last value of a tag.

    Args:
        best: Record of the best checkpoint. None: there is no best checkpoint, and the result is empty.
    """
    return {} if best is None else {BEST_VALUE: float(best["value"]), BEST_STEP: float(best["step"])}


def searched_tags(wanted: object, *, mode: Mode) -> dict[str, Mode]:
    """Return the tags that a search optimizes, each with its mode, "min" or "max".

    Args:
        wanted: Value of `sweep.monitor`: a tag, or a mapping of tags to modes. For other values, the result is empty.
        mode: Mode of the run. It applies if `wanted` is a single tag.
    """
    if isinstance(wanted, str):
        return {wanted: mode}
    entries = wanted.items() if isinstance(wanted, Mapping) else ()
    return {str(tag): "min" if one == "min" else "max" for tag, one in entries if one in ("min", "max")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor in a sample.

    Attributes:
        shape: Shape without the batch dimension, such as (1, 8, 8). A length that differs between batches is None.
        dtype: Name of the dtype without `torch.`, such as "float32" or "int64".
    """

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Shapes and dtypes that a data set declares. exp uses them to build and check the model before samples are read.

    Attributes:
        inputs: Shape and dtype of each input of the network, by name. Default: a single input named `input`, with
            `input_shape` and `input_dtype`.
        input_shape: Shape of a single input, without the batch dimension.
        input_dtype: Dtype of a single input, without `torch.`.
        num_classes: Number of classes, or size of the vocabulary of a text. None: a regression.
        num_outputs: Number of values that the model must return per sample or token. It is the number of classes, or
            the number of values in a regression target. None: samples have several targets. Each term of the objective
            then declares the number of values for its target.
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
        """Number of elements in the largest input tensor of one sample. A length that is None counts as 1."""
        return max(math.prod(size for size in one.shape if size is not None) for one in self.inputs.values())

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> DataSpec:
        """Return the spec that the values of the config node `data` describe.

        Values that exp reads from the data, such as `input_shape`, must already be filled in.
        """
        return cls(
            inputs=tensor_specs(data["inputs"] or {}),
            input_shape=None if data["input_shape"] is None else tuple(data["input_shape"]),
            input_dtype=data["input_dtype"],
            num_classes=data["num_classes"],
            num_outputs=data["num_outputs"],
        )


def tensor_specs(inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorSpec]:
    """Return the shape and dtype of each input, by name.

    Args:
        inputs: Value of the config key `data.inputs`.
    """
    return {name: TensorSpec(shape=tuple(one["shape"]), dtype=one["dtype"]) for name, one in inputs.items()}


class StepWeights(NamedTuple):
    """Divisors of the summed losses in an optimizer step that accumulates gradients over several micro-batches.

    Attributes:
        micro_batches: Number of micro-batches in the step.
        size: Mean number of samples in a micro-batch, counted on all ranks.
        divisors: 0-d tensors by the name of a term. Only terms that divide their loss by a sum of weights have a
            divisor: the sum of the weights in a micro-batch on all ranks, averaged over the micro-batches.
    """

    micro_batches: int
    size: float
    divisors: Mapping[str, Tensor]


class Batch(NamedTuple):
    """The part of a global batch that this rank processes.

    Attributes:
        data: Pair (input, target) of tensors `[b, ...]`, or a mapping of names to tensors.
        size: Number of samples on this rank, b. The size is 0 on some ranks if the global batch has fewer samples than
            there are ranks. Such a rank processes one sample without effect, because all ranks must run the same
            collectives.
        global_size: Number of samples on all ranks, B.
        world_size: Number of ranks.
        step: Divisors of the optimizer step if the step accumulates several micro-batches. None: the step has one
            micro-batch.
    """

    data: Sequence[Tensor] | Mapping[str, Tensor] | Any
    size: int
    global_size: int
    world_size: int
    step: StepWeights | None = None

    def with_data(self, data: object) -> Batch:
        """Return a copy of this batch with other data."""
        return Batch(data, self.size, self.global_size, self.world_size, self.step)

    def with_step(self, step: StepWeights) -> Batch:
        """Return a copy of this batch with the divisors of its optimizer step."""
        return Batch(self.data, self.size, self.global_size, self.world_size, step)

    @property
    def mean_size(self) -> float:
        """Number by which the sum of the sample losses in this batch is divided."""
        return self.global_size if self.step is None else self.step.size

    @property
    def weight(self) -> float:
        """Factor by which this rank's mean loss must be multiplied.

        The mean of the multiplied losses over ranks and micro-batches then equals the mean loss over all samples of the
        step.
        """
        return self.size * self.world_size / self.mean_size
