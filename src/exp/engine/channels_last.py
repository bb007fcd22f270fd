"""runtime.channels_last: pictures and the weights of convolutions with their channels innermost in memory.

The numbers are the same, in another order: kernels may round otherwise. What lies in memory in two orders at once is no
fault to torch, and wrong: a fused optimizer walks through a weight and its averages in the order of their memory (seen
in torch 2.13, AdamW and Adam on CPU). So a checkpoint's optimizer state is laid out as the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import Fault
from exp.nested import mapped

KEY = "runtime.channels_last"
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def put_channels_last(network: nn.Module) -> None:
    """In place: its weights `[C, C', H, W]`, and from now on every input `[B, C, H, W]` that it is called with."""
    network.to(memory_format=torch.channels_last)
    network.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)


def lay_out_optimizer_states(checkpoint: dict[str, Any], network: nn.Module) -> None:
    """The state of a checkpoint's optimizers in the layout of the network that it will be loaded for."""
    if "optimizer_states" in checkpoint:
        is_last = any(_is_channels_last(parameter) for parameter in network.parameters())
        layout = torch.channels_last if is_last else torch.contiguous_format
        checkpoint["optimizer_states"] = mapped(
            checkpoint["optimizer_states"],
            lambda value: value.contiguous(memory_format=layout) if value.dim() == 4 else value,
        )


def channels_last_faults(network: nn.Module, input_shape: Sequence[int]) -> list[Fault]:
    """What it would not do anything for. input_shape: of one sample."""
    if len(input_shape) != 3:
        return [
            Fault(
                key=KEY,
                got=f"true with samples of shape {list(input_shape)}",
                expected="samples [C, H, W], so that a batch has four dimensions",
                cure=f"Write {KEY}=false",
            )
        ]
    if not any(isinstance(module, CONVOLUTIONS) for module in network.modules()):
        return [
            Fault(
                key=KEY,
                got="true for a model without a convolution",
                expected="a model with a Conv2d, which is what it is faster for",
                cure=f"Write {KEY}=false",
            )
        ]
    return []


def _is_channels_last(tensor: Tensor) -> bool:
    # A weight of one channel, or one pixel, is both.
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()


def _lay_out_inputs(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(_laid_out(value) for value in inputs), {name: _laid_out(value) for name, value in named.items()}


def _laid_out(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
