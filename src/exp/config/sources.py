"""The files and overrides that set each key of a config, in the order of merging. Read only when an error asks."""

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

TARGET, ARGUMENTS = "_target_", "_args_"
# The value of a key that an override removes.
REMOVED = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The value that a file or an override gives to a key.

    Args:
        key: The dotted key.
        value: As written there; REMOVED for an override that removes the key.
        layer: The file; None for the command line.
        keys: The names that lead to the value inside the file.
        text: The override.
    """

    key: str
    value: object
    layer: Layer | None = None
    keys: tuple[str, ...] = ()
    text: str = ""

    @property
    def file(self) -> Path | None:
        """The file that holds the value; None for the command line."""
        return None if self.layer is None else self.layer.file

    @property
    def replaces_node(self) -> bool:
        """Return whether keys below this key have no value from earlier settings."""
        if self.value is REMOVED or not isinstance(self.value, Mapping):
            return True
        return self.layer is None and self.text[:1] not in ("+", "~") and TARGET in self.value


def source_of(config: DictConfig, key: str) -> str | None:
    """Return the file and line that set a dotted key last, such as `conf/model/mlp.yaml, line 4`, or `command line`.

    For a key that no layer set, this is the source of the nearest key above it. None if no key has a source, or if
    exp.compose did not compose the config.
    """
    setters = setters_of(config)
    key = _listed_key(setters, key)
    for at in (key, *above(key)):
        # No key stands for a whole file: its target does.
        setter = setters.get(at) or setters.get(f"{at}.{TARGET}")
        if setter is not None:
            return COMMAND_LINE if setter.file is None else _display_position(setter.file, setter.keys)
    return None


def is_set(config: DictConfig, key: str) -> bool:
    """Return whether a file or the command line set exactly this key."""
    setters = setters_of(config)
    return _listed_key(setters, key) in setters


def above(key: str) -> Iterator[str]:
    """Yield the dotted keys that hold a key, the nearest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _listed_key(setters: Mapping[str, Setting], key: str) -> str:
    """Return the key of a layer in the `_args_` of its holder, as of torch.nn.Sequential, for `body.2`."""
    way: tuple[str, ...] = ()
    for part in split(key):
        listed = ".".join((*way, ARGUMENTS, part))
        is_listed = ".".join((*way, part)) not in setters and listed in setters
        way = (*way, ARGUMENTS, part) if is_listed else (*way, part)
    return ".".join(way)


def _display_position(file: Path, keys: Sequence[str]) -> str:
    line = yaml_files.line_of(file, keys)
    return display_path(file) if line is None else f"{display_path(file)}, line {line}"


def position_of(config: DictConfig, key: str) -> Position | None:
    """Return file, line and column of the value of a dotted key, or of the first character of a block scalar.

    None if no file set the key.
    """
    setter = setters_of(config).get(".".join(split(key)))
    return None if setter is None or setter.file is None else yaml_files.position_of(setter.file, setter.keys)


def setters_of(config: DictConfig) -> Mapping[str, Setting]:
    """Return the last setting of each dotted key. Empty if a file has changed and cannot be read any more."""
    if COMPOSITION not in config:
        return {}
    try:
        return _last(*_composition(config))
    except ConfigError:
        return {}


def history_of(config: DictConfig, key: str) -> list[Setting]:
    """Return the settings that decide a dotted key, first to last: its own, and those that replace a node above it.

    Raises:
        ConfigError: A file cannot be read any more.
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
    """Return the files that a config was composed of, in the order of merging."""
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
    """Yield the settings of each file and each override by dotted key."""
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
    """Return whether an override chooses the options of a group, and sets no value."""
    value = None if parsed.is_delete() else parsed.value()
    options = value if isinstance(value, list) else [value]
    paths = {layer.config_path for layer in layers}
    # An empty choice, hooks=[], has no file.
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
