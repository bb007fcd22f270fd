"""Look up the equivalents in exp of words of Hydra, Lightning and lightning-hydra-template, in habits.yaml.

In each fix, the words after `Write` can be typed. A test types them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from exp.spelling import habits

# The template's and Lightning's names of a tag, `val/acc_best` or `val_loss`.
TAG = re.compile(r"(train|val|valid|validation|test)[/_](\w+?)(?:_best|_epoch|_step)?")
MEASURES = {"acc": "accuracy"}


def fix_of_key(key: str, value: str) -> str | None:
    """Return what is written instead of a key that has another name in exp; None for any other key."""
    keys: Mapping[str, str] = habits()["keys"]
    if key in keys:
        if (fix := fix_of_value(key, value)) is not None:
            return fix
        if keys[key].startswith("Write monitor="):
            value = tag_of(value)
        # A list has brackets.
        template = keys[key].replace("[{value}]", "{value}") if value.startswith("[") else keys[key]
        return template.format(value=value, rest="")
    names = [f"{name}." for name in accumulate(key.split(".")[:-1], "{}.{}".format)]
    found = [name for name in names if name in keys]
    return keys[found[-1]].format(value=value, rest=key.removeprefix(found[-1])) if found else None


def fix_of_value(key: str, value: object) -> str | None:
    """Return what is written instead of a value that Lightning or torch has for a key; None for any other value."""
    word = str(value).strip("'\"").lower()
    group = {"trainer.precision": "precision", "trainer.strategy": "strategy"}.get(key, "")
    return _fix_of_choice(group, word) or _entry(habits()["values"], key, word)


def fix_of_flag(flag: str, value: str) -> str | None:
    """Return what is written instead of a flag of Hydra or LightningCLI; None for any other flag."""
    if flag.endswith(".help"):
        return "Write --cfg job"
    path, fix = PurePath(value), _entry(habits(), "flags", flag)
    return fix and fix.format(value=value, stem=path.stem, folder=path.parent)


def fix_of_subcommand(word: str) -> str | None:
    """Return what is written instead of a subcommand of LightningCLI; None for any other word."""
    return _entry(habits(), "subcommands", word)


def call_forms() -> Mapping[str, str]:
    """Return the functions of Hydra's overrides, each with its form."""
    forms: Mapping[str, str] = habits()["calls"]
    return forms


def command_of(word: str) -> str | None:
    """Return the command of exp that does what a command of another trainer does; None for any other word."""
    return _entry(habits(), "commands", word)


def target_of_habit(dotted: str) -> str | None:
    """Return the name of a class that another spelling names; None for any other name."""
    for other, name in habits()["targets"].items():
        if dotted == other or (other.endswith(".") and dotted.startswith(other)):
            return f"{name}{dotted[len(other) :]}"
    return None


def fix_of_option(group: str, option: object) -> str | None:
    """Return what is written instead of an option that has another name in exp; None for any other option."""
    return _fix_of_choice(group, str(option)) or _entry(habits()["options"], group, str(option))


def _fix_of_choice(group: str, word: str) -> str | None:
    """Return what is written instead of Lightning's word for a precision or a strategy."""
    found = _entry(habits(), group, word) if group in ("precision", "strategy") else None
    return found and (f"Write precision={found}" if group == "precision" else f"Write {found}")


def _entry(table: Mapping[str, Any], first: str, second: str) -> str | None:
    found: str | None = table[first][second] if first in table and second in table[first] else None
    return found


def tag_of(value: str) -> str:
    """Return a tag as exp writes it, `accuracy/val`, for the template's or Lightning's `val/acc_best`."""
    found = TAG.fullmatch(value.strip("'\""))
    if found is None:
        return value
    stage = "val" if found[1].startswith("val") else found[1]
    measure = MEASURES[found[2]] if found[2] in MEASURES else found[2]
    return f"{measure}/{stage}"
