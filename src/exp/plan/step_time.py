"""The estimated time of a step, by the roofline model (Williams, Waterman and Patterson, 2009).

The time of an operator is the time of its arithmetic or the time of its memory traffic, whichever is longer. The
estimate is a lower bound, because real kernels reach only 50 to 90 % of the peak rates. Communication is a separate
part, because it can overlap with the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exp.plan.device_peaks import Device
from exp.plan.fake_step import StepFigures
from exp.plan.rank_memory import PlaceMemory
from exp.precision.words import WORDS
from exp.strategies.footprint import Footprint

# Name of the number format in exp for each dtype name of torch.
ARITHMETIC = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Memory traffic of an optimizer step, divided by the bytes of parameters, gradients and optimizer state. A step reads
# all three, and writes parameters and state.
READ_AND_WRITTEN = 2


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of an optimizer step.

    Attributes:
        device: Device of the ranks.
        compute: Seconds of operators that are limited by arithmetic.
        memory: Seconds of the optimizer, and of operators that are limited by memory bandwidth.
        overhead: Seconds of operators that are limited by the overhead of their call.
        communication: Seconds of communication of a rank.
        flops: FLOPs of a rank in a step.
    """

    device: Device
    compute: float
    memory: float
    overhead: float
    communication: float
    flops: float

    @property
    def seconds(self) -> float:
        """Total time of a step in seconds. Communication overlaps with at most half of the other parts."""
        own = self.compute + self.memory + self.overhead
        return own + max(0.0, self.communication - own / 2)

    @property
    def bound(self) -> str:
        """Name of the part that takes the longest time."""
        parts = {
            "compute": self.compute,
            "memory bandwidth": self.memory,
            "calls of small operators": self.overhead,
            "communication": self.communication,
        }
        return max(parts, key=lambda name: parts[name])


def step_time(
    figures: StepFigures, footprint: Footprint, places: Sequence[PlaceMemory], *, device: Device, micro_batches: int
) -> StepTime:
    """Return the time of an optimizer step on the slowest rank.

    Args:
        figures: Memory and FLOPs of one micro-batch of a rank.
        footprint: Memory and communication of the strategy.
        places: Memory of each device.
        device: Device of the ranks.
        micro_batches: Number of micro-batches in an optimizer step.
    """
    found = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
    tf32 = WORDS[figures.setting.word].tf32
    for one in figures.operators:
        word = ARITHMETIC.get(one.dtype, "fp32")
        word = "tf32" if tf32 and word == "fp32" else word
        compute, memory = device.seconds(one.flops, one.moved, word=word)
        work = footprint.work_of(one.layer)
        parts = {"compute": compute * work, "memory": memory * work, "overhead": device.overhead * footprint.calls}
        longest = max(parts, key=lambda name: parts[name])
        found[longest] += parts[longest] * one.times * micro_batches * footprint.waiting
    stepped = max((_updated_bytes(place) for place in places), default=0)
    found["memory"] += READ_AND_WRITTEN * stepped / device.bandwidth
    communication = sum(one.sent / device.link + one.messages * device.latency for one in footprint.transfers)
    flops = micro_batches * sum(one.flops * one.times * footprint.work_of(one.layer) for one in figures.operators)
    return StepTime(device=device, communication=communication, flops=flops, **found)


def _updated_bytes(place: PlaceMemory) -> int:
    return place.parameters + (place.gradients or 0) + (place.optimizer or 0)
