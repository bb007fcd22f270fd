"""Find switches of `runtime` that have no effect on a run, or that it does not support."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import LBFGS

from exp.errors import ErrorDetails
from exp.shared_types import DataSpec
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import Blueprint

# The compilers that inductor looks for on a machine without a GPU, after the environment's CXX.
COMPILERS = ("g++", "clang++", "c++", "cl", "icpx")


def switch_errors(planned: Blueprint) -> Iterator[ErrorDetails]:
    """Yield the errors of the switches."""
    runtime, network = planned.settings.runtime, planned.network
    if runtime.compile:
        backend, mode = runtime.compile_backend, runtime.compile_mode
        yield from compile_errors(network, backend=backend, mode=mode, accelerator=planned.placement.accelerator)
    if runtime.channels_last:
        key, fix = "runtime.channels_last", "Write runtime.channels_last=false"
        shapes = [list(one.shape) for one in DataSpec.of(planned.settings.data).inputs.values()]
        if all(len(shape) != 3 for shape in shapes):
            got = f"true with samples of shape {' and '.join(map(str, shapes))}"
            yield ErrorDetails(key, got, "samples [C, H, W], so that a batch has four dimensions", fix)
        elif not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in network.modules()):
            got = "true for a model without a convolution"
            yield ErrorDetails(key, got, "a model with a Conv2d, which is faster with it", fix)
    if runtime.non_finite == "skip":
        expected = "an optimizer of torch.optim except LBFGS, and a strategy that leaves the step to it"
        for reason in _step_makers(planned):
            yield ErrorDetails("runtime.non_finite", f"skip with {reason}", expected, "Write runtime.non_finite=stop")


def _step_makers(planned: Blueprint) -> Iterator[str]:
    """Yield what makes steps that cannot be skipped."""
    for kind in planned.optimizers if not planned.settings.phases else ():  # those of phases get no closure to call
        if not kind.__module__.startswith("torch.optim.") or issubclass(kind, LBFGS):
            yield f"{kind.__name__}, which may make the gradients of a step itself"
    if "owns_step" in planned.traits:
        yield f"strategy={planned.settings.strategy['name']}, whose engine makes the steps"


def compile_errors(
    network: nn.Module, *, backend: str, mode: str | None = None, accelerator: str
) -> Iterator[ErrorDetails]:
    """Yield what runtime.compile=true would not compile, or not run. accelerator: cpu, cuda or mps."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        expected = f"one of {among(known, word=backend)}"
        yield ErrorDetails("runtime.compile_backend", backend, expected, did_you_mean(backend, known))
    named = os.environ["CXX"].split()[:1] if os.environ.get("CXX") else []
    if backend == "inductor" and accelerator == "cpu" and not any(map(shutil.which, (*named, *COMPILERS))):
        expected = f"one of {', '.join(COMPILERS[:3])} on the path: on CPU inductor writes C++"
        got, fix = "inductor on a machine without a C++ compiler", "Install g++, or write runtime.compile=false"
        yield ErrorDetails("runtime.compile_backend", got, expected, fix)
    if mode is not None and (backend != "inductor" or accelerator != "cuda"):
        expected = "null, or the backend inductor on a CUDA device: modes choose its kernels and CUDA graphs"
        fix = "Write runtime.compile_mode=null"
        yield ErrorDetails("runtime.compile_mode", f"{mode} with {backend} on {accelerator}", expected, fix)
    if type(network).forward.__module__.startswith("torch.nn."):
        got = f"true for a model that is a {type(network).__name__} of torch itself, which torch never compiles"
        fix = "Put it into model=sequential as a layer, or write runtime.compile=false"
        yield ErrorDetails("runtime.compile", got, "a model with a class of its own", fix)
