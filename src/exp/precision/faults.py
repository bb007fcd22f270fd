"""What a word of precision cannot do on a device, with an optimizer, or with a network: said before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError, Fault, MissingExtraError
from exp.precision.fp8 import refuse_without
from exp.precision.keep import kept_layers, refuse_shared
from exp.precision.words import WORDS, Word

# The smallest number of float16 is 6e-8: half of it and less is rounded to 0.
SMALLEST_HALF = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def device_faults(word: Word, accelerator: str) -> list[Fault]:
    """accelerator: cpu, cuda or mps."""
    if accelerator == "mps" and word in ("fp16", "fp64"):
        reason = "the loss scale of fp16 has no kernels there" if word == "fp16" else "it has no float64"
        expected = f"fp32 or bf16: {reason}"
        return [Fault(key="precision.word", got=f"{word} on mps", expected=expected, cure="Write precision=bf16")]
    if word != "fp8":
        return []
    try:
        refuse_without(accelerator)
    except ConfigError as error:
        return list(error.faults)
    except MissingExtraError as error:
        return [Fault(key="precision.word", got="fp8 without torchao", expected=str(error))]
    return []


def report_faults(precision: Mapping[str, Any], *, phases: Mapping[str, Any], ranks_of_a_model: int) -> list[Fault]:
    """precision: the config's node. ranks_of_a_model: how many ranks or devices hold parts of one network."""
    if not precision["report"]:
        return []
    expected = "false: it measures one network with one loss, whole, on one device"
    if phases:
        return [Fault(key="precision.report", got=f"true with the phases {', '.join(phases)}", expected=expected)]
    if ranks_of_a_model > 1:
        return [
            Fault(
                key="precision.report",
                got=f"true, and {ranks_of_a_model} devices hold parts of the network",
                expected=expected,
                cure="Run it once with strategy=single",
            )
        ]
    return []


def network_faults(word: Word, network: nn.Module, keep: Mapping[str, str]) -> list[Fault]:
    """Patterns of precision.keep that match nothing, and shared parameters of which only one is kept."""
    try:
        kept = kept_layers(network, keep)
        refuse_shared(network, kept, otherwise=WORDS[word].parameters or torch.float32)
    except ConfigError as error:
        return list(error.faults)
    return []


def optimizer_faults(word: Word, optimizer: Optimizer) -> list[Fault]:
    """What an optimizer cannot do in the word's numbers."""
    if word == "fp16" and isinstance(optimizer, LBFGS):
        expected = "bf16 or fp32: LBFGS cannot skip a step"
        return [Fault(key="precision.word", got="fp16 with LBFGS", expected=expected, cure="Write precision=bf16")]
    if word != "fp16_true":
        return []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if eps is not None and 0 < eps < SMALLEST_HALF:
            return [
                Fault(
                    key="optimizer.eps",
                    got=f"{eps:g} with precision=fp16_true",
                    expected=f"{SMALLEST_HALF:.0e} or more: in float16 it is 0, and the step divides by it",
                    cure="Write optimizer.eps=1e-4, or precision=fp16 or bf16_true",
                )
            ]
    return []
