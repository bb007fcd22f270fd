"""A number that an autograd Function keeps for its backward: plain, or a 0-d tensor that may change between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_number(ctx: Any, number: float | Tensor) -> None:
    """In `setup_context`. A tensor goes the way of saved tensors: one that changes before the backward is an error."""
    if isinstance(number, Tensor):
        ctx.save_for_backward(number)
        ctx.number = None
    else:
        ctx.number = number


def kept_number(ctx: Any, gradient: Tensor) -> float | Tensor:
    """In `backward`: the number, where the gradient is. Layers may lie on several devices, and it on one."""
    return ctx.saved_tensors[0].to(gradient.device) if ctx.number is None else ctx.number


class CopyWithNumber(torch.autograd.Function):
    """Forward a copy of x, with a number for the backward that a subclass gives.

    A copy, because what stands behind it may work in place, which autograd refuses on a view that a Function made.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, number: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        keep_number(ctx, inputs[1])
