"""The override `from_run=DIR`, which starts a new run with the config of an existing run.

The new run has the overrides of the existing run. If the command has an override of the same key, the command's
override is used. If a YAML file or a default of exp has changed since the existing run, the new run uses the old value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from exp.config.frozen import frozen_values, read_frozen, read_overrides
from exp.config.grammar import parse_override
from exp.config.reading import UNKNOWN, raw_values, read
from exp.config.slots import MANY
from exp.config.versions import CHOSEN_CLASSES, REMOVED_VALUES, removed_keys
from exp.errors import COMMAND_LINE, ConfigError, config_error
from exp.spelling import among

KEY = "from_run"
# Keys that apply only to the existing run.
LEFT_OUT = ("resume", "sweep")
# Keys with values that exp has determined in the existing run, such as a path for `auto`. They are not compared.
FOUND = (*LEFT_OUT, "weights.from")
WHERE = "a run directory, such as outputs/train/2026-01-31/12-00-00"


def find_run(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the run directory in the override `from_run=DIR`, and the other overrides.

    Args:
        overrides: Overrides of the command.

    Returns:
        Run directory. None if the overrides do not contain `from_run`.
        Other overrides.

    Raises:
        ConfigError: `from_run` is given twice, or its value is not a run directory.
    """
    own = [text for text in overrides if key_of(text) == KEY]
    others = [text for text in overrides if key_of(text) != KEY]
    if not own:
        return None, others
    try:
        parsed = parse_override(own[0])
    except (HydraException, RecursionError):
        return None, list(overrides)  # checked_lines reports the error
    if len(own) > 1 or parsed.is_sweep_override():
        raise _refusal(" ".join(own), "one run", "For several runs, sweep over another key: -m from_run=DIR seed=0,1,2")
    path: object = parsed.value()
    if own[0].startswith(("+", "~")) or not isinstance(path, str):
        raise _refusal(own[0], f"{KEY}=DIR, {WHERE}")
    run = Path(path)
    for name in ("config.yaml", "overrides.yaml"):
        if not (run / name).is_file():
            raise _refusal(f"{run}, which has no {name}", WHERE)
    return run, others


def _refusal(got: str, expected: str, fix: str | None = None) -> ConfigError:
    return config_error(KEY, got=got, expected=expected, fix=fix, source=COMMAND_LINE)


def merge_overrides(run: Path, now: Sequence[str], *, without: Sequence[str] = ("resume",)) -> list[str]:
    """Return the overrides of an existing run, followed by the overrides of a command.

    If both have an override of the same key, the run's override is left out. An override such as `+hooks=NAME` adds an
    entry to the hooks of the run.

    Args:
        run: Directory of the existing run.
        now: Overrides of the command.
        without: Keys of the run's overrides to leave out, with all keys below these keys. Default: `resume`.

    Raises:
        ConfigError: The run allows a package that the command does not name.
    """
    adding = [text for text in now if text.startswith("+") and key_of(text) in MANY]
    keys = {key_of(text) for text in now if text not in adding}
    removed = removed_keys(frozen_values(run))
    # Hydra's settings are left out, because the command decides where results are written.
    left = (*without, "hydra", *removed)
    recorded = [_with_class(text) for text in read_overrides(run) if not key_of(text).startswith("hydra/")]
    recorded = [
        _without_hooks(text, removed)
        for text in recorded
        if not _is_below(key_of(text), left) and _key_and_value(text) not in REMOVED_VALUES
    ]
    kept = [text for text in recorded if key_of(text) not in keys and text != "+hooks=[]"]
    trusting = [text for text in kept if key_of(text) == "security.allow"]
    if trusting:
        got, fix = f"{trusting[0]} in {run}", f"If you trust the packages, add '{trusting[0]}' to this command"
        raise config_error("security.allow", got=got, expected="packages that this command allows", fix=fix)
    return [*kept, *now]


def _with_class(override: str) -> str:
    """Return an override converted to this version of exp.

    In earlier versions, overrides such as `strategy.communication_hook=ring` selected a class. They are converted to an
    override of `_target_`. Any other override is returned unchanged.
    """
    key, value = _key_and_value(override)
    if (key, value) not in CHOSEN_CLASSES:
        return override
    return f"{key.rpartition('.')[0]}._target_={CHOSEN_CLASSES[key, value]}"


def _key_and_value(override: str) -> tuple[str, str]:
    return key_of(override), override.partition("=")[2].strip("'\"")


def _without_hooks(override: str, removed: Sequence[str]) -> str:
    """Return an override of `hooks` without the hooks that do not exist in this version of exp.

    Any other override is returned unchanged.

    Args:
        override: Override as typed.
        removed: Dotted keys that do not exist in this version, such as "hooks.landscape".
    """
    group, _, options = override.partition("=")
    names = options.strip("[]").split(",")
    left = [name for name in names if f"hooks.{name.strip()}" not in removed]
    if key_of(override) != "hooks" or left == names:
        return override
    return f"{group}=[{','.join(left)}]"


def key_of(override: str) -> str:
    """Return the key or the group of an override, without its sign (`+`, `++` or `~`)."""
    return override.lstrip("+~").partition("=")[0]


def _is_below(key: str, others: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def changes(run: Path, own: DictConfig, combined: DictConfig, now: Sequence[str]) -> dict[str, object]:
    """Return the values of an existing run that have changed since then in YAML files or in exp's defaults.

    The run's frozen config is compared with the config that the run's overrides compose today. Values that exp
    determined in the run, such as a shape of the data, are left out. Values that the command changes are left out, too.

    Args:
        run: Directory of the existing run.
        own: Config composed today from the overrides of the run.
        combined: Config composed today from the overrides of the run and of the command.
        now: Overrides of the command.

    Returns:
        Values in the run's frozen config, by the key of an override that sets the value. If the key does not exist
        today, it begins with `++`.
    """
    today, changed = (dict(_values(read(config)[0])) for config in (own, combined))
    frozen = dict(_values(raw_values(read_frozen(run))))
    chosen = [key_of(text) for text in now if "." not in key_of(text)]
    aside = (*FOUND, *chosen, *(key for key, value in today.items() if value is UNKNOWN))
    same = {key for key in {**today, **frozen} if today.get(key) == changed.get(key) and not _is_below(key, aside)}
    return {
        f"{'' if key in today else '++'}{key}": value
        for key, value in frozen.items()
        if key in same
        and (key not in today or today[key] != value)
        and not (key.startswith("data.") and today.get(key) is None)
    }


def override_texts(values: Mapping[str, object]) -> list[str]:
    """Return the texts of overrides that set values, such as `optimizer.lr=0.1`.

    Args:
        values: Values by dotted key. A key may begin with `+` or `++`.
    """
    return [f"{key}={override_value(value)}" for key, value in values.items()]


def report_changes(run: Path, then: Mapping[str, object]) -> str:
    """Return a message about the values of an existing run that differ from the values in the files of today.

    Args:
        run: Directory of the existing run.
        then: Result of `changes`.
    """
    pairs = [text.removeprefix("++") for text in override_texts(then)]
    return f"values of {run} replace other values of the present files: {among(pairs)}"


def _values(plain: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield each dotted key and value of nested dicts. A list or an empty dict is yielded as one value."""
    if not isinstance(plain, Mapping) or (not plain and key):
        yield key, plain
        return
    for name, inner in plain.items():
        if name != "_composition_":
            yield from _values(inner, f"{key}.{name}" if key else str(name))


def override_value(value: object) -> str:
    """Return the text of a value for an override. Hydra parses the text to the same value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_name(name)}:{override_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    return QuotedString(text=str(value), quote=Quote.single).with_quotes()


def _name(key: object) -> str:
    """Return the text of a mapping's key for an override.

    Special characters are escaped, because Hydra does not allow quotes in keys.
    """
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))
