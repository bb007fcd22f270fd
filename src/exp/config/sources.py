"""Who set this key: the YAML file, and where in it, or the command line. Worked out only when a fault asks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from exp.config import yaml_files
from exp.config.freeze import COMPOSITION
from exp.config.groups import COMMAND_LINE
from exp.config.hydra_adapter import Layer, parse_override
from exp.config.search_path import shown
from exp.config.yaml_files import Position, read_yaml, split
from exp.errors import ConfigError

TARGET, ARGUMENTS = "_target_", "_args_"


@dataclass(frozen=True, kw_only=True)
class Setter:
    """What set a key last. file: None for the command line; keys: the way to it inside the file."""

    file: Path | None
    keys: tuple[str, ...]


def source_of(config: DictConfig, key: str) -> str | None:
    """The file that set a dotted key last and the line of the key in it, `conf/model/mlp.yaml, line 4`, or
    `command line`.

    Of a key that nobody set: of the nearest part of it that somebody did. None where nothing of it was set, or where
    the config was not composed by exp.compose.
    """
    setters = setters_of(config)
    parts = _as_written(setters, split(key))
    for count in range(len(parts), 0, -1):
        # No key stands for a whole file: its target does.
        setter = setters.get(parts[:count]) or setters.get((*parts[:count], TARGET))
        if setter is not None:
            return COMMAND_LINE if setter.file is None else _placed(setter)
    return None


def is_set(config: DictConfig, key: str) -> bool:
    """Whether a file or the command line set this very key."""
    setters = setters_of(config)
    return _as_written(setters, split(key)) in setters


def _as_written(setters: Mapping[tuple[str, ...], Setter], parts: tuple[str, ...]) -> tuple[str, ...]:
    """The way to a layer of a list in its holder's `_args_`, as of torch.nn.Sequential, for `body.2`."""
    way: tuple[str, ...] = ()
    for part in parts:
        is_listed = (*way, part) not in setters and (*way, ARGUMENTS, part) in setters
        way = (*way, ARGUMENTS, part) if is_listed else (*way, part)
    return way


def _placed(setter: Setter) -> str:
    assert setter.file is not None
    line = yaml_files.line_of(setter.file, setter.keys)
    return shown(setter.file) if line is None else f"{shown(setter.file)}, line {line}"


def position_of(config: DictConfig, key: str) -> Position | None:
    """File, line and column of the value of a dotted key; of a block scalar, of the first character of its text.

    None where no file set it: it came from the command line, or nobody set it.
    """
    setter = setters_of(config).get(split(key))
    return None if setter is None or setter.file is None else yaml_files.position_of(setter.file, setter.keys)


def setters_of(config: DictConfig) -> dict[tuple[str, ...], Setter]:
    """What set each key last, by its parts."""
    if COMPOSITION not in config:
        return {}
    composition = config[COMPOSITION]
    return _setters(tuple(composition.layers), (*composition.of_sweep, *composition.overrides))


@functools.lru_cache(maxsize=16)
def _setters(texts: tuple[str, ...], overrides: tuple[str, ...]) -> dict[tuple[str, ...], Setter]:
    setters: dict[tuple[str, ...], Setter] = {}
    layers = [Layer.of(text) for text in texts]
    try:
        for layer in layers:
            setters.update(_of_layer(layer))
    except ConfigError:
        return {}  # one has changed since, and nobody knows what it set
    groups = {layer.config_path.rpartition("/")[0] for layer in layers}
    for text in overrides:
        line = parse_override(text)
        if line.is_delete() or (line.key_or_group in groups and not isinstance(line.value(), dict)):
            continue
        key = split(line.key_or_group)
        for below, _ in _walk(line.value(), ()):
            setters[(*key, *below)] = Setter(file=None, keys=())
    return setters


def _of_layer(layer: Layer) -> dict[tuple[str, ...], Setter]:
    if layer.file is None:
        return {}
    package = split("" if layer.package == "_global_" else layer.package)
    content = read_yaml(layer.file)
    return {
        (*package, *keys): Setter(file=layer.file, keys=keys)
        for keys, _ in _walk(content, ())
        if keys and keys[0] != "defaults"
    }


def _walk(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield keys, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*keys, str(key)))
    elif isinstance(value, list):
        items: Sequence[Any] = value
        for index, inner in enumerate(items):
            yield from _walk(inner, (*keys, str(index)))
