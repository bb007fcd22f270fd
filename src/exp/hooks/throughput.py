"""Hook `throughput`, which logs the speed of training, the times of the parts of a step, and device utilisation."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn

from exp.hooks.hook import Boundary, Hook, Period, Workload
from exp.hooks.panels import Column, Healthy, Panel
from exp.hooks.step import Step
from exp.hooks.utilisation import PeakFlops, Utilisation

AHEAD = 5
# Maximum number of timed steps whose times are kept until the device has finished them. Older times are dropped.
LAG = 64
# The duration of a part has no healthy limit.
NO_BOUND = Healthy()


class Throughput(Hook):
    """Hook that logs mean speeds over the last `every_n_steps` steps, and the times of the parts of one step.

    The mean speeds are `throughput/step_ms` and `throughput/samples_per_second`. If the input is integers `[B, T]`,
    `throughput/tokens_per_second` is added. The time of a step starts at the end of the previous step, and includes
    loading, logging and other hooks. The first step of the run and the first step after a pause are not timed. A pause
    is a validation, or a checkpoint at the end of an epoch. On CUDA the host runs ahead of the device. The means are
    still valid, because the device's queue is limited.

    `throughput/part_ms` is a heat map with the times of data, forward, backward, optimizer and rest. Their sum is the
    time of one step. With `each_part` these times are also scalars: `throughput/data_ms`, `forward_ms`, `backward_ms`,
    `optimizer_ms` and `rest_ms`. A pipeline alternates forward and backward, and has one part `forward_backward_ms`
    instead.

    The timed step is up to five steps before the logged step, because other hooks are due at the logged step. On CUDA
    the times are logged after the device has finished the step, so that the host does not wait.

    `throughput/mfu` is the model FLOPs utilisation. The text `throughput/flops` shows how it is computed.

    Args:
        every_n_steps: Steps between two records. `auto` depends on the length of the run. Default: auto.
        each_part: Whether the times of a step's parts are also logged as scalars. Default: False.
        peak_flops: Peak FLOPs per second of one device. `measured` measures the peak by matrix products. None uses the
            listed value of a GPU, and logs no utilisation on a CPU. Default: None.
        flops_per_sample: FLOPs of one sample in a step. None counts them once, on the meta device. Default: None.
        workload: Work of a step; set by exp. Default: None.
    """

    longest = {"every_n_steps": 50}

    def __init__(
        self,
        *,
        every_n_steps: Period = "auto",
        each_part: bool = False,
        peak_flops: PeakFlops = None,
        flops_per_sample: Annotated[float, Gt(0)] | None = None,
        workload: Workload | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self._utilisation = Utilisation(peak_flops=peak_flops, flops_per_sample=flops_per_sample, workload=workload)
        self.each_part = each_part
        self._begin()

    def _begin(self) -> None:
        # Number of steps between the timed step and the logged step. In these steps, a GPU finishes the timed step.
        self._ahead = min(AHEAD, (self.every_n_steps - 1) // 2)
        # Totals of the timed steps: number of steps, samples, seconds.
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        # Values at the end of the last observed step: time, step index, and number of samples since the start.
        self._last: tuple[float, int, int] | None = None
        self._paused_at: float | None = None
        self._split: StepTimer | None = None
        self._ended: deque[StepTimer] = deque(maxlen=LAG)

    def setup(self, network: nn.Module) -> None:
        self._begin()

    def due(self, index: int) -> bool:
        """Return whether a measurement starts or ends at this step, or whether the clock must be started."""
        place = (index + 1 + self._ahead) % self.every_n_steps
        return place <= 1 or index % self.every_n_steps == 0 or self._last is None or self._paused_at is not None

    def passed(self, boundary: Boundary, step: Step) -> None:
        if self._split is not None:
            self._split.mark(boundary)

    def after_step(self, step: Step) -> Mapping[str, Tensor | float | Panel] | None:
        now = time.perf_counter()
        self._count(step, now)
        if self._split is not None:
            self._split.end(now, waited=step.seconds_waited)
            self._ended.append(self._split)
            self._split = None
        values = None
        if step.index % self.every_n_steps == 0:
            values = self._values(step)
            now = time.perf_counter() if "throughput/flops" in values else now
        self._last = (now, step.index, step.samples_seen)
        if (step.index + 1 + self._ahead) % self.every_n_steps == 0:
            self._split = StepTimer(step.device, now, waited=step.seconds_waited)
        return values

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.perf_counter()
        self._split = None

    def _count(self, step: Step, now: float) -> None:
        """Add the steps after the last observed step, up to the current step, to the totals."""
        last, paused_at, self._paused_at = self._last, self._paused_at, None
        if last is None:
            return
        then, index, seen = last
        steps, samples = step.index - index, step.samples_seen - seen
        if paused_at is not None:
            # The pause and the first step after the pause are not counted, because the end of the pause is unknown.
            now, steps, samples = paused_at, steps - 1, samples - step.batch_size
        if steps:
            self._steps += steps
            self._samples += samples
            self._seconds += now - then

    def _values(self, step: Step) -> dict[str, Tensor | float | Panel]:
        values: dict[str, Tensor | float | Panel] = {}
        if self._steps:
            rate = self._samples / self._seconds
            values["throughput/step_ms"] = 1000 * self._seconds / self._steps
            self._steps, self._samples, self._seconds = 0, 0, 0.0
            values["throughput/samples_per_second"] = rate
            tokens = tokens_in_a_sample(step.data)
            if tokens is not None:
                values["throughput/tokens_per_second"] = rate * tokens
            text = self._utilisation.prepare(step, name=self.name)
            if text is not None:
                values["throughput/flops"] = text
            mfu = self._utilisation.at(rate)
            if mfu is not None:
                values["throughput/mfu"] = mfu
        known = None
        while self._ended and self._ended[0].is_known:
            known = self._ended.popleft()
        if known is not None:
            parts = known.milliseconds()
            values["throughput/part_ms"] = Column.of(parts, healthy=NO_BOUND)
            if self.each_part:
                values |= {f"throughput/{part}_ms": taken for part, taken in parts.items()}
        return values


def tokens_in_a_sample(data: object) -> int | None:
    """Return the number T of tokens per sample if a batch's first input is integers `[B, T]`. Otherwise return None.

    Args:
        data: A pair or a mapping of tensors, or only the input.
    """
    if isinstance(data, Mapping):
        data = data["input"] if "input" in data else next((v for name, v in data.items() if name != "target"), None)
    elif isinstance(data, list | tuple):
        data = data[0]
    if not isinstance(data, Tensor) or data.dim() != 2 or data.is_floating_point() or data.dtype == torch.bool:
        return None
    return data.shape[1]


PARTS = ("data", "forward", "backward", "optimizer", "rest")
# Name of the only part before the optimizer step of a pipeline. Its schedule alternates forwards and backwards.
TOGETHER = "forward_backward"


class StepTimer:
    """Times of the parts of one step, from the end of the previous step to the end of this step.

    The time before a mark with the name forward, backward or optimizer belongs to the part with this name. The
    remaining time has two parts: the wait for the batch, and the rest, such as callbacks, hooks, loggers, and the copy
    of the batch to the device. On CUDA, marks are events in the device's queue. The wait for a batch is then measured
    only while the device had no other work.

    Args:
        device: Device of the network.
        now: End of the previous step, by time.perf_counter.
        waited: Total seconds for which the loop has waited for batches before the step.
    """

    def __init__(self, device: torch.device, now: float, *, waited: float) -> None:
        self._device, self._waited = device, waited
        self._names: list[str] = []
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark("", now)

    def mark(self, name: str, now: float | None = None) -> None:
        """End a part of the step at the current time.

        Args:
            name: Name of the part.
            now: Current time by time.perf_counter. Default: None, which reads the time.
        """
        self._names.append(name)
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter() if now is None else now)

    def end(self, now: float, *, waited: float) -> None:
        """End the step.

        Args:
            now: End of the step, by time.perf_counter.
            waited: Seconds for which the loop has waited for batches since the start of the run.
        """
        self.mark("rest", now)
        self._waited = waited - self._waited

    @property
    def is_known(self) -> bool:
        """True if the device has finished the step. Reading the times then does not wait."""
        return not self._events or self._events[-1].query()

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of each part. Their sum is the time of the step.

        Wait for the device unless `is_known`. Without a mark named forward, the part TOGETHER replaces the parts
        forward and backward.
        """
        if self._events:
            taken = [a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]
        else:
            taken = [1000 * (b - a) for a, b in itertools.pairwise(self._moments)]
        found = dict.fromkeys(PARTS, 0.0)
        for name, part in zip(self._names[1:], taken, strict=True):
            found[name if name in found else "rest"] += part
        found["data"] = min(1000 * self._waited, found["rest"])
        found["rest"] -= found["data"]
        if "forward" not in self._names:
            found[TOGETHER] = found.pop("forward") + found.pop("backward")
        return found
