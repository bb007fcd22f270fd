"""The jobs of a sweep: composed as single runs are, checked, and told apart."""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, overload

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from exp.check.stages import early_faults, once, refuse_early
from exp.config.compose import Composition, composition_of, job_config, recorded, with_values
from exp.config.copying import copied
from exp.config.freeze import COMPOSITION, OUTPUT_DIR, literal
from exp.config.grammar import parse_override
from exp.config.hydra_adapter import recorded_overrides
from exp.config.module_key import has_module
from exp.config.overrides import IS_THERE, NO_SUCH_KEY
from exp.config.plain_tree import are_referred, are_same, leaves, with_changes
from exp.config.reading import Unknown, Values, plain_values, read
from exp.config.slots import MANY
from exp.config.sources import source_of
from exp.config.values import set_value
from exp.errors import ConfigError, Fault
from exp.spelling import show

MAX_FAULTS = 30
# What a sweep reads once, before its jobs.
READ_ONCE = ("sweep", "hydra.sweeper", "hydra.launcher", "hydra.sweep.dir")
# Of the configs of several jobs, the faults of each; None where there is none.
Check = Callable[[Sequence[DictConfig]], Sequence[ConfigError | None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job.

    swept: key to value as text, of what was swept. packed, error: the config that can be run, or why it cannot.
    faulty: the config of a job whose errors need no torch.
    directory: of its run, absolute; None of a job without a config.
    plain: the values of its config, as `plain_values` has them, without the record of its composition.
    is_known: an earlier sweep of the same directory has begun it. is_stacked: it is trained together with others.
    """

    number: int
    overrides: tuple[str, ...]
    swept: dict[str, str]
    packed: bytes | None
    faulty: bytes | None = None
    directory: Path | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    error: ConfigError | None = None
    is_known: bool = False
    is_stacked: bool = False

    @property
    def config(self) -> DictConfig | None:
        """A copy of its config, whoever asks; None where it has faults."""
        if self.packed is None:
            return None
        config = _unpacked(self.packed)
        config[COMPOSITION].directory = literal(str(self.directory))
        return config


class Configs(Sequence[DictConfig]):
    """Configs that are unpacked one at a time, in this process or in another.

    A config takes some 4 kB packed, and 100 times as much as a DictConfig: ten thousand jobs would take gigabytes.
    """

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> DictConfig: ...

    @overload
    def __getitem__(self, place: slice) -> Configs: ...

    def __getitem__(self, place: int | slice) -> DictConfig | Configs:
        return Configs(self._packed[place]) if isinstance(place, slice) else _unpacked(self._packed[place])


def packed(config: DictConfig) -> bytes:
    """A config in little memory."""
    return zlib.compress(pickle.dumps(config), 1)


def _unpacked(text: bytes) -> DictConfig:
    return cast(DictConfig, pickle.loads(zlib.decompress(text)))


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """A job from whose config those of others are made, which differ in plain values alone.

    pickled: its config, which is copied so in a seventh of the time that a deepcopy takes.
    raw, reading: its values, unresolved and as the check reads them.
    """

    lines: Sequence[Override]
    composition: Composition
    pickled: bytes
    raw: Mapping[str, Any]
    reading: Mapping[str, Any]
    plain: Mapping[str, Any]


class Jobs:
    """Makes the jobs of one sweep.

    directory: of the sweep. check: the faults of each of several configs.
    everything: where a job has faults that need no torch, look for the others, too.
    reads: the keys that the sweep reads before its jobs, which have one value in all of them.
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
        self.directory, self.check, self.everything = directory, check, everything
        self.config_dir, self.config_name = master.config_dir, master.config_name
        self.reads, self._settings = reads, _settings(master.config, reads)
        self._hydra_overrides = recorded_overrides(master.config, "hydra")
        typed = [parse_override(text) for text in recorded_overrides(master.config)]
        # Of two equal keys the last one counts.
        last = {line.get_key_element(): line for line in typed}
        fixed = [line for line in typed if not line.is_sweep_override()]
        self._fixed = {key for key, line in last.items() if not line.is_sweep_override()}
        self._typed_security = [_setting(line) for line in fixed if _is_security(line)]
        self._last: tuple[Composition, list[Override]] | None = None
        self._pattern: _Pattern | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Plain data, so that a launcher of other processes can carry it."""
        return {**vars(self), "_last": None, "_pattern": None}

    def composed(self, number: int, overrides: Sequence[str]) -> Job:
        """A job with its config, not checked by what needs torch."""
        lines = [parse_override(text) for text in overrides]
        swept = {
            line.key_or_group: _as_typed(line, text)
            for line, text in zip(lines, overrides, strict=True)
            if line.get_key_element() not in self._fixed
        }
        job = Job(number=number, overrides=tuple(overrides), swept=swept, packed=None)
        try:
            self._refuse_security(lines)
            alike = self._by_pattern(job, lines)
            if alike is not None:
                return alike
            composition = self._composition(lines, [*self._hydra_overrides, *overrides])
            is_plain = _follows_no_hydra_value(composition.config)
            others = self._other_settings(composition.config)
            config = job_config(composition, job=number, sweep=str(self.directory))
            if others:
                options = [key for key in swept if composition.vocabulary.group_exists(key)]
                groups = [text for line, text in zip(lines, overrides, strict=True) if line.key_or_group in options]
                cure = f"Start one sweep for each option: -m {' '.join(groups)}"
                raise ConfigError([replace(one, cure=cure, source=source_of(config, one.key)) for one in others])
        except ConfigError as error:
            return replace(job, error=error)
        try:
            refuse_early(config)
        except ConfigError as error:
            return replace(job, error=error, faulty=packed(config))
        directory = config[COMPOSITION].directory
        # A job is the same job in another directory.
        config[COMPOSITION].directory = literal(OUTPUT_DIR)
        plain = {name: value for name, value in plain_values(config).items() if name != COMPOSITION}
        config[COMPOSITION].directory = literal(directory)
        job = replace(job, packed=packed(config), directory=Path(directory), plain=plain)
        if is_plain:
            self._pattern = _Pattern(
                lines=lines,
                composition=composition,
                pickled=pickle.dumps(config),
                raw=cast(dict[str, Any], OmegaConf.to_container(config, resolve=False)),
                reading=read(config)[0],
                plain=job.plain,
            )
        return job

    def _by_pattern(self, job: Job, lines: Sequence[Override]) -> Job | None:
        """The job made from the config of one before; None where that is another in more than plain values."""
        pattern = self._pattern
        if pattern is None or len(pattern.lines) != len(lines):
            return None
        pairs = zip(pattern.lines, lines, strict=True)
        changed = [(was, now) for was, now in pairs if was.input_line != now.input_line]
        keys = [now.key_or_group for _, now in changed]
        paths = [tuple(key.split(".")) for key in keys]
        if not all(_is_other_value(was, now, pattern.composition) for was, now in changed):
            return None
        is_known = not any(isinstance(Values(dict(pattern.raw))[key], Unknown) for key in keys)
        if not is_known or are_referred(paths, pattern.raw):
            return None
        config = cast(DictConfig, pickle.loads(pattern.pickled))
        for _, now in changed:
            set_value(config, now)
        values = {path: OmegaConf.select(config, key) for path, key in zip(paths, keys, strict=True)}
        directory = self.directory.absolute() / str(job.number)
        config[COMPOSITION].overrides = recorded(job.overrides)
        config[COMPOSITION].directory = literal(str(directory))
        try:
            refuse_early(config, reading=(with_changes(pattern.reading, values), []))
        except ConfigError as error:
            return replace(job, error=error, faulty=packed(config))
        plain = with_changes(pattern.plain, values)
        return replace(job, packed=packed(config), directory=directory, plain=plain)

    def checked(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the same jobs; those with a fault have it in the place of a config, beside those of before."""
        looked = {job.number: config for job in jobs if (config := job.packed or job.faulty) is not None}
        errors = dict(zip(looked, self.check(Configs([*looked.values()])), strict=True))
        found = [(job, [one for one in (job.error, errors.get(job.number)) if one is not None]) for job in jobs]
        return [
            replace(job, packed=None, directory=None, error=ConfigError(once([*both[0].faults, *both[-1].faults])))
            if both
            else job
            for job, both in found
        ]

    def _composition(self, lines: Sequence[Override], overrides: Sequence[str]) -> Composition:
        """Composed by Hydra; or, where the job before differs in plain values alone, that one's with these values."""
        if self._last is not None:
            before, known = self._last
            changed = [(was, now) for was, now in zip(known, lines, strict=False) if was.input_line != now.input_line]
            if len(known) == len(lines) and all(_is_other_value(was, now, before) for was, now in changed):
                return with_values(before, [now for _, now in changed], overrides=overrides)
        check: Callable[[DictConfig], Sequence[Fault]] = early_faults
        if self.everything:
            from exp.check.examination import config_faults as check  # imports torch
        composition = composition_of(overrides, config_dir=self.config_dir, config_name=self.config_name, check=check)
        # Making a job's config of it changes it.
        self._last = (replace(composition, config=copied(composition.config)), list(lines))
        return composition

    def _other_settings(self, config: DictConfig) -> list[Fault]:
        """Return an error for each setting of the sweep that a job has and the sweep has not, or the reverse."""
        own, shared = _settings(config, self.reads), self._settings
        both = {name: (own.get(name), shared.get(name)) for name in {**shared, **own}}
        expected = "{}, the value of the whole sweep, which reads it before its jobs"
        return [
            Fault(key=name, got=f"{show(mine)} in an option that is swept", expected=expected.format(show(whole)))
            for name, (mine, whole) in both.items()
            if not are_same(mine, whole)
        ]

    def _refuse_security(self, lines: Sequence[Override]) -> None:
        """Rejects security keys in a job that were not typed: a sweeper may have read them in a file."""
        for line in lines:
            if _is_security(line) and _setting(line) not in self._typed_security:
                key, value = _setting(line)
                cure = "Write 'security.allow=[PACKAGE]' on the command line, if you trust it"
                fault = Fault(key=key, got=f"{value} in a job", expected="one value for the whole sweep", cure=cure)
                raise ConfigError([fault])


def _settings(config: DictConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of some nodes by dotted key, as they are written."""
    raw = Values(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)))
    return {key: value for key, value in leaves({key: raw[key] for key in keys}) if not isinstance(value, dict)}


def _as_typed(line: Override, text: str) -> str:
    """The value of an override as somebody typed it: a sweeper escapes the signs of Hydra's grammar in it."""
    value = line.value()
    return value if isinstance(value, str) and "\\" in text else text.partition("=")[2]


def _follows_no_hydra_value(config: DictConfig) -> bool:
    """Whether a job's directory is its number, and nothing else in its config comes from Hydra's own values."""
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    hydra = raw.pop("hydra")
    is_numbered = hydra["sweep"]["subdir"] == "${hydra.job.num}"
    return is_numbered and not has_module(raw) and not are_referred([("hydra",)], raw)


def _is_other_value(was: Override, now: Override, composition: Composition) -> bool:
    """Whether two overrides set the same key of the composed config, to plain values."""
    plain = (str, int, float, bool, type(None))
    return (
        was.get_key_element() == now.get_key_element()
        and now.type == was.type
        and not (now.is_delete() or now.is_add() or now.is_force_add())
        and isinstance(was.value(), plain)
        and isinstance(now.value(), plain)
        and "${" not in f"{was.value()}{now.value()}"
        and not composition.vocabulary.group_exists(now.key_or_group)
    )


def job_faults(jobs: Sequence[Job]) -> list[Fault]:
    """The faults of all jobs, one that several share told once, with the numbers of those jobs."""
    where: dict[Fault, list[int]] = {}
    # Options that are swept have other keys, which a fault lists.
    first: dict[object, Fault] = {}
    for job in jobs:
        for fault in job.error.faults if job.error else ():
            fault = first.setdefault((fault.key, fault.got, fault.at, fault.subject, fault.source), fault)
            where.setdefault(fault, []).append(job.number)
    refused = Counter(fault.key for job in jobs if job.error for fault in job.error.faults)
    faults = []
    for fault, numbers in itertools.islice(where.items(), MAX_FAULTS):
        many = f"jobs {', '.join(map(str, numbers[:6]))}{' ...' if len(numbers) > 6 else ''}"
        label = "every job" if len(numbers) == len(jobs) > 1 else many if len(numbers) > 1 else f"job {numbers[0]}"
        if len(numbers) == 1:
            overrides = next(job.overrides for job in jobs if job.number == numbers[0])
            label += f" ({' '.join(overrides)})"
        if fault.got in (NO_SUCH_KEY, IS_THERE) and refused[fault.key] < len(jobs):
            fault = replace(fault, cure=_cure_for_some(fault.key, jobs[0].overrides))
        faults.append(replace(fault, source=f"{label}, {fault.source}" if fault.source else label))
    if len(where) > MAX_FAULTS:
        faults.append(Fault(key="sweep", got=f"{len(where) - MAX_FAULTS} more faults", expected="none"))
    return faults


def _cure_for_some(key: str, overrides: Sequence[str]) -> str | None:
    """Return what to write instead of an override of a key that only some of the swept options have."""
    group, _, entry = key.rpartition(".")[0].partition(".")
    if group in MANY and entry:
        return f"Write conf/{group}/NAME.yaml with `defaults: [{entry}]` and this value, and sweep over NAME"
    text = next((text for text in overrides if parse_override(text).key_or_group == key), None)
    return None if text is None else f"Write ++{text.lstrip('+')}, which sets it or adds it"


def is_of_sweep(override: str) -> bool:
    """Whether an override says how a sweep goes about its jobs."""
    return override.lstrip("+~").startswith("sweep.")


def _is_security(line: Override) -> bool:
    return line.key_or_group.partition(".")[0] == "security"


def _setting(line: Override) -> tuple[str, str]:
    return line.key_or_group, "nothing" if line.is_delete() else str(line.value())
