"""Start the probe, and read what came of each try, also of the one in which the process died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# By which a module that is imported for the first time from a network's disk has come.
SECONDS = 300.0

Facts = Mapping[str, Any]


def tried(wanted: Sequence[str], *, seconds: float = SECONDS) -> dict[str, Facts]:
    """Try things in fresh interpreters, one after another, until each has come to its end or has ended its process.

    wanted: as of `exp.extras.doctor.probe`. seconds: for each process.
    Returns: what came of each; {"error": {...}} where it failed, {"died": words} where it ended the process.
    """
    found: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory(prefix="exp-doctor-") as folder:
        file = Path(folder, "results")
        while left := [what for what in wanted if what not in found]:
            file.write_text("", encoding="utf-8")
            end = _process(file, left, seconds=seconds)
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found |= {line["what"]: line for line in lines if "begins" not in line}
            begun = [line["what"] for line in lines if "begins" in line and line["what"] not in found]
            # Of a process that did not even begin, the first has nothing to say, nor has any other.
            for what in begun or [one for one in left if one not in found]:
                found[what] = {"died": end}
    return found


def _process(file: Path, wanted: Sequence[str], *, seconds: float) -> str:
    """How it ended, in words."""
    command = [sys.executable, "-X", "faulthandler", "-m", "exp.extras.doctor.probe", str(file), *wanted]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False, env=dict(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {seconds:g} s"
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = next(iter(done.stderr.strip().splitlines()[::-1]), "")
    return f"its process ended with status {done.returncode}" + (f": {last}" if last else "")
