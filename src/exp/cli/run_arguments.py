"""Read the command of a tool for saved runs: `run=DIR`, words of the tool's own, and overrides of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from exp.config.found_run import key_of
from exp.config.hydra_adapter import parse_override
from exp.errors import ConfigError, Fault
from exp.spelling import among, did_you_mean, nearest

ALLOW = "security.allow"
RUN = "a run directory, a job's in a sweep's directory, or a checkpoint"
WEIGHTS = "best, last, or a checkpoint's path"


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """values: what stands behind the tool's own keys, as text; None for one that was left out.

    allow: packages whose classes the run may name. overrides: all else, security.allow included.
    """

    values: Mapping[str, str | None]
    allow: Sequence[str]
    overrides: Sequence[str]


def read_arguments(
    argv: Sequence[str],
    *,
    keys: Mapping[str, str],
    words: Mapping[str, Sequence[str]] | None = None,
    needed: Sequence[str] = ("run",),
    takes_overrides: bool = True,
) -> RunArguments:
    """Divide a command into the tool's own keys and the run's overrides.

    keys: of the tool, each with what it must be, for messages. words: the values that a key may have, where these are
    few. needed: keys that must be there. takes_overrides: whether the run's own keys may stand here; security.allow may
        always.
    Raises: ConfigError with all faults.
    """
    own = [text for text in argv if key_of(text) in keys]
    others = [text for text in argv if text not in own]
    faults = [_no_pair(text, keys) for text in others if text.startswith("-") or "=" not in text.lstrip("~")]
    found: dict[str, str | None] = dict.fromkeys(keys)
    for text in own:
        key, _, given = text.partition("=")
        if key not in keys or found[key] is not None:
            got = f"{text}, and it is there twice" if key in keys else text
            faults.append(_fault(key_of(text), got=got, expected=f"{key_of(text)}=..., once"))
        else:
            found[key] = _unquoted(given)
    for key, value in found.items():
        if value == "" or (value is None and key in needed):
            got = "nothing" if value is None else "an empty value"
            near = nearest(key, [key_of(text) for text in others]) if value is None else []
            advice = f"Did you mean {key} where {near[0]} is?" if near else f"Write {key}={key.upper()}"
            faults.append(_fault(key, got=got, expected=keys[key], cure=advice))
        elif value is not None and key in (words or {}) and value not in (words or {})[key]:
            known = (words or {})[key]
            faults.append(_fault(key, got=value, expected=among(known), cure=did_you_mean(value, known)))
    allow, wrong = _allow([text for text in others if key_of(text) == ALLOW])
    faults += wrong
    if not takes_overrides:
        beside = [text for text in others if key_of(text) != ALLOW and text not in [fault.got for fault in faults]]
        for text in beside:
            cure = did_you_mean(key_of(text), keys)
            faults.append(_fault(key_of(text), got=text, expected=f"one of {among(keys)}, {ALLOW}", cure=cure))
    if faults:
        raise ConfigError(faults)
    return RunArguments(values=found, allow=allow, overrides=others)


def _no_pair(text: str, keys: Mapping[str, str]) -> Fault:
    cure = f"Write run={text}" if "run" in keys and not text.startswith("-") else "--help shows them"
    return _fault(text, got=text, expected=f"key=value, such as {among(f'{key}=...' for key in keys)}", cure=cure)


def _allow(texts: Sequence[str]) -> tuple[Sequence[str], list[Fault]]:
    """The packages that the command trusts."""
    if not texts:
        return (), []
    found = words_in(texts[-1])
    if found is not None:
        return found, []
    return (), [_fault(ALLOW, got=texts[-1], expected=f"a list of packages, {ALLOW}=[mine]")]


def words_in(override: str) -> tuple[str, ...] | None:
    """Return the words of an override such as `keep=[id,name]`, or None for anything but a list of words."""
    value: Any
    try:
        value = parse_override(override).value()
    except (HydraException, RecursionError):
        value = None
    return tuple(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else None


def _unquoted(value: str) -> str:
    """As Hydra takes a quoted value; a path may hold any other sign."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _fault(key: str, *, got: str, expected: str, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure, source="command line")
