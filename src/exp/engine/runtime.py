"""Apply the config's `runtime` to a network: its layout in memory, its compilation, its threads.

runtime.channels_last: pictures and the weights of convolutions lie with their channels innermost in memory. The numbers
are the same, in another order: kernels may round otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from exp.config.settings import RuntimeSettings
from exp.engine.compilation import compile_network
from exp.engine.module import TrainingModule

BLOCKING = "CUDA_LAUNCH_BLOCKING"
# Multiply-adds of an operator in the forward. On two idle cores a second thread was worth nothing to an MLP
# 64-256-256-10 (3.8 million, batch 64), a fifth to the ResNet (8.7) and a factor of 1.8 to an MLP of 512 (16). Where
# others use the second core, each operator waits for it: steps of 2.5 ms took 63.
SMALL_OPERATOR = 12e6


def switch_on(module: TrainingModule, runtime: RuntimeSettings) -> None:
    """Do what the config's `runtime` says, before the module is placed on a device."""
    if runtime.channels_last:
        put_channels_last(module.network)
    if runtime.compile:
        for network, needs in module.runs():
            compile_network(network, backend=runtime.compile_backend, mode=runtime.compile_mode, needs=needs)


def block_launches(is_wanted: object) -> None:
    """Have this process, and those that it starts, wait for each kernel, where `runtime.cuda_blocking` is true.

    Before anything asks for a GPU, for CUDA reads the variable once.
    """
    if is_wanted is True:
        os.environ[BLOCKING] = "1"


def put_channels_last(network: nn.Module) -> None:
    """Lay a network's weights `[C, C', H, W]` out, and from now on every input `[B, C, H, W]` of it."""
    move: Callable[..., nn.Module] = network.to  # the stubs of torch 2.14 and older have no memory_format alone
    move(memory_format=torch.channels_last)
    network.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)


def _lay_out_inputs(
    module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(_laid_out(value) for value in inputs), {name: _laid_out(value) for name, value in named.items()}


def _laid_out(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def threads_of(requested: int | None, *, operator: float | None) -> int | None:
    """How many threads an operator takes on a CPU; None leaves torch's choice, OMP_NUM_THREADS or the cores.

    requested: None takes one thread for a network of small operators.
    operator: the multiply-adds of an operator in the forward of a process's share of a batch, in the mean over
        multiply-adds, or a bound on it; None where nobody knows.
    """
    return 1 if requested is None and operator is not None and operator < SMALL_OPERATOR else requested


def set_threads(count: int | None) -> None:
    """Let this process's operators take so many threads; see `threads_of`."""
    if count is not None:
        torch.set_num_threads(count)


def operator_at_most(network: nn.Module, *, positions: int) -> float:
    """A bound for one sample: no layer meets more positions than the largest input of a sample has numbers."""
    return float(max((one.numel() for one in network.parameters()), default=0) * positions)
