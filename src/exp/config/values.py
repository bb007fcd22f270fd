"""Apply overrides of values to a composed config."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from exp.config.plain_tree import ABSENT, is_node, value_at
from exp.spelling import fix_of_key, is_typo

# `1e3` and `1.5e3`, which Hydra reads as floats. Above MOST_EXACT, a float cannot represent every integer.
WITH_EXPONENT = re.compile(r"[+-]?[\d_]+(\.\d*)?[eE]\+?\d+")
MOST_EXACT = 2**53
Container = DictConfig | ListConfig


def held_value(node: object, part: str) -> Any:
    """Return the value of an entry of a mapping or a list.

    Args:
        node: Mapping or list of a config. For any other value, the result is ABSENT.
        part: Key of the mapping, or index of the list, as text.

    Returns:
        The value. ABSENT if there is no such entry. None if its value is `???` or cannot be resolved.
    """
    name = _entry(node, part)
    if name is ABSENT or not isinstance(node, Container):
        return ABSENT
    try:
        return None if OmegaConf.is_missing(node, name) else node[name]
    except OmegaConfBaseException:
        return None


def _entry(node: object, part: str) -> Any:
    """Return the key or index of an entry in its node; ABSENT if there is no such entry.

    Digits may be an int key, because YAML reads the keys of `unfreeze: {10: ...}` as numbers.
    """
    if isinstance(node, ListConfig):
        return int(part) if part.isdecimal() and int(part) < len(node) else ABSENT
    names = list(node) if isinstance(node, DictConfig) else []
    number = int(part) if part.isdecimal() else part
    return part if part in names else number if number in names else ABSENT


def deepest(config: DictConfig, key: str) -> tuple[str, Any]:
    """Return the longest beginning of a dotted key that exists in a config, and the value at that key.

    A reference such as `${model}` is not followed: the returned key ends at the reference, and the value is None.
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
    """Return whether an override may add a new key to a node without a `+`.

    A node with a `_target_` accepts new keys, because its class decides about the parameters. An entry of `phases`
    accepts new keys, too. Two kinds of key are refused: likely typing errors of an existing key, and keys of another
    framework in the node of a class of exp or torch.

    Args:
        holder: Dotted key of the node.
        node: Value of the node.
        name: New key.
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

    If the old and the new value are mappings, they are merged. Otherwise the new value replaces the old value.

    A new node with a `_target_`, set without a `+`, replaces the old node with a `_target_`. Keys of the old node that
    the primary config declares are kept.

    If a node above the key is a reference such as `${model}`, a new mapping replaces the reference. So the override
    does not change the node that it refers to.

    Args:
        config: Composed config, which is changed in place.
        override: Override of a value.
        declared: Values of the primary config.

    Raises:
        OmegaConfBaseException: The key is in the hydra node, and the value does not have the declared type.
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
    """Return the key or index of an entry.

    If there is no such entry, return the key to add: an int if all other keys are ints, else a text.

    Args:
        holder: Mapping or list of the entry.
        part: Key or index as text.
        is_made: The mapping was created for this override, so that new keys are texts.
    """
    name = _entry(holder, part)
    if name is not ABSENT:
        return name
    is_numbered = isinstance(holder, DictConfig) and not is_made and all(type(one) is int for one in holder)
    return int(part) if part.isdecimal() and is_numbered else part


def _read_value(override: Override, old: object) -> object:
    """Return the value of an override, with `1e3` as an int if the old value is an int or null.

    Hydra reads `1e3` as the float 1000.0.
    """
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
