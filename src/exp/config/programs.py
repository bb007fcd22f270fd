"""Forward programs of a config, parsed before any layer is built. A fault names line and column of the YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from exp.config.slots import nodes_in
from exp.config.sources import position_of
from exp.errors import Fault


def program_faults(config: DictConfig, plain: dict[str, Any]) -> list[Fault]:
    """The faults of every `forward` and every entry of `programs` that stands beside `layers`."""
    return [fault for key, node in nodes_in(plain.get("model"), "model") for fault in _faults(config, key, node)]


def program_fault(config: DictConfig, key: str, error: Any) -> Fault:
    """A ProgramError of the program at a key as a fault of the config, placed in the YAML file that holds it."""
    position = position_of(config, key)
    source = None
    if position is not None:
        line, column = position.line + error.line - 1, position.column + error.column - 1
        source = f"{position.file}, line {line}, column {column}"
    got = error.message if source else f"line {error.line}, column {error.column}: {error.message}"
    return Fault(key=key, got=got, expected=error.expected, source=source)


def _faults(config: DictConfig, key: str, node: dict[str, Any]) -> Iterator[Fault]:
    layers = node.get("layers")
    if not isinstance(layers, dict):
        return
    from exp.models.program import layers_used

    names = [str(name) for name in layers]
    programs = node.get("programs")
    texts = (
        {name: text for name, text in programs.items() if isinstance(text, str)} if isinstance(programs, dict) else {}
    )
    offers = _offers(node)
    if isinstance(node.get("forward"), str):
        used = layers_used(texts.values(), names)
        yield from _fault(config, f"{key}.forward", node["forward"], names, {**offers, "used_elsewhere": used})
    for name, text in texts.items():
        yield from _fault(config, f"{key}.programs.{name}", text, names, {**offers, "used_elsewhere": names})


def _offers(node: dict[str, Any]) -> dict[str, Any]:
    inputs, constants = node.get("inputs"), node.get("constants")
    offers: dict[str, Any] = {}
    if isinstance(inputs, list) and all(isinstance(name, str) for name in inputs):
        offers["inputs"] = inputs
    if isinstance(constants, dict):
        offers["constants"] = [str(name) for name in constants]
    return offers


def _fault(config: DictConfig, key: str, text: str, layers: list[str], offers: dict[str, Any]) -> Iterator[Fault]:
    from exp.models.program import parse
    from exp.models.program_error import ProgramError

    try:
        parse(text, layers, **offers)
    except ProgramError as error:
        yield program_fault(config, key, error)
