"""Apply the config's `runtime` to a network: its layout in memory, its graphs, its compilation, its threads.

runtime.channels_last: pictures and the weights of convolutions lie with their channels innermost in memory. The numbers
are the same, in another order: kernels may round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exp.engine.compilation import compile_faults, compile_network
from exp.engine.cuda_graphs import GraphedNetwork, cuda_graph_faults
from exp.engine.module import TrainingModule
from exp.errors import Fault
from exp.strategies.strategy import Planned

CHANNELS_LAST = "runtime.channels_last"
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def put_channels_last(network: nn.Module) -> None:
    """In place: its weights `[C, C', H, W]`, and from now on every input `[B, C, H, W]` that it is called with."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs leave it out
    network.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)


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


def _lay_out_inputs(
    module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(_laid_out(value) for value in inputs), {name: _laid_out(value) for name, value in named.items()}


def _laid_out(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


# Multiply-adds of one forward. Below it an operator is over before a second thread has begun: the digits MLP (52,000
# parameters, batch 64) took 8 ms a step with one thread and 99 ms with two, on two cores that others used as well.
SMALL_FORWARD = 2**28


def set_threads(requested: int | None, *, network: nn.Module, input_shape: Sequence[int], batch_size: int) -> int:
    """Sets the threads of this process's operators, and returns how many.

    requested: None takes one thread for a small network, and leaves torch's choice otherwise (OMP_NUM_THREADS or the
        cores; a rank's launcher has shared them out).
    input_shape: of one sample. batch_size: samples that this rank has of a batch.
    """
    # No layer meets more positions than the input has, so no forward has more multiply-adds than this.
    bound = sum(parameter.numel() for parameter in network.parameters()) * batch_size * math.prod(input_shape)
    if requested is not None:
        torch.set_num_threads(requested)
    elif bound < SMALL_FORWARD:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def switch_on(module: TrainingModule, runtime: Mapping[str, Any]) -> None:
    """Before the module is placed on a device. runtime: the config's node."""
    if runtime["channels_last"]:
        put_channels_last(module.network)
    if runtime["cuda_graph"]:
        # Past nn.Module: the state dict has the network once.
        vars(module)["run_network"] = GraphedNetwork(module.network)
    if runtime["compile"]:
        for network, needs in module.runs():
            compile_network(network, backend=runtime["compile_backend"], needs=needs)


def switch_faults(planned: Planned) -> Sequence[Fault]:
    """What the switches cannot do for a run."""
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
