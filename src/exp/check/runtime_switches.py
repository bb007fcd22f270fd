"""The errors of keys of `runtime` that have no effect on a run, or that the run does not support."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import LBFGS

from exp.errors import ErrorDetails, not_supported_with, unknown_word
from exp.shared_types import DataSpec
from exp.strategies.strategy import Blueprint


def switch_errors(planned: Blueprint) -> Iterator[ErrorDetails]:
    """Yield the errors of keys of `runtime` that have no effect or that the run does not support."""
    runtime, network = planned.settings.runtime, planned.network
    if runtime.compile:
        backend, mode = runtime.compile_backend, runtime.compile_mode
        yield from compile_errors(network, backend=backend, mode=mode, accelerator=planned.placement.accelerator)
    if runtime.channels_last:
        key, fix = "runtime.channels_last", "Write runtime.channels_last=false"
        shapes = [list(one.shape) for one in DataSpec.of(planned.settings.data).inputs.values()]
        if all(len(shape) != 3 for shape in shapes):
            other = f"samples of shape {' and '.join(map(str, shapes))}"
            yield not_supported_with(
                key, True, other, "samples of shape [C, H, W], because channels_last needs batches with four axes", fix
            )
        elif not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in network.modules()):
            expected = "a model with a Conv2d, because other layers are not faster with channels_last"
            yield not_supported_with(key, True, "a model without a convolution", expected, fix)
    if runtime.non_finite == "skip":
        expected = "an optimizer of torch.optim except LBFGS, and a strategy that calls it in each step"
        for reason in _step_makers(planned):
            yield not_supported_with("runtime.non_finite", "skip", reason, expected, "Write runtime.non_finite=stop")


def _step_makers(planned: Blueprint) -> Iterator[str]:
    """Yield a description of each optimizer or strategy with steps that exp cannot skip."""
    for kind in planned.optimizers if not planned.settings.phases else ():  # phases call optimizers without a closure
        if not kind.__module__.startswith("torch.optim.") or issubclass(kind, LBFGS):
            yield f"{kind.__name__}, which may compute the gradients of a step itself"
    if "owns_step" in planned.traits:
        yield f"strategy={planned.settings.strategy['name']}, whose engine runs the optimizer steps"


def compile_errors(
    network: nn.Module, *, backend: str, mode: str | None = None, accelerator: str
) -> Iterator[ErrorDetails]:
    """Yield the errors of runtime.compile=true.

    Args:
        network: The network.
        backend: Value of runtime.compile_backend.
        mode: Value of runtime.compile_mode. Default: None.
        accelerator: Type of the devices: cpu, cuda or mps.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        yield unknown_word("runtime.compile_backend", backend, known)
    if mode is not None and (backend != "inductor" or accelerator != "cuda"):
        expected = "null, because modes apply only to the backend inductor on a CUDA device"
        fix = "Write runtime.compile_mode=null"
        yield not_supported_with("runtime.compile_mode", mode, f"{backend} on {accelerator}", expected, fix)
    if type(network).forward.__module__.startswith("torch.nn."):
        other = f"a model of torch's own class {type(network).__name__}, which torch never compiles"
        fix = "Make the model a layer of model=sequential, or write runtime.compile=false"
        yield not_supported_with("runtime.compile", True, other, "a model of another class", fix)
