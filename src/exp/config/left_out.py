"""Removal of the config nodes that a run of a user's LightningModule (key `module`) does not use.

The LightningModule has its own network, losses, metrics and optimizers. exp's default nodes for these parts are removed
from the composed config. If the user chose one of these nodes, `module_errors` reports an error. If another node refers
to one of them, as in `net: ${model}`, the referenced node is kept. A LightningDataModule has its own data loaders, so
exp's default keys of `data` are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.config.frozen import COMPOSITION
from exp.config.grammar import parse_override
from exp.config.module_key import MODULE_KEY, REFUSED_KEYS, REPLACED, brings_data, has_module
from exp.config.reading import raw_values
from exp.config.search_path import OWN_CONF, display_path
from exp.config.sources import Setting, layers_of, setters_of
from exp.config.yaml_files import choices_of, read_yaml
from exp.errors import COMMAND_LINE

REFERENCE = re.compile(rf"\$\{{({'|'.join(REPLACED)})\b")
# Groups with options that may choose options of other groups. For example, a data set may also select an objective.
OTHERS = ("data", *REPLACED)


def leave_out(config: DictConfig) -> None:
    """Remove the unused nodes from a composed config, in place.

    If the user set a key of an unused node, the key is recorded in the node COMPOSITION. `module_errors` reports it
    later. A config without a user's LightningModule is not changed.
    """
    if not has_module(raw_values(OmegaConf.masked_copy(config, MODULE_KEY))):
        return
    plain = raw_values(config)
    others = {name: node for name, node in plain.items() if name not in (*REPLACED, COMPOSITION)}
    referred = set(REFERENCE.findall(str(others)))
    left = [name for name in REPLACED if name in config and name not in referred]
    found = {key: source for key, source in _user_choices(config) if key.partition(".")[0] in left}
    setters = setters_of(config)
    with open_dict(config):
        config[COMPOSITION][REFUSED_KEYS] = [f"{key}={source}" for key, source in found.items()]
        if brings_data(plain):
            for name in [name for name in config.data if _is_default(setters, f"data.{name}")]:
                del config.data[name]
        if _is_default(setters, "monitor"):
            config.monitor = None  # a module does not log exp's loss/val
        for name in left:
            config[name] = REPLACED[name][0]


def _user_choices(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that the user set in a node of REPLACED, with the file or command line that set the key."""
    for text in config[COMPOSITION].overrides:
        line = parse_override(str(text))
        key = str(line.key_or_group)
        if key.partition(".")[0] in REPLACED and not line.is_delete() and line.value() != []:
            yield key, COMMAND_LINE
    for layer in layers_of(config):
        group, _, is_below = layer.config_path.partition("/")
        # Settings in the primary config and in options of the groups in OTHERS may be defaults, not the user's choice.
        if layer.file is None or not is_below or group in OTHERS:
            continue
        if group == "experiment" or _is_users(layer.file):
            content = read_yaml(layer.file)
            keys = [choice.group for choice in choices_of(content) if choice.options]
            if layer.package in ("", "_global_") and isinstance(content, dict):
                for name, below in content.items():
                    keys += [f"{name}.{inner}" for inner in below] if isinstance(below, dict) else [str(name)]
            yield from ((key, display_path(layer.file)) for key in keys if key.partition(".")[0] in REPLACED)


def _is_users(file: Path) -> bool:
    return not file.resolve().is_relative_to(OWN_CONF.resolve())


def _is_default(setters: Mapping[str, Setting], key: str) -> bool:
    """Return whether the value of a key comes from one of exp's own config files, not from the user.

    Args:
        setters: Last setting of each key, as returned by `setters_of`.
        key: Dotted key.
    """
    setter = setters.get(key)
    return setter is not None and setter.file is not None and not _is_users(setter.file)
