"""Model FLOPs utilisation: what the model had to compute, as a share of what the devices could have computed.

MFU as in the appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311): samples a second, times the FLOPs of forward
and backward for a sample, divided by the peak. What is computed twice, to save activations, counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from exp.hooks.step import Step
from exp.hooks.timing.device_peak import arithmetic, listed_peak, measured_peak
from exp.hooks.values import Text
from exp.models.flops import FlopCount

log = logging.getLogger(__name__)

PeakFlops = float | Literal["measured"] | None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run's step computes, and on what.

    precision: its word. devices: on which all ranks together compute.
    flops: of one sample in a step, from a batch as the data set gives it.
    """

    precision: str
    devices: int
    flops: Callable[[Any], FlopCount]


class Utilisation:
    """Counts and measures once, when it is first asked, and says once why it has nothing to say.

    peak_flops: FLOPs a second of one device; `measured` measures them; None looks the device up.
    flops_per_sample: FLOPs of one sample in a step; None counts them.
    name: of the hook in the config, for messages.
    """

    def __init__(self, *, peak_flops: PeakFlops, flops_per_sample: float | None, workload: Workload | None) -> None:
        self._given_peak, self._given_flops, self._workload = peak_flops, flops_per_sample, workload
        self._flops: float | None = None
        self._peak: float | None = None
        self._is_prepared = False

    def prepare(self, step: Step, *, name: str) -> Text | None:
        """Once, outside what is timed: finds the FLOPs and the peak. Gives a text of both, where both are known."""
        if self._is_prepared:
            return None
        self._is_prepared = True
        workload = self._workload or Workload(precision="fp32", devices=1, flops=_nobody_counts)
        peak, source = self._peak_of(step.device, workload)
        if peak is None:
            # A CPU has no peak that anybody lists: that is how it is, and nothing to warn of.
            if step.device.type != "cpu":
                log.warning(
                    "throughput/mfu is not logged: no peak is known for %s in %s. Write hooks.%s.peak_flops=measured, "
                    "or the FLOPs a second of one device",
                    source,
                    workload.precision,
                    name,
                )
            return None
        count = self._count(step, workload, name=name)
        if count is None:
            return None
        self._flops, self._peak = count.total, peak * workload.devices
        return Text(_described(count, peak=peak, source=source, workload=workload))

    def at(self, samples_per_second: float) -> float | None:
        """The share, 1 where every device computes all it can; None where it is not known."""
        if self._flops is None or self._peak is None:
            return None
        return samples_per_second * self._flops / self._peak

    def _peak_of(self, device: torch.device, workload: Workload) -> tuple[float | None, str]:
        """FLOPs a second of one device, and where they are from; the device's name where there are none."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        if self._given_peak == "measured":
            return measured_peak(device, workload.precision), f"{name}, measured by matrix products"
        if self._given_peak is not None:
            return self._given_peak, f"{name}, from the config"
        peak = listed_peak(name, workload.precision) if device.type == "cuda" else None
        return peak, name if peak is None else f"{name}, as its maker lists it, dense"

    def _count(self, step: Step, workload: Workload, *, name: str) -> FlopCount | None:
        if self._given_flops is not None:
            return FlopCount(forward=self._given_flops, backward=0.0, by_operator={})
        try:
            return workload.flops(step.data)
        except Exception as error:  # a user's own layer may raise anything where tensors have no numbers
            log.warning(
                "throughput/mfu is not logged: the FLOPs of a step could not be counted without numbers (%s: %s). "
                "Write hooks.%s.flops_per_sample",
                type(error).__name__,
                str(error).partition("\n")[0],
                name,
            )
            return None


def _nobody_counts(data: Any) -> FlopCount:
    raise NotImplementedError("this hook was made without a run's config")


def _described(count: FlopCount, *, peak: float, source: str, workload: Workload) -> str:
    lines = [
        "| what | FLOPs |",
        "|---|---|",
        f"| a sample, in a step | {count.total:.6g} |",
    ]
    if count.by_operator:
        note = ", estimated as twice the forward" if count.is_estimated else ""
        lines += [f"| its forward | {count.forward:.6g} |", f"| its backward{note} | {count.backward:.6g} |"]
        lines += [f"| of both, `{name}` | {flops:.6g} |" for name, flops in sorted(count.by_operator.items())]
    kind = arithmetic(workload.precision)
    lines += [f"| a second, one device at most, {kind} ({source}) | {peak:.6g} |", f"| devices | {workload.devices} |"]
    return "\n".join(lines)
