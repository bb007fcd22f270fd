"""Peaks of memory use, and errors of allocations that failed.

To measure the peak between two points of a run, a counter of the CUDA allocator or of the Linux kernel is reset. Only
this module resets these counters, so that it can keep the largest value from before a reset.
"""

from __future__ import annotations

import functools
import logging
import re
import resource
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from exp.errors import message_of

log = logging.getLogger(__name__)

MIB = 2**20
STATUS, SWITCH = "/proc/self/status", "/proc/self/clear_refs"
# Messages of torch's allocators and CUDA's libraries, which raise a plain RuntimeError (torch 2.13).
ALLOCATORS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory|CUDA error: out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
)
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Peak(ABC):
    """Counter of the largest memory use, in bytes."""

    def __init__(self) -> None:
        self._before = 0

    @property
    def can_restart(self) -> bool:
        """True if the counter can be reset."""
        return True

    @abstractmethod
    def since_restart(self) -> int:
        """Return the peak in bytes since the last restart.

        If the counter was never restarted, return the peak since the start of the process.
        """

    @abstractmethod
    def _reset(self) -> None:
        """Set the counter to the current memory use."""

    def restart(self) -> int:
        """Return the peak in bytes since the last restart, and reset the counter.

        Later calls of `so_far` include this peak.
        """
        found = self.since_restart()
        self._before = max(self._before, found)
        if self.can_restart:
            self._reset()
        return found

    def so_far(self) -> int:
        """Return the peak in bytes since the last call of `forget`.

        Without such a call, the peak since the start of the process.
        """
        return max(self._before, self.since_restart())

    def forget(self) -> None:
        """Begin a new peak for another run in this process.

        Later calls of `so_far` do not include earlier memory use.
        """
        self.restart()
        self._before = 0


class ResidentPeak(Peak):
    """Peak of this process's resident set. Only Linux can reset this counter (proc(5): VmHWM, clear_refs)."""

    @functools.cached_property
    def can_restart(self) -> bool:
        """True if the process can reset its counter: on Linux, unless a sandbox denies the permission.

        The permission is checked once.
        """
        if sys.platform != "linux":
            return False
        try:
            self._before = max(self._before, _largest_resident())
            self._reset()
        except (OSError, ValueError) as error:
            log.warning(
                "the system does not let a process reset the peak of its resident set (%s): memory/host_peak_* are not "
                "logged, and the peak in report.json is that of the whole process",
                error,
            )
            return False
        return True

    def since_restart(self) -> int:
        if self.can_restart:
            return _largest_resident()
        # getrusage(2) reports bytes on macOS, and KiB on other systems.
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest

    def _reset(self) -> None:
        Path(SWITCH).write_text("5")


def _largest_resident() -> int:
    """Return the kernel's counter in bytes.

    Raises:
        ValueError: The kernel's file has no such counter.
    """
    text = Path(STATUS).read_text()
    return int(text[text.index("VmHWM:") :].split(maxsplit=2)[1]) * 1024


class AllocatedPeak(Peak):
    """Peak of the CUDA allocator on one device."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def since_restart(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def _reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)


HOST = ResidentPeak()
_of_device = functools.cache(AllocatedPeak)


def peak_of(device: torch.device) -> Peak:
    """Return the counter of a device: the CUDA allocator's counter, or the resident set's counter for other devices."""
    if device.type != "cuda":
        return HOST
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


def peak_of_run() -> Peak:
    """Return the counter of the device that this process uses."""
    return peak_of(torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has run out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATORS.search(message_of(error)) is not None


def asked_for(error: BaseException) -> int | None:
    """Return the size in bytes of the failed allocation. Return None if the message does not state the size."""
    found = ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def explain_out_of_memory(error: BaseException, *, is_built: bool) -> str:
    """Return a report of the failed allocation, followed by the allocator's message.

    The report comes from the hook `memory`. Without the hook, it is a hint to add the hook.

    Args:
        error: The error.
        is_built: Whether network and data are already built. Hooks run only after that.
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    if is_built:
        without = "out of memory. Add +hooks=memory to see the layer, what filled the memory, and what to change"
    else:
        without = "out of memory while the network and the data were built, before training"
    return "\n".join([*(getattr(error, "__notes__", None) or [without]), message])
