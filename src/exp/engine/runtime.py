"""Functions that apply the config node `runtime`: memory format, compilation and number of threads.

With runtime.channels_last, the channels of images and of convolution weights are innermost in memory. The results
change only by rounding.

With runtime.compile, torch compiles the network in place, so the module and its state dict stay the same. Tested with
torch 2.13: if the class of a module belongs to torch, `nn.Module.compile` compiles nothing and raises no error. A copy
of a compiled network is not compiled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from exp.config.settings import RuntimeSettings
from exp.objectives.term import TWICE

log = logging.getLogger(__name__)

# Needs of loss terms that a compiled network does not support. The backward of a compiled network can run only once,
# and cannot be differentiated.
EAGER = TWICE | {"retained_graph"}
_compiled: WeakSet[nn.Module] = WeakSet()
BLOCKING = "CUDA_LAUNCH_BLOCKING"
# One CPU thread is used if an operator of the forward has fewer multiply-adds than this number. Measured on two idle
# cores, a second thread saved no time for an MLP 64-256-256-10 (3.8 million, batch 64). It saved a fifth of the time
# for the ResNet (8.7 million). It made an MLP of width 512 (16 million) 1.8 times as fast. If other processes use the
# second core, each operator waits for this core: steps of 2.5 ms took 63 ms.
SMALL_OPERATOR = 12e6


def switch_on(
    network: nn.Module, runtime: RuntimeSettings, *, runs: Iterable[tuple[nn.Module, frozenset[str]]]
) -> None:
    """Apply memory format and compilation to a network. Call this function before the network is moved to a device.

    Args:
        network: The network.
        runtime: Settings of the config's node `runtime`.
        runs: Modules that a step calls, each with the needs of the terms that use the module's output.
    """
    if runtime.channels_last:
        put_channels_last(network)
    if runtime.compile:
        for part, needs in runs:
            compile_network(part, backend=runtime.compile_backend, mode=runtime.compile_mode, needs=needs)


def compile_network(network: nn.Module, *, backend: str, mode: str | None = None, needs: frozenset[str]) -> None:
    """Make a network compile its forward at the first call with each input shape and mode, which takes seconds.

    Args:
        network: The network.
        backend: Backend of torch.compile, such as inductor.
        mode: Mode of torch.compile, such as reduce-overhead. Default: None.
        needs: Needs of the objective's terms. A warning lists the needs that a compiled network does not support.
    """
    options: dict[str, Any] | None = None
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    if backend == "inductor" and on_cpu and mode is None:  # torch accepts only one of mode and options
        # On a CPU, the layout optimization lost gradients of a LeNet with a batch of 41 samples (torch 2.13).
        options = {"layout_optimization": False}
    network.compile(backend=backend, mode=mode, options=options)
    _compiled.add(network)
    if needs & EAGER:
        log.warning(
            "terms of the objective need %s, which a compiled network does not support. Their steps run uncompiled",
            ", ".join(sorted(needs & EAGER)),
        )


def run_uncompiled(network: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a network runs uncompiled, even if `compile_network` compiled it."""
    if network not in _compiled:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def block_launches(is_wanted: object) -> None:
    """Make this process and its child processes wait for each CUDA kernel if runtime.cuda_blocking is true.

    Call this function before the first use of a GPU, because CUDA reads the environment variable only once.

    Args:
        is_wanted: Value of runtime.cuda_blocking.
    """
    if is_wanted is True:
        os.environ[BLOCKING] = "1"


def put_channels_last(network: nn.Module) -> None:
    """Convert the weights `[C, C', H, W]` and all future inputs `[B, C, H, W]` of a network to channels last."""
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
    """Return the number of CPU threads per operator; None for torch's default: OMP_NUM_THREADS or the number of cores.

    Args:
        requested: Number in the config. None: one thread if the operators are small, torch's default otherwise.
        operator: Multiply-adds of one operator in the forward on this process's part of a batch: a mean weighted by
            multiply-adds, or an upper bound. None: unknown.
    """
    return 1 if requested is None and operator is not None and operator < SMALL_OPERATOR else requested


def set_threads(count: int | None) -> None:
    """Set the number of CPU threads of this process. None changes nothing."""
    if count is not None:
        torch.set_num_threads(count)


def operator_at_most(network: nn.Module, *, positions: int) -> float:
    """Return an upper bound on the multiply-adds of any operator in the forward of one sample.

    Args:
        network: The network.
        positions: Number of elements in the largest input of a sample, which bounds the number of positions of a layer.
    """
    return float(max((one.numel() for one in network.parameters()), default=0) * positions)
