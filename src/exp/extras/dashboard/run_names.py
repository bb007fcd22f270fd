"""Creates a folder of links that are named by the overrides of runs, because TensorBoard names runs by their folders.

lr=0.01 model=lenet · 2026-01-31 09-39-17
lr=0.1 seed=2 · 09-41-02 7
defaults · 2025-11-25 17-02-33
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from exp.config.frozen import read_overrides
from exp.errors import ExpError
from exp.tensorboard.event_file import EVENTS
from exp.tensorboard.hparams import OF_SWEEP

# Keys that are no hyperparameters.
PASSED_OVER = ("hydra", "name", "resume", "tags", "print_config")
# Folders without runs.
PASSED_BY = ("checkpoints", "pictures", "predictions", "report")
# The longest name in bytes; file systems take 255.
LONGEST = 120


class LinkedRuns:
    """Creates links with unique, stable names to all folders with event files at and below a directory.

    Args:
        directory: outputs, a sweep, or a run.
        place: An empty folder for the links.
    """

    def __init__(self, directory: Path, place: Path) -> None:
        self._directory, self._place = directory, place
        self._names: dict[Path, str] = {}

    def refresh(self) -> None:
        """Link new runs, and remove links to deleted runs."""
        runs = runs_below(self._directory)
        for folder in self._names.keys() - {*runs}:
            (self._place / self._names.pop(folder)).unlink(missing_ok=True)
        for folder in runs:
            if folder not in self._names:
                name = free = run_name(folder, below=self._directory)
                number = 1
                while free in self._names.values():
                    number += 1
                    free = f"{name} ({number})"
                self._names[folder] = free
                (self._place / free).symlink_to(folder.absolute(), target_is_directory=True)


def runs_below(directory: Path) -> list[Path]:
    """Return the folders at and below a directory that contain TensorBoard events of runs, without those of sweeps."""
    runs: list[Path] = []
    for folder, inner, files in os.walk(directory):
        if any(fnmatch.fnmatchcase(name, EVENTS) and not name.endswith(OF_SWEEP) for name in files):
            runs.append(Path(folder))
        # A run directory contains no other run, but possibly many files.
        is_run = {"tensorboard", "checkpoints"} <= {*inner}
        others = [name for name in inner if name not in PASSED_BY and not name.startswith(".")]
        inner[:] = ["tensorboard"] if is_run else others
    return sorted(runs)


def run_name(folder: Path, *, below: Path) -> str:
    """Return the name of a link: overrides, date and time of a run, or the relative path of a folder that is no run.

    Args:
        folder: The folder of event files.
        below: The directory of the dashboard.
    """
    run = folder.parent if folder.name == "tensorboard" else folder
    typed = _overrides(run)
    if typed is None:
        place = os.path.relpath(folder, below)
        name = run.name if place == "." else place.replace(os.sep, " ")
    else:
        name = f"{' '.join(_short(typed)) or 'defaults'} · {' '.join(run.absolute().parts[-2:])}"
    clean = "".join(sign if sign.isprintable() else " " for sign in name).replace("/", ":")
    return clean.encode()[:LONGEST].decode(errors="ignore")


def _overrides(run: Path) -> list[str] | None:
    try:
        found = read_overrides(run)
    except (OSError, ExpError):
        return None
    return [str(text) for text in found] if isinstance(found, list) else None


def _short(typed: Sequence[str]) -> list[str]:
    """Return the overrides in short form.

    `optimizer.lr=0.01` becomes `lr=0.01` if no other key ends in `lr`. Paths lose their folders.
    """
    parted = [one.partition("=") for one in typed]
    parted = [one for one in parted if one[0].lstrip("+~").partition(".")[0] not in PASSED_OVER]
    count = Counter(key.rpartition(".")[2] for key, _, _ in parted)
    found = []
    for key, sign, value in parted:
        last = key.rpartition(".")[2]
        is_path = value.startswith(("/", ".", "~")) and "/" in value
        short = last if count[last] == 1 and not key.startswith("~") else key
        found.append(short + sign + (value.rpartition("/")[2] if is_path else value))
    return found
