"""Translate keys, values and flags of Hydra, Lightning and lightning-hydra-template to exp, by habits.yaml.

Functions return a fix for an error message, such as `Write precision=bf16`. A test runs the text after `Write`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from exp.spelling import habits


def fix_of_key(key: str, value: str) -> str | None:
    """Return a fix for a key that has another name in exp; None if the key is not in habits.yaml.

    Args:
        key: Dotted key as typed.
        value: Value as typed, which the fix repeats.
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
    """Return a fix for a value of Lightning or torch, such as `16-mixed`; None if it is not in habits.yaml."""
    word = str(value).strip("'\"").lower()
    group = {"trainer.precision": "precision", "trainer.strategy": "strategy"}.get(key, "")
    return _fix_of_choice(group, word) or _entry(habits()["values"], key, word)


def fix_of_flag(flag: str, value: str) -> str | None:
    """Return a fix for a flag of Hydra or LightningCLI; None if the flag is not in habits.yaml.

    Args:
        flag: Flag as typed.
        value: Value of the flag, which the fix repeats.
    """
    if flag.endswith(".help"):
        return "Write --cfg job"
    path, fix = PurePath(value), _entry(habits(), "flags", flag)
    return fix and fix.format(value=value, stem=path.stem, folder=path.parent)


def fix_of_subcommand(word: str) -> str | None:
    """Return a fix for a subcommand of LightningCLI, such as `fit`; None for any other word."""
    return _entry(habits(), "subcommands", word)


def call_forms() -> Mapping[str, str]:
    """Return the functions that overrides may call, such as `range`, each with its syntax."""
    forms: Mapping[str, str] = habits()["calls"]
    return forms


def command_of(word: str) -> str | None:
    """Return the command of exp that replaces a command of another framework; None for any other word."""
    return _entry(habits(), "commands", word)


def target_of_habit(dotted: str) -> str | None:
    """Return the dotted name that exp accepts for a class with several names; None if it is not in habits.yaml."""
    for other, name in habits()["targets"].items():
        if dotted == other or (other.endswith(".") and dotted.startswith(other)):
            return f"{name}{dotted[len(other) :]}"
    return None


def fix_of_option(group: str, option: object) -> str | None:
    """Return a fix for an option that has another name in exp; None if the option is not in habits.yaml."""
    return _fix_of_choice(group, str(option)) or _entry(habits()["options"], group, str(option))


def _fix_of_choice(group: str, word: str) -> str | None:
    """Return a fix for Lightning's name of a precision or a strategy; None for any other name."""
    found = _entry(habits(), group, word) if group in ("precision", "strategy") else None
    return found and (f"Write precision={found}" if group == "precision" else f"Write {found}")


def _entry(table: Mapping[str, Any], first: str, second: str) -> str | None:
    found: str | None = table[first][second] if first in table and second in table[first] else None
    return found
