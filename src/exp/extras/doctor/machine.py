"""Checks disks and shared memory, and lists NVIDIA's GPUs. The module does not import torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exp.errors import describe_exception
from exp.extras.doctor.finding import Finding

MIB, GIB = 2**20, 2**30
# Even checkpoints, logs and event files of the smallest networks fit into less than 1 MiB.
LEAST_FREE = 100 * MIB
# Docker gives a container 64 MiB by default. A data worker that fills shared memory is killed by SIGBUS.
LITTLE_SHARED = 256 * MIB


def findings(outputs: Path) -> Iterator[Finding]:
    """Yield the findings about the disks of `outputs` and of temporary files, and about shared memory."""
    yield disk("outputs", outputs)
    yield disk("temporary files", Path(tempfile.gettempdir()))
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        fix = "docker run --shm-size=2g, or data.num_workers=0" if total < LITTLE_SHARED else ""
        yield Finding("note" if fix else "ok", "shared memory", f"{shared}: {total / MIB:,.0f} MiB", fix)


def disk(part: str, wanted: Path, *, least: int = LEAST_FREE) -> Finding:
    """Return a finding that states whether a directory can be written and has free space.

    If the directory does not exist, the nearest existing directory above it is checked.

    Args:
        part: Use of the directory: `outputs` or `temporary files`.
        wanted: Path of the directory, which may be missing.
        least: Number of free bytes below which the disk counts as full. Default: LEAST_FREE.
    """
    place = next(path for path in (wanted.absolute(), *wanted.absolute().parents) if os.path.lexists(path))
    other = "make outputs a link to another disk" if part == "outputs" else "set TMPDIR to another directory"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(
            "error", part, f"{place} cannot be written: {describe_exception(error)}", f"Get write access, or {other}"
        )
    found = f"{place}: {free / GIB:,.1f} GiB free"
    if free < least:
        return Finding("error", part, found, f"Free some space, or {other}")
    return Finding("ok", part, found)


def nvidia_drivers() -> list[str]:
    """Return the driver version of each GPU that nvidia-smi lists. The list is empty if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^\s*(\d+\.[\d.]+)\s*$", output, flags=re.MULTILINE)
