"""Checks for the key `module`. If it is set, the run trains a LightningModule of the user.

The run then does not use keys such as `model`, `objective` and `optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

from exp.config.frozen import COMPOSITION
from exp.config.plain_tree import value_at
from exp.config.reading import UNKNOWN, Values
from exp.config.settings import Word
from exp.errors import ErrorDetails, not_supported_with
from exp.spelling import show

MODULE_KEY = "module"
# Key of the node COMPOSITION. Its value lists the keys that the user set although the run does not use them. Each entry
# also names the file or command line that set the key.
REFUSED_KEYS = "refused"
# Nodes that a run of a LightningModule does not use. Each has the value that replaces the node, and a text that states
# which part of the module is used instead.
REPLACED: Mapping[str, tuple[object, str]] = {
    "model": (None, "the module makes its network from its parameters, such as module.net"),
    "objective": ({}, "the training_step of the module returns the loss"),
    "metrics": ({}, "the module logs its metrics by self.log"),
    "phases": ({}, "the configure_optimizers of the module returns several optimizers for manual optimization"),
    "optimizer": (None, "configure_optimizers makes the optimizer from parameters such as module.optimizer"),
    "scheduler": (None, "configure_optimizers makes the schedule from parameters such as module.scheduler"),
}
_NETWORK = "the module owns its network: change it in __init__ or configure_model"
_STEP = "the module defines the step, and Lightning's Trainer runs it"
# Keys that have only one allowed value in a run of a LightningModule. Each has this value, and the reason.
FIXED: Mapping[str, tuple[object, str]] = {
    "weights.from": (None, "the module loads its initial weights; resume continues from a checkpoint of exp"),
    "initialisation": ({}, _NETWORK),
    "freeze.parameters": ([], _NETWORK),
    "freeze.unfreeze": ({}, _NETWORK),
    "lora.layers": ([], _NETWORK),
    "metric_stages": (["val", "test"], "the module logs its metrics in the steps that it chooses"),
    "precision.keep": ({}, "the layers that the module calls are unknown before its step"),
    "runtime.steps_per_execution": (None, _STEP),
    "runtime.compile": (False, "the module compiles its parts itself: self.net = torch.compile(self.net) in setup"),
    "runtime.channels_last": (False, _NETWORK),
    "runtime.non_finite": ("stop", _STEP),
}
# Options of the group precision that Lightning supports.
WORDS = tuple(word for word in get_args(Word) if word != "fp8")


def brings_data(plain: Mapping[str, object]) -> bool:
    """Return whether a config trains a user's LightningModule with the data loaders of a LightningDataModule.

    `data` is a LightningDataModule if its class is not of exp.
    """
    target = value_at(plain, "data._target_")
    return has_module(plain) and isinstance(target, str) and not target.startswith("exp.")


def has_module(plain: Mapping[str, object]) -> bool:
    """Return whether a config trains a LightningModule of the user."""
    return MODULE_KEY in plain and plain[MODULE_KEY] is not None


def module_errors(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of a config that trains a user's LightningModule.

    It is an error if the user sets a key that the run ignores, such as `model`. Values that are not supported for a
    LightningModule are errors, too.
    """
    other = f"module, {values[f'{MODULE_KEY}._target_']}"
    refused = values[f"{COMPOSITION}.{REFUSED_KEYS}"]
    for text in refused if isinstance(refused, list) else ():
        key, _, source = text.partition("=")
        expected = f"no value, because {REPLACED[key.partition('.')[0]][1]}"
        error = not_supported_with(key, "set", other, expected, f"Leave out {key} or module")
        yield replace(error, source=source)
    for key, (required, why) in FIXED.items():
        value = values[key]
        if value is not UNKNOWN and value != required:
            yield not_supported_with(key, show(value), other, f"{show(required)}, because {why}")
    if values["precision.word"] == "fp8":
        expected = f"one of {', '.join(WORDS)}, because fp8 replaces layers of the network"
        yield not_supported_with("precision.word", "fp8", other, expected, "Write precision=bf16")
