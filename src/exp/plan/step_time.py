"""The time of a step from its operators: each takes what its arithmetic or its memory takes, whichever is more.

The roofline of Williams, Waterman and Patterson (2009), operator by operator. A device at its peak gives a lower bound:
real kernels reach a half to nine tenths of it. Communication stands beside it, for it overlaps with the backward where
there is something to overlap with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exp.plan.device_peaks import Device
from exp.plan.fake_step import StepFigures
from exp.plan.rank_memory import PlaceMemory
from exp.precision.words import WORDS
from exp.strategies.footprint import Footprint

# torch's names to the words of arithmetic.
ARITHMETIC = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# What an optimizer reads and writes, in units of what it holds: it reads parameter, gradient and state, and writes
# parameter and state.
READ_AND_WRITTEN = 2


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step.

    compute: of the operators that arithmetic bounds. memory: of those that memory bounds, and of the optimizer.
    overhead: of those so small that calling them takes longer. communication: of all that a rank sends.
    flops: of a rank, in a step.
    """

    device: Device
    compute: float
    memory: float
    overhead: float
    communication: float
    flops: float

    @property
    def seconds(self) -> float:
        """With communication behind the backward, of which half the time is there to overlap."""
        own = self.compute + self.memory + self.overhead
        hidden = own / 2 if self.device.overlaps else 0.0
        return own + max(0.0, self.communication - hidden)

    @property
    def bound(self) -> str:
        """What takes most of it."""
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
    """Of the rank that takes longest.

    places: of the footprint. micro_batches: that are accumulated in a step.
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
    stepped = max((_stepped(place) for place in places), default=0)
    found["memory"] += READ_AND_WRITTEN * stepped / device.bandwidth
    communication = sum(one.sent / device.link + one.messages * device.latency for one in footprint.transfers)
    flops = micro_batches * sum(one.flops * one.times * footprint.work_of(one.layer) for one in figures.operators)
    return StepTime(device=device, communication=communication, flops=flops, **found)


def _stepped(place: PlaceMemory) -> int:
    return place.parameters + (place.gradients or 0) + (place.optimizer or 0)
