"""Model FLOPs utilisation: what the model had to compute, as a share of what the devices could have computed.

MFU as in the appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311): samples a second, times the FLOPs of forward
and backward for a sample, divided by the peak. What is computed twice, to save activations, counts once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from annotated_types import Gt

from exp.hooks.hook import Workload
from exp.hooks.panels import Text
from exp.hooks.step import Step
from exp.models.flop_count import FlopCount

log = logging.getLogger(__name__)

PeakFlops = Annotated[float, Gt(0)] | Literal["measured"] | None


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


def _nobody_counts(data: object) -> FlopCount:
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


TERA = 1e12
# Beside these, torch.cuda.get_device_name says variants that are slower, or parts: Laptop, Ti, D, MIG.
_NAMES = {
    "B200": r"NVIDIA B200",
    "H200": r"NVIDIA H200",
    "H200 NVL": r"NVIDIA H200 NVL",
    "H100 SXM": r"NVIDIA H100 80GB HBM3",
    "H100 NVL": r"NVIDIA H100 NVL",
    "H100 PCIe": r"NVIDIA H100 PCIe",
    "A100": r"(NVIDIA )?A100-(SXM4|PCIE|SXM)-(40|80)GB|NVIDIA A100 80GB PCIe",
    "L40S": r"NVIDIA L40S",
    "L4": r"NVIDIA L4",
    "T4": r"Tesla T4|NVIDIA T4",
    "V100 SXM2": r"Tesla V100-SXM2-(16|32)GB",
    "V100 PCIe": r"Tesla V100-PCIE-(16|32)GB",
    "RTX 4090": r"NVIDIA GeForce RTX 4090",
    "RTX 3090": r"NVIDIA GeForce RTX 3090",
}
# In TFLOPS, for dense matrices: where NVIDIA gives only a figure with sparsity, half of it. With sums in float32: with
# sums in float16, which training does not take, fp16 and fp8 of the two GeForce cards would be twice as fast.
#   B200               datasheet of HGX B200, one of its eight
#   H200, H200 NVL     datasheet of H200            H100 ...   datasheet of H100
#   A100               datasheet of A100            L40S, L4   their datasheets
#   T4, V100 ...       their datasheets             RTX ...    whitepapers of Ada and of GA102, appendix A
_TERAFLOPS: dict[str, dict[str, float]] = {
    "B200": {"fp64": 37, "fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250, "fp8": 4500},
    "H200": {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979},
    "H200 NVL": {"fp64": 60, "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5},
    "H100 SXM": {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979},
    "H100 NVL": {"fp64": 60, "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5},
    "H100 PCIe": {"fp64": 51, "fp32": 51, "tf32": 378, "bf16": 756.5, "fp16": 756.5, "fp8": 1513},
    "A100": {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 366, "fp16": 366, "fp8": 733},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
    "T4": {"fp32": 8.1, "fp16": 65},
    "V100 SXM2": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
    "V100 PCIe": {"fp64": 7, "fp32": 14, "fp16": 112},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
}
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def arithmetic(word: str) -> str:
    """Which column of the table a precision's word means: what matrix products are computed in.

    fp32 is tf32 where torch is allowed to take it.
    """
    kind = word.removesuffix("_true")
    return "tf32" if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" else kind


def listed_peak(device_name: str, word: str) -> float | None:
    """FLOPs a second of one device, dense; None where it is not listed, or not for this precision.

    device_name: as torch.cuda.get_device_name gives it. word: of a precision.
    """
    card = card_of(device_name)
    tera = None if card is None else _TERAFLOPS[card].get(arithmetic(word))
    return None if tera is None else tera * TERA


def card_of(device_name: str) -> str | None:
    """The card in the table of a device by torch's name; None where it is not listed."""
    return next((card for card, pattern in _NAMES.items() if re.fullmatch(pattern, device_name)), None)


def card_peaks(card: str) -> Mapping[str, float]:
    """FLOPs a second of a card in the table, dense, by the arithmetic's word."""
    return {word: tera * TERA for word, tera in _TERAFLOPS[card].items()}


def measured_peak(device: torch.device, word: str, *, seconds: float = 0.05) -> float | None:
    """FLOPs a second of the fastest of some square matrix products; None for a precision that torch.mm has not.

    On a CPU with this process's threads. It draws no random numbers, and takes a few times `seconds`; a device's queue
    is waited for.

    seconds: larger products are tried until one takes so long.
    """
    dtype = _DTYPES.get(arithmetic(word))
    if dtype is None:
        return None
    best = 0.0
    with torch.no_grad():
        for size in _SIZES:
            # Of ones, for zeros and denormals are computed at speeds of their own.
            matrix = torch.ones(size, size, dtype=dtype, device=device)
            _seconds_of(matrix)  # warm-up
            taken = min(_seconds_of(matrix) for _ in range(3))
            best = max(best, 2 * size**3 / taken)
            if taken > seconds / 8:
                break
    return best


def _seconds_of(matrix: torch.Tensor) -> float:
    _wait(matrix.device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
