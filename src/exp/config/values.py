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

# Numbers such as `1e3` and `1.5e3`, which Hydra reads as floats.
WITH_EXPONENT = re.compile(r"[+-]?[\d_]+(\.\d*)?[eE]\+?\d+")
# The largest integer up to which a float represents every integer.
MOST_EXACT = 2**53
Container = DictConfig | ListConfig


def held_value(node: object, part: str) -> Any:
    """Return the value of an entry of a mapping or a list in a config.

    Args:
        node: Mapping or list. For any other value, the result is ABSENT.
        part: Key in the mapping, or index in the list, as text.

    Returns:
        The value. ABSENT if the entry does not exist. None if the value is `???` or an interpolation that fails.
    """
    name = _entry(node, part)
    if name is ABSENT or not isinstance(node, Container):
        return ABSENT
    try:
        return None if OmegaConf.is_missing(node, name) else node[name]
    except OmegaConfBaseException:
        return None


def _entry(node: object, part: str) -> Any:
    """Return the key or index of an entry in the type that its node uses; ABSENT if the entry does not exist.

    A text of digits also finds an int key, because YAML reads keys such as 10 in `unfreeze: {10: ...}` as numbers.

    Args:
        node: Mapping or list of a config.
        part: Key or index as text.
    """
    if isinstance(node, ListConfig):
        return int(part) if part.isdecimal() and int(part) < len(node) else ABSENT
    names = list(node) if isinstance(node, DictConfig) else []
    number = int(part) if part.isdecimal() else part
    return part if part in names else number if number in names else ABSENT


def deepest(config: DictConfig, key: str) -> tuple[str, Any]:
    """Return the longest beginning of a dotted key that exists in a config, and the value at this beginning.

    A reference such as `${model}` is not followed. The returned key then ends at the reference, and the value is None.

    Args:
        config: Composed config.
        key: Dotted key, which may not exist.
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
    """Return whether a mapping has keys, at any depth, that do not exist in a node."""
    pairs = [(held_value(node, str(name)), inner) for name, inner in value.items()]
    return any(
        old is ABSENT or (isinstance(old, DictConfig) and isinstance(inner, dict) and adds_keys(old, inner))
        for old, inner in pairs
    )


def takes_new_key(holder: str, node: object, name: str) -> bool:
    """Return whether an override without a `+` may add a new key to a node.

    A node with a `_target_` accepts new keys, because they may be parameters of the class. An entry of `phases` accepts
    new keys, too. Two kinds of key are not accepted: likely typing errors of an existing key, and, for a class of exp
    or torch, keys of another framework.

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
    """Apply one override to a config: set, add or delete a value.

    If the old and the new value are mappings, they are merged. Otherwise the new value replaces the old value.

    There is an exception if both mappings have a `_target_` and the override has no `+`. The new node then replaces the
    old node, except for keys that the primary config declares.

    If a node above the key is a reference such as `${model}`, a new mapping replaces the reference. The node to which
    the reference refers is not changed.

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
    """Return the key or index of an entry, or the key of a new entry.

    The key of a new entry is an int if it consists of digits and all other keys are ints. Otherwise it is a text.

    Args:
        holder: Mapping or list of the entry.
        part: Key or index as text.
        is_made: The mapping was created for this override. A new key is then always a text.
    """
    name = _entry(holder, part)
    if name is not ABSENT:
        return name
    is_numbered = isinstance(holder, DictConfig) and not is_made and all(type(one) is int for one in holder)
    return int(part) if part.isdecimal() and is_numbered else part


def _read_value(override: Override, old: object) -> object:
    """Return the value of an override.

    Hydra reads `1e3` as the float 1000.0. It is converted to an int if the old value is an int or null.

    Args:
        override: Override of a value.
        old: Value that the override replaces.
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
