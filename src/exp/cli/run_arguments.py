"""Parse the arguments of a command for saved runs: `run=DIR`, other keys of the command, and overrides of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from exp.config.found_run import key_of
from exp.config.grammar import parse_override
from exp.errors import command_line_error, raise_errors
from exp.spelling import among, did_you_mean, find_nearest

ALLOW = "security.allow"
RUN = "a run directory, the directory of a job of a sweep, or a checkpoint"
WEIGHTS = "best, last, or the path of a checkpoint"


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Parsed arguments of a command for saved runs.

    Args:
        values: Values of the command's keys, as text. None: the key was not given.
        allow: Packages that the run's config may name.
        overrides: Overrides of the run, including security.allow.
    """

    values: Mapping[str, str | None]
    allow: Sequence[str]
    overrides: Sequence[str]


def read_arguments(
    argv: Sequence[str],
    *,
    keys: Mapping[str, str | tuple[str, ...]],
    needed: Sequence[str] = ("run",),
    takes_overrides: bool = True,
) -> RunArguments:
    """Parse the arguments of a command into values of the command's keys and overrides of the run.

    Args:
        argv: Arguments, without the program.
        keys: Keys of the command. A key has a tuple of allowed values, or a description of its value for messages.
        needed: Keys that must be given. Default: run.
        takes_overrides: Whether overrides of the run are allowed. security.allow is always allowed. Default: True.

    Raises:
        ConfigError: The arguments have errors.
    """
    values: dict[str, str | None] = dict.fromkeys(keys)
    errors, others = [], []
    for text in argv:
        key, sign, given = text.partition("=")
        if key in keys and values[key] is not None:
            errors.append(command_line_error(key, f"{text}, which is given twice", f"{key}=..., once"))
        elif key in keys and sign:
            values[key] = _unquote(given)
        elif text.startswith("-") or (not sign and not text.startswith("~")):
            fix = f"Write run={text}" if "run" in keys and not text.startswith("-") else "--help lists the keys"
            expected = f"key=value, such as {among(f'{key}=...' for key in keys)}"
            errors.append(command_line_error(text, text, expected, fix))
        else:
            others.append(text)
    for key, known in keys.items():
        value, expected = values[key], known if isinstance(known, str) else among(known)
        if value == "":
            errors.append(command_line_error(key, "an empty value", expected))
        elif value is None and key in needed:
            near = find_nearest(key, [key_of(text) for text in others])
            advice = f"Did you mean {key} instead of {near[0]}?" if near else f"Write {key}={key.upper()}"
            errors.append(command_line_error(key, "no value", expected, advice))
        elif value is not None and not isinstance(known, str) and value not in known:
            errors.append(command_line_error(key, value, expected, did_you_mean(value, known)))
    allow: Sequence[str] | None = ()
    for text in others:
        if key_of(text) == ALLOW:
            allow = words_in(text)
            if allow is None:
                errors.append(command_line_error(ALLOW, text, f"a list of packages, {ALLOW}=[mine]"))
        elif not takes_overrides:
            key, expected = key_of(text), f"one of {among(keys)}, {ALLOW}"
            errors.append(command_line_error(key, text, expected, did_you_mean(key, keys)))
    raise_errors(errors)
    return RunArguments(values=values, allow=allow or (), overrides=others)


def words_in(override: str) -> tuple[str, ...] | None:
    """Return the texts in the list of an override such as `security.allow=[mine]`.

    Return None for any other override.
    """
    value: Any
    try:
        value = parse_override(override).value()
    except (HydraException, RecursionError):
        value = None
    return tuple(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else None


def _unquote(value: str) -> str:
    """Return a value without the quotes around it, which Hydra's grammar allows."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value
