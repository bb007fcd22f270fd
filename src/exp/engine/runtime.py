"""Application of the config's `runtime` to a network: memory format, compilation and threads.

With runtime.channels_last, the channels of images and convolution weights are innermost in memory. Results are equal
except for the rounding of kernels.
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
# Multiply-adds of one operator in the forward, below which one CPU thread is used. Measured on two idle cores, a second
# thread saved nothing for an MLP 64-256-256-10 (3.8 million, batch 64). It saved a fifth for the ResNet (8.7 million),
# and a factor of 1.8 for an MLP of width 512 (16 million). If other processes use the second core, each operator waits
# for it: steps of 2.5 ms took 63 ms.
SMALL_OPERATOR = 12e6


def switch_on(module: TrainingModule, runtime: RuntimeSettings) -> None:
    """Apply memory format and compilation. Call this function before the module is moved to a device."""
    if runtime.channels_last:
        put_channels_last(module.network)
    if runtime.compile:
        for network, needs in module.runs():
            compile_network(network, backend=runtime.compile_backend, mode=runtime.compile_mode, needs=needs)


def block_launches(is_wanted: object) -> None:
    """Make this process and its children wait for each CUDA kernel, if `runtime.cuda_blocking` is true.

    Call this function before the first use of a GPU, because CUDA reads the environment variable only once.
    """
    if is_wanted is True:
        os.environ[BLOCKING] = "1"


def put_channels_last(network: nn.Module) -> None:
    """Convert the weights `[C, C', H, W]` and all later inputs `[B, C, H, W]` of a network to channels last."""
    move: Callable[..., nn.Module] = network.to  # torch's stubs (to 2.14) reject memory_format as the only argument
    move(memory_format=torch.channels_last)
    network.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)


def _lay_out_inputs(
    module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(_to_channels_last(value) for value in inputs), {
        name: _to_channels_last(value) for name, value in named.items()
    }


def _to_channels_last(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def threads_of(requested: int | None, *, operator: float | None) -> int | None:
    """Return the number of CPU threads per operator; None for torch's default (OMP_NUM_THREADS or the number of cores).

    Args:
        requested: Number in the config. None selects one thread for a network of small operators.
        operator: Multiply-adds of one operator in the forward on this process's part of a batch; None if unknown. It is
            a mean weighted by multiply-adds, or an upper bound.
    """
    return 1 if requested is None and operator is not None and operator < SMALL_OPERATOR else requested


def set_threads(count: int | None) -> None:
    """Set the number of CPU threads of this process. None changes nothing."""
    if count is not None:
        torch.set_num_threads(count)


def operator_at_most(network: nn.Module, *, positions: int) -> float:
    """Return an upper bound on the multiply-adds of one operator for one sample.

    Args:
        network: The network.
        positions: Number of elements in the largest input of a sample. No layer has more positions.
    """
    return float(max((one.numel() for one in network.parameters()), default=0) * positions)
