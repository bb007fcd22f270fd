"""The hook `gradients`: how large the gradients are, how they are distributed, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from exp.errors import Fault
from exp.hooks.entries import histograms, shares
from exp.hooks.hook import Hook, Values
from exp.hooks.norms import norms, with_total
from exp.hooks.step import Step
from exp.hooks.update_ratio import UpdateRatio
from exp.models.matching import matching

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

NORM, CLIPPED = "gradients/norm/", "gradients/norm_clipped/"
OWN_PERIODS = ("histogram_every_n_steps", "update_ratio_every_n_steps", "shares_every_n_steps")


class Gradients(Hook):
    """Logs what follows, of the gradients of an optimizer step: accumulated, averaged over ranks, without a loss scale.

    `gradients/norm/<parameter>`, the 2-norm of each parameter's gradient, and `gradients/norm/total` of all together,
        before clipping. A parameter that got no gradient in a step has no value there.
    `gradients/norm_clipped/total`, and `gradients/norm_clipped/<parameter>`, after clipping, where the run clips.
    `gradients/histogram/<parameter>`, of its finite entries.
    `gradients/update_ratio/<parameter>`, the norm of the change of the parameter in the step over its norm before.
    `gradients/zeros/<parameter>` and `gradients/non_finite/<parameter>`, the shares of entries that are.

    every_n_steps: of the norms; each of the others has a period of its own, None for none of it.
    modules: patterns of modules whose parameters, and those of the modules below, are taken; the total is theirs.
    clipped: the norms after clipping: of all together, of each parameter, too, or none.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        modules: Sequence[str] = ("*",),
        clipped: Literal["total", "each"] | None = "total",
        histogram_every_n_steps: int | None = 100,
        update_ratio_every_n_steps: int | None = 100,
        shares_every_n_steps: int | None = 100,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.clipped = clipped
        self.histogram_every_n_steps = histogram_every_n_steps
        self.update_ratio_every_n_steps = update_ratio_every_n_steps
        self.shares_every_n_steps = shares_every_n_steps
        self._parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._tags: dict[str, list[str]] = {}
        self._ratio = UpdateRatio()

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """Stage 3 of DeepSpeed has no gradients to look at, but their norms, and clips them itself."""
        faults = list(super().faults(planned))
        if not {"owns_step", "shards_parameters"} <= planned.traits:
            return faults
        reason = "null: in stage 3 DeepSpeed keeps the gradients and the weights in parts of its own"
        for key in OWN_PERIODS:
            if (value := getattr(self, key)) is not None:
                cure = f"Write hooks.{self.name}.{key}=null"
                faults.append(Fault(key=f"hooks.{self.name}.{key}", got=f"{value}", expected=reason, cure=cure))
        if self.clipped is not None and planned.config["trainer"].get("gradient_clip_val"):
            expected = "null: in stage 3 DeepSpeed clips where no hook can look"
            cure = f"Write hooks.{self.name}.clipped=null"
            faults.append(Fault(key=f"hooks.{self.name}.clipped", got=self.clipped, expected=expected, cure=cure))
        return faults

    def setup(self, network: nn.Module) -> None:
        chosen = {
            id(parameter)
            for module in matching(network, self.modules, key=f"hooks.{self.name}.modules").values()
            for parameter in module.parameters()
        }
        named = [
            (name, parameter)
            for name, parameter in network.named_parameters()
            if id(parameter) in chosen and parameter.requires_grad
        ]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._tags = {beginning: [beginning + name for name in self._names] for beginning in (NORM, CLIPPED)}

    def teardown(self) -> None:
        self._ratio.forget()

    def due(self, index: int) -> bool:
        """Whether any of the periods has come."""
        return (
            index % self.every_n_steps == 0
            or index == 1
            or any(_has_come(getattr(self, period), index) for period in OWN_PERIODS)
        )

    def after_backward(self, step: Step) -> Values | None:
        index = step.index
        values = self._norms(step, NORM) if _has_come(self.every_n_steps, index) else {}
        has_histograms = _has_come(self.histogram_every_n_steps, index)
        has_shares = _has_come(self.shares_every_n_steps, index)
        has_ratio = _has_come(self.update_ratio_every_n_steps, index)
        if has_histograms or has_shares or has_ratio:
            names, gradients = self._gradients()
            found = dict(zip(names, gradients, strict=True))
            # Also without any here: other ranks may hold some.
            if has_histograms:
                values |= {f"gradients/histogram/{name}": one for name, one in histograms(found, step).items()}
            if has_shares:
                for name, (zeros, non_finite) in shares(found, step).items():
                    values[f"gradients/zeros/{name}"] = zeros
                    values[f"gradients/non_finite/{name}"] = non_finite
            if has_ratio:
                chosen = dict(zip(self._names, self._parameters, strict=True))
                self._ratio.remember({name: chosen[name] for name in names})
        return values or None

    def after_clipping(self, step: Step) -> Values | None:
        if self.clipped is None or not step.clips or not _has_come(self.every_n_steps, step.index):
            return None
        values = self._norms(step, CLIPPED)
        if self.clipped == "each" or not values:
            return values
        total = CLIPPED + "total"
        return {total: values[total]}

    def after_step(self, step: Step) -> Values | None:
        if not _has_come(self.update_ratio_every_n_steps, step.index):
            return None
        return {f"gradients/update_ratio/{name}": ratio for name, ratio in self._ratio.taken(step).items()}

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Of the parameters that have one, and their names."""
        pairs = [
            (name, gradient)
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if (gradient := parameter.grad) is not None
        ]
        return [name for name, _ in pairs], [gradient for _, gradient in pairs]

    def _norms(self, step: Step, beginning: str) -> dict[str, Any]:
        """Of each gradient, and of all together; the tags begin so."""
        if step.parts is None:
            gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
            tags = self._tags[beginning]
            if len(gradients) != len(tags):
                tags = [beginning + name for name in self._gradients()[0]]
            each, total = with_total(norms(gradients))
        else:
            names, gradients = self._gradients()
            # Also without any here: other ranks may hold some.
            found = step.norms(dict(zip(names, gradients, strict=True)))
            tags = [beginning + name for name in found]
            each, total = with_total(list(found.values()))
        if not tags:
            return {}
        values = dict(zip(tags, each, strict=True))
        values[beginning + "total"] = total
        return values


def _has_come(period: int | None, index: int) -> bool:
    return period is not None and (index % period == 0 or index == 1)
