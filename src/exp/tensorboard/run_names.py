"""Call the runs of a page by what was typed: a folder of links beside outputs/, for TensorBoard names runs by folders.

lr=0.01 model=lenet · 09-39
lr=0.1 seed=2 · 09-41 job 7
defaults · 11-25 17-02
"""

from __future__ import annotations

import datetime
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
# What says nothing of what was tried.
PASSED_OVER = ("name", "resume", "tags", "print_config")
LONGEST = 90


class LinkedRuns:
    """Links to the folders of event files at and below a directory, each under a name of its own that stays.

    place: an empty folder, for the links. directory: outputs, a sweep, or a run.
    """

    def __init__(self, directory: Path, place: Path) -> None:
        self._directory, self._place = directory, place
        self._names: dict[Path, str] = {}

    def refresh(self) -> list[Path]:
        """Link what is new, and drop links to what is gone. Returns: the folders that are there."""
        found = runs_below(self._directory)
        for folder in found:
            if folder not in self._names:
                self._link(folder, self._free(run_name(folder, below=self._directory)))
        for folder in self._names.keys() - {*found}:
            (self._place / self._names.pop(folder)).unlink(missing_ok=True)
        self._link_sweeps()
        return found

    def _link(self, folder: Path, name: str) -> None:
        self._names[folder] = name
        (self._place / name).symlink_to(folder.absolute(), target_is_directory=True)

    def _free(self, name: str) -> str:
        taken = {*self._names.values()}
        return next(one for one in _numbered(name) if one not in taken)

    def _link_sweeps(self) -> None:
        """What a sweep declares of all of its jobs stands in a file of its own directory."""
        for path in sorted(self._directory.rglob(EVENTS)):
            if path.name.endswith(OF_SWEEP):
                own = path.parent == self._directory
                link = self._place / path.name if own else self._place / f"sweep · {_time(path.parent)}" / path.name
                link.parent.mkdir(exist_ok=True)
                if not link.is_symlink():
                    link.symlink_to(path.absolute())


def runs_below(directory: Path) -> list[Path]:
    """The folders at and below a directory that hold TensorBoard events; those of a sweep's own are none."""
    return sorted({path.parent for path in directory.rglob(EVENTS) if not path.name.endswith(OF_SWEEP)})


def run_name(folder: Path, *, below: Path) -> str:
    """What was typed, and when; of a folder that is no run's, its path.

    folder: of event files. below: the directory that is shown.
    """
    run = folder.parent if folder.name == "tensorboard" else folder
    typed = _typed(run)
    if typed is None:
        shown = os.path.relpath(folder, below)
        return run.name if shown == "." else shown.replace(os.sep, " ")
    words = " ".join(_short(typed)) or "defaults"
    if len(words) > LONGEST:
        words = words[: LONGEST - 1] + "…"
    return f"{words} · {_time(run)}"


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1


def _typed(run: Path) -> list[str] | None:
    """The overrides of a run, of a sweep's job those first that are swept; None of a folder that has none to read."""
    try:
        found = read_overrides(run)
    except (OSError, ExpError):
        return None
    if not isinstance(found, list):
        return None
    declared = declared_above(run)
    infos = [] if declared is None else declared.hparam_infos
    swept = {info.name for info in infos if info.WhichOneof("domain") is not None}
    return sorted(map(str, found), key=lambda one: one.lstrip("+").partition("=")[0] not in swept)


def _short(typed: Sequence[str]) -> Iterator[str]:
    """`lr=0.01` of `optimizer.lr=0.01`, where that is one key alone."""
    parted = [one.partition("=") for one in typed]
    parted = [one for one in parted if one[0].lstrip("+~").partition(".")[0] not in ("hydra", *PASSED_OVER)]
    count = Counter(key.rpartition(".")[2] for key, _, _ in parted)
    for key, sign, value in parted:
        last = key.rpartition(".")[2]
        # A path would be a folder of its own.
        yield (last if count[last] == 1 and not key.startswith("~") else key) + sign + value.rpartition("/")[2]


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
