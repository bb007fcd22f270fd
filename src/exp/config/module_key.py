"""The key `module`, a LightningModule of the user's own, and the keys that a run of it does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from exp.config.frozen import COMPOSITION
from exp.config.reading import UNKNOWN, Values
from exp.errors import ErrorDetails
from exp.spelling import show

MODULE_KEY = "module"
# In the record of the composition: what the user chose of the replaced nodes, with its source.
REFUSED_KEYS = "refused"
# The values that replace each node, and what stands for the node in a run of a module.
REPLACED: Mapping[str, tuple[Any, str]] = {
    "model": (None, "the network is what the module makes of its own parameters, such as module.net"),
    "objective": ({}, "its losses are what its training_step returns"),
    "metrics": ({}, "its metrics are what it gives to self.log"),
    "phases": ({}, "several optimizers are made by its configure_optimizers, and stepped by manual optimization"),
    "optimizer": (None, "its configure_optimizers makes them of its own parameters, such as module.optimizer"),
    "scheduler": (None, "its configure_optimizers makes them of its own parameters, such as module.scheduler"),
}
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


def brings_data(plain: Mapping[str, Any]) -> bool:
    """Return whether the data of a run with a module are of a class that is not exp's, which has its own loaders."""
    target = Values(dict(plain))["data._target_"]
    return has_module(plain) and isinstance(target, str) and not target.startswith("exp.")


def has_module(plain: Mapping[str, Any]) -> bool:
    """Return whether a config trains a LightningModule of the user's own."""
    return MODULE_KEY in plain and plain[MODULE_KEY] is not None


def target_of(plain: Mapping[str, Any]) -> str:
    """Return the name of the module's class, for a message."""
    node = plain[MODULE_KEY]
    return str(node["_target_"]) if isinstance(node, dict) and "_target_" in node else "which is set"


def module_stands_alone(values: Values) -> Iterator[ErrorDetails]:
    """Yield an error for each choice of exp's own model, objective, optimizer and so on, which a module ignores."""
    refused = values[f"{COMPOSITION}.{REFUSED_KEYS}"]
    for text in refused if isinstance(refused, list) else ():
        key, _, source = text.partition("=")
        got, why = f"set beside module, {target_of(values.plain)}", REPLACED[key.partition(".")[0]][1]
        fix = "Leave it out, or leave out module"
        yield ErrorDetails(key=key, got=got, expected=f"nothing: {why}", fix=fix, source=source)
    named = f"with module, {target_of(values.plain)}"
    for key, (without, why) in FIXED.items():
        value = values[key]
        if value is not UNKNOWN and value != without:
            yield ErrorDetails(key=key, got=f"{show(value)} {named}", expected=f"{show(without)}: {why}")
    word = values["precision.word"]
    if isinstance(word, str) and word == "fp8":
        expected = f"one of {', '.join(WORDS)}: fp8 puts other layers in the place of the network's"
        yield ErrorDetails(key="precision.word", got=f"fp8 {named}", expected=expected, fix="Write precision=bf16")
