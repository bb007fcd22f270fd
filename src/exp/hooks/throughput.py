"""The hook `throughput`: how fast training goes, where a step's time goes, and how much of the devices it uses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn

from exp.hooks.hook import Boundary, Hook, Period, Workload
from exp.hooks.panels import Column, Healthy, Panel
from exp.hooks.step import Step
from exp.hooks.utilisation import PeakFlops, Utilisation

AHEAD = 5
# Steps by which a device may lag behind the host before the split of one is given up.
LAG = 64
# Of what a part takes nobody can say that it is too long.
NO_BOUND = Healthy()


@dataclass(kw_only=True, slots=True)
class _TimedSteps:
    """Whole steps that were timed: how many, their samples, and their time."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


class Throughput(Hook):
    """Logs means over the last `every_n_steps` steps, and the split of one of them.

    `throughput/step_ms`, `throughput/samples_per_second`, and `throughput/tokens_per_second` where the input is whole
    numbers `[B, T]`. A step's time runs from the end of the one before to its own end, so that loading, logging and
    other hooks count. The first step of the run and the first after a pause (validation, a checkpoint at an epoch's
    end) have no such time and are left out. On CUDA the host runs ahead of the device, by a bounded queue: the means
    hold, a single step's time would not.

    `throughput/part_ms` is a heat map of data, forward, backward, optimizer and rest of one step, whose sum is its
    time, and with `each_part` `throughput/data_ms`, `forward_ms`, `backward_ms`, `optimizer_ms` and `rest_ms` are
    scalars, too.
    The step lies up to five steps before the one at which they are logged, since other hooks that are due at
    every n-th step are due then, and a GPU may lag behind; with every_n_steps of 1 or 2 it is that step itself. On CUDA
    they are logged when the device is through with it: nothing waits. Of a pipeline `forward_backward_ms` is in the
    place of forward and backward, which its stages run by turns.

    `throughput/mfu` is the model FLOPs utilisation, and the text `throughput/flops` what it was computed from.

    each_part: whether the parts of a step are scalars, too.
    peak_flops: FLOPs a second of one device; `measured` measures them once, by matrix products; None looks a GPU up,
        and logs no utilisation on a CPU.
    flops_per_sample: FLOPs of one sample in a step; None counts them once, on the meta device.
    workload: given by exp.
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
        # How far before the due step the one lies that is split: by then a GPU is through with it.
        self._ahead = min(AHEAD, (self.every_n_steps - 1) // 2)
        self._window = _TimedSteps()
        # The end of the last step that was looked at: when, its index, and the samples until then.
        self._last: tuple[float, int, int] | None = None
        self._paused_at: float | None = None
        self._split: StepTimer | None = None
        self._ended: deque[StepTimer] = deque(maxlen=LAG)

    def setup(self, network: nn.Module) -> None:
        self._begin()

    def due(self, index: int) -> bool:
        """At the end of a window and of the steps that a split needs, and where the clock has to be started."""
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
        """Adds the steps since the last one that was looked at."""
        last, paused_at, self._paused_at = self._last, self._paused_at, None
        if last is None:
            return
        then, index, seen = last
        steps, samples = step.index - index, step.samples_seen - seen
        if paused_at is not None:
            # Nobody saw where the pause ended: it and the step that it lies before, or in, are left out.
            now, steps, samples = paused_at, steps - 1, samples - step.batch_size
        if steps:
            self._window.steps += steps
            self._window.samples += samples
            self._window.seconds += now - then

    def _values(self, step: Step) -> dict[str, Tensor | float | Panel]:
        values: dict[str, Tensor | float | Panel] = {}
        window, self._window = self._window, _TimedSteps()
        if window.steps:
            rate = window.samples / window.seconds
            values["throughput/step_ms"] = 1000 * window.seconds / window.steps
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
    """T, where the input of a batch, the first of several, is whole numbers `[B, T]`; else None.

    data: a pair or a mapping of tensors, or the input alone, as the data set gives it.
    """
    if isinstance(data, Mapping):
        data = data["input"] if "input" in data else next((v for name, v in data.items() if name != "target"), None)
    elif isinstance(data, list | tuple):
        data = data[0]
    if not isinstance(data, Tensor) or data.dim() != 2 or data.is_floating_point() or data.dtype == torch.bool:
        return None
    return data.shape[1]


PARTS = ("data", "forward", "backward", "optimizer", "rest")
# Of a pipeline's step: its schedule runs the forward of one micro-batch between the backwards of others.
TOGETHER = "forward_backward"


class StepTimer:
    """The moments of one step, from the end of the one before to its own end.

    What ends in a mark called forward, backward or optimizer is that part's time. The others are what the loop waited
    for the batch, and the rest: what callbacks, hooks and loggers did between two parts, and the batch's way to the
    device. On CUDA a moment is an event in the device's queue. There a wait for the batch counts as far as the device
    had nothing else to do.

    device: where the network is. now: when the step before ended, by time.perf_counter.
    waited: seconds for which the loop has waited for batches so far.
    """

    def __init__(self, device: torch.device, now: float, *, waited: float) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._waited = waited
        self._names: list[str] = []
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark("", now)

    def mark(self, name: str, now: float | None = None) -> None:
        """This moment ends the part of that name. now: the host's clock, where it was read already."""
        self._names.append(name)
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter() if now is None else now)

    def end(self, now: float, *, waited: float) -> None:
        """The step is over. now, waited: as before."""
        self.mark("rest", now)
        self._waited = waited - self._waited

    @property
    def is_known(self) -> bool:
        """Whether the device has come to the end: nothing has to wait for it any more."""
        return not self._events or self._events[-1].query()

    def milliseconds(self) -> dict[str, float]:
        """By part; their sum is the step's time. Waits for the device unless `is_known`.

        A step without a mark called forward has TOGETHER in the place of forward and backward.
        """
        found = dict.fromkeys(PARTS, 0.0)
        for name, taken in zip(self._names[1:], self._intervals(), strict=True):
            found[name if name in found else "rest"] += taken
        found["data"] = min(1000 * self._waited, found["rest"])
        found["rest"] -= found["data"]
        if "forward" not in self._names:
            found[TOGETHER] = found.pop("forward") + found.pop("backward")
        return found

    def _intervals(self) -> Sequence[float]:
        if not self._on_cuda:
            return [1000 * (b - a) for a, b in zip(self._moments[:-1], self._moments[1:], strict=True)]
        return [a.elapsed_time(b) for a, b in zip(self._events[:-1], self._events[1:], strict=True)]
