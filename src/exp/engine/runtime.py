"""Apply the config's `runtime` to a network: its layout in memory, its graphs, its compilation, its threads.

runtime.channels_last: pictures and the weights of convolutions lie with their channels innermost in memory. The numbers
are the same, in another order: kernels may round otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exp.engine.compilation import compile_network
from exp.engine.cuda_graphs import GraphedNetwork
from exp.engine.module import TrainingModule

BLOCKING = "CUDA_LAUNCH_BLOCKING"
# Multiply-adds of one forward. Below it an operator is over before a second thread has begun: the digits MLP (52,000
# parameters, batch 64) took 8 ms a step with one thread and 99 ms with two, on two cores that others used as well.
SMALL_FORWARD = 2**28


def switch_on(module: TrainingModule, runtime: Mapping[str, Any]) -> None:
    """Do what the config's `runtime` says, before the module is placed on a device."""
    if runtime["channels_last"]:
        put_channels_last(module.network)
    if runtime["cuda_graph"]:
        # Past nn.Module: the state dict has the network once.
        vars(module)["run_network"] = GraphedNetwork(module.network)
    if runtime["out_of_memory"] == "halve":
        from exp.engine.halving import Halving

        module.halving = Halving()
    if runtime["compile"]:
        for network, needs in module.runs():
            compile_network(network, backend=runtime["compile_backend"], needs=needs)


def deterministic(is_wanted: bool) -> bool | None:
    """What Lightning's Trainer takes for `runtime.deterministic`: None where it is false, as torch is already.

    Where torch is told so once more, it imports its compiler (0.4 s, torch 2.13).
    """
    return is_wanted or (False if torch.are_deterministic_algorithms_enabled() else None)


def block_launches(is_wanted: object) -> None:
    """Have this process, and those that it starts, wait for each kernel, where `runtime.cuda_blocking` is true.

    Before anything asks for a GPU, for CUDA reads the variable once.
    """
    if is_wanted is True:
        os.environ[BLOCKING] = "1"


def put_channels_last(network: nn.Module) -> None:
    """Lay a network's weights `[C, C', H, W]` out, and from now on every input `[B, C, H, W]` of it."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs leave it out
    network.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)


def _lay_out_inputs(
    module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(_laid_out(value) for value in inputs), {name: _laid_out(value) for name, value in named.items()}


def _laid_out(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def set_threads(requested: int | None, *, network: nn.Module, positions: int | None, batch_size: int) -> int:
    """Set the threads of this process's operators, and return how many.

    requested: None takes one thread for a small network, and leaves torch's choice otherwise (OMP_NUM_THREADS or the
        cores; a rank's launcher has shared them out).
    positions: numbers in the largest input of one sample; None where nobody knows.
    batch_size: samples that this rank has of a batch.
    """
    # No layer meets more positions than an input has, so no forward has more multiply-adds than this.
    bound = sum(parameter.numel() for parameter in network.parameters()) * batch_size * (positions or 0)
    if requested is not None:
        torch.set_num_threads(requested)
    elif positions is not None and bound < SMALL_FORWARD:
        torch.set_num_threads(1)
    return torch.get_num_threads()
