"""The hook `gradients`: how large the gradients are, how they are distributed, and what a step makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from exp.errors import Fault
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Values, has_come
from exp.hooks.norms import norms, with_total
from exp.hooks.panels import BINS, Histogram, bin_counts, finite_range
from exp.hooks.step import Step
from exp.models.matching import matching
from exp.strategies.whole_state import local

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


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

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        """A parameter called total; and stage 3 of DeepSpeed has no gradients to look at, but their norms, and clips
        them itself."""
        yield from super().faults(planned)
        if "total" in dict(planned.network.named_parameters()):
            yield self.fault(
                got=f"a parameter called total, and {NORM}total is of all together",
                expected="a tag with one meaning",
                cure=f"rename the parameter, or {self.leave_out}",
            )
        if not {"owns_step", "shards_parameters"} <= planned.traits:
            return
        reasons = dict.fromkeys(
            OWN_PERIODS, "in stage 3 DeepSpeed keeps the gradients and the weights in parts of its own"
        )
        if planned.config["trainer"].get("gradient_clip_val"):
            reasons["clipped"] = "in stage 3 DeepSpeed clips where no hook can look"
        for setting, reason in reasons.items():
            if (value := getattr(self, setting)) is not None:
                cure = f"Write hooks.{self.name}.{setting}=null"
                yield self.fault(setting, got=value, expected=f"null: {reason}", cure=cure)

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

    @property
    def names(self) -> Sequence[str]:
        """The parameters that it looks at, once it is set up."""
        return self._names

    def norms_alone(self, index: int) -> bool:
        """Whether norms before clipping are all that it gives at step `index`."""
        return has_come(self.every_n_steps, index) and not any(
            has_come(getattr(self, period), index) for period in OWN_PERIODS
        )

    def named(self, each: Sequence[float]) -> dict[str, float]:
        """Name norms that somebody else took, one of each of its parameters, and add the total."""
        values = dict(zip(self._tags[NORM], each, strict=True))
        # By squares, as with_total has it.
        values[NORM + "total"] = math.sqrt(sum([number * number for number in each]))
        return values

    def due(self, index: int) -> bool:
        """Whether any of the periods has come."""
        return any(has_come(getattr(self, period), index) for period in ("every_n_steps", *OWN_PERIODS))

    def after_backward(self, step: Step) -> Values | None:
        index = step.index
        values = self._norms(step, NORM) if has_come(self.every_n_steps, index) else {}
        has_histograms = has_come(self.histogram_every_n_steps, index)
        has_shares = has_come(self.shares_every_n_steps, index)
        has_ratio = has_come(self.update_ratio_every_n_steps, index)
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
        if self.clipped is None or not step.clips or not has_come(self.every_n_steps, step.index):
            return None
        values = self._norms(step, CLIPPED)
        if self.clipped == "each" or not values:
            return values
        total = CLIPPED + "total"
        return {total: values[total]}

    def after_step(self, step: Step) -> Values | None:
        if not has_come(self.update_ratio_every_n_steps, step.index):
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


def histograms(tensors: Mapping[str, Tensor], step: Step) -> dict[str, Histogram]:
    """The histogram of each whole tensor's finite entries. Where ranks have parts every one of them must call it."""
    if step.parts is None:
        return {name: Histogram.of(_dense(tensor)) for name, tensor in tensors.items()}
    parts = {name: _flat(tensor) for name, tensor in tensors.items()}
    ranges = {name: finite_range(part) for name, part in parts.items()}
    # Largest and smallest at once: the smallest is the largest of what is on the other side of zero.
    found = step.parts.maxima({name: torch.stack([high, -low]) for name, (low, high) in ranges.items()})
    limits = {name: (-pair[1], pair[0]) for name, pair in found.items()}
    counts = {name: bin_counts(part, *limits[name], bins=BINS) for name, part in parts.items()}
    totals = step.parts.sums(counts, tensors)
    return {name: Histogram.counted(totals[name], *limits[name]) for name in totals}


def shares(tensors: Mapping[str, Tensor], step: Step) -> dict[str, tuple[Tensor, Tensor]]:
    """The share of each whole tensor's entries that are zero, and that are infinite or not a number: 0-d, on its
    device. Where ranks have parts every one of them must call it."""
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        stored = part.coalesce().values() if part.is_sparse else part
        # What a sparse tensor does not store is zero.
        zeros = part.numel() - torch.count_nonzero(stored)
        finite = torch.count_nonzero(stored.isfinite())
        own[name] = torch.stack([zeros, stored.numel() - finite, torch.full_like(zeros, part.numel())])
    counts = own if step.parts is None else step.parts.sums(own, tensors)
    return {name: (count[0] / count[2], count[1] / count[2]) for name, count in counts.items()}


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _flat(tensor: Tensor) -> Tensor:
    """This rank's part, `[K]`, in a dtype that has bins."""
    return _dense(local(tensor)).detach().reshape(-1).to(at_least_float32(tensor.dtype))


class UpdateRatio:
    """Copies parameters before an optimizer step, and compares them behind it.

    The ratio of a parameter is the norm of its change over its norm before the step (0.001 is the usual advice for
    weights: https://cs231n.github.io/neural-networks-3/#ratio). It is 0 where nothing changed, as in a step that a loss
    scale skips, and 1 where the parameter was all zeros and moved.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    @torch.no_grad()
    def remember(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copies them; those of this step that are known already stay as they were."""
        for name, parameter in parameters.items():
            if name not in self._before:
                self._before[name] = (parameter, parameter.detach().clone())

    @torch.no_grad()
    def taken(self, step: Step) -> dict[str, Tensor]:
        """The ratios, 0-d, by name, and forgets the copies. Where ranks have parts every one of them must call it."""
        held, self._before = self._before, {}
        before = step.norms({name: copy for name, (_, copy) in held.items()})
        changed = step.norms({name: parameter.detach() - copy for name, (parameter, copy) in held.items()})
        if not before:
            return {}
        size, change = torch.stack(list(before.values())), torch.stack(list(changed.values()))
        ratios = change / torch.where(size == 0, change, size)
        return dict(zip(before, torch.where(change == 0, 0.0, ratios).unbind(), strict=True))

    def forget(self) -> None:
        """Frees the copies of a step that came to no end."""
        self._before = {}
