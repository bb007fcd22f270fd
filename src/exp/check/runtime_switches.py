"""What `runtime` may ask for: compilation, the layout in memory and CUDA graphs, where a run has a use for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from exp.errors import Fault
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import Blueprint

CHANNELS_LAST = "runtime.channels_last"
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
CUDA_GRAPH = "runtime.cuda_graph"
# What inductor looks for on a machine without a GPU, behind the environment's CXX.
COMPILERS = ("g++", "clang++", "c++", "cl", "icpx")


def switch_faults(planned: Blueprint) -> Sequence[Fault]:
    """Everything that `runtime` asks for and that would do nothing for a run, or not run."""
    runtime = planned.config["runtime"]
    faults: list[Fault] = []
    if runtime["compile"]:
        backend, accelerator = runtime["compile_backend"], planned.placement.accelerator
        faults += compile_faults(planned.network, backend=backend, accelerator=accelerator)
    if runtime["channels_last"]:
        faults += channels_last_faults(planned.network, planned.config["data"]["input_shape"])
    if runtime["cuda_graph"]:
        faults += cuda_graph_faults(planned)
    return faults


def compile_faults(network: nn.Module, *, backend: str, accelerator: str) -> Sequence[Fault]:
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


def channels_last_faults(network: nn.Module, input_shape: Sequence[int]) -> list[Fault]:
    """What it would not do anything for. input_shape: of one sample."""
    if len(input_shape) != 3:
        return [
            Fault(
                key=CHANNELS_LAST,
                got=f"true with samples of shape {list(input_shape)}",
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


def cuda_graph_faults(planned: Blueprint) -> list[Fault]:
    """What of a run cannot be in a graph."""
    config, placement = planned.config, planned.placement
    if placement.accelerator != "cuda":
        return [
            Fault(
                key=CUDA_GRAPH,
                got=f"true on {placement.accelerator}",
                expected="a CUDA device: the graphs are CUDA's",
                cure=f"Write {CUDA_GRAPH}=false",
            )
        ]
    count = config["trainer"].get("accumulate_grad_batches")
    in_the_way: Mapping[str, object] = {
        f"strategy={config['strategy']['name']} over several devices": placement.world_size > 1
        or placement.devices_per_rank > 1,
        f"trainer.accumulate_grad_batches={count}, whose next batch would overwrite the gradients": isinstance(
            count, int
        )
        and count > 1,
        "phases, which run parts of the network": config["phases"],
        "an objective that differentiates twice or looks inside the network": planned.needs,
        "runtime.compile=true, which makes graphs of its own": config["runtime"]["compile"],
    }
    return [
        Fault(
            key=CUDA_GRAPH,
            got=f"true with {reason}",
            expected="one network, called once a step",
            cure=f"Write {CUDA_GRAPH}=false",
        )
        for reason, is_there in in_the_way.items()
        if is_there
    ]
