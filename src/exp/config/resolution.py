"""How an interpolation comes to its value: what it refers to, and what that refers to, down to values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exp.config import yaml_files
from exp.config.history import NOWHERE, found_in
from exp.config.reading import ENVIRONMENT, REFERENCE
from exp.redaction import is_secret

# As many as anybody reads; `reading.py` refuses what leads through a thousand.
MOST_STEPS = 40
RESOLVER = re.compile(r"\$\{([\w.]+):([^${}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One reference of an interpolation. depth: how many stand around it, from 0.

    text: as written. key: what it refers to, a whole dotted key; None of a resolver's, such as oc.env.
    value: as written there; NOWHERE where there is nothing. words: what a resolver reads.
    """

    depth: int
    text: str
    key: str | None
    value: Any = NOWHERE
    words: str = ""


def is_interpolation(value: object) -> bool:
    """Whether a value as written waits to be resolved."""
    return isinstance(value, str) and "${" in value


def steps_of(raw: Mapping[str, Any], key: str, text: str, *, environment: Mapping[str, str] = os.environ) -> list[Step]:
    """The steps from an interpolation to its value, each reference followed at once, what leads in a circle once.

    raw: the config with its interpolations as written. key: of the interpolation. text: it itself.
    """
    found: list[Step] = []
    for step in _steps(raw, yaml_files.split(key), text, environment, depth=0, trail=(key,)):
        found.append(step)
        if len(found) == MOST_STEPS:
            break
    return found


def _steps(
    raw: Mapping[str, Any],
    at: tuple[str, ...],
    text: str,
    environment: Mapping[str, str],
    *,
    depth: int,
    trail: tuple[str, ...],
) -> Iterator[Step]:
    for match in REFERENCE.finditer(text):
        key = whole(match[1], at)
        value, _ = found_in(raw, yaml_files.split(key))
        yield Step(depth=depth, text=match[0], key=key, value=value)
        if is_interpolation(value) and key not in trail:
            parts = yaml_files.split(key)
            yield from _steps(raw, parts, value, environment, depth=depth + 1, trail=(*trail, key))
    for match in RESOLVER.finditer(text):
        yield Step(depth=depth, text=match[0], key=None, words=_words(match[0], environment))


def _words(text: str, environment: Mapping[str, str]) -> str:
    named = ENVIRONMENT.match(text)
    if named is None:
        return ""
    name = named[1].strip()
    if name not in environment:
        return f"the environment has no {name}"
    return f"{name} is set" if is_secret(name) else f"{name} is {environment[name]!r}"


def whole(reference: str, at: tuple[str, ...]) -> str:
    """The dotted key that a reference means, `.lr` or `..seed` from the place of its text. at: the parts of that."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference.strip()
    return ".".join([*at[: max(len(at) - dots, 0)], reference[dots:].strip()])
