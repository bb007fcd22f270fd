"""What has no gradient of one sample by itself, told before the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import vmap

from exp.errors import Fault
from exp.hooks.apart import objective_faults
from exp.models.inference import example_inputs
from exp.models.normalisation import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import tensors_in
from exp.types import DataSpec

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

CLIP_MODULE = "exp.hooks.clip_module.ClipModule"
APART = "a network that treats the samples of a batch apart"


def sample_faults(name: str, planned: Planned) -> Iterator[Fault]:
    """Of a hook of this name that takes the gradient of each sample. Each at the key of what stands in its way."""
    config, network = planned.config, planned.network
    hook = f"hooks.{name}"
    leave = f"leave the hook out with ~{hook}"
    yield from objective_faults(name, planned, takes_samples=True)
    if planned.batch_size * config["trainer"].get("accumulate_grad_batches", 1) < 2:
        got, expected = f"a step of one sample, with {hook}", "2 or more, to compare one with all"
        yield Fault(key="data.batch_size", got=got, expected=expected, cure=f"Take more, or {leave}")
    yield from _clipping_faults(hook, config["hooks"])
    mixing = [path for path, module in network.named_modules() if _mixes(module)]
    if mixing:
        kind = type(network.get_submodule(mixing[0])).__name__
        paths = f"{', '.join(mixing[:3])}{' and others' if len(mixing) > 3 else ''}"
        yield Fault(
            key="model",
            got=f"{paths}: {kind}, which mixes samples, with {hook}",
            expected=APART,
            cure=f"Take torch.nn.GroupNorm or torch.nn.LayerNorm in its place, or {leave}",
        )
    else:
        yield from _forward_faults(hook, network, DataSpec.of(config["data"]), f"Choose another model, or {leave}")


def _clipping_faults(hook: str, hooks: Mapping[str, Any]) -> Iterator[Fault]:
    for other, node in hooks.items():
        # Written out: a hook that its YAML leaves at the default of `at` is at the output.
        at, algorithm = node.get("at", "output"), node.get("algorithm", "norm")
        if node["_target_"] == CLIP_MODULE and at != "parameters" and algorithm == "norm":
            yield Fault(
                key=f"hooks.{other}",
                got=f"the gradient of a batch clipped, with {hook}, for which each sample's would be by itself",
                expected="gradients of samples whose mean is the batch's",
                cure=f"Write hooks.{other}.at=parameters, or leave one of the two out",
            )


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) or (isinstance(module, INSTANCE_NORMS) and module.track_running_stats)


def _forward_faults(hook: str, network: nn.Module, spec: DataSpec, cure: str) -> Iterator[Fault]:
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
                key="model",
                got=f"a network that makes of {count} samples a tensor of shape {shapes[0]}, with {hook}",
                expected="an output with the batch as its first axis",
                cure=cure,
            )
            return
    reason = _why_not_by_vmap(network, example_inputs(spec, device="meta"))
    if reason is not None:
        got = f"a network that torch.func.vmap refuses, with {hook}: {reason}"
        yield Fault(key="model", got=got, expected=APART, cure=cure)


def _why_not_by_vmap(network: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    try:
        with torch.no_grad():
            vmap(lambda *sample: network(*(one[None] for one in sample)), randomness="different")(*inputs)
    except Exception as error:  # a user's own layer may raise anything, and so do operators without numbers
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return message if "vmap" in str(error) else None
    return None
