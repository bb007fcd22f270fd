"""Model FLOPs utilisation (MFU): the model's FLOPs as a fraction of the devices' peak.

The definition is that of PaLM, appendix B (Chowdhery et al. 2022, arXiv:2204.02311). The number of samples per second
is multiplied by the FLOPs of a sample's forward and backward, and divided by the peak FLOPs per second. Activations
that are recomputed to save memory count once.
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
    """Model FLOPs utilisation of a run. At the first use, FLOPs are counted and the peak is measured.

    If a number cannot be determined, a warning is logged once.

    Args:
        peak_flops: Peak FLOPs per second of one device. `measured` measures the peak. None uses the listed value of the
            device.
        flops_per_sample: FLOPs of one sample in a step. None counts them.
        workload: Work of a step; None without a config.
    """

    def __init__(self, *, peak_flops: PeakFlops, flops_per_sample: float | None, workload: Workload | None) -> None:
        self._given_peak, self._given_flops, self._workload = peak_flops, flops_per_sample, workload
        # FLOPs of one sample in a step, divided by the peak FLOPs per second of all devices together.
        self._share: float | None = None
        self._is_prepared = False

    def prepare(self, step: Step, *, name: str) -> Text | None:
        """Determine the FLOPs and the peak at the first call. Must be called outside of the timed steps.

        Args:
            step: Current step.
            name: Name of the hook, for messages.

        Returns:
            A table of the FLOPs and the peak. None at later calls, or if the FLOPs or the peak are unknown.
        """
        if self._is_prepared:
            return None
        self._is_prepared = True
        workload = self._workload or Workload(precision="fp32", devices=1, flops=_raise_without_config)
        peak, source = self._peak_of(step.device, workload)
        if peak is None:
            # For a CPU, no warning is logged, because no CPU has a listed peak.
            if step.device.type != "cpu":
                log.warning(
                    "throughput/mfu is not logged: the peak FLOPs per second of %s in %s are unknown. Write "
                    "hooks.%s.peak_flops=measured, or the FLOPs per second of one device",
                    source,
                    workload.precision,
                    name,
                )
            return None
        count = self._count(step, workload, name=name)
        if count is None:
            return None
        self._share = count.total / (peak * workload.devices)
        estimated = ", its backward estimated as twice its forward" if count.is_estimated else ""
        return Text(
            "| what | FLOPs |\n|---|---|\n"
            f"| a sample, in a step{estimated} | {count.total:.6g} |\n"
            f"| a second, one device at most, {arithmetic(workload.precision)} ({source}) | {peak:.6g} |\n"
            f"| devices | {workload.devices} |"
        )

    def at(self, samples_per_second: float) -> float | None:
        """Return the utilisation, from 0 to 1. Return None if the FLOPs or the peak are unknown."""
        return None if self._share is None else samples_per_second * self._share

    def _peak_of(self, device: torch.device, workload: Workload) -> tuple[float | None, str]:
        """Return the peak FLOPs per second of one device, and a description of the source of this number.

        The peak is None if it is unknown.
        """
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
        except Exception as error:  # a user's layer may raise any error on the meta device
            log.warning(
                "throughput/mfu is not logged: the FLOPs of a step could not be counted on the meta device (%s: %s). "
                "Write the FLOPs of a sample in hooks.%s.flops_per_sample",
                type(error).__name__,
                str(error).partition("\n")[0],
                name,
            )
            return None


def _raise_without_config(data: object) -> FlopCount:
    raise NotImplementedError("the hook was built without the config of a run")


TERA = 1e12
# Pattern of each card's name in torch, and the card's TFLOPS for dense matrices. If NVIDIA states a figure only with
# sparsity, half of this figure is listed. The patterns do not match slower variants or partitions, such as Laptop, Ti,
# D and MIG. The figures are for sums in float32. With sums in float16, which training does not use, fp16 and fp8 of the
# two GeForce cards would be twice as fast. Sources: datasheets of HGX B200 (one of its eight GPUs), H200, H100, A100,
# L40S, L4, T4 and V100, and the whitepapers of Ada and of GA102, appendix A.
_ARITHMETIC = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_CARDS: dict[str, tuple[str, tuple[float | None, ...]]] = {
    "B200": ("NVIDIA B200", (37, 75, 1100, 2250, 2250, 4500)),
    "H200": ("NVIDIA H200", (67, 67, 494.5, 989.5, 989.5, 1979)),
    "H200 NVL": ("NVIDIA H200 NVL", (60, 60, 417.5, 835.5, 835.5, 1670.5)),
    "H100 SXM": ("NVIDIA H100 80GB HBM3", (67, 67, 494.5, 989.5, 989.5, 1979)),
    "H100 NVL": ("NVIDIA H100 NVL", (60, 60, 417.5, 835.5, 835.5, 1670.5)),
    "H100 PCIe": ("NVIDIA H100 PCIe", (51, 51, 378, 756.5, 756.5, 1513)),
    "A100": (r"(NVIDIA )?A100-(SXM4|PCIE|SXM)-(40|80)GB|NVIDIA A100 80GB PCIe", (19.5, 19.5, 156, 312, 312, None)),
    "L40S": ("NVIDIA L40S", (None, 91.6, 183, 366, 366, 733)),
    "L4": ("NVIDIA L4", (None, 30.3, 60, 121, 121, 242.5)),
    "T4": ("Tesla T4|NVIDIA T4", (None, 8.1, None, None, 65, None)),
    "V100 SXM2": (r"Tesla V100-SXM2-(16|32)GB", (7.8, 15.7, None, None, 125, None)),
    "V100 PCIe": (r"Tesla V100-PCIE-(16|32)GB", (7, 14, None, None, 112, None)),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", (None, 82.6, 82.6, 165.2, 165.2, 330.3)),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", (None, 35.6, 35.6, 71, 71, None)),
}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def arithmetic(word: str) -> str:
    """Return the arithmetic of matrix products for a value of `precision`.

    The arithmetic of fp32 is tf32 if torch's settings allow tf32.
    """
    kind = word.removesuffix("_true")
    return "tf32" if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" else kind


def listed_peak(device_name: str, word: str) -> float | None:
    """Return the peak FLOPs per second of a device for dense matrices. Return None if no peak is listed.

    Args:
        device_name: Result of torch.cuda.get_device_name.
        word: Value of `precision` in the config.
    """
    card = card_of(device_name)
    return None if card is None else card_peaks(card).get(arithmetic(word))


def card_of(device_name: str) -> str | None:
    """Return the name of the card in the table of cards that matches a device name. Return None if no card matches.

    Args:
        device_name: Result of torch.cuda.get_device_name.
    """
    return next((card for card, (pattern, _) in _CARDS.items() if re.fullmatch(pattern, device_name)), None)


def card_peaks(card: str) -> Mapping[str, float]:
    """Return the peak FLOPs per second of a listed card for dense matrices, by arithmetic such as bf16."""
    return {word: tera * TERA for word, tera in zip(_ARITHMETIC, _CARDS[card][1], strict=True) if tera is not None}


def measured_peak(device: torch.device, word: str, *, seconds: float = 0.05) -> float | None:
    """Measure the FLOPs per second of square matrix products, and return the highest result.

    Return None if torch.mm does not support the precision. On a CPU, the products use the threads of this process. The
    function draws no random numbers, takes a few times `seconds`, and waits for the device's queue.

    Args:
        device: Device to measure.
        word: Value of `precision` in the config.
        seconds: Approximate duration in seconds of the longest measured product. Default: 0.05.
    """
    kind = arithmetic(word)
    dtype = _DTYPES.get("fp32" if kind == "tf32" else kind)
    if dtype is None:
        return None
    best = 0.0
    with torch.no_grad():
        for size in _SIZES:
            # The matrix contains ones, because products of zeros and denormals have other speeds.
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
