"""The largest use of memory: of a run as a whole, and between two points of it.

Whoever wants the largest between two points sets the counter back, of the CUDA allocator or of the Linux kernel. So
there is one place that does, and keeps what was largest before.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from abc import ABC, abstractmethod

import torch

log = logging.getLogger(__name__)

STATUS, SWITCH = "/proc/self/status", "/proc/self/clear_refs"


class Peak(ABC):
    """The largest use so far, and since `restart`."""

    def __init__(self) -> None:
        self._before = 0

    @property
    def can_restart(self) -> bool:
        """Whether there is a counter that can be set back."""
        return True

    @abstractmethod
    def since_restart(self) -> int:
        """Bytes; where nothing can restart, since the process began."""

    @abstractmethod
    def _restart(self) -> None:
        """Sets the counter to what is used now."""

    def restart(self) -> int:
        """Counts anew from here, and gives what was largest since the last time; `so_far` forgets nothing."""
        found = self.since_restart()
        self._before = max(self._before, found)
        self._restart()
        return found

    def so_far(self) -> int:
        """Bytes, since `forget` or the beginning of the process."""
        return max(self._before, self.since_restart())

    def forget(self) -> None:
        """Another run begins in this process."""
        if self.can_restart:
            self._restart()
        self._before = 0


class ResidentPeak(Peak):
    """Of this process's resident set. Linux has a counter that can be set back (proc(5): VmHWM, clear_refs)."""

    def __init__(self) -> None:
        super().__init__()
        self._process = 0
        # Its counter and what sets it back, open; None where the system has none, or lets nobody.
        self._files: tuple[int, int] | None = None

    @property
    def can_restart(self) -> bool:
        # Once a process: to open them takes longer than to read, and a fork would look at its parent.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._files = self._opened()
        return self._files is not None

    def since_restart(self) -> int:
        if not self.can_restart:
            # By getrusage(2) bytes on macOS, and KiB elsewhere.
            largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return largest if sys.platform == "darwin" else 1024 * largest
        assert self._files is not None
        return _largest(self._files[0])

    def _restart(self) -> None:
        if self.can_restart:
            assert self._files is not None
            os.write(self._files[1], b"5")

    def _opened(self) -> tuple[int, int] | None:
        """By trying all of it: a sandbox may have neither file, and a process may not be allowed its own."""
        if sys.platform != "linux":
            return None
        found: list[int] = []
        try:
            for path, flag in ((STATUS, os.O_RDONLY), (SWITCH, os.O_WRONLY)):
                found.append(os.open(path, flag | os.O_CLOEXEC))
            largest = _largest(found[0])
            os.write(found[1], b"5")
        except (OSError, ValueError) as error:
            for file in found:
                os.close(file)
            log.warning(
                "the peak of the resident set cannot be set back here (%s): memory/host_peak_* are left out, and the "
                "peak in a report is that of the whole process",
                error,
            )
            return None
        self._before = max(self._before, largest)
        return found[0], found[1]


def _largest(status: int) -> int:
    """Raises: ValueError where the counter is not in it."""
    text = os.pread(status, 8192, 0)
    at = text.index(b"VmHWM:") + len(b"VmHWM:")
    return int(text[at : text.index(b"kB", at)]) * 1024


class AllocatedPeak(Peak):
    """Of what the CUDA allocator gave out on one device."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def since_restart(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def _restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)


HOST = ResidentPeak()
_devices: dict[int, AllocatedPeak] = {}


def peak_of(device: torch.device) -> Peak:
    """The allocator's on CUDA, else the process's resident set."""
    if device.type != "cuda":
        return HOST
    index = torch.cuda.current_device() if device.index is None else device.index
    return _devices.setdefault(index, AllocatedPeak(index))


def peak_of_run() -> Peak:
    """That of the device that this process uses."""
    return peak_of(torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"))
