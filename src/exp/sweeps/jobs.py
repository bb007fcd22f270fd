"""The jobs of a sweep, composed and checked like single runs."""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from exp.check.stages import early_errors, refuse_early, unique_errors
from exp.config.compose import Composition, composition_of, job_config, job_overrides
from exp.config.frozen import COMPOSITION, OUTPUT_DIR, literal
from exp.config.grammar import parse_override
from exp.config.groups import Vocabulary
from exp.config.hydra_adapter import recorded_overrides
from exp.config.module_key import has_module
from exp.config.overrides import IS_THERE, NO_SUCH_KEY
from exp.config.plain_tree import are_referred, are_same, leaves, with_changes
from exp.config.reading import Reading, Unknown, Values, plain_values, raw_values, read
from exp.config.sources import source_of
from exp.config.values import set_value
from exp.errors import ConfigError, ErrorDetails, config_error, not_supported_with
from exp.spelling import show

# A config as plain Python values, with all interpolations resolved.
Plain = Mapping[str, Any]
MAX_ERRORS = 30
# Keys of the config that a sweep reads once, before it composes jobs.
READ_ONCE = ("sweep", "hydra.sweeper", "hydra.launcher", "hydra.sweep.dir")
# Function that checks configs. Its argument contains configs packed by `pack`. It returns the error of each config, or
# None.
Check = Callable[[Sequence[bytes]], Sequence[ConfigError | None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep.

    Attributes:
        number: Number of the job. The run directory has this number as its default name.
        overrides: Overrides of the job.
        swept: Values of the swept keys as text, by key.
        packed: Config of the job as bytes; see `pack`. None if the config cannot be composed.
        directory: Absolute path of the run directory. None if the job has an error.
        plain: Values of the config from `plain_values`, without the key `COMPOSITION`.
        error: Error that prevents the job from running. None if the job can run.
        is_known: Whether an earlier sweep in the same directory started the job.
        is_stacked: Whether the job is trained together with other jobs in one process.
    """

    number: int
    overrides: tuple[str, ...]
    swept: dict[str, str]
    packed: bytes | None
    directory: Path | None = None
    plain: Plain = field(default_factory=dict)
    error: ConfigError | None = None
    is_known: bool = False
    is_stacked: bool = False

    def new_config(self) -> DictConfig:
        """Return a new copy of the config. Call this method only for a job without an error."""
        assert self.packed is not None
        config = unpack(self.packed)
        config[COMPOSITION].directory = literal(str(self.directory))
        return config


def pack(config: DictConfig) -> bytes:
    """Return a config as about 4 kB of bytes.

    A DictConfig takes a hundred times as much memory, so the configs of ten thousand jobs would take gigabytes.
    """
    return zlib.compress(pickle.dumps(config), 1)


def unpack(text: bytes) -> DictConfig:
    """Return the config that `pack` turned into bytes."""
    return cast(DictConfig, pickle.loads(zlib.decompress(text)))


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """A composed job, from which configs of similar jobs are made without Hydra.

    A job is similar if it differs from this job only in plain values, such as numbers.

    Attributes:
        lines: Overrides of the job.
        vocabulary: The config groups and their options.
        pickled: Config of the job, pickled. Unpickling takes a seventh of the time of a deepcopy.
        raw: Values of the config, with unresolved interpolations.
        reading: Values that the function `read` returns for the config. The check uses these values.
        plain: Same as `Job.plain`.
    """

    lines: Sequence[Override]
    vocabulary: Vocabulary
    pickled: bytes
    raw: dict[str, Any]
    reading: Plain
    plain: Plain

    def changes(self, lines: Sequence[Override]) -> list[Override] | None:
        """Return the overrides of another job that set different values than the overrides of this job.

        Args:
            lines: Overrides of the other job.

        Returns:
            The different overrides. None if the other job differs in more than plain values.
        """
        if len(self.lines) != len(lines):
            return None
        pairs = zip(self.lines, lines, strict=True)
        changed = [(was, now) for was, now in pairs if was.input_line != now.input_line]
        known = Values(self.raw)
        if any(isinstance(known[now.key_or_group], Unknown) for _, now in changed):
            return None
        return [now for _, now in changed] if all(_is_other_value(*pair, self.vocabulary) for pair in changed) else None


class Jobs:
    """Factory of the jobs of one sweep, which composes and checks their configs.

    Args:
        master: Result of `compose_sweep`.
        directory: Directory of the sweep.
        check: Function that checks several configs; see `Check`.
        everything: Whether to run the checks that need torch on jobs that already have errors, too.
        reads: Config keys that the sweep reads only once. All jobs must have the same values of these keys.
    """

    def __init__(
        self,
        *,
        master: Composition,
        directory: Path,
        check: Check,
        everything: bool = False,
        reads: Sequence[str] = READ_ONCE,
    ) -> None:
        self.everything = everything
        self._directory, self._check = directory.absolute(), check
        self._config_dir, self._config_name = master.config_dir, master.config_name
        self._reads, self._settings = reads, _settings(master.config, reads)
        self._hydra_overrides = recorded_overrides(master.config, "hydra")
        typed = [parse_override(text) for text in recorded_overrides(master.config)]
        # If a key is set twice, the last override counts.
        last = {line.get_key_element(): line for line in typed}
        self._fixed = {key for key, line in last.items() if not line.is_sweep_override()}
        fixed = [line for line in typed if not line.is_sweep_override()]
        self._typed_security = [_setting(line) for line in fixed if _is_security(line)]
        self._pattern: _Pattern | None = None

    def compose(self, number: int, overrides: Sequence[str]) -> Job:
        """Compose the config of a job, and return the job after the checks that need no torch.

        Args:
            number: Number of the job.
            overrides: Overrides of the job.
        """
        lines = [parse_override(text) for text in overrides]
        swept = {
            line.key_or_group: _as_typed(line, text)
            for line, text in zip(lines, overrides, strict=True)
            if line.get_key_element() not in self._fixed
        }
        job = Job(number=number, overrides=tuple(overrides), swept=swept, packed=None)
        try:
            self._refuse_security(lines)
            changed = None if self._pattern is None else self._pattern.changes(lines)
            if self._pattern is not None and changed is not None:
                return self._by_pattern(job, self._pattern, changed)
            return self._by_hydra(job, lines)
        except ConfigError as error:
            return replace(job, error=error)

    def _by_hydra(self, job: Job, lines: Sequence[Override]) -> Job:
        check: Callable[[DictConfig], Sequence[ErrorDetails]] = early_errors
        if self.everything:
            from exp.check.examination import config_errors as check  # this import loads torch
        overrides, where = [*self._hydra_overrides, *job.overrides], (self._config_dir, self._config_name)
        composition = composition_of(overrides, config_dir=where[0], config_name=where[1], check=check)
        is_plain = _follows_no_hydra_value(composition.config)
        others = self._other_settings(composition.config)
        config = job_config(composition, job=job.number, sweep=str(self._directory))
        if others:
            fix = "Start one sweep for each option"
            raise ConfigError([replace(one, fix=fix, source=source_of(config, one.key)) for one in others])
        job = with_config(job, config, Path(config[COMPOSITION].directory))
        if is_plain and job.error is None:
            self._pattern = _Pattern(
                lines=lines,
                vocabulary=composition.vocabulary,
                pickled=pickle.dumps(config),
                raw=raw_values(config),
                reading=read(config)[0],
                plain=job.plain,
            )
        return job

    def _by_pattern(self, job: Job, pattern: _Pattern, changed: Sequence[Override]) -> Job:
        config = cast(DictConfig, pickle.loads(pattern.pickled))
        for line in changed:
            set_value(config, line)
        config[COMPOSITION].overrides = job_overrides(job.overrides)
        paths = {line.key_or_group: tuple(line.key_or_group.split(".")) for line in changed}
        directory = self._directory / str(job.number)
        if are_referred(paths.values(), pattern.raw):
            return with_config(job, config, directory)
        values = {path: OmegaConf.select(config, key) for key, path in paths.items()}
        reading, plain = with_changes(pattern.reading, values), with_changes(pattern.plain, values)
        return with_config(job, config, directory, reading=(reading, []), plain=plain)

    def check(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs after the checks that need torch.

        New errors are added to the errors that a job already has.
        """
        looked = {job.number: job.packed for job in jobs if job.packed is not None}
        errors = dict(zip(looked, self._check([*looked.values()]), strict=True))
        found = []
        for job in jobs:
            both = [one for one in (job.error, errors.get(job.number)) if one is not None]
            if both:
                error = ConfigError(unique_errors([*both[0].errors, *both[-1].errors]))
                job = replace(job, directory=None, error=error)
            found.append(job)
        return found

    def _other_settings(self, config: DictConfig) -> list[ErrorDetails]:
        """Return an error for each setting of the sweep that this job changes."""
        own, shared = _settings(config, self._reads), self._settings
        both = {name: (own.get(name), shared.get(name)) for name in {**shared, **own}}
        return [
            not_supported_with(name, mine, "a swept option of this job", f"{show(whole)}, the value of the whole sweep")
            for name, (mine, whole) in both.items()
            if not are_same(mine, whole)
        ]

    def _refuse_security(self, lines: Sequence[Override]) -> None:
        """Raise ConfigError if a job sets a security key that is not on the command line.

        A sweeper may have read the override from a file, and a file must not extend the list security.allow.
        """
        for line in lines:
            if _is_security(line) and _setting(line) not in self._typed_security:
                key, value = _setting(line)
                fix = "Write 'security.allow=[PACKAGE]' on the command line, if you trust the package"
                raise config_error(key, got=f"{value} in a job", expected="one value for the whole sweep", fix=fix)


def with_config(
    job: Job,
    config: DictConfig,
    directory: Path,
    *,
    reading: Reading | None = None,
    plain: Plain | None = None,
) -> Job:
    """Return a job with its config, and with the error that the checks without torch find.

    Args:
        job: Job without a config.
        config: Config of the job.
        directory: Run directory of the job.
        reading: Result of `read` for the config. None computes the result.
        plain: Values of the config as in `Job.plain`. None computes the values.
    """
    # `plain` must not depend on the run directory, because the identity of a job is computed from `plain`.
    config[COMPOSITION].directory = literal(OUTPUT_DIR)
    if plain is None:
        plain = {name: value for name, value in plain_values(config).items() if name != COMPOSITION}
    config[COMPOSITION].directory = literal(str(directory))
    try:
        refuse_early(config, reading=reading)
    except ConfigError as error:
        return replace(job, error=error, packed=pack(config))
    return replace(job, packed=pack(config), directory=directory, plain=plain)


def _settings(config: DictConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return all values of the given config nodes, by dotted key, with unresolved interpolations."""
    raw = Values(raw_values(config))
    return {key: value for key, value in leaves({key: raw[key] for key in keys}) if not isinstance(value, dict)}


def _as_typed(line: Override, text: str) -> str:
    """Return the value of an override as the user typed it.

    A sweeper adds escapes for Hydra's grammar, and this function removes them.
    """
    value = line.value()
    return value if isinstance(value, str) and "\\" in text else text.partition("=")[2]


def _follows_no_hydra_value(config: DictConfig) -> bool:
    """Return whether Hydra's values affect the config of a job only through the job number.

    The run directory must be named after the job number, and no key outside of the node `hydra` may refer to that node.
    """
    raw = raw_values(config)
    hydra = raw.pop("hydra")
    is_numbered = hydra["sweep"]["subdir"] == "${hydra.job.num}"
    return is_numbered and not has_module(raw) and not are_referred([("hydra",)], raw)


def _is_other_value(was: Override, now: Override, vocabulary: Vocabulary) -> bool:
    """Return whether two overrides set the same key to plain values: numbers, text, bool or null."""
    plain = (str, int, float, bool, type(None))
    return (
        was.get_key_element() == now.get_key_element()
        and now.type == was.type
        and not (now.is_delete() or now.is_add() or now.is_force_add())
        and isinstance(was.value(), plain)
        and isinstance(now.value(), plain)
        and "${" not in f"{was.value()}{now.value()}"
        and not vocabulary.group_exists(now.key_or_group)
    )


def job_errors(jobs: Sequence[Job]) -> list[ErrorDetails]:
    """Return the errors of all jobs, at most MAX_ERRORS.

    If several jobs have the same error, the error is listed once with the numbers of the jobs.
    """
    where: dict[object, tuple[ErrorDetails, list[Job]]] = {}
    for job in jobs:
        for error in job.error.errors if job.error else ():
            # The fix is left out of the comparison, because it may list keys of a swept option.
            same = (error.key, error.got, error.at, error.subject, error.source)
            where.setdefault(same, (error, []))[1].append(job)
    errors = []
    for error, having in itertools.islice(where.values(), MAX_ERRORS):
        numbers = [job.number for job in having]
        if len(having) == 1:
            label = f"job {numbers[0]} ({' '.join(having[0].overrides)})"
        elif len(having) == len(jobs):
            label = "every job"
        else:
            label = f"jobs {', '.join(map(str, numbers[:6]))}{' ...' if len(numbers) > 6 else ''}"
        if error.got in (NO_SUCH_KEY, IS_THERE) and len(having) < len(jobs):
            texts = [text for text in having[0].overrides if parse_override(text).key_or_group == error.key]
            error = replace(error, fix=f"Write ++{texts[0].lstrip('+')}, which sets or adds it" if texts else None)
        errors.append(replace(error, source=f"{label}, {error.source}" if error.source else label))
    if len(where) > MAX_ERRORS:
        errors.append(ErrorDetails("sweep", f"{len(where) - MAX_ERRORS} more errors", "none"))
    return errors


def is_of_sweep(override: str) -> bool:
    """Return whether an override sets a key of the node `sweep`."""
    return override.lstrip("+~").startswith("sweep.")


def _is_security(line: Override) -> bool:
    return line.key_or_group.partition(".")[0] == "security"


def _setting(line: Override) -> tuple[str, str]:
    return line.key_or_group, "nothing" if line.is_delete() else str(line.value())
