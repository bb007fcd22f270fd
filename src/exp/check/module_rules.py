"""What a config may not ask for beside a LightningModule of the user's own: rules between keys, without an import.

Each of these keys says something of a network, a loss or a step that exp makes itself. In a run of a module the step is
the module's, and Lightning's Trainer runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from exp.config.module_key import chosen_faults, target_of
from exp.config.reading import UNKNOWN, Values
from exp.errors import Fault
from exp.spelling import show

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
    "precision.report": (False, "it compares losses of exp's objective"),
    "runtime.steps_per_execution": (None, _STEP),
    "runtime.compile": (False, "the module compiles what it likes: self.net = torch.compile(self.net) in setup"),
    "runtime.channels_last": (False, _NETWORK),
    "runtime.out_of_memory": ("stop", _STEP),
    "runtime.non_finite": ("stop", _STEP),
}
# Words of precision that change layers one by one, or are none of Lightning's.
WORDS = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64")


def module_stands_alone(values: Values) -> Iterator[Fault]:
    """What the user chose of exp's own model, objective, optimizer ... does not apply to a module, and is told."""
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
