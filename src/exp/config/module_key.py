"""What a LightningModule of the user's own, the key `module`, leaves of the rest of a config.

It brings its network, its losses, its metrics and its optimizers, so the nodes that say these are not its run's. Those
that exp's defaults set are taken out of the composed config, and a note says so; one that the user chose is a fault
that names it. A node that something else of the config refers to, as `net: ${model}` does, stays for that.

A LightningDataModule of the user's own has its loaders: of `data` it is given what the user wrote, and not the defaults
that exp's own data sets take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.config.freeze import COMPOSITION
from exp.config.grammar import parse_override
from exp.config.groups import COMMAND_LINE
from exp.config.hydra_adapter import Layer
from exp.config.reading import UNKNOWN, Values
from exp.config.search_path import OWN_CONF, shown
from exp.config.sources import Setting, setters_of
from exp.config.yaml_files import read_yaml
from exp.errors import Fault
from exp.spelling import show

MODULE_KEY = "module"
# What is left of each node, and where its words belong in a run of a module.
REPLACED: Mapping[str, tuple[Any, str]] = {
    "model": (None, "the network is what the module makes of its own parameters, such as module.net"),
    "objective": ({}, "its losses are what its training_step returns"),
    "metrics": ({}, "its metrics are what it gives to self.log"),
    "phases": ({}, "several optimizers are made by its configure_optimizers, and stepped by manual optimization"),
    "optimizer": (None, "its configure_optimizers makes them of its own parameters, such as module.optimizer"),
    "scheduler": (None, "its configure_optimizers makes them of its own parameters, such as module.scheduler"),
}
REFUSED_KEYS = "refused"
REFERENCE = re.compile(rf"\$\{{({'|'.join(REPLACED)})\b")
# Chosen by somebody else than the run: a data set of another task brings an objective along.
OTHERS = ("data", *REPLACED)
_NETWORK = "the network is the module's own, and so is what is done to it: do it in its __init__, or in configure_model"
_STEP = "the step is the module's own, and Lightning's Trainer runs it"
# By key: what it is in a run of a module, and why.
FIXED: Mapping[str, tuple[Any, str]] = {
    "weights.from": (None, "the module loads what it starts from; resume goes on from a checkpoint of exp"),
    "initialisation": ({}, _NETWORK),
    "freeze.parameters": ([], _NETWORK),
    "freeze.unfreeze": ({}, _NETWORK),
    "lora.layers": ([], _NETWORK),
    "metric_stages": (["val", "test"], "the module gives its metrics to self.log, in the steps that it likes"),
    "precision.keep": ({}, "which layers the module calls, and how, nobody knows before its step"),
    "runtime.steps_per_execution": (None, _STEP),
    "runtime.compile": (False, "the module compiles what it likes: self.net = torch.compile(self.net) in setup"),
    "runtime.channels_last": (False, _NETWORK),
    "runtime.non_finite": ("stop", _STEP),
}
# Words of precision that change layers one by one, or are none of Lightning's.
WORDS = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64")


def leave_out(config: DictConfig) -> None:
    """Take out of a composed config, in place, what does not apply to a run of a module.

    What the user chose of it is written into the record of the composition, for `chosen_faults`.
    """
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    if not has_module(plain):
        return
    read = _referred(plain)
    left = [name for name in REPLACED if name in config and name not in read]
    composition = config[COMPOSITION]
    found = {key: source for key, source in _chosen(config) if key.partition(".")[0] in left}
    setters = setters_of(config)
    with open_dict(config):
        composition[REFUSED_KEYS] = [f"{key}={source}" for key, source in found.items()]
        if brings_data(plain):
            for name in [name for name in config.data if _is_default(setters, f"data.{name}")]:
                del config.data[name]
        if _is_default(setters, "monitor"):
            config.monitor = None  # exp's loss/val is no tag of a module's
        for name in left:
            config[name] = REPLACED[name][0]


def brings_data(plain: Mapping[str, Any]) -> bool:
    """Whether the data of a run with a module are of a class that is not exp's: it has loaders of its own."""
    target = Values(dict(plain))["data._target_"]
    return has_module(plain) and isinstance(target, str) and not target.startswith("exp.")


def has_module(plain: Mapping[str, Any]) -> bool:
    """Whether a LightningModule of the user's own is what is trained."""
    return MODULE_KEY in plain and plain[MODULE_KEY] is not None


def chosen_faults(plain: Mapping[str, Any]) -> Iterator[Fault]:
    """The faults of what the user chose beside a module, and no module reads."""
    refused = Values(dict(plain))[f"{COMPOSITION}.{REFUSED_KEYS}"]
    for text in refused if isinstance(refused, list) else ():
        key, _, source = text.partition("=")
        yield Fault(
            key=key,
            got=f"set beside module, {target_of(plain)}",
            expected=f"nothing: {REPLACED[key.partition('.')[0]][1]}",
            cure="Leave it out, or leave out module",
            source=source,
        )


def target_of(plain: Mapping[str, Any]) -> str:
    """The name of the module's class, for a message."""
    node = plain[MODULE_KEY]
    return str(node["_target_"]) if isinstance(node, dict) and "_target_" in node else "which is set"


def _referred(plain: Mapping[str, Any]) -> set[str]:
    """The nodes that other nodes refer to by an interpolation."""
    others = {name: node for name, node in plain.items() if name not in (*REPLACED, COMPOSITION)}
    return set(REFERENCE.findall(str(others)))


def _chosen(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Each key of such a node that the user set or chose, and where."""
    composition = config[COMPOSITION]
    for text in composition.overrides:
        line = parse_override(str(text))
        key = str(line.key_or_group)
        if key.partition(".")[0] in REPLACED and not line.is_delete() and line.value() != []:
            yield key, COMMAND_LINE
    for layer in map(Layer.of, map(str, composition.layers)):
        group, _, is_below = layer.config_path.partition("/")
        # The primary config and the options of these groups are in every run, whoever wrote them.
        if is_below and group not in OTHERS and (group == "experiment" or _is_users(layer.file)):
            yield from ((key, shown(cast(Path, layer.file))) for key in _named_in(layer))


def _named_in(layer: Layer) -> Iterator[str]:
    """The keys of such nodes that one file sets, and the groups that its defaults list chooses from."""
    content = cast("dict[str, Any]", read_yaml(cast(Path, layer.file)) or {})
    for entry in content.get("defaults", ()):
        for words, option in entry.items() if isinstance(entry, dict) else ():
            group = str(words).removeprefix("override ").strip().lstrip("/")
            if group in REPLACED and option not in (None, []):
                yield group
    if layer.package in ("", "_global_"):
        for name in (name for name in content if name in REPLACED):
            below = content[name]
            yield from (f"{name}.{inner}" for inner in below) if isinstance(below, dict) else (name,)


def _is_users(file: Path | None) -> bool:
    return file is not None and not file.resolve().is_relative_to(OWN_CONF.resolve())


def _is_default(setters: Mapping[str, Setting], key: str) -> bool:
    """Whether a key has the value that a file of exp's gave it."""
    setter = setters.get(key)
    return setter is not None and setter.file is not None and not _is_users(setter.file)


def module_stands_alone(values: Values) -> Iterator[Fault]:
    """Yield an error for each choice of exp's own model, objective, optimizer and so on, which a module ignores."""
    yield from chosen_faults(values.plain)
    named = f"with module, {target_of(values.plain)}"
    for key, (without, why) in FIXED.items():
        value = values[key]
        if value is not UNKNOWN and value != without:
            yield Fault(key=key, got=f"{show(value)} {named}", expected=f"{show(without)}: {why}")
    word = values["precision.word"]
    if isinstance(word, str) and word == "fp8":
        expected = f"one of {', '.join(WORDS)}: fp8 puts other layers in the place of the network's"
        yield Fault(key="precision.word", got=f"fp8 {named}", expected=expected, cure="Write precision=bf16")
