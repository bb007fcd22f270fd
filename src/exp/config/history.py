"""Every layer that set a key, in the order of merging: the files of the defaults list, then the command line.

`sources.py` knows the last one of each key, for faults. This is for who asks how a value came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from exp.config import yaml_files
from exp.config.freeze import COMPOSITION
from exp.config.groups import COMMAND_LINE
from exp.config.hydra_adapter import Layer, parse_override
from exp.config.search_path import shown
from exp.config.yaml_files import read_yaml

# What a search finds where there is nothing.
NOWHERE: Any = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One layer's word on a key.

    effect: `sets` the key; `covers` it, where a value that is no mapping takes the place of what holds it, and the key
        is gone; `empties` what holds it, before it sets it anew or not; `removes` it.
    value: as written there; NOWHERE where the effect leaves none. layer: None for the command line.
    text: the override. keys: the way to the value inside the file.
    """

    effect: Literal["sets", "covers", "empties", "removes"]
    value: Any
    layer: Layer | None = None
    text: str = ""
    keys: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is written, as `conf/optimizer/adamw.yaml:3`."""
        if self.layer is None or self.layer.file is None:
            return COMMAND_LINE
        return place_of(self.layer.file, self.keys)


def place_of(file: Path, keys: Sequence[str]) -> str:
    """A file as shown to a reader, with the line in which the value under nested keys begins."""
    found = yaml_files.position_of(file, keys)
    return shown(file) if found is None else f"{found.file}:{found.line}"


def history_of(config: DictConfig, key: str) -> list[Setting]:
    """What each layer says of a dotted key, first to last; empty where the config was not composed by exp.compose.

    Raises: ConfigError where a file cannot be read any more.
    """
    if COMPOSITION not in config:
        return []
    parts = yaml_files.split(key)
    layers = layers_of(config)
    settings = [one for layer in layers if (one := _of_layer(layer, parts)) is not None]
    for text in overrides_of(config):
        settings += _of_override(text, parts, layers)
    return settings


def layers_of(config: DictConfig) -> list[Layer]:
    """The files that a config was composed of, in the order of merging."""
    return [Layer.of(text) for text in config[COMPOSITION].layers]


def overrides_of(config: DictConfig) -> list[str]:
    """The overrides that a config was composed with."""
    return list(config[COMPOSITION].overrides)


def found_in(tree: Any, parts: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The value under a way through mappings and lists, and the names on it; NOWHERE where it leads nowhere.

    A name may hold dots itself, as the patterns of `initialisation` do, and be a number.
    """
    if not parts:
        return tree, ()
    if isinstance(tree, Mapping):
        names = {str(name): inner for name, inner in tree.items()}
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name in names:
                value, rest = found_in(names[name], parts[count:])
                if value is not NOWHERE:
                    return value, (name, *rest)
    if isinstance(tree, list) and parts[0].isdecimal() and int(parts[0]) < len(tree):
        value, rest = found_in(tree[int(parts[0])], parts[1:])
        return value, (parts[0], *rest)
    return NOWHERE, ()


def _of_layer(layer: Layer, parts: tuple[str, ...]) -> Setting | None:
    if layer.file is None:
        return None
    package = yaml_files.split("" if layer.package == "_global_" else layer.package)
    if parts[: len(package)] != package:
        return None
    content = read_yaml(layer.file)
    value, keys = found_in(content, parts[len(package) :])
    if keys[:1] == ("defaults",):
        return None
    if value is not NOWHERE:
        return Setting(effect="sets", value=value, layer=layer, keys=keys)
    held = _holder(content, parts[len(package) :])
    return None if held is None else Setting(effect="covers", value=held[0], layer=layer, keys=held[1])


def _holder(tree: Any, parts: Sequence[str]) -> tuple[Any, tuple[str, ...]] | None:
    """The value that is no mapping in the place of one that would hold a key, with the names that lead to it."""
    for count in range(len(parts) - 1, 0, -1):
        value, keys = found_in(tree, parts[:count])
        if value is not NOWHERE:
            return None if isinstance(value, Mapping) else (value, keys)
    return None


def _of_override(text: str, parts: tuple[str, ...], layers: Sequence[Layer]) -> Iterator[Setting]:
    """What an override does to a key, by the way that Hydra goes about it."""
    parsed = parse_override(text)
    at = yaml_files.split(parsed.key_or_group)
    if parts[: len(at)] != at or chooses(parsed, layers):
        return
    if parsed.is_delete():
        yield Setting(effect="removes", value=NOWHERE, text=text)
        return
    given = parsed.value()
    if parsed.type is OverrideType.CHANGE and isinstance(given, dict) and "_target_" in given:
        # As exp takes it: the node of the groups goes.
        yield Setting(effect="empties", value=NOWHERE, text=text)
    value, _ = found_in(given, parts[len(at) :])
    if value is not NOWHERE:
        yield Setting(effect="sets", value=value, text=text)
    elif (held := _holder({"": given}, ("", *parts[len(at) :]))) is not None:
        yield Setting(effect="covers", value=held[0], text=text)


def chooses(parsed: Override, layers: Sequence[Layer]) -> bool:
    """Whether an override is a choice of a group's options, and no value."""
    value = None if parsed.is_delete() else parsed.value()
    options = value if isinstance(value, list) else [value]
    paths = {layer.config_path for layer in layers}
    groups = {path.rpartition("/")[0] for path in paths}
    # An empty choice, hooks=[], brings no file.
    return not isinstance(value, dict) and (
        parsed.key_or_group in groups or any(f"{parsed.key_or_group}/{one}" in paths for one in options)
    )


def reason_of(config: DictConfig, layer: Layer) -> str | None:
    """Who chose a layer: the override, or the line of a defaults list; None of the primary config.

    Raises: ConfigError where a file cannot be read any more.
    """
    group, _, option = layer.config_path.rpartition("/")
    if not group:
        return None
    for text in reversed(overrides_of(config)):
        parsed = parse_override(text)
        if parsed.key_or_group != group or parsed.is_delete():
            continue
        value = parsed.value()
        if option in (value if isinstance(value, list) else [value]):
            return text
    lists = [(one, number, line) for one in layers_of(config) if one.file for number, line in _defaults(one.file)]
    # What an override line says counts more than the list that it changes.
    for is_override in (True, False):
        for one, number, line in reversed(lists):
            if _names(line, layer, near=one) and _is_override(line) is is_override:
                assert one.file is not None
                return place_of(one.file, ("defaults", str(number)))
    return None


def _defaults(file: Path) -> list[tuple[int, Any]]:
    content = read_yaml(file)
    found = content.get("defaults") if isinstance(content, Mapping) else None
    return list(enumerate(found)) if isinstance(found, list) else []


def _is_override(line: Any) -> bool:
    return isinstance(line, Mapping) and any(str(key).startswith("override ") for key in line)


def _names(line: Any, layer: Layer, *, near: Layer) -> bool:
    """Whether a line of the defaults list of a file brings a layer. near: the file's own."""
    pairs = line.items() if isinstance(line, Mapping) else [("", line)]
    folder = near.config_path.rpartition("/")[0]
    for key, value in pairs:
        words = str(key).removeprefix("override ").removeprefix("optional ").partition("@")[0]
        for option in value if isinstance(value, list) else [value]:
            path = f"{words}/{str(option).partition('@')[0]}".lstrip("/")
            is_absolute = words.startswith("/") or str(option).startswith("/") or not folder
            if layer.config_path == (path if is_absolute else f"{folder}/{path}"):
                return True
    return False


def raw_of(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain values with its interpolations as they are written, and without its record."""
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False, throw_on_missing=False))
    return {name: value for name, value in plain.items() if name != COMPOSITION}
