"""Forward programs of a config, parsed before any layer is built. A fault names line and column of the YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from exp.config.slots import nodes_in
from exp.errors import Fault


def program_faults(config: DictConfig, plain: dict[str, Any]) -> list[Fault]:
    """The faults of every `forward` that stands beside `layers`."""
    return [fault for key, node in nodes_in(plain.get("model"), "model") for fault in _faults(config, key, node)]


def program_fault(config: DictConfig, key: str, error: Any) -> Fault:
    """A ProgramError of the program at a key as a fault of the config, placed in the YAML file that holds it."""
    from exp.config.sources import position_of

    position = position_of(config, key)
    source = None
    if position is not None:
        line, column = position.line + error.line - 1, position.column + error.column - 1
        source = f"{position.file}, line {line}, column {column}"
    got = error.message if source else f"line {error.line}, column {error.column}: {error.message}"
    return Fault(key=key, got=got, expected=error.expected, source=source)


def _faults(config: DictConfig, key: str, node: dict[str, Any]) -> Iterator[Fault]:
    text, layers = node.get("forward"), node.get("layers")
    if not isinstance(text, str) or not isinstance(layers, dict):
        return
    from exp.models.program import parse
    from exp.models.program_error import ProgramError

    inputs, constants = node.get("inputs"), node.get("constants")
    offers: dict[str, Any] = {}
    if isinstance(inputs, list) and all(isinstance(name, str) for name in inputs):
        offers["inputs"] = inputs
    if isinstance(constants, dict):
        offers["constants"] = [str(name) for name in constants]
    try:
        parse(text, [str(name) for name in layers], **offers)
    except ProgramError as error:
        yield program_fault(config, f"{key}.forward", error)
