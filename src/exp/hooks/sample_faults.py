"""What has no gradient of one sample by itself, told before the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import vmap

from exp.errors import Fault
from exp.models.inference import example_inputs
from exp.models.normalisation import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import tensors_in
from exp.types import DataSpec

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

APART = "a network that treats the samples of a batch apart"


def sample_faults(name: str, planned: Planned) -> Iterator[Fault]:
    """Of a hook of this name that takes the gradient of each sample."""
    key, config, network = f"hooks.{name}", planned.config, planned.network
    cure = f"Leave the hook out with ~{key}"
    if planned.needs:
        words = ", ".join(sorted(planned.needs))
        expected = "terms of the values of one forward pass: a gradient of theirs cannot be taken for each sample"
        yield Fault(key=key, got=f"an objective that needs {words}", expected=expected, cure=cure)
    if planned.weighed:
        yield Fault(
            key=key,
            got=f"an objective that divides by weights of its targets: {', '.join(planned.weighed)}",
            expected="a mean over samples, of which each has an equal share",
            cure=f"Take class_weights and ignore_index out, or {cure[0].lower()}{cure[1:]}",
        )
    accumulated = config["trainer"].get("accumulate_grad_batches", 1)
    if planned.batch_size * accumulated < 2:
        yield Fault(key=key, got="a step of one sample", expected="2 or more, to compare one with all", cure=cure)
    mixing = [path for path, module in network.named_modules() if _mixes(module)]
    if mixing:
        kind = type(network.get_submodule(mixing[0])).__name__
        yield Fault(
            key=key,
            got=f"{', '.join(mixing[:3])}{' and others' if len(mixing) > 3 else ''}: {kind}, which mixes samples",
            expected=APART,
            cure=f"Take torch.nn.GroupNorm or torch.nn.LayerNorm in its place, or {cure[0].lower()}{cure[1:]}",
        )
    else:
        yield from _forward_faults(key, network, DataSpec.of(config["data"]), cure)


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) or (isinstance(module, INSTANCE_NORMS) and module.track_running_stats)


def _forward_faults(key: str, network: nn.Module, spec: DataSpec, cure: str) -> Iterator[Fault]:
    """Forwards without numbers, of 2 samples, of 3, and of 2 by vmap."""
    try:
        with torch.no_grad():
            outputs = {count: network(*example_inputs(spec, batch_size=count, device="meta")) for count in (2, 3)}
    except Exception:  # the shape check has told what is wrong, or why nothing can be said
        return
    for count, output in outputs.items():
        shapes = [list(tensor.shape) for tensor in tensors_in(output)]
        if any(not shape or shape[0] != count for shape in shapes):
            yield Fault(
                key=key,
                got=f"a network that makes of {count} samples a tensor of shape {shapes[0]}",
                expected="an output with the batch as its first axis",
                cure=cure,
            )
            return
    reason = _why_not_by_vmap(network, example_inputs(spec, device="meta"))
    if reason is not None:
        yield Fault(key=key, got=f"a network that torch.func.vmap refuses: {reason}", expected=APART, cure=cure)


def _why_not_by_vmap(network: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    try:
        with torch.no_grad():
            vmap(lambda *sample: network(*(one[None] for one in sample)), randomness="different")(*inputs)
    except Exception as error:  # a user's own layer may raise anything, and so do operators without numbers
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return message if "vmap" in str(error) else None
    return None
