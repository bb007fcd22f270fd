"""The hook `clip_module`: clips the gradient at chosen modules during the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import torch.distributed as dist
from annotated_types import Gt
from torch import Tensor

from exp.errors import ErrorDetails
from exp.extras.research.gradient_transform import At, GradientTransform
from exp.functions.identities import clip_gradient_by_norm, clip_gradient_by_value
from exp.hooks.step import Step

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class ClipModule(GradientTransform):
    """Hook that clips the gradient at each matching module, by norm or by value.

    The limit applies to the gradient of the mean loss over all ranks, without the factor of the loss scaler. The norm
    covers the gradients of all ranks, so that several ranks give the same result as one rank. Each micro-batch is
    clipped separately. Infinite and NaN values stay unchanged, because the loss scaler and the hook `nan_guard` must
    detect them.

    Args:
        modules: Name patterns of modules.
        limit: Largest 2-norm, or largest absolute value, of the gradient. Default: 1.
        algorithm: "norm" limits the 2-norm, and "value" limits each absolute value. Default: norm.
        at: "output": the matching module and modules before it in the forward get the clipped gradient. "input": only
            modules before the matching module get the clipped gradient. Default: output.
    """

    needs = frozenset({"all_layers", "own_backward", "whole_outputs", "one_thread"})
    nests = True

    def __init__(
        self,
        *,
        modules: Sequence[str],
        limit: Annotated[float, Gt(0)] = 1.0,
        algorithm: Literal["norm", "value"] = "norm",
        at: At = "output",
    ) -> None:
        super().__init__(modules=modules, at=at)
        self.limit, self.algorithm = limit, algorithm
        self._ranks = 1
        self._now: float | Tensor = limit

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        if self.algorithm == "norm" and planned.placement.world_size > 1 and planned.settings.runtime.compile:
            yield self.error(
                key="runtime.compile",
                got=f"true over several ranks, with hooks.{self.name} of algorithm=norm",
                expected="false: a compiled backward cannot communicate with other ranks",
                fix=f"Write false, or hooks.{self.name}.algorithm=value",
            )

    def around_forward(self, step: Step) -> None:
        # Each rank computes the gradient of the mean loss over its samples. The run then averages gradients over ranks.
        self._ranks = step.world_size
        scale = self.loss_scale
        if not isinstance(scale, Tensor) and scale == 1.0:
            self._now = self.limit * self._ranks
            return
        if not isinstance(self._now, Tensor):
            # The limit is a tensor, because torch.compile would compile the network again for each new number.
            self._now = torch.zeros((), dtype=torch.float32, device=step.device)
        self._now.copy_(self.limit * self._ranks * torch.as_tensor(scale))

    def change(self, tensor: Tensor) -> Tensor:
        if self.algorithm == "value":
            return clip_gradient_by_value(tensor, self._now)
        return clip_gradient_by_norm(tensor, self._now, total=_sum_over_ranks if self._ranks > 1 else None)


def _sum_over_ranks(square: Tensor) -> Tensor:
    dist.all_reduce(square)
    return square
