"""`from_run=DIR`: a command that starts from the config of a run that is there, and says only what it does otherwise.

What the run was told on its command line is told again, with this command's overrides in the place of those of the same
key. What a YAML file or exp itself has another value for today is set to what the run had.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from exp.config.frozen import frozen_values, read_frozen, read_overrides
from exp.config.grammar import parse_override
from exp.config.reading import UNKNOWN, read
from exp.config.slots import MANY
from exp.config.versions import CHOSEN_CLASSES, REMOVED_VALUES, removed_keys
from exp.errors import ConfigError, config_error
from exp.spelling import among

KEY = "from_run"
# Of the run's own: where it began, and the sweep that it was a job of.
LEFT_OUT = ("resume", "sweep")
# What a run's config has that no file says: the paths that `auto` and a run's directory led to.
FOUND = (*LEFT_OUT, "weights.from")
# In every frozen config.
WHOLE = (
    *("name", "seed", "monitor", "mode", "train", "test", "data", "model", "objective", "metrics", "optimizer"),
    *("scheduler", "trainer", "hooks", "logger", "precision", "runtime", "launch", "security", "strategy", "weights"),
)
# Keys in one line.
MOST_TOLD = 6
WHERE = "a run directory, such as outputs/train/2026-01-31/12-00-00"


def named_run(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run that a command starts from, None without one, and the other overrides.

    Raises: ConfigError where it is named twice, or is no run directory.
    """
    own = [text for text in overrides if key_of(text) == KEY]
    others = [text for text in overrides if key_of(text) != KEY]
    if not own:
        return None, others
    try:
        parsed = parse_override(own[0])
    except (HydraException, RecursionError) as error:
        fix = f"Quote it, once more for a shell: \"{KEY}='DIR'\""
        raise _refusal(own[0].partition("=")[2], WHERE, fix) from error
    if len(own) > 1 or parsed.is_sweep_override():
        raise _refusal(" ".join(own), "one run", "Sweep over what differs from it: -m from_run=DIR seed=0,1,2")
    named = parsed.value()
    if own[0].startswith(("+", "~")) or not isinstance(named, str):
        raise _refusal(own[0], f"{KEY}=DIR, {WHERE}")
    run = Path(named)
    jobs = sorted(path.parent.name for path in run.glob("*/config.yaml"))
    for name in ("config.yaml", "overrides.yaml"):
        if not (run / name).is_file():
            got = f"{run}, a directory of {len(jobs)} runs" if jobs else f"{run}, which holds no {name}"
            raise _refusal(got, WHERE, f"Write {KEY}={run / jobs[0]}" if jobs else None)
    if not isinstance(read_overrides(run), list):
        raise _refusal(f"{run}, whose overrides.yaml is no list", "the file as exp wrote it")
    lost = lost_keys(read_frozen(run))
    if lost:
        got = f"{run}, whose config.yaml has no {among(lost)}: a part of it is lost"
        raise _refusal(got, "the file as exp wrote it", "Take another run, or type the overrides anew")
    return run, others


def lost_keys(config: DictConfig) -> list[str]:
    """The keys of a frozen config that are not there, as where its file was cut."""
    return [name for name in WHOLE if name not in config]


def _refusal(got: str, expected: str, fix: str | None = None) -> ConfigError:
    return config_error(KEY, got=got, expected=expected, fix=fix, source="command line")


def merged(run: Path, now: Sequence[str], *, without: Sequence[str] = ("resume",)) -> list[str]:
    """The overrides of a run, with others in the place of those of the same key; `+hooks=NAME` adds to the run's hooks.

    without: keys that are left out, with those below them.
    Raises: ConfigError where the run trusts a package that this command does not name.
    """
    adding = [text for text in now if text.startswith("+") and key_of(text) in MANY]
    keys = {key_of(text) for text in now if text not in adding}
    # Where results go is said by whoever types this command; a run that is as exp wrote it records nothing of Hydra's.
    removed = removed_keys(frozen_values(run))
    left = (*without, "hydra", *removed)
    recorded = [_with_class(text) for text in read_overrides(run) if not key_of(text).startswith("hydra/")]
    recorded = [text for text in recorded if not _is_below(key_of(text), left) and not _has_removed_value(text)]
    recorded = [_without_hooks(text, removed) for text in recorded]
    kept = [text for text in recorded if key_of(text) not in keys and text != "+hooks=[]"]
    trusting = [text for text in kept if key_of(text) == "security.allow"]
    if trusting:
        fix = f"If you trust it, add '{trusting[0]}' to this command"
        raise config_error("security.allow", got=f"{trusting[0]} in {run}", expected="it here", fix=fix)
    return [*kept, *now]


def _has_removed_value(override: str) -> bool:
    return _key_and_value(override) in REMOVED_VALUES


def _with_class(override: str) -> str:
    """Return an override that chooses a class where its value did so in earlier versions."""
    key, value = _key_and_value(override)
    if (key, value) not in CHOSEN_CLASSES:
        return override
    return f"{key.rpartition('.')[0]}._target_={CHOSEN_CLASSES[key, value]}"


def _key_and_value(override: str) -> tuple[str, str]:
    return key_of(override), override.partition("=")[2].strip("'\"")


def _without_hooks(override: str, removed: Sequence[str]) -> str:
    """Return an override without the hooks that it chooses and that no longer exist. removed: dotted keys."""
    group, _, options = override.partition("=")
    names = options.strip("[]").split(",")
    left = [name for name in names if f"hooks.{name.strip()}" not in removed]
    if key_of(override) != "hooks" or left == names:
        return override
    return f"{group}=[{','.join(left)}]"


def key_of(override: str) -> str:
    """The key or the group of an override, without a sign."""
    return override.lstrip("+~").partition("=")[0]


def _is_below(key: str, others: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a run's own overrides compose to today that is not as it was, by dotted key.

    Not what it found out for itself: a shape that the data said, the path that `weights.from=auto` led to.

    then: values that the run had. known: which of their keys are there today, too. since: values that it did not have.
    """

    then: Mapping[str, Any]
    known: Collection[str]
    since: Mapping[str, Any]

    @classmethod
    def of(cls, run: Path, own: DictConfig) -> Changes:
        """own: what the run's overrides compose to."""
        today = dict(_values(read(own)[0]))
        frozen = dict(_values(OmegaConf.to_container(read_frozen(run), resolve=False)))
        aside = (*FOUND, *(key for key, value in today.items() if value is UNKNOWN))
        then = {
            key: value
            for key, value in frozen.items()
            if (key not in today or today[key] != value)
            and not _is_below(key, aside)
            and not (key.startswith("data.") and today.get(key) is None)
        }
        new = (key for key, value in today.items() if value not in (None, {}, []))
        since = {key: today[key] for key in new if key not in frozen and not _is_below(key, aside)}
        return cls(then=then, known=[key for key in then if key in today], since=since)

    def beside(self, now: Sequence[str], own: DictConfig, changed: DictConfig) -> Changes:
        """Those that a command leaves alone.

        now: its overrides. own: as of `of`. changed: what the two together compose to.
        """
        chosen = [key_of(text) for text in now if "." not in key_of(text)]
        before, after = (dict(_values(read(config)[0])) for config in (own, changed))
        same = {key for key in {*self.then, *self.since} if before.get(key) == after.get(key)}
        kept = {key for key in same if not _is_below(key, chosen)}
        then = {key: value for key, value in self.then.items() if key in kept}
        since = {key: value for key, value in self.since.items() if key in kept}
        return Changes(then=then, known=self.known, since=since)

    def overrides(self) -> list[str]:
        """Return the overrides that give today's config the values of the run."""
        return [f"{'' if key in self.known else '++'}{key}={written(value)}" for key, value in self.then.items()]

    def lines(self, run: Path) -> Iterator[str]:
        """Yield the lines that name the changes."""
        words = {
            f"as in {run}, though the configs say otherwise today": self.then,
            f"what {run} did not have, as it is today": self.since,
        }
        for word, values in words.items():
            pairs = [f"{key}={written(value)}" for key, value in values.items()]
            more = f" and {len(pairs) - MOST_TOLD} more" if len(pairs) > MOST_TOLD else ""
            yield from [f"{word}: {', '.join(pairs[:MOST_TOLD])}{more}"] if pairs else ()


def _values(plain: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values below a plain tree by dotted key; a list is one value, and so is a mapping of nothing."""
    if not isinstance(plain, Mapping) or (not plain and key):
        yield key, plain
        return
    for name, inner in plain.items():
        if name != "_composition_":
            yield from _values(inner, f"{key}.{name}" if key else str(name))


def written(value: Any) -> str:
    """A value as an override has it behind `=`, so that Hydra reads the same one."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_name(name)}:{written(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return QuotedString(text=str(value), quote=Quote.single).with_quotes()


def _name(key: Any) -> str:
    """A key of a mapping in an override, which Hydra takes without quotes alone."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))
