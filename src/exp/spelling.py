"""Propose words for mistyped words and for words of other frameworks, and shorten values and lists for messages.

habits.yaml contains keys, values and flags of Hydra, Lightning and lightning-hydra-template, with their names in exp.
The functions `fix_of_...` return a fix for an error message, such as `Write precision=bf16`. A test runs the command
after `Write`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

# The smallest likeness of a proposal. Less similar names would mislead: "seed" is no proposal for "lr".
LIKENESS = 0.6


def find_nearest(word: str, known: Iterable[str], *, count: int = 1, likeness: float = LIKENESS) -> list[str]:
    """Return the names that are similar to a word, the most similar first.

    Case, hyphens and underscores are ignored. If the word is the beginning or a part of a name, the likeness of the
    name is at least 0.8.

    Args:
        word: Word as typed.
        known: Names to compare with the word.
        count: Maximum number of returned names.
        likeness: Minimum likeness of a returned name. 0 means different, 1 means equal.
    """
    ranked = sorted(((-_likeness(word, name), name) for name in dict.fromkeys(known)), key=lambda pair: pair)
    return [name for unlike, name in ranked if -unlike >= likeness][:count]


def is_typo(word: str, known: Iterable[str]) -> bool:
    """Return whether a word differs from one of the names by one letter, or by two swapped letters."""
    for name in known:
        longest = max(len(word), len(name))
        if longest > 2 and SequenceMatcher(None, word, name).ratio() >= 1 - 1 / longest:
            return True
    return False


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a fix that proposes the name most similar to a word, such as `Did you mean lr?`.

    Args:
        word: Word as typed.
        known: Names to compare with the word.

    Returns:
        The fix. None if no name is similar.
    """
    found = find_nearest(word, known)
    return f"Did you mean {found[0]}?" if found else None


def among(names: Iterable[str], *, word: str = "", count: int = 8) -> str:
    """Return names as text for a message, separated by commas.

    If there are more than `count` names, the text contains only some names and the total number of names.

    Args:
        names: Names to list.
        word: Word as typed. If the text contains only some names, the names most similar to the word come first.
        count: Maximum number of names that are all listed.
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
    """Return the tables of habits.yaml. They map keys, values and flags of other frameworks to their names in exp."""
    import yaml  # imported late, because every command imports this module, and few commands need YAML here

    with Path(__file__).with_name("habits.yaml").open(encoding="utf-8") as file:
        found: dict[str, Any] = yaml.load(file, vars(yaml).get("CSafeLoader", yaml.SafeLoader))
    return found


def fix_of_key(key: str, value: str) -> str | None:
    """Return a fix for a key of another framework that has a different name in exp.

    Args:
        key: Dotted key as typed.
        value: Value as typed. The fix contains this value.

    Returns:
        The fix. None if the key is not in habits.yaml.
    """
    keys: Mapping[str, str] = habits()["keys"]
    if key in keys:
        if (fix := fix_of_value(key, value)) is not None:
            return fix
        # The template has brackets around the value. They are removed if the value is a list.
        template = keys[key].replace("[{value}]", "{value}") if value.startswith("[") else keys[key]
        return template.format(value=value, rest="")
    names = [f"{name}." for name in accumulate(key.split(".")[:-1], "{}.{}".format)]
    found = [name for name in names if name in keys]
    return keys[found[-1]].format(value=value, rest=key.removeprefix(found[-1])) if found else None


def fix_of_value(key: str, value: object) -> str | None:
    """Return a fix for a value of Lightning or torch, such as `16-mixed`.

    Args:
        key: Dotted key.
        value: Value as typed.

    Returns:
        The fix. None if the value is not in habits.yaml.
    """
    word = str(value).strip("'\"").lower()
    group = {"trainer.precision": "precision", "trainer.strategy": "strategy"}.get(key, "")
    return _fix_of_choice(group, word) or _entry(habits()["values"], key, word)


def fix_of_flag(flag: str, value: str) -> str | None:
    """Return a fix for a flag of Hydra or LightningCLI; None if the flag is not in habits.yaml.

    Args:
        flag: Flag as typed.
        value: Value of the flag. The fix contains this value.
    """
    if flag.endswith(".help"):
        return "Write --cfg job"
    path, fix = PurePath(value), _entry(habits(), "flags", flag)
    return fix and fix.format(value=value, stem=path.stem, folder=path.parent)


def fix_of_subcommand(word: str) -> str | None:
    """Return a fix for a subcommand of LightningCLI, such as `fit`; None for any other word."""
    return _entry(habits(), "subcommands", word)


def call_forms() -> Mapping[str, str]:
    """Return the syntax of each function that overrides may call, such as `range`, by the name of the function."""
    forms: Mapping[str, str] = habits()["calls"]
    return forms


def command_of(word: str) -> str | None:
    """Return the command of exp that replaces a command of another framework; None for any other word."""
    return _entry(habits(), "commands", word)


def target_of_habit(dotted: str) -> str | None:
    """Return the dotted name of a class for exp, such as `torch.nn.Linear` for `nn.Linear`.

    Args:
        dotted: Dotted name as typed.

    Returns:
        The name that exp accepts. None if habits.yaml contains neither the typed name nor its package.
    """
    for other, name in habits()["targets"].items():
        if dotted == other or (other.endswith(".") and dotted.startswith(other)):
            return f"{name}{dotted[len(other) :]}"
    return None


def fix_of_option(group: str, option: object) -> str | None:
    """Return a fix for an option of a config group that has another name in exp.

    Args:
        group: Config group.
        option: Option as typed.

    Returns:
        The fix. None if the option is not in habits.yaml.
    """
    return _fix_of_choice(group, str(option)) or _entry(habits()["options"], group, str(option))


def _fix_of_choice(group: str, word: str) -> str | None:
    """Return a fix for Lightning's name of a precision or a strategy; None for any other name."""
    found = _entry(habits(), group, word) if group in ("precision", "strategy") else None
    return found and (f"Write precision={found}" if group == "precision" else f"Write {found}")


def _entry(table: Mapping[str, Any], first: str, second: str) -> str | None:
    found: str | None = table[first][second] if first in table and second in table[first] else None
    return found
