"""What this machine has: cores, disks, shared memory and NVIDIA's driver. Knows nothing of torch."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from exp.errors import words_of
from exp.extras.doctor.finding import Finding, fault, note, ok

MIB, GIB = 2**20, 2**30
# A checkpoint of the smallest networks, with the log and TensorBoard's file, takes less than one MiB.
LEAST_FREE, LITTLE_FREE = 100 * MIB, 5 * GIB
# What Docker gives a container by default is 64 MiB; a loader's worker that fills it dies of SIGBUS.
LITTLE_SHARED = 256 * MIB
MOUNTS = Path("/proc/self/mountinfo")
SHARED_MEMORY = Path("/dev/shm")
IN_MEMORY = ("tmpfs", "ramfs")
OF_NETWORK = re.compile(r"nfs|cifs|smb|9p|lustre|gpfs|beegfs|ceph|fuse\.(sshfs|s3fs|gcsfuse)")


@dataclass(frozen=True, kw_only=True)
class Nvidia:
    """What the system says of NVIDIA's GPUs, whatever torch does.

    gpus: how many devices it has. driver: its version; None without one. cuda: the newest CUDA version that the driver
    runs, such as 12.4; None where it does not say so.
    """

    gpus: int
    driver: str | None
    cuda: str | None


def findings(outputs: Path, *, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at cores and threads, at the disk of `outputs`, at temporary files and at shared memory."""
    yield from threads(environment)
    yield from disk("outputs", outputs)
    yield from disk("temporary files", Path(tempfile.gettempdir()), least=MIB)
    yield from shared_memory()


def threads(environment: Mapping[str, str] = os.environ, *, cores: int | None = None) -> Iterator[Finding]:
    """Look at the cores that this process may use, and at what sets threads. cores: how many; None asks the system."""
    there = os.cpu_count() or 1
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    share = _quota()
    limits = "" if share is None or share >= cores else f", of which a control group gives {share:g}"
    yield ok("cores", f"{cores} of {there} may be used{limits}")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = environment.get(name)
        if text is None:
            continue
        first = text.partition(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            yield fault("threads", f"{name}={text} is no number of threads", f"unset {name}, or set it to 1 to {cores}")
        elif int(first) > cores:
            cure = f"unset {name}, and set runtime.threads where you want another number"
            yield note("threads", f"{name}={text} is more than the {cores} cores: threads wait for each other", cure)
        else:
            yield note("threads", f"{name}={text}: an operator uses no more cores than that")


def _quota() -> float | None:
    """How many cores a control group gives this process; None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None  # no control groups here, or of the first version


def disk(part: str, wanted: Path, *, least: int = LEAST_FREE) -> Iterator[Finding]:
    """Look whether a directory, or the nearest one above it, can be written, and what it lies on.

    least: bytes that must be free.
    """
    place = _existing(wanted.absolute())
    if not place.is_dir():
        what = f"a link to {os.readlink(place)}, which is not there" if place.is_symlink() else "a file"
        cure = f"Move it away, mv {place} {place}.old, or name another directory"
        if part != "outputs":
            cure = "Set TMPDIR to a directory that you may write"
        yield fault(part, f"{place} is {what}, where a directory must be", cure)
        return
    kind, mount = file_system(place)
    try:
        free, nodes = shutil.disk_usage(place).free, _free_files(place)
    except OSError as error:
        yield fault(part, f"{place}: {words_of(error)}", f"Mount it again, or work in another directory than {place}")
        return
    where = f"{place}: {_size(free)} free on {kind or 'a file system that is not known'} at {mount}"
    unwritten = _write_error(place)
    if unwritten is not None:
        yield unwritable(part, place, unwritten)
    elif free < least or nodes == 0:
        left = f"{where}, and no file more" if nodes == 0 else where
        yield fault(
            part, left, "Make room, or make outputs a link to another disk" if part == "outputs" else "Make room"
        )
    elif part == "outputs" and free < LITTLE_FREE:
        yield note(part, where, "Checkpoints of larger networks fill that: make room, or make outputs a link elsewhere")
    elif part == "outputs" and kind in IN_MEMORY:
        yield note(part, where, "It is memory, and gone when the machine goes down: make outputs a link to a disk")
    elif part == "outputs" and kind == "overlay":
        yield note(
            part, where, "It is the container's own, and gone with it: mount a disk, and make outputs a link to it"
        )
    elif part == "outputs" and OF_NETWORK.search(kind):
        yield note(
            part, where, "A network's file system: many small files are slow there, and data are better on a disk"
        )
    else:
        yield ok(part, where)


def unwritable(part: str, place: Path, error: OSError) -> Finding:
    """Return the finding for a directory in which a write failed, with the fix that the error allows."""
    cure = "Work in a directory of your own, or make outputs a link to one"
    if error.errno == errno.EACCES and place.stat().st_uid == os.geteuid():
        cure = f"chmod u+wx {place}, or work in another directory; outputs may be a link to one"
    if part != "outputs":
        cure = f"Set TMPDIR to a directory that you may write in the place of {place}"
    return fault(part, f"{place} cannot be written: {words_of(error)}", cure)


def _existing(wanted: Path) -> Path:
    """The path itself, or the nearest one above it that is there."""
    return next(place for place in (wanted, *wanted.parents) if os.path.lexists(place))


def _write_error(place: Path) -> OSError | None:
    """Why a file cannot be made, synced and renamed in a directory; None where it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".exp-doctor-", delete=False) as file:
            path = Path(file.name)
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        try:
            path.replace(renamed := path.with_suffix(".renamed"))
            path = renamed
        finally:
            path.unlink()
    except OSError as error:
        return error
    return None


def _free_files(place: Path) -> int | None:
    """How many files more a file system takes; None where it counts none."""
    if not hasattr(os, "statvfs"):
        return None
    status = os.statvfs(place)
    return status.f_favail if status.f_files else None


def file_system(place: Path, *, mounts: Path = MOUNTS) -> tuple[str, str]:
    """The kind and the mount point of the file system that a path lies on; ("", "?") where the system does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", "?"
    found = ("", "?")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        # The longest that holds it, and of equal ones the last, which hides those before.
        if place.resolve().is_relative_to(point) and (found[1] == "?" or len(point) >= len(found[1])):
            found = after.split()[0], point
    return found


def shared_memory(place: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Look at the memory through which the workers of a loader hand over their batches; nothing where there is none."""
    if not place.is_dir():
        return
    total = shutil.disk_usage(place).total
    found = f"{place}: {_size(total)}"
    if total < LITTLE_SHARED:
        cure = "docker run --shm-size=2g, or data.num_workers=0: a worker that fills it dies of SIGBUS"
        yield note("shared memory", found, cure)
    else:
        yield ok("shared memory", found)


def nvidia() -> Nvidia:
    """Ask the system for NVIDIA's GPUs and driver, without torch and without CUDA's variables."""
    folders = [*Path("/proc/driver/nvidia/gpus").glob("*")]
    # A container may have the devices, and not that folder.
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    driver = None
    try:
        told = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        matched = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", told)
        driver = matched[1] if matched else None
    except OSError:
        pass  # no driver in this kernel, or WSL, whose nvidia-smi knows
    listed = _listed_gpus()
    return Nvidia(
        gpus=max(len(folders), len(nodes), len(listed)), driver=driver or next(iter(listed), None), cuda=_cuda()
    )


def _listed_gpus() -> list[str]:
    """The driver's version, once for each GPU that nvidia-smi lists."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []  # a driver that hangs is told by torch's own start
    return [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\s*\d+\.[\d.]+\s*", line)]


def _cuda() -> str | None:
    """The newest CUDA that the driver runs, asked of its library; that needs no device and starts none."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"
