"""Sources of the values in a config: the files and overrides that set each key, in the order of merging.

The files are read a second time only if an error message needs the source of a key.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from exp.config import yaml_files
from exp.config.frozen import COMPOSITION
from exp.config.grammar import parse_override
from exp.config.hydra_adapter import Layer
from exp.config.search_path import display_path
from exp.config.yaml_files import Position, read_yaml, split
from exp.errors import COMMAND_LINE, ConfigError

TARGET = "_target_"
# Placeholder for the value of a key that an override removes.
REMOVED = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Value that one file or one override sets for a key.

    Args:
        key: Dotted key in the composed config.
        value: Value as written in the file or the override. REMOVED: the override removes the key.
        layer: File that sets the value. None: an override of the command line sets it.
        keys: Names in the key of the value within the file. They differ from `key` if the file is merged below a key.
        text: Override as typed. "": a file sets the value.
    """

    key: str
    value: object
    layer: Layer | None = None
    keys: tuple[str, ...] = ()
    text: str = ""

    @property
    def file(self) -> Path | None:
        """File that sets the value. None: the command line sets the value."""
        return None if self.layer is None else self.layer.file

    @property
    def replaces_node(self) -> bool:
        """Return whether this setting discards the values that previous settings gave to keys below its key."""
        if self.value is REMOVED or not isinstance(self.value, Mapping):
            return True
        return self.layer is None and self.text[:1] not in ("+", "~") and TARGET in self.value


def source_of(config: DictConfig, key: str) -> str | None:
    """Return the source of a key's value, for error messages.

    Args:
        config: Composed config.
        key: Dotted key. If no file or override sets this key, the source of its nearest parent is returned.

    Returns:
        Text such as `conf/model/mlp.yaml, line 4`, or `command line`. None if the source is unknown, for example
        because exp.compose did not compose the config.
    """
    setters, key = setters_of(config), ".".join(split(key))
    for at in (key, *above(key)):
        # A config file contains no line with the key of the whole node, so the line of the `_target_` is reported.
        setter = setters.get(at) or setters.get(f"{at}.{TARGET}")
        if setter is not None:
            return COMMAND_LINE if setter.file is None else _display_position(setter.file, setter.keys)
    return None


def is_set(config: DictConfig, key: str) -> bool:
    """Return whether a file or the command line sets exactly this key. Parents and keys below it do not count."""
    return ".".join(split(key)) in setters_of(config)


def above(key: str) -> Iterator[str]:
    """Yield the parents of a dotted key, the nearest first: for `a.b.c`, they are `a.b` and `a`."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _display_position(file: Path, keys: Sequence[str]) -> str:
    line = yaml_files.line_of(file, keys)
    return display_path(file) if line is None else f"{display_path(file)}, line {line}"


def position_of(config: DictConfig, key: str) -> Position | None:
    """Return the position at which a key's value begins in its YAML file; None if no file sets the key."""
    setter = setters_of(config).get(".".join(split(key)))
    return None if setter is None or setter.file is None else yaml_files.position_of(setter.file, setter.keys)


def setters_of(config: DictConfig) -> Mapping[str, Setting]:
    """Return the last setting of each key, which determines the key's value.

    Returns:
        Settings by dotted key. Empty if a file has changed since the composition and cannot be read.
    """
    if COMPOSITION not in config:
        return {}
    try:
        return _last(*_composition(config))
    except ConfigError:
        return {}


def history_of(config: DictConfig, key: str) -> list[Setting]:
    """Return all settings that affect the value of a key, in the order of merging.

    These are settings of the key, and settings of a parent that replace the parent's whole node.

    Args:
        config: Composed config.
        key: Dotted key.

    Raises:
        ConfigError: A file has changed since the composition and cannot be read.
    """
    found = []
    for settings in _settings(*_composition(config)) if COMPOSITION in config else ():
        holders = (settings[at] for at in above(key) if at in settings)
        found += [
            one for one in holders if one.replaces_node and (key not in settings or isinstance(one.value, Mapping))
        ][:1]
        found += [settings[key]] if key in settings else []
    return found


def layers_of(config: DictConfig) -> list[Layer]:
    """Return the files that were merged into a config, in the order of merging."""
    return [Layer.of(text) for text in config[COMPOSITION].layers]


def _composition(config: DictConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    composition = config[COMPOSITION]
    return tuple(composition.layers), (*composition.of_sweep, *composition.overrides)


@functools.lru_cache(maxsize=16)
def _last(layers: tuple[str, ...], overrides: tuple[str, ...]) -> Mapping[str, Setting]:
    last: dict[str, Setting] = {}
    for settings in _settings(layers, overrides):
        last.update((key, one) for key, one in settings.items() if one.value is not REMOVED)
    return last


def _settings(texts: tuple[str, ...], overrides: tuple[str, ...]) -> Iterator[dict[str, Setting]]:
    """Yield the settings of each file and of each override, in the order of merging. Settings are by dotted key.

    Args:
        texts: Files that were merged, in the text format of Layer.
        overrides: Overrides as typed. Overrides that choose an option are skipped, because they set no value.
    """
    layers = [Layer.of(text) for text in texts]
    for layer in layers:
        package = split("" if layer.package == "_global_" else layer.package)
        content = {} if layer.file is None else read_yaml(layer.file)
        found = [(".".join((*package, *keys)), keys, value) for keys, value in _walk(content) if keys]
        yield {
            key: Setting(key=key, value=value, layer=layer, keys=keys)
            for key, keys, value in found
            if keys[0] != "defaults"
        }
    for text in overrides:
        parsed = parse_override(text)
        if not chooses(parsed, layers):
            given = REMOVED if parsed.is_delete() else parsed.value()
            named = [(".".join((*split(parsed.key_or_group), *keys)), value) for keys, value in _walk(given)]
            yield {key: Setting(key=key, value=value, text=text) for key, value in named}


def chooses(parsed: Override, layers: Sequence[Layer]) -> bool:
    """Return whether an override chooses options of a group instead of setting a value.

    Args:
        parsed: Override.
        layers: Files that were merged into the config.
    """
    value = None if parsed.is_delete() else parsed.value()
    options = value if isinstance(value, list) else [value]
    paths = {layer.config_path for layer in layers}
    # An empty choice, such as hooks=[], merges no file. The group is then recognized by files of other options.
    is_group = parsed.key_or_group in {path.rpartition("/")[0] for path in paths}
    return not isinstance(value, dict) and (
        is_group or any(f"{parsed.key_or_group}/{option}" in paths for option in options)
    )


def _walk(value: object, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    yield keys, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*keys, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*keys, str(index)))
