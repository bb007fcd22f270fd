"""Record of a search: an Optuna study in the sweep directory, which Optuna's tools can read.

The sweep writes the proposed trials and their results. A job reports its monitored values, and the pruner decides
whether the job is pruned. This module does not import torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from exp.errors import ExpError, MissingExtraError, config_error, one_line
from exp.files import lock
from exp.shared_types import Pruner

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

JOURNAL = "sweep.journal"
STUDY = "sweep"
# Name of the trial attribute with the validation at which the trial was pruned.
PRUNED_AT = "pruned_at"
# Largest length in bytes of an incomplete last line of the journal.
MOST_OF_LINE = 2**20


def _pruner(name: Pruner, *, epochs: int | None) -> BasePruner:
    """Return the Optuna pruner for a name. `asha` and `hyperband` keep a third of the trials at each rung.

    Args:
        name: Name of the pruner.
        epochs: Largest number of reports of a job; None if unknown.
    """
    from optuna import pruners

    if name == "median":
        # Optuna counts steps from 0 and exp from 1, so 2 warmup steps disable pruning only at the first report.
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2)
    if name == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if name == "hyperband":
        most: Any = "auto" if epochs is None else max(1, epochs)
        return pruners.HyperbandPruner(min_resource=1, max_resource=most, reduction_factor=3)
    return pruners.NopPruner()


class _JournalLock:
    """Lock of the journal that the operating system releases when the process ends, unlike Optuna's locks.

    Optuna 5.0 calls the methods acquire and release.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        """Wait for the lock, then remove an incomplete last line, which a killed process may have written."""
        self._file = self._path.open("rb+")
        lock(self._file)
        size = self._file.seek(0, os.SEEK_END)
        start = max(0, size - MOST_OF_LINE)
        self._file.seek(start)
        self._file.truncate(start + self._file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        assert self._file is not None
        self._file.close()


def open_journal(directory: Path) -> BaseStorage:
    """Return Optuna's storage of the journal of a sweep. Create the file if it does not exist."""
    from optuna import storages
    from optuna.storages.journal import JournalFileBackend

    path = directory / JOURNAL
    path.touch()
    return storages.JournalStorage(JournalFileBackend(str(path), lock_obj=cast(Any, _JournalLock(path))))


@contextmanager
def report_unreadable(directory: Path) -> Iterator[None]:
    """Return a context that raises ConfigError if the sweep's journal cannot be read."""
    try:
        yield
    except ExpError:
        raise
    except Exception as error:  # another program may have written to the journal
        got = f"{os.path.relpath(directory / JOURNAL)} cannot be read ({one_line(error)})"
        fix = "Restore the file, or start a new sweep"
        expected = "the record of the search as Optuna wrote it"
        raise config_error("sweep.resume", got=got, expected=expected, fix=fix) from error


class TrialOfJob:
    """Optuna trial of one job of the sweep.

    Args:
        number: Number of the trial.
        directory: Directory of the sweep.
        pruner: Name of the pruner.
        epochs: Largest number of reports of the job; None if unknown.

    Raises:
        MissingExtraError: Optuna is not installed.
    """

    def __init__(self, number: int, *, directory: Path, pruner: Pruner, epochs: int | None) -> None:
        optuna = optuna_package()
        with report_unreadable(directory):
            record = open_journal(directory)
            study: Study = optuna.load_study(
                study_name=STUDY,
                storage=record,
                sampler=optuna.samplers.RandomSampler(),
                pruner=_pruner(pruner, epochs=epochs),
            )
            known = record.get_trial_id_from_study_id_trial_number(record.get_study_id_from_name(STUDY), number)
            self._trial: Trial = optuna.trial.Trial(study, known)
        before = record.get_trial(known)
        self._reported = set(before.intermediate_values)
        self.pruned_at: int | None = before.user_attrs.get(PRUNED_AT)

    def report(self, value: float, *, step: int) -> bool:
        """Report a monitored value, and return whether the trial is pruned.

        Args:
            value: Monitored value.
            step: Number of the validation, counted from 1. If the job reported this step before it was resumed, the
                earlier value is kept.
        """
        if self.pruned_at is not None:
            return step >= self.pruned_at
        if step not in self._reported:
            self._trial.report(value, step)
            self._reported.add(step)
        elif step < max(self._reported):
            return False
        if self._trial.should_prune():
            self.pruned_at = step
            self._trial.set_user_attr(PRUNED_AT, step)
        return self.pruned_at is not None


def optuna_package() -> Any:
    """Import Optuna. Disable its log messages about trials and its warnings about experimental features."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError(feature="a sweep that searches", package="optuna", extra="search") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
