"""The hook `retain_gradients`: logs norms of the gradients with respect to the outputs of modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.gradients import HEALTHY_NORM
from exp.hooks.hook import Boundary, Hook, Period
from exp.hooks.panels import Column, Panel
from exp.hooks.step import Step
from exp.models.matching import find_modules

# Name of the whole network in tags, because its module name is empty.
WHOLE = "network"
OUTPUT_NORM = "gradients/output_norm"


class RetainGradients(Hook):
    """Hook that logs the 2-norm of the gradient of the loss with respect to the outputs of modules.

    The norms have the tag `gradients/output_norm`. They are shown as a heat map of modules by steps, and written to
    table.csv of the run directory. If `each_module` is true, they are also logged as scalars,
    `gradients/output_norm/<module>`.

    The loss is the mean over all ranks and micro-batches, without the factor of the loss scaler. The norm is the square
    root of the sum of squares over ranks, micro-batches, calls of the module and returned tensors. The gradient equals
    the one that torch's `retain_grad()` stores. If a module gets no gradient in a step, it has no value in this step.

    Args:
        every_n_steps: Period in optimizer steps. "auto": the period depends on the length of the run. Default: auto.
        each_module: Whether the norms are also logged as one scalar per module. Default: False.
        modules: Name patterns of modules. Default: *, which selects all modules.
    """

    needs = frozenset({"whole_outputs", "all_layers"})

    longest = {"every_n_steps": 50}

    def __init__(
        self,
        *,
        every_n_steps: Period = "auto",
        each_module: bool = False,
        modules: Sequence[str] = ("*",),
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.each_module = each_module
        self._names: list[str] = []
        # The list has one entry per forward. If a phase repeats, only the last forwards belong to the step.
        self._forwards: list[dict[str, list[Tensor]]] = []
        self._is_in_backward = False
        self._index = self._batches = 0

    def setup(self, network: nn.Module) -> None:
        self._names = list(find_modules(network, self.modules, key=f"hooks.{self.name}.modules"))
        self._forwards = []

    def passed(self, boundary: Boundary, step: Step) -> None:
        if boundary == "batch":
            self._batches = self._batches + 1 if self._index == step.index else 1
            self._index = step.index
        if boundary == "forward":
            self._forwards.append({})
        # Gradients that a term of the objective computes before the backward pass are ignored.
        self._is_in_backward = boundary == "forward"

    def tensor_gradient(self, name: str, gradient: Tensor) -> None:
        if self._is_in_backward:
            # A single append is thread-safe. nn.DataParallel calls this method from one thread per device.
            norm: Tensor = torch.linalg.vector_norm(gradient, dtype=at_least_float32(gradient.dtype))
            self._forwards[-1].setdefault(name, []).append(norm)

    def after_backward(self, step: Step) -> dict[str, Tensor | Panel] | None:
        forwards, self._forwards = self._forwards[-self._batches :], []
        found: dict[str, list[Tensor]] = {}
        for name, norms in (item for forward in forwards for item in forward.items()):
            found.setdefault(name, []).extend(norms)
        zero = torch.zeros((), device=step.device)
        totals = [get_total_norm(found[name]).to(step.device) if name in found else zero for name in self._names]
        # Each rank computes the gradient of the mean loss over its samples. The run then averages gradients over ranks.
        whole = torch.stack(totals) / (step.world_size * self.loss_scale)
        whole = torch.linalg.vector_norm(step.gather(whole), dim=0)
        sizes = {name or WHOLE: size for name, size in zip(self._names, whole.unbind(), strict=True) if name in found}
        values: dict[str, Tensor | Panel] = {}
        if sizes:
            values[OUTPUT_NORM] = Column.of(sizes, healthy=HEALTHY_NORM)
        if self.each_module:
            values |= {f"{OUTPUT_NORM}/{name}": size for name, size in sizes.items()}
        return values
