"""Who set this key: the YAML file, and where in it, or the command line. Worked out only when a fault asks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from exp.config import yaml_files
from exp.config.freeze import COMPOSITION
from exp.config.groups import COMMAND_LINE, open_search_path
from exp.config.hydra_adapter import HYDRA_ERRORS, Layer, parse_override
from exp.config.overrides import checked_lines, for_hydra
from exp.config.search_path import shown
from exp.config.yaml_files import Position, read_yaml, split
from exp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class _Setter:
    """What set a key last. file: None for the command line; keys: the way to it inside the file."""

    file: Path | None
    keys: tuple[str, ...]


def source_of(config: DictConfig, key: str) -> str | None:
    """The file that set a dotted key last, as `conf/model/mlp.yaml`, or `command line`.

    Of a key that nobody set: of the nearest part of it that somebody did. None where nothing of it was set, or where
    the config was not composed by exp.compose.
    """
    if COMPOSITION in config and "." in key:
        # A dotted key is no group: who typed it has set it, and nothing need be composed again to say so.
        typed = [str(text).lstrip("+").partition("=") for text in config[COMPOSITION].overrides]
        if any(sign and name == key for name, sign, _ in typed):
            return COMMAND_LINE
    setters = _setters_of(config)
    parts = split(key)
    for count in range(len(parts), 0, -1):
        setter = setters.get(parts[:count])
        if setter is not None:
            return COMMAND_LINE if setter.file is None else shown(setter.file)
    return None


def position_of(config: DictConfig, key: str) -> Position | None:
    """File, line and column of the value of a dotted key; of a block scalar, of the first character of its text.

    None where no file set it: it came from the command line, or nobody set it.
    """
    setter = _setters_of(config).get(split(key))
    return None if setter is None or setter.file is None else yaml_files.position_of(setter.file, setter.keys)


def _setters_of(config: DictConfig) -> dict[tuple[str, ...], _Setter]:
    if COMPOSITION not in config:
        return {}
    composition = config[COMPOSITION]
    return _replay(tuple(composition.overrides), composition.config_dir, composition.config_name, str(Path.cwd()))


@functools.lru_cache(maxsize=16)
def _replay(
    overrides: tuple[str, ...], config_dir: str | None, config_name: str, _directory: str
) -> dict[tuple[str, ...], _Setter]:
    setters: dict[tuple[str, ...], _Setter] = {}
    try:
        layers = _layers_of(overrides, config_dir=config_dir, config_name=config_name)
    except (ConfigError, *HYDRA_ERRORS):
        # A file has changed since, or the config was put together by hand: the fault is told without its file.
        return setters
    for layer in layers:
        setters.update(_of_layer(layer))
    groups = {layer.config_path.rpartition("/")[0] for layer in layers}
    for text in overrides:
        line = parse_override(text)
        if line.is_delete() or (line.key_or_group in groups and not isinstance(line.value(), dict)):
            continue
        key = split(line.key_or_group)
        for below, _ in _walk(line.value(), ()):
            setters[(*key, *below)] = _Setter(file=None, keys=())
    return setters


def _layers_of(overrides: Sequence[str], *, config_dir: str | None, config_name: str) -> list[Layer]:
    """The files that a command without faults composes, in the order of merging.

    Raises: ConfigError, or one of HYDRA_ERRORS, where it has some.
    """
    loader, vocabulary = open_search_path(config_dir=config_dir, config_name=config_name, overrides=overrides)
    lines, faults = checked_lines(overrides, vocabulary, multirun=False)
    if faults:
        raise ConfigError(faults)
    loader.compose(config_name=config_name, overrides=for_hydra(lines, vocabulary))
    return loader.layers


def _of_layer(layer: Layer) -> dict[tuple[str, ...], _Setter]:
    if layer.file is None:
        return {}
    package = split("" if layer.package == "_global_" else layer.package)
    content = read_yaml(layer.file)
    return {
        (*package, *keys): _Setter(file=layer.file, keys=keys)
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
