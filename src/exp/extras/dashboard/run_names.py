"""Call the runs of a page by what was typed: a folder of links beside outputs/, for TensorBoard names runs by folders.

lr=0.01 model=lenet · 09-39
lr=0.1 seed=2 · 09-41 job 7
defaults · 11-25 17-02
"""

from __future__ import annotations

import datetime
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from exp.config.freeze import read_overrides
from exp.errors import ExpError
from exp.tensorboard.hparams import EVENTS, OF_SWEEP, declared_above

TIME = re.compile(r"(\d\d-\d\d)-(\d\d)(?:-\d+)?")
DATE = re.compile(r"\d{4}-(\d\d-\d\d)")
# A number with a point within a value, such as a rate that a search has drawn.
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+(e[+-]?\d+)?(?![\w.])", re.IGNORECASE)
# What says nothing of what was tried.
PASSED_OVER = ("name", "resume", "tags", "print_config")
# Of a run's directory, or beside runs.
PASSED_BY = ("checkpoints", "pictures", "predictions", "report")
# In bytes: file systems take 255.
LONGEST = 120


class LinkedRuns:
    """Links to the folders of event files at and below a directory, each under a name of its own that stays.

    place: an empty folder, for the links. directory: outputs, a sweep, or a run.
    """

    def __init__(self, directory: Path, place: Path) -> None:
        self._directory, self._place = directory, place
        # Of runs; and of sweeps, by links to the files that declare what all of their jobs have.
        self._names: dict[Path, str] = {}
        self._sweeps: dict[Path, str] = {}

    def refresh(self) -> None:
        """Link what is new, and drop links to what is gone."""
        runs, sweeps = _found_below(self._directory)
        for folder in self._names.keys() - {*runs}:
            (self._place / self._names.pop(folder)).unlink(missing_ok=True)
        for folder in self._sweeps.keys() - sweeps.keys():
            self._drop_sweep(folder)
        for folder in runs:
            if folder not in self._names:
                name = self._names[folder] = self._free(run_name(folder, below=self._directory))
                (self._place / name).symlink_to(folder.absolute(), target_is_directory=True)
        for folder, files in sweeps.items():
            own = folder == self._directory
            name = self._sweeps.setdefault(folder, "" if own else self._free(as_name(f"sweep · {_time(folder)}")))
            (self._place / name).mkdir(exist_ok=True)
            for file in files:
                if not (self._place / name / file).is_symlink():
                    (self._place / name / file).symlink_to((folder / file).absolute())

    def _drop_sweep(self, folder: Path) -> None:
        place = self._place / self._sweeps.pop(folder)
        for link in place.glob(f"*{OF_SWEEP}"):
            link.unlink(missing_ok=True)
        if place != self._place:
            place.rmdir()

    def _free(self, name: str) -> str:
        taken = {*self._names.values(), *self._sweeps.values()}
        return next(one for one in _numbered(name) if one not in taken)


def runs_below(directory: Path) -> list[Path]:
    """The folders at and below a directory that hold TensorBoard events; those of a sweep's own are none."""
    return _found_below(directory)[0]


def _found_below(directory: Path) -> tuple[list[Path], dict[Path, list[str]]]:
    """Return the folders of runs, and the files of sweeps by their folders. What goes meanwhile is left out.

    Evaluations of saved runs are no runs beside those that train.
    """
    runs: list[Path] = []
    sweeps: dict[Path, list[str]] = {}
    for folder, inner, files in os.walk(directory):
        events = [name for name in files if fnmatch.fnmatchcase(name, EVENTS)]
        of_sweep = sorted(name for name in events if name.endswith(OF_SWEEP))
        if of_sweep:
            sweeps[Path(folder)] = of_sweep
        if len(events) > len(of_sweep):
            runs.append(Path(folder))
        # In a run's directory there are no others, but there may be many files.
        inner[:] = (
            ["tensorboard"]
            if {"tensorboard", "checkpoints"} <= {*inner}
            else [name for name in inner if name not in PASSED_BY and not name.startswith(".")]
        )
    training = [folder for folder in runs if not _is_evaluation(_run_of(folder))]
    return sorted(training or runs), sweeps


def run_name(folder: Path, *, below: Path) -> str:
    """What was typed, and when; of a folder that is no run's, its path.

    folder: of event files. below: the directory that is shown.
    """
    run = _run_of(folder)
    typed = _typed(run)
    if typed is None:
        shown = os.path.relpath(folder, below)
        return as_name(run.name if shown == "." else shown.replace(os.sep, " "))
    return as_name(" ".join(_short(typed)) or "defaults", f" · {_time(run)}")


def as_name(words: str, ending: str = "") -> str:
    """A name of one folder: without a separator or a sign that cannot be seen, and no longer than a system takes."""
    clean = "".join(sign if sign.isprintable() else " " for sign in words).replace("/", ":")
    ending = ending.replace("/", ":")
    if len((clean + ending).encode()) > LONGEST:
        room = LONGEST - len(ending.encode()) - len("…".encode())
        clean = clean.encode()[: max(0, room)].decode(errors="ignore") + "…"
    return clean + ending


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1


def _typed(run: Path) -> list[str] | None:
    """The overrides of a run, of a sweep's job those first that are swept; None of a folder that has none to read."""
    found = _overrides(run)
    if found is None:
        return None
    declared = declared_above(run)
    infos = [] if declared is None else declared.hparam_infos
    swept = {info.name for info in infos if info.WhichOneof("domain") is not None}
    return sorted(found, key=lambda one: one.lstrip("+").partition("=")[0] not in swept)


def _overrides(run: Path) -> list[str] | None:
    try:
        found = read_overrides(run)
    except (OSError, ExpError):
        return None
    return [str(text) for text in found] if isinstance(found, list) else None


def _run_of(folder: Path) -> Path:
    return folder.parent if folder.name == "tensorboard" else folder


def _is_evaluation(run: Path) -> bool:
    """Return whether a run trains nothing, as the runs of exp.evaluate."""
    return "train=false" in (text.lstrip("+").lower() for text in _overrides(run) or ())


def _short(typed: Sequence[str]) -> Iterator[str]:
    """`lr=0.01` of `optimizer.lr=0.01`, where that is one key alone."""
    parted = [one.partition("=") for one in typed]
    parted = [one for one in parted if one[0].lstrip("+~").partition(".")[0] not in ("hydra", *PASSED_OVER)]
    count = Counter(key.rpartition(".")[2] for key, _, _ in parted)
    for key, sign, value in parted:
        last = key.rpartition(".")[2]
        yield (last if count[last] == 1 and not key.startswith("~") else key) + sign + _end_of(value)


def _end_of(value: str) -> str:
    """Return the last part of a path; of any other value the whole, its long numbers with four significant digits."""
    if "/" in value and (value.startswith(("/", ".", "~")) or value.count("/") > 1):
        return value.rpartition("/")[2]
    return NUMBER.sub(lambda found: min(found[0], f"{float(found[0]):.4g}", key=len), value)


def _time(run: Path) -> str:
    """The time of a run's directory, with its date unless that is today's, and the job's number."""
    parts = run.absolute().parts
    at = next((place for place in reversed(range(len(parts))) if TIME.fullmatch(parts[place])), None)
    if at is None:
        return " ".join(parts[-2:])
    found, date = TIME.fullmatch(parts[at]), DATE.fullmatch(parts[at - 1])
    assert found is not None
    is_old = date is not None and parts[at - 1] != f"{datetime.date.today():%Y-%m-%d}"
    job = "".join(f" job {part}" for part in parts[at + 1 :])
    return (f"{date[1]} " if is_old and date is not None else "") + found[1] + job
