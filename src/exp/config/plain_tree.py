"""Plain dicts and lists, as YAML gives them: their leaves by dotted key, and what two of them differ in.

Nothing is imported: a completion reads trees, and has no time for OmegaConf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a plain tree with its value, inner nodes included, the root left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        path = f"{key}.{name}" if key else str(name)
        yield path, child
        yield from leaves(child, path)


def text_values(plain: Any) -> Iterator[tuple[str, str]]:
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


# The names that lead to a value; a name may hold a dot, and be a number.
KeyPath = tuple[Any, ...]


def changes(before: Any, after: Any, path: KeyPath = ()) -> dict[KeyPath, Any] | None:
    """The values by path that a plain tree has in the place of another's; None where one has other keys."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.keys() != after.keys():
            return None
        found: dict[KeyPath, Any] = {}
        for name, value in after.items():
            inner = changes(before[name], value, (*path, name))
            if inner is None:
                return None
            found |= inner
        return found
    if isinstance(before, dict) or isinstance(after, dict):
        return None
    return {} if are_same(before, after) else {path: after}


def are_referred(paths: Iterable[KeyPath], raw: Any) -> bool:
    """Whether an interpolation in an unresolved tree may refer to one of some paths: one names its last word."""
    texts = [value for _, value in leaves(raw) if isinstance(value, str) and "${" in value]
    return any(str(path[-1]) in text for path in paths for text in texts)


def with_changes(plain: Mapping[str, Any], values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """A plain tree with other values, of paths that are there; what lies beside the paths is shared with the other."""
    found = dict(plain)
    for (*path, last), value in values.items():
        node = found
        for name in path:
            node[name] = dict(node[name]) if isinstance(node[name], Mapping) else list(node[name])
            node = node[name]
        node[last] = value
    return found
