"""The hook `retain_gradients`: norms of the gradients that flow back into the outputs of modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from exp.hooks.gradients import HEALTHY_NORM
from exp.hooks.hook import Boundary, Hook, Period
from exp.hooks.norms import norm
from exp.hooks.panels import Column, Panel
from exp.hooks.step import Step
from exp.models.matching import find_modules

# The network itself has the empty name, which no tag can end with.
WHOLE = "network"
OUTPUT_NORM = "gradients/output_norm"


class RetainGradients(Hook):
    """Draws `gradients/output_norm`, the 2-norm of the loss's gradient with respect to the outputs of a module.

    It is a heat map, modules by steps, whose numbers are in the run's table.csv. With `each_module` they are scalars,
    too: `gradients/output_norm/<module>`.

    The loss is the step's, a mean over the samples of all ranks and micro-batches, without a loss scale. The norm is
    that of the outputs for all these samples as one batch: the root of the sum of squares over ranks, micro-batches,
    calls of the module and tensors that it returns. It is the gradient that torch's `retain_grad()` keeps. A module
    into whose output no gradient flows has no value in that step.

    Args:
        every_n_steps: Period. `auto` depends on the length of the run.
        each_module: Whether the norms are scalars, too.
        modules: Patterns of modules.
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
        # One entry a forward: of a phase's repeats the last one's are the step's.
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
        # A term may take gradients of its own in the forward: they are not the loss's.
        self._is_in_backward = boundary == "forward"

    def tensor_gradient(self, name: str, gradient: Tensor) -> None:
        if self._is_in_backward:
            # One append, for the devices of nn.DataParallel call from threads of their own.
            self._forwards[-1].setdefault(name, []).append(norm(gradient))

    def after_backward(self, step: Step) -> dict[str, Tensor | Panel] | None:
        forwards, self._forwards = self._forwards[-self._batches :], []
        found: dict[str, list[Tensor]] = {}
        for name, norms in (item for forward in forwards for item in forward.items()):
            found.setdefault(name, []).extend(norms)
        zero = torch.zeros((), device=step.device)
        totals = [get_total_norm(found[name]).to(step.device) if name in found else zero for name in self._names]
        # Each rank has the gradient of the mean over its own samples, and the run takes the mean over ranks.
        whole = torch.stack(totals) / (step.world_size * self.loss_scale)
        whole = torch.linalg.vector_norm(step.gather(whole), dim=0)
        sizes = {name or WHOLE: size for name, size in zip(self._names, whole.unbind(), strict=True) if name in found}
        values: dict[str, Tensor | Panel] = {}
        if sizes:
            values[OUTPUT_NORM] = Column.of(sizes, healthy=HEALTHY_NORM)
        if self.each_module:
            values |= {f"{OUTPUT_NORM}/{name}": size for name, size in sizes.items()}
        return values
