"""A plain config asked by dotted key, for rules that hold between keys."""

from __future__ import annotations

from typing import Any

from exp.config.kinds import UNKNOWN, is_node


class Values:
    """The plain config, asked by dotted key; UNKNOWN where a key is not there."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain

    def __getitem__(self, key: str) -> Any:
        node: Any = self.plain
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return UNKNOWN
            node = node[part]
        return node

    def entries(self, key: str) -> dict[str, Any]:
        """The named nodes of a group, those that could not be read left out."""
        node = self[key]
        return {name: value for name, value in node.items() if is_node(value)} if isinstance(node, dict) else {}
