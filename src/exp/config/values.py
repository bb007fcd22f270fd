"""Overrides of values, applied to a composed config one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from exp.config.habits import fix_of_key
from exp.config.plain_tree import ABSENT, is_node, value_at
from exp.spelling import is_typo

# `1e3` and `1.5e3`, which Hydra reads as floats. Above the limit a float is no longer an exact integer.
WITH_EXPONENT = re.compile(r"[+-]?[\d_]+(\.\d*)?[eE]\+?\d+")
MOST_EXACT = 2**53
Container = DictConfig | ListConfig


def held_value(node: object, part: str) -> Any:
    """Return the value of an entry: ABSENT if it is missing, None if it has no value yet or cannot be resolved."""
    name = _entry(node, part)
    if name is ABSENT or not isinstance(node, Container):
        return ABSENT
    try:
        return None if OmegaConf.is_missing(node, name) else node[name]
    except OmegaConfBaseException:
        return None


def _entry(node: object, part: str) -> Any:
    """Return the name of an entry in its node: YAML reads the names of `unfreeze: {10: ...}` as numbers."""
    if isinstance(node, ListConfig):
        return int(part) if part.isdecimal() and int(part) < len(node) else ABSENT
    names = list(node) if isinstance(node, DictConfig) else []
    number = int(part) if part.isdecimal() else part
    return part if part in names else number if number in names else ABSENT


def deepest(config: DictConfig, key: str) -> tuple[str, Any]:
    """Return the longest beginning of a dotted key that a config holds, and its value.

    A reference such as `${model}` ends the way, with the value None. The keys of the other node are not below it.
    """
    node: object = config
    parts = key.split(".")
    for count, part in enumerate(parts):
        inner = held_value(node, part)
        if inner is ABSENT:
            return ".".join(parts[:count]), node
        if count + 1 < len(parts) and _is_reference(node, part):
            return ".".join(parts[: count + 1]), None
        node = inner
    return key, node


def _is_reference(node: object, part: str) -> bool:
    name = _entry(node, part)
    return name is not ABSENT and OmegaConf.is_interpolation(node, name)


def adds_keys(node: DictConfig, value: Mapping[str, object]) -> bool:
    """Return whether a mapping has keys, at any depth, that a node does not have."""
    pairs = [(held_value(node, str(name)), inner) for name, inner in value.items()]
    return any(
        old is ABSENT or (isinstance(old, DictConfig) and isinstance(inner, dict) and adds_keys(old, inner))
        for old, inner in pairs
    )


def takes_new_key(holder: str, node: object, name: str) -> bool:
    """Return whether a node takes a key that no file shows without a `+`.

    A node with a `_target_` does, because its class decides, and so does an entry of `phases`. A slip of an existing
    key is an error, and so is a key of another framework in a class of exp or torch.
    """
    is_phase = holder.startswith("phases.") and holder.count(".") == 1
    is_hydras = holder.partition(".")[0] in ("", "hydra")
    if is_hydras or not isinstance(node, DictConfig) or not (is_phase or "_target_" in node):
        return False
    target = "" if is_phase else str(node["_target_"])
    is_habit = fix_of_key(f"{holder}.{name}", "") is not None and target.partition(".")[0] in ("exp", "torch")
    return not is_habit and not is_typo(name, map(str, node))


def set_value(config: DictConfig, override: Override, *, declared: Mapping[str, object] | None = None) -> None:
    """Set, add or delete the value of an override.

    A mapping is merged into a mapping, and replaces anything else. Above the key, a new mapping replaces a reference
    such as `${model}`, so that the other node keeps its values. A node with a `_target_` that is set without a `+`
    replaces the node that the groups chose, except for the keys that the primary config declares.

    Args:
        declared: The values of the primary config.

    Raises:
        OmegaConfBaseException: The hydra node, which has types, does not take the value.
    """
    *way, last = override.key_or_group.split(".")
    with open_dict(config):
        holder: Any = config
        is_made = False
        for part in way:
            inner = held_value(holder, part)
            if not isinstance(inner, Container) or _is_reference(holder, part):
                name = _name_in(holder, part, is_made=is_made)
                holder[name] = {}
                inner, is_made = holder[name], True
            holder = inner
        name = _name_in(holder, last, is_made=is_made)
        if override.is_delete():
            del holder[name]
            return
        old = held_value(holder, last)
        value = _read_value(override, old)
        if (
            is_node(value)
            and override.type is OverrideType.CHANGE
            and isinstance(old, DictConfig)
            and "_target_" in old
        ):
            kept = value_at(declared, override.key_or_group)
            holder[name] = copy.deepcopy(kept) if isinstance(kept, dict) else {}
        _merge(holder, name, value)


def _name_in(holder: object, part: str, *, is_made: bool) -> Any:
    """Return the name of an entry. A new one is a number if all others are. is_made: the holder is new, too."""
    name = _entry(holder, part)
    if name is not ABSENT:
        return name
    is_numbered = isinstance(holder, DictConfig) and not is_made and all(type(one) is int for one in holder)
    return int(part) if part.isdecimal() and is_numbered else part


def _read_value(override: Override, old: object) -> object:
    """Return the value of an override: for `1e3`, which Hydra reads as 1000.0, an int if an int or null is there."""
    value: Any = override.value()
    text = (override.input_line or "").partition("=")[2]
    is_exact = isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT
    if not is_exact or WITH_EXPONENT.fullmatch(text) is None:
        return value
    # In Lightning's limits, 1.0 is all batches and 1 is one batch.
    return int(value) if type(old) is int or (old is None and abs(value) > 1) else value


def _merge(holder: Any, name: str | int, value: object) -> None:
    old = held_value(holder, str(name))
    if isinstance(value, dict) and isinstance(old, DictConfig) and not _is_reference(holder, str(name)):
        for inner, one in value.items():
            _merge(old, inner, one)
    else:
        holder[name] = value
