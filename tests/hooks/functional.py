"""Layer and term that use torch.func, for the tests of hooks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from exp.objectives.term import AbstractTerm


class GradientOfEnergy(nn.Module):
    """Layer that returns the gradient of sum(tanh(A x + b)) with respect to x for each sample of `[B, n]`."""

    def __init__(self, *, size: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda one: self.inner(one).tanh().sum()))(x)


class Derivative(AbstractTerm):
    """Term with the mean square of the network or its derivative on the first samples of a batch, by torch.func."""

    needs = frozenset({"forward_passes"})

    def __init__(self, *, how: Literal["vmap", "hessian", "vjp"]) -> None:
        super().__init__(weight=0.1)
        self.how = how

    def forward(self, values: Any, batch: Any = None, passes: Any = None) -> Tensor:
        x = values["input"][:3].detach()
        parameters = dict(passes.network.named_parameters())

        def output(one: Tensor) -> Tensor:
            return functional_call(passes.network, parameters, (one[None],))[0]

        if self.how == "vmap":
            return vmap(output)(x).square().mean()
        if self.how == "hessian":
            return jacrev(jacrev(lambda one: output(one).sum()))(x[0]).square().mean()
        outputs, pulled = vjp(output, x[0])
        return pulled(torch.ones_like(outputs))[0].square().mean()
