"""The settings of a sweep, and the errors of settings that are incompatible with the swept keys."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from exp.check.stages import locate_errors, refuse_nodes
from exp.config.compose import Composition, shared_config
from exp.config.grammar import parse_override
from exp.config.hydra_adapter import hydra_config, recorded_overrides
from exp.errors import (
    COMMAND_LINE,
    ConfigError,
    ErrorDetails,
    invalid_value,
    missing_value,
    not_supported_with,
    raise_errors,
)
from exp.shared_types import Mode, Sampler, searched_tags, span_seconds
from exp.sweeps.jobs import is_of_sweep
from exp.sweeps.results import FOLD, NONE
from exp.sweeps.search import DEFAULT_TRIALS
from exp.sweeps.space import Axis, Space, space_of

# Keys of the config that a sweep reads before it composes jobs.
READ_FIRST = ("sweep", "seed", "monitor", "mode")
# Prefix of the class names of launchers that run jobs through exp.sweeps.executor.
OUR_LAUNCHERS = "hydra_plugins.exp."
# Prefixes of overrides that only a resumed sweep has. They do not change the jobs of the sweep.
OF_RESUME = ("sweep.resume=", "sweep.retry_failed=")


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep.

    Attributes:
        values: Node `sweep` of the config.
        overrides: Overrides of the command, except those that resume a sweep.
        monitor: Tag by which jobs are compared. None: jobs are not compared.
        mode: `min` if smaller values of the monitored tag are better, `max` if larger values are better.
        seed: Seed of the search.
        space: Swept keys with their values.
    """

    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    monitor: str | None
    mode: Mode
    seed: int
    space: Space

    @property
    def is_search(self) -> bool:
        """Return whether a sampler draws the values. If false, the sweep is a grid of all combinations."""
        sampler = self.values["sampler"]
        return sampler != "grid" and (sampler != "auto" or self.space.has_intervals)

    @property
    def sampler(self) -> Sampler:
        sampler = self.values["sampler"]
        return "tpe" if sampler == "auto" else cast(Sampler, sampler)

    @property
    def trials(self) -> int:
        return self.values["trials"] or DEFAULT_TRIALS

    @property
    def seconds(self) -> float:
        """Time in seconds after which no more jobs start. inf: no limit."""
        timeout = self.values["timeout"]
        return math.inf if timeout is None else span_seconds(timeout) if isinstance(timeout, str) else timeout

    @property
    def repeat_over(self) -> str | None:
        """The swept key in which repeats differ, such as seed. None if the sweep has no repeats.

        sweep.repeat_over sets the key. If it is null, the key is `data.split.fold` if this key is swept without a
        pruner.
        """
        over = self.values["repeat_over"]
        if over is None and self.values["pruner"] == "none" and self.space.axis(FOLD) is not None:
            return FOLD
        return None if over == NONE else over

    @property
    def repeated(self) -> Axis | None:
        return None if self.repeat_over is None else self.space.axis(self.repeat_over)

    @property
    def drawn(self) -> Space:
        """The space without the repeated key, from which a search draws values."""
        return replace(self.space, axes=tuple(axis for axis in self.space.axes if axis is not self.repeated))

    @property
    def objectives(self) -> Mapping[str, Mode]:
        """The tags by which a search compares trials, each with its direction."""
        if named := searched_tags(self.values["monitor"], mode=self.mode):
            return named
        return {} if self.monitor is None else {self.monitor: self.mode}

    def resume_command(self, directory: str) -> str:
        """Return the command that resumes the sweep in a directory."""
        return shlex.join(["python", "-m", "exp.train", "-m", *self.overrides, f"sweep.resume={directory}"])

    def errors(self) -> Iterator[ErrorDetails]:
        """Yield an error for each setting that is incompatible with the swept keys."""
        over = self.repeat_over
        if over is not None and self.repeated is None:
            yield not_supported_with("sweep.repeat_over", over, f"a single {over}", "a swept key, such as seed=0,1,2")
        yield from self._search_errors() if self.is_search else self._grid_errors()

    def _grid_errors(self) -> Iterator[ErrorDetails]:
        interval = next((axis for axis in self.space.axes if axis.is_interval), None)
        if interval is not None:
            other, expected = f"{interval.name}, an interval", "auto or a sampler: a grid lists all values"
            yield not_supported_with("sweep.sampler", "grid", other, expected)
        fix = "Write sweep.sampler=random to draw values from the lists"
        for name, default, shown in (("trials", None, "null"), ("pruner", "none", "none")):
            if (value := self.values[name]) != default:
                expected = f"{shown}: a grid runs every combination to its end"
                yield not_supported_with(f"sweep.{name}", value, "a grid", expected, fix)

    def _search_errors(self) -> Iterator[ErrorDetails]:
        if self.repeated is not None and self.repeated.is_interval:
            key, expected = "sweep.repeat_over", "a list, such as seed=0,1,2"
            yield not_supported_with(key, self.repeated.name, "an interval", expected)
        objectives, pruner = self.objectives, self.values["pruner"]
        if not objectives:
            yield missing_value("monitor", "the tag that a search compares", "Write monitor=loss/val")
        if self.sampler == "cmaes" and len(objectives) > 1:
            expected, fix = "nsga2, tpe, gp or random", "Or write a single tag in sweep.monitor"
            yield not_supported_with("sweep.sampler", "cmaes", "several tags in sweep.monitor", expected, fix)
        if pruner != "none" and self.repeat_over is not None:
            expected = "one of the two settings: a pruner compares single jobs"
            yield not_supported_with("sweep.pruner", pruner, "sweep.repeat_over", expected)
        if pruner != "none" and objectives and dict(objectives) != {self.monitor: self.mode}:
            tag, mode = next(iter(objectives.items()))
            fix = f"Replace sweep.monitor: write monitor={tag} mode={mode}"
            other = f"sweep.monitor={','.join(objectives)}"
            expected = f"a search by {self.monitor}, which is the tag that jobs report"
            yield not_supported_with("sweep.pruner", pruner, other, expected, fix)


def read_settings(master: Composition) -> SweepSettings:
    """Return the settings of a sweep.

    Args:
        master: Result of `compose_sweep`.

    Raises:
        ConfigError: The values of a key cannot be swept.
    """
    config = master.config
    return SweepSettings(
        values=cast(dict[str, Any], OmegaConf.to_container(config.sweep, resolve=True)),
        overrides=tuple(text for text in recorded_overrides(config) if not text.lstrip("+").startswith(OF_RESUME)),
        monitor=config.monitor,
        mode=config.mode,
        seed=int(config.seed),
        space=space_of(config, master.vocabulary),
    )


def refuse_settings(master: Composition) -> None:
    """Raise ConfigError for settings that no sweep supports. Call this function before `read_settings`."""
    lines = [parse_override(text) for text in filter(is_of_sweep, recorded_overrides(master.config))]
    expected = "one value for the whole sweep"
    errors = [
        invalid_value(line.key_or_group, line.get_value_string(), expected, source=COMMAND_LINE)
        for line in lines
        if line.is_sweep_override()
    ]
    launcher = str(master.config.hydra.launcher["_target_"])
    if not launcher.startswith(OUR_LAUNCHERS):
        fix = "Remove hydra/launcher. sweep.jobs sets the number of jobs at a time"
        errors.append(invalid_value("hydra/launcher", launcher, "exp, slurm or ray", fix))
    raise_errors(errors)
    config = shared_config(master)
    refuse_nodes(config, READ_FIRST)
    if config.sweep.retry_failed and config.sweep.resume is None:
        other, expected = "sweep.resume=null", "sweep.resume with the directory of the failed jobs, or auto"
        error = not_supported_with("sweep.retry_failed", True, other, expected, "Add sweep.resume=auto")
        raise ConfigError(locate_errors(config, [error]))


def wanted_directory(master: Composition) -> Path:
    """Return the directory of a new sweep, from hydra.sweep.dir."""
    with hydra_config(master.config):
        return Path(master.config.hydra.sweep.dir)
