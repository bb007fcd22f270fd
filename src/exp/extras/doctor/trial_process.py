"""Runs the probe in processes that may crash or hang, and collects the results of its tries."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The first import of torch from a network file system can take minutes.
SECONDS = 300.0

Facts = Mapping[str, Any]


def tried(wanted: Sequence[str]) -> dict[str, Facts]:
    """Try several things in order; a new process continues after each crash.

    Args:
        wanted: Tries as `exp.extras.doctor.probe` takes them.

    Returns:
        The facts of each try; {"error": words} if it failed, crashed or took longer than SECONDS.
    """
    found: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory(prefix="exp-doctor-") as folder:
        file = Path(folder, "results")
        while left := [what for what in wanted if what not in found]:
            file.write_text("", encoding="utf-8")
            end = _run_probe(file, left)
            lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
            found |= {facts["what"]: facts for facts in lines}
            missing = [what for what in left if what not in found]
            found |= {what: {"error": end} for what in missing[:1]}
    return found


def _run_probe(file: Path, wanted: Sequence[str]) -> str:
    """Return how the process ended, in words."""
    command = [sys.executable, "-m", "exp.extras.doctor.probe", str(file), *wanted]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {SECONDS:g} s"
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = next(iter(done.stderr.strip().splitlines()[::-1]), "")
    return f"its process ended with status {done.returncode}: {last}"
