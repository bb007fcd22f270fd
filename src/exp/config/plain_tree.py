"""Plain dicts and lists, as YAML has them: their leaves by dotted key, and the differences of two trees.

This module imports nothing, because tab completion reads trees and has no time to import OmegaConf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

# The values of a config by key.
Plain = dict[str, Any]
# The value of a key that a tree or a config does not have.
ABSENT: Any = object()


def is_node(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a mapping with a `_target_`."""
    return isinstance(value, dict) and "_target_" in value


def value_at(tree: object, key: str) -> Any:
    """Return the value at a dotted key of nested dicts; ABSENT if a key is missing."""
    node = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return ABSENT
        node = node[name]
    return node


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a plain tree with its value, inner nodes included, without the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        path = f"{key}.{name}" if key else str(name)
        yield path, child
        yield from leaves(child, path)


def text_values(plain: object) -> Iterator[tuple[str, str]]:
    """Yield key and text of every text and interpolation of a plain tree."""
    return ((key, value) for key, value in leaves(plain) if isinstance(value, str))


def are_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal and of the same types.

    1, 1.0 and true are different: a `trainer.limit_train_batches` of 1 is one batch, one of 1.0 is all batches.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other or (one != one and other != other))


# The names that lead to a value. A name may contain a dot, and may be a number.
KeyPath = tuple[Any, ...]


def changes(before: object, after: object, path: KeyPath = ()) -> dict[KeyPath, object] | None:
    """Return the values of `after` that differ from `before`, by path; None if the keys of a mapping differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.keys() != after.keys():
            return None
        found: dict[KeyPath, object] = {}
        for name, value in after.items():
            inner = changes(before[name], value, (*path, name))
            if inner is None:
                return None
            found |= inner
        return found
    if isinstance(before, dict) or isinstance(after, dict):
        return None
    return {} if are_same(before, after) else {path: after}


def are_referred(paths: Iterable[KeyPath], raw: object) -> bool:
    """Return whether an interpolation of an unresolved tree contains the last name of one of some paths."""
    texts = [text for _, text in text_values(raw) if "${" in text]
    return any(str(path[-1]) in text for path in paths for text in texts)


def with_changes(plain: Mapping[str, Any], values: Mapping[KeyPath, object]) -> dict[str, Any]:
    """Return a plain tree with other values at existing paths. The two trees share what did not change."""
    found = dict(plain)
    for (*path, last), value in values.items():
        node = found
        for name in path:
            node[name] = dict(node[name]) if isinstance(node[name], Mapping) else list(node[name])
            node = node[name]
        node[last] = value
    return found
