"""Keys that versions of exp added and removed, so that runs and sweeps of earlier versions resume."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from exp.config.plain_tree import are_same, leaves

# Keys that every config has now, with the value of a config that has none.
PRESENT: Mapping[str, Any] = {"vars": {}, "resolvers": {}, "runtime.compile_mode": None}
# Keys that change nothing at these values; configs of earlier versions do not have them.
ADDED: Mapping[str, Any] = {
    "runtime.compile_mode": None,
    "data.split": {"stratify": False, "group": None, "column": None, "folds": None, "fold": 0},
    "data.eval_transforms": {},
    "data.dataset.background": "white",
    "data.dataset.any_size": False,
}
# Keys that no longer exist, with the values that they had by default.
REMOVED: Mapping[str, Any] = {"runtime.warm": "auto", "runtime.cuda_graph": False}
REMOVED_HOOKS = ("exp.hooks.landscape.Landscape",)
# A data set that had a parameter `packed`.
PACKING = "exp.data.delimited.Csv"


def with_present_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an earlier version with the keys of this one, without hooks that no longer exist."""
    found = copy.deepcopy(dict(content))
    for key in removed_keys(content):
        _remove(found, key)
    for key, value in PRESENT.items():
        _add(found, key, value)
    return found


def as_before(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as the earliest version would have it: equal for all versions that compute the same."""
    found = copy.deepcopy(dict(plain))
    for key, value in ADDED.items():
        parent, _, name = key.rpartition(".")
        node = _node(found, parent)
        if node is not None and name in node and are_same(node[name], value):
            del node[name]
    for key, value in REMOVED.items():
        _add(found, key, value)
    return found


def removed_keys(content: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that the config of an earlier version may have and that no longer exist."""
    targets = {
        key: value["_target_"] for key, value in leaves(content) if isinstance(value, dict) and "_target_" in value
    }
    hooks = [key for key, target in targets.items() if target in REMOVED_HOOKS]
    packed = [f"{key}.packed" for key, target in targets.items() if target == PACKING]
    return [*REMOVED, *hooks, *packed]


def _node(tree: dict[str, Any], key: str) -> dict[str, Any] | None:
    node: Any = tree
    for name in key.split(".") if key else ():
        node = node[name] if isinstance(node, dict) and name in node else None
    return node if isinstance(node, dict) else None


def _add(tree: dict[str, Any], key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    node = _node(tree, parent)
    if node is not None and name not in node:
        node[name] = copy.deepcopy(value)


def _remove(tree: dict[str, Any], key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = _node(tree, parent)
    if node is not None:
        node.pop(name, None)
