"""Functions for plain trees: nested dicts and lists, as read from YAML.

This module does not import OmegaConf, because tab completion uses it and must be fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

# Nested dicts and lists with the values of a config.
Plain = dict[str, Any]
# Placeholder for the value of a key that does not exist in a tree or a config.
ABSENT: Any = object()


def is_node(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a mapping with a `_target_`."""
    return isinstance(value, dict) and "_target_" in value


def value_at(tree: object, key: str) -> Any:
    """Return the value at a dotted key of nested dicts; ABSENT if the key does not exist."""
    node = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return ABSENT
        node = node[name]
    return node


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a plain tree with its value. Values that are dicts and lists are yielded, too.

    Args:
        value: Root of the tree. The root itself is not yielded.
        key: Dotted key of the root. Each yielded key begins with it. Default: "".
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        path = f"{key}.{name}" if key else str(name)
        yield path, child
        yield from leaves(child, path)


def text_values(plain: object) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each string in a plain tree."""
    return ((key, value) for key, value in leaves(plain) if isinstance(value, str))


def are_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal and have the same types, at any depth. NaN equals NaN.

    1, 1.0 and true are different: `trainer.limit_train_batches: 1` means one batch, and 1.0 means all batches.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other or (one != one and other != other))


# Keys and indices from the root of a tree to a value. Dotted keys are not used, because a key may contain a dot or be a
# number.
KeyPath = tuple[Any, ...]


def changes(before: object, after: object, path: KeyPath = ()) -> dict[KeyPath, object] | None:
    """Return the values of `after` that differ from `before`, by path.

    Args:
        before: Plain tree.
        after: Plain tree to compare with `before`.
        path: Path of the roots of both trees. Each returned path begins with it. Default: ().

    Returns:
        Values of `after` by path. None if a mapping has different keys in the two trees.
    """
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
    """Return whether an interpolation in a tree may refer to a value at one of the paths.

    The texts with interpolations are searched for the last name of each path.

    Args:
        paths: Paths of values.
        raw: Tree with unresolved interpolations.
    """
    texts = [text for _, text in text_values(raw) if "${" in text]
    return any(str(path[-1]) in text for path in paths for text in texts)


def with_changes(plain: Mapping[str, Any], values: Mapping[KeyPath, object]) -> dict[str, Any]:
    """Return a copy of a plain tree with new values at existing paths.

    Unchanged dicts and lists are not copied: the result and `plain` share them.

    Args:
        plain: Plain tree.
        values: New values by path.
    """
    found = dict(plain)
    for (*path, last), value in values.items():
        node = found
        for name in path:
            node[name] = dict(node[name]) if isinstance(node[name], Mapping) else list(node[name])
            node = node[name]
        node[last] = value
    return found
