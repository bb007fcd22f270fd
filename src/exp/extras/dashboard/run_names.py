"""Creates a folder of links to runs, because TensorBoard names runs by their folders.

The name of a link has the overrides of the run and the last two folders of its path. These folders are the date and the
time, or the time of a sweep and the number of the job. Examples:

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

# Overrides of these keys are no hyperparameters and are left out of names.
PASSED_OVER = ("hydra", "name", "resume", "tags", "print_config")
# Folders without runs.
PASSED_BY = ("checkpoints", "pictures", "predictions", "report")
# Largest length of a name in bytes. File systems allow 255 bytes.
LONGEST = 120


class LinkedRuns:
    """Folder of links to all folders with event files at and below a directory.

    The names of the links are unique and stable.

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
    """Return the folders at and below a directory that contain TensorBoard events of runs.

    A folder that contains only the events of a sweep is left out.
    """
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
    """Return the name of the link to a folder.

    The name of a run has its overrides, date and time. A folder that is no run is named by its path relative to
    `below`.

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

    `optimizer.lr=0.01` becomes `lr=0.01` if no other key ends in `lr`. A path is shortened to its last part.
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
