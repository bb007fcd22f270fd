"""The largest use of memory: of a run as a whole, and between two points of it.

Whoever wants the largest between two points sets the counter back, of the CUDA allocator or of the Linux kernel. So
there is one place that does, and keeps what was largest before.
"""

from __future__ import annotations

import os
import resource
import sys
from abc import ABC, abstractmethod

import torch


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
        self._before = 0
        if self.can_restart:
            self._restart()


class ResidentPeak(Peak):
    """Of this process's resident set. Linux has a counter that can be set back (proc(5): VmHWM, clear_refs)."""

    def __init__(self) -> None:
        super().__init__()
        self._process = 0
        self._status = self._switch = -1

    @property
    def can_restart(self) -> bool:
        return sys.platform == "linux"

    def since_restart(self) -> int:
        if not self.can_restart:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, by its getrusage(2)
        self._open()
        text = os.pread(self._status, 8192, 0)
        at = text.index(b"VmHWM:") + len(b"VmHWM:")
        return int(text[at : text.index(b"kB", at)]) * 1024

    def _restart(self) -> None:
        self._open()
        os.write(self._switch, b"5")

    def _open(self) -> None:
        """Once a process: to open them takes longer than to read, and a fork would look at its parent."""
        if self._process != os.getpid():
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            self._switch = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._process = os.getpid()


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
