"""Where the time of one step went: moments on the host's clock, or on a CUDA device's own."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

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
