"""What `runtime` may ask for: compilation and the layout in memory, where a run has a use for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import LBFGS

from exp.errors import Fault
from exp.shared_types import DataSpec
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import Blueprint

CHANNELS_LAST = "runtime.channels_last"
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# What inductor looks for on a machine without a GPU, behind the environment's CXX.
COMPILERS = ("g++", "clang++", "c++", "cl", "icpx")


def switch_faults(planned: Blueprint) -> Sequence[Fault]:
    """Everything that `runtime` asks for and that would do nothing for a run, or not run."""
    runtime = planned.config["runtime"]
    faults: list[Fault] = []
    if runtime["compile"]:
        faults += compile_faults(
            planned.network,
            backend=runtime["compile_backend"],
            mode=runtime["compile_mode"],
            accelerator=planned.placement.accelerator,
        )
    if runtime["channels_last"]:
        faults += channels_last_faults(planned.network, DataSpec.of(planned.config["data"]))
    if runtime["non_finite"] == "skip":
        faults += skip_faults(planned)
    return faults


def skip_faults(planned: Blueprint) -> list[Fault]:
    """What steps cannot be skipped in the place of the optimizer, or of the strategy that makes them."""
    kinds = planned.optimizers if not planned.config["phases"] else ()  # those of phases get no closure to call
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.optim.") or issubclass(kind, LBFGS)]
    reasons = [f"{kind.__name__}, which may make the gradients of a step itself" for kind in own]
    if "owns_step" in planned.traits:
        reasons.append(f"strategy={planned.config['strategy']['name']}, whose engine makes the steps")
    return [
        Fault(
            key="runtime.non_finite",
            got=f"skip with {reason}",
            expected="an optimizer of torch.optim but LBFGS, and a strategy that leaves the step to it",
            cure="Write runtime.non_finite=stop",
        )
        for reason in reasons
    ]


def compile_faults(network: nn.Module, *, backend: str, mode: str | None = None, accelerator: str) -> Sequence[Fault]:
    """What would not be compiled, or not run, of runtime.compile=true. accelerator: cpu, cuda or mps."""
    faults = []
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        faults.append(
            Fault(
                key="runtime.compile_backend",
                got=backend,
                expected=f"one of {among(known, word=backend)}",
                cure=did_you_mean(backend, known),
            )
        )
    if backend == "inductor" and accelerator == "cpu" and not _has_compiler():
        faults.append(
            Fault(
                key="runtime.compile_backend",
                got="inductor on a machine without a C++ compiler",
                expected=f"one of {', '.join(COMPILERS[:3])} on the path: on CPU inductor writes C++",
                cure="Install g++, or write runtime.compile=false",
            )
        )
    if mode is not None and (backend != "inductor" or accelerator != "cuda"):
        faults.append(
            Fault(
                key="runtime.compile_mode",
                got=f"{mode} with {backend} on {accelerator}",
                expected="null, or the backend inductor on a CUDA device: modes choose its kernels and CUDA graphs",
                cure="Write runtime.compile_mode=null",
            )
        )
    if type(network).forward.__module__.startswith("torch.nn."):
        faults.append(
            Fault(
                key="runtime.compile",
                got=f"true for a model that is a {type(network).__name__} of torch itself, which torch never compiles",
                expected="a model with a class of its own",
                cure="Put it into model=sequential as a layer, or write runtime.compile=false",
            )
        )
    return faults


def _has_compiler() -> bool:
    named = os.environ["CXX"].split()[:1] if os.environ.get("CXX") else []
    return any(shutil.which(name) for name in (*named, *COMPILERS))


def channels_last_faults(network: nn.Module, spec: DataSpec) -> list[Fault]:
    """What it would not do anything for."""
    shapes = [list(one.shape) for one in spec.inputs.values()]
    if all(len(shape) != 3 for shape in shapes):
        return [
            Fault(
                key=CHANNELS_LAST,
                got=f"true with samples of shape {' and '.join(map(str, shapes))}",
                expected="samples [C, H, W], so that a batch has four dimensions",
                cure=f"Write {CHANNELS_LAST}=false",
            )
        ]
    if not any(isinstance(module, CONVOLUTIONS) for module in network.modules()):
        return [
            Fault(
                key=CHANNELS_LAST,
                got="true for a model without a convolution",
                expected="a model with a Conv2d, which is what it is faster for",
                cure=f"Write {CHANNELS_LAST}=false",
            )
        ]
    return []
