"""The hook `gradients`: how large the gradients are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exp.hooks.hook import Hook, Step, matching


class Gradients(Hook):
    """Logs `gradients/norm/<parameter>`, the 2-norm of each parameter's gradient, and `gradients/norm/total` of all.

    They are those of the optimizer step: accumulated, averaged over ranks, unscaled, before clipping. A parameter
    that got no gradient in a step has no value there.

    modules: patterns of modules whose parameters, and those of the modules below, are taken; the total is theirs.
    """

    def __init__(self, *, every_n_steps: int = 1, modules: Sequence[str] = ("*",)) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def setup(self, network: nn.Module) -> None:
        chosen = {
            id(parameter)
            for module in matching(network, self.modules, key="hooks.gradients.modules").values()
            for parameter in module.parameters()
        }
        self._parameters = [
            (name, parameter)
            for name, parameter in network.named_parameters()
            if id(parameter) in chosen and parameter.requires_grad
        ]

    def after_backward(self, step: Step) -> dict[str, Tensor] | None:
        gradients = {name: parameter.grad for name, parameter in self._parameters if parameter.grad is not None}
        # Also without any here: other ranks may hold some.
        each = step.norms(gradients)
        if not each:
            return None
        values = {f"gradients/norm/{name}": norm for name, norm in each.items()}
        values["gradients/norm/total"] = torch.linalg.vector_norm(torch.stack(list(each.values())))
        return values
