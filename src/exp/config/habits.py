"""What is written in exp instead of words of Hydra, Lightning and its template: the tables of habits.yaml.

Each fix is a sentence whose words after `Write` can be typed as they are: a test types them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from exp.spelling import habits

# The template's and Lightning's names of a tag, `val/acc_best` or `val_loss`.
TAG = re.compile(r"(train|val|valid|validation|test)[/_](\w+?)(?:_best|_epoch|_step)?")
MEASURES = {"acc": "accuracy"}


def known_keys() -> Mapping[str, str]:
    """Return the keys of others, each with what is written instead."""
    found: Mapping[str, str] = habits()["keys"]
    return found


def fix_of_key(key: str, value: str) -> str | None:
    """Return what is written instead of a key that has another name in exp; None for any other key."""
    keys = known_keys()
    said = fix_of_value(key, value) if key in keys else None
    if said is not None:
        return said
    if key in keys:
        if keys[key].startswith("Write monitor="):
            value = tag_of(value)
        # A list has brackets already.
        template = keys[key].replace("[{value}]", "{value}") if value.startswith("[") else keys[key]
        return template.format(value=value, rest="")
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        beginning = ".".join(parts[:count]) + "."
        if beginning in keys:
            return keys[beginning].format(value=value, rest=key.removeprefix(beginning))
    return None


def fix_of_value(key: str, value: object) -> str | None:
    """Return what is written instead of a value that Lightning or torch has for a key; None for any other value."""
    word, table = str(value).strip("'\"").lower(), habits()
    if key == "trainer.precision" and word in table["precision"]:
        return f"Write precision={table['precision'][word]}"
    if key == "trainer.strategy" and word in table["strategy"]:
        return f"Write {table['strategy'][word]}"
    return _entry(table["values"], key, word)


def fix_of_flag(flag: str, value: str) -> str | None:
    """Return what is written instead of a flag of LightningCLI; None for any other flag."""
    if flag == "--config":
        return f"Write --config-name {PurePath(value).stem}, for conf/{PurePath(value).stem}.yaml"
    if flag.endswith(".help"):
        return "Write --cfg job"
    flags: Mapping[str, str] = habits()["flags"]
    return flags.get(flag)


def fix_of_option(group: str, option: object) -> str | None:
    """Return what is written instead of an option that has another name in exp; None for any other option."""
    table = habits()
    if group == "precision" and str(option) in table["precision"]:
        return f"Write precision={table['precision'][str(option)]}"
    if group == "strategy" and str(option) in table["strategy"]:
        return f"Write {table['strategy'][str(option)]}"
    return _entry(table["options"], group, str(option))


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
