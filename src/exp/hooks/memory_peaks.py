"""The largest use of memory, of a run as a whole and between two points of it.

To measure between two points resets a counter of the CUDA allocator or of the Linux kernel. This module is the only one
that resets them, and it remembers the largest value from before.
"""

from __future__ import annotations

import functools
import logging
import resource
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch

log = logging.getLogger(__name__)

MIB = 2**20
STATUS, SWITCH = "/proc/self/status", "/proc/self/clear_refs"


class Peak(ABC):
    """A counter of the largest use of memory, in bytes."""

    def __init__(self) -> None:
        self._before = 0

    @property
    def can_restart(self) -> bool:
        """True if the counter can be reset."""
        return True

    @abstractmethod
    def since_restart(self) -> int:
        """Return the peak since the last restart; since the start of the process if there is no restart."""

    @abstractmethod
    def _reset(self) -> None:
        """Set the counter to the present use."""

    def restart(self) -> int:
        """Return the peak since the last restart, and reset the counter. `so_far` still counts it."""
        found = self.since_restart()
        self._before = max(self._before, found)
        if self.can_restart:
            self._reset()
        return found

    def so_far(self) -> int:
        """Return the peak since `forget` or the start of the process."""
        return max(self._before, self.since_restart())

    def forget(self) -> None:
        """Begin the peak of another run in this process."""
        self.restart()
        self._before = 0


class ResidentPeak(Peak):
    """The peak of the resident set of this process. Only Linux can reset it (proc(5): VmHWM, clear_refs)."""

    @functools.cached_property
    def can_restart(self) -> bool:
        """True if this is Linux and the process may reset its counter, which a sandbox may refuse. Checked once."""
        if sys.platform != "linux":
            return False
        try:
            self._before = max(self._before, _largest_resident())
            self._reset()
        except (OSError, ValueError) as error:
            log.warning(
                "the peak of the resident set cannot be set back here (%s): memory/host_peak_* are left out, and the "
                "peak in a report is that of the whole process",
                error,
            )
            return False
        return True

    def since_restart(self) -> int:
        if self.can_restart:
            return _largest_resident()
        # By getrusage(2) bytes on macOS, and KiB elsewhere.
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest

    def _reset(self) -> None:
        Path(SWITCH).write_text("5")


def _largest_resident() -> int:
    """Return the kernel's counter in bytes. Raises: ValueError if the file lacks it."""
    text = Path(STATUS).read_text()
    return int(text[text.index("VmHWM:") :].split(maxsplit=2)[1]) * 1024


class AllocatedPeak(Peak):
    """The peak of the CUDA allocator on one device."""

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
    """Return the peak of the allocator of a CUDA device; of the resident set for another device."""
    if device.type != "cuda":
        return HOST
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


def peak_of_run() -> Peak:
    """Return the peak of the device that this process uses."""
    return peak_of(torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"))
