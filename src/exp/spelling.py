"""Propose spellings for a mistyped word, and shorten values and lists for messages."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

# The smallest likeness of a proposal. Less similar names would mislead: "seed" is no proposal for "lr".
LIKENESS = 0.6


def find_nearest(word: str, known: Iterable[str], *, count: int = 1, likeness: float = LIKENESS) -> list[str]:
    """Return the known names that are most similar to a word, with the most similar first.

    Case and the signs - and _ are ignored. If the word is the beginning or a part of a name, its likeness to the name
    is at least 0.8.

    Args:
        word: Word as typed.
        known: Known names.
        count: Largest number of returned names.
        likeness: Smallest likeness of a returned name, from 0 to 1 (equal).
    """
    ranked = sorted(((-_likeness(word, name), name) for name in dict.fromkeys(known)), key=lambda pair: pair)
    return [name for unlike, name in ranked if -unlike >= likeness][:count]


def is_typo(word: str, known: Iterable[str]) -> bool:
    """Return whether a word differs from a known name by one letter, or by two swapped letters."""
    for name in known:
        longest = max(len(word), len(name))
        if longest > 2 and SequenceMatcher(None, word, name).ratio() >= 1 - 1 / longest:
            return True
    return False


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a fix with the most similar known name, such as `Did you mean lr?`; None if no name is similar."""
    found = find_nearest(word, known)
    return f"Did you mean {found[0]}?" if found else None


def among(names: Iterable[str], *, word: str = "", count: int = 8) -> str:
    """Return a list of names for a message. A long list is shortened and ends with the total number of names.

    Args:
        names: Names to list.
        word: Word as typed. In a shortened list, the most similar names come first.
        count: Largest number of names in the list.
    """
    names = list(dict.fromkeys(names))
    if len(names) <= count:
        return ", ".join(names) if names else "(nothing)"
    near = find_nearest(word, names, count=count) if word else []
    first = (near + [name for name in names if name not in near])[: count - 2]
    return f"{', '.join(first)} ... ({len(names)} in all)"


def show(value: object) -> str:
    """Return a value as text similar to YAML, shortened to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = f"[{', '.join(map(show, value))}]" if isinstance(value, list) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _likeness(word: str, name: str) -> float:
    plain, other = _plain(word), _plain(name)
    if not plain or not other:
        return 0.0
    if plain == other:
        return 1.0
    ratio = SequenceMatcher(None, plain, other).ratio()
    if len(plain) > 2 and (other.startswith(plain) or plain in _parts(name) or _plain(other) in _parts(word)):
        ratio = max(ratio, 0.8)
    if len(plain) == len(other) and sorted(plain) == sorted(other):  # two letters swapped
        ratio = max(ratio, 0.95)
    return ratio


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").strip()


def _parts(name: str) -> set[str]:
    return {_plain(part) for part in name.replace(".", "_").split("_")}


@functools.cache
def habits() -> dict[str, Any]:
    """Return the tables of habits.yaml, which map keys, values and flags of other frameworks to those of exp."""
    import yaml  # every command imports this module

    with Path(__file__).with_name("habits.yaml").open(encoding="utf-8") as file:
        found: dict[str, Any] = yaml.load(file, vars(yaml).get("CSafeLoader", yaml.SafeLoader))
    return found
