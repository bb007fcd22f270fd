"""The jobs of a sweep: composed as single runs are, checked, and told apart."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from exp.check.stages import config_faults, early_faults, refuse_early
from exp.config.compose import Composition, composition_of, job_config, with_values
from exp.config.hydra_adapter import parse_override, recorded_overrides, task_overrides
from exp.config.reading import plain_values
from exp.errors import ConfigError, Fault

MAX_FAULTS = 30
# Of the configs of several jobs, the faults of each; None where there is none.
Check = Callable[[Sequence[DictConfig]], Sequence[ConfigError | None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job.

    swept: key to value as text, of what was swept. config, error: what can be run, or why it cannot.
    is_known: an earlier sweep of the same directory has begun it. is_stacked: it is trained together with others.
    """

    number: int
    overrides: tuple[str, ...]
    swept: dict[str, str]
    config: DictConfig | None
    error: ConfigError | None = None
    is_known: bool = False
    is_stacked: bool = False

    @functools.cached_property
    def plain(self) -> dict[str, Any]:
        """The values of its config."""
        assert self.config is not None
        return plain_values(self.config)


class Jobs:
    """Makes the jobs of one sweep.

    directory: of the sweep. check: the faults of each of several configs.
    everything: where a job has faults that need no torch, look for the others, too.
    """

    def __init__(self, *, master: Composition, directory: Path, check: Check, everything: bool = False) -> None:
        self.directory, self.check, self.everything = directory, check, everything
        self.config_dir, self.config_name = master.config_dir, master.config_name
        self._hydra_overrides = recorded_overrides(master.config, "hydra")
        fixed = [parse_override(text) for text in task_overrides(master.config)]
        fixed = [line for line in fixed if not line.is_sweep_override()]
        self._fixed = {line.get_key_element() for line in fixed}
        self._typed_security = [_setting(line) for line in fixed if _is_security(line)]
        self._last: tuple[Composition, list[Override]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Plain data, so that a launcher of other processes can carry it."""
        return {**vars(self), "_last": None}

    def composed(self, number: int, overrides: Sequence[str]) -> Job:
        """A job with its config, not checked by what needs torch."""
        lines = [parse_override(text) for text in overrides]
        swept = {
            line.key_or_group: text.partition("=")[2]
            for line, text in zip(lines, overrides, strict=True)
            if line.get_key_element() not in self._fixed
        }
        job = Job(number=number, overrides=tuple(overrides), swept=swept, config=None)
        try:
            self._refuse_security(lines)
            composition = self._composition(lines, [*self._hydra_overrides, *overrides])
            config = job_config(composition, job=number, sweep=str(self.directory))
            if not self.everything:
                refuse_early(config)
        except ConfigError as error:
            return replace(job, error=error)
        return replace(job, config=config)

    def checked(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs; those with a fault have it in the place of a config."""
        configs = {job.number: job.config for job in jobs if job.config is not None}
        errors = dict(zip(configs, self.check(list(configs.values())), strict=True))
        found = ((job, errors.get(job.number)) for job in jobs)
        return [job if error is None else replace(job, config=None, error=error) for job, error in found]

    def _composition(self, lines: Sequence[Override], overrides: Sequence[str]) -> Composition:
        """Composed by Hydra; or, where the job before differs in plain values alone, that one's with these values."""
        if self._last is not None:
            before, known = self._last
            changed = [(was, now) for was, now in zip(known, lines, strict=False) if was.input_line != now.input_line]
            if len(known) == len(lines) and all(_is_other_value(was, now, before) for was, now in changed):
                return with_values(before, [now for _, now in changed], overrides=overrides)
        composition = composition_of(
            overrides,
            config_dir=self.config_dir,
            config_name=self.config_name,
            check=config_faults if self.everything else early_faults,
        )
        # Making a job's config of it changes it.
        self._last = (replace(composition, config=copy.deepcopy(composition.config)), list(lines))
        return composition

    def _refuse_security(self, lines: Sequence[Override]) -> None:
        """Rejects security keys in a job that were not typed: a sweeper may have read them in a file."""
        for line in lines:
            if _is_security(line) and _setting(line) not in self._typed_security:
                key, value = _setting(line)
                cure = "Write 'security.allow=[PACKAGE]' on the command line, if you trust it"
                fault = Fault(key=key, got=f"{value} in a job", expected="one value for the whole sweep", cure=cure)
                raise ConfigError([fault])


def _is_other_value(was: Override, now: Override, composition: Composition) -> bool:
    """Whether two overrides set the same key of the composed config, to plain values."""
    plain = (str, int, float, bool, type(None))
    return (
        was.get_key_element() == now.get_key_element()
        and now.type == was.type
        and not (now.is_delete() or now.is_add() or now.is_force_add())
        and isinstance(was.value(), plain)
        and isinstance(now.value(), plain)
        and "${" not in f"{was.input_line}{now.input_line}"
        and not composition.loader.group_exists(now.key_or_group)
    )


def job_faults(jobs: Sequence[Job]) -> list[Fault]:
    """The faults of all jobs, one that several share told once, with the numbers of those jobs."""
    where: dict[Fault, list[int]] = {}
    for job in jobs:
        for fault in job.error.faults if job.error else ():
            where.setdefault(fault, []).append(job.number)
    faults = []
    for fault, numbers in where.items():
        many = f"jobs {', '.join(map(str, numbers[:6]))}{' ...' if len(numbers) > 6 else ''}"
        label = "every job" if len(numbers) == len(jobs) > 1 else many if len(numbers) > 1 else f"job {numbers[0]}"
        if len(numbers) == 1:
            overrides = next(job.overrides for job in jobs if job.number == numbers[0])
            label += f" ({' '.join(overrides)})"
        faults.append(replace(fault, source=f"{label}, {fault.source}" if fault.source else label))
    if len(faults) > MAX_FAULTS:
        rest = len(faults) - MAX_FAULTS
        faults = [*faults[:MAX_FAULTS], Fault(key="sweep", got=f"{rest} more faults", expected="none")]
    return faults


def is_of_sweep(override: str) -> bool:
    """Whether an override says how a sweep goes about its jobs."""
    return override.lstrip("+~").startswith("sweep.")


def _is_security(line: Override) -> bool:
    return line.key_or_group.partition(".")[0] == "security"


def _setting(line: Override) -> tuple[str, str]:
    return line.key_or_group, "nothing" if line.is_delete() else str(line.value())
