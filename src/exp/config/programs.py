"""Forward programs of a config, parsed before any layer is built. A fault names line and column of the YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exp.config.slots import nodes_in
from exp.errors import Fault


def program_faults(plain: dict[str, Any]) -> list[Fault]:
    """The faults of every `forward` that stands beside `layers`."""
    return [fault for key, node in nodes_in(plain.get("model"), "model") for fault in _program(key, node)]


def _program(key: str, node: dict[str, Any]) -> Iterator[Fault]:
    text, layers = node.get("forward"), node.get("layers")
    if not isinstance(text, str) or not isinstance(layers, dict):
        return
    from exp.models.program import ProgramError, parse

    try:
        parse(text, [str(name) for name in layers])
    except ProgramError as error:
        yield program_fault(f"{key}.forward", error)


def program_fault(key: str, error: Any) -> Fault:
    """A ProgramError as a fault of the config."""
    return Fault(key=key, got=f"line {error.line}, column {error.column}: {error.message}", expected=error.expected)
