"""The hook `clip_module`: gradients clipped at modules, where they flow back or where they have come to rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import torch.distributed as dist
from annotated_types import Gt
from torch import Tensor, nn

from exp.errors import Fault
from exp.extras.research.gradient_transform import GradientTransform
from exp.functions.identities import clip_gradient_by_norm, clip_gradient_by_value, clipped_by_value, norm_factor
from exp.hooks.step import Step
from exp.models.matching import matching
from exp.strategies.whole_state import local

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

PART_OF_A_GRADIENT = (
    "ranks hold parts of one network, and what flows back in one of them is no gradient of a whole tensor"
)


class ClipModule(GradientTransform):
    """Clips, for each module that matches by itself, a gradient to a norm or each of its numbers to a size.

    limit is for true gradients: of the step's loss, a mean over the samples of all ranks and micro-batches, without a
    loss scale. At `output` and `input` the gradient is that of a tensor, of one micro-batch over all ranks: several
    ranks give what one would, whereas each of several micro-batches is clipped by itself. At `parameters` it is the
    complete one that the optimizer is about to take, before trainer.gradient_clip_val; hooks that stand before this one
    see it as it was, those behind it as it is then.

    What is not finite stays so, for a loss scale and nan_guard to see.

    limit: the largest 2-norm, or the largest absolute value; above 0.
    algorithm: norm or value, as in trainer.gradient_clip_algorithm.
    at: output: the module gets the clipped gradient and hands it on. input: only what lies before it does.
        parameters: those of the module and of the modules in it.
    """

    needs = frozenset({"all_layers", "own_backward"})

    def __init__(
        self,
        *,
        modules: Sequence[str],
        limit: Annotated[float, Gt(0)] = 1.0,
        algorithm: Literal["norm", "value"] = "norm",
        at: Literal["output", "input", "parameters"] = "output",
    ) -> None:
        super().__init__(modules=modules, at=at)
        self.limit, self.algorithm = limit, algorithm
        self.nests = at != "parameters"
        self._ranks = 1
        self._now: float | Tensor = limit
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}

    def overrides(self, method: str) -> bool:
        if method in ("around_forward", "after_backward"):
            return (method == "after_backward") == (self.at == "parameters")
        return super().overrides(method)

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        set_to = f"with hooks.{self.name} of at={self.at}, algorithm={self.algorithm}"
        for key, what, expected, cure in self._conflicts(planned):
            yield self.fault(key=key, got=f"{what}, {set_to}", expected=expected, cure=cure)

    def _conflicts(self, planned: Blueprint) -> Iterator[tuple[str, str, str, str]]:
        """What only some of its settings cannot live with: its key, what it is, what is expected, and a cure."""
        config, traits = planned.config, planned.traits
        strategy, in_forward = config["strategy"], self.at != "parameters"
        if config["phases"] and not in_forward:
            cure = "Write phases.<name>.gradient_clip_val, or at=output"
            yield "phases", "phases", "a run without them: a repeat steps without asking hooks", cure
        if "splits_tensors" in traits and ("splits_batch" in traits or in_forward):
            cure = "Leave the hook out" if "splits_batch" in traits else "Write at=parameters"
            yield "strategy", strategy["name"], f"another strategy: {PART_OF_A_GRADIENT}", cure
        if "replicates_in_threads" in traits and in_forward:
            reason = "another strategy: each device has a part of the batch, and of its gradient"
            yield "strategy", strategy["name"], reason, "Write strategy=ddp, or at=parameters"
        if "averages_between_steps" in traits:
            reason = "null: ranks that step by themselves have no gradient in common"
            yield "strategy.local_sgd.every_n_steps", "a number", reason, "Or leave the hook out"
        gathers = in_forward and self.algorithm == "norm" and planned.placement.world_size > 1
        if gathers and config["runtime"]["compile"]:
            reason = "false: a compiled backward cannot ask other ranks for their norms"
            yield "runtime.compile", "true over several ranks", reason, "Or write algorithm=value"

    def setup(self, network: nn.Module) -> None:
        chosen = matching(network, self.modules, key=f"hooks.{self.name}.modules")
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        self._parameters = {
            name: {names[id(parameter)]: parameter for parameter in module.parameters()}
            for name, module in chosen.items()
        }

    def around_forward(self, step: Step) -> None:
        # Each has the gradient of the mean over its own samples, and the run takes the mean over ranks of that.
        self._ranks = step.world_size
        scale = self.loss_scale
        if not isinstance(scale, Tensor) and scale == 1.0:
            self._now = self.limit * self._ranks
            return
        if not isinstance(self._now, Tensor):
            # A compiled network would be compiled anew for every number.
            self._now = torch.zeros((), dtype=torch.float32, device=step.device)
        self._now.copy_(self.limit * self._ranks * torch.as_tensor(scale))

    def change(self, tensor: Tensor) -> Tensor:
        if self.algorithm == "value":
            return clip_gradient_by_value(tensor, self._now)
        return clip_gradient_by_norm(tensor, self._now, total=_sum_over_ranks if self._ranks > 1 else None)

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        held = {
            name: {full: one.grad for full, one in parameters.items() if one.grad is not None}
            for name, parameters in self._parameters.items()
        }
        if self.algorithm == "value":
            for gradient in (local(one) for gradients in held.values() for one in gradients.values()):
                gradient.copy_(clipped_by_value(gradient, self.limit))
            return
        # Also without any here: other ranks may hold some.
        norms = step.norms({full: one for gradients in held.values() for full, one in gradients.items()})
        for name, gradients in held.items():
            own = [norms[full] for full in self._parameters[name] if full in norms]
            if not own:
                continue
            factor = norm_factor(torch.linalg.vector_norm(torch.stack(own)), self.limit)
            for gradient in map(local, gradients.values()):
                gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))


def _sum_over_ranks(square: Tensor) -> Tensor:
    dist.all_reduce(square)
    return square
