"""The hook `gradients`: how large the gradients are, how they are distributed, and what a step makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from exp.errors import Fault
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Period, Values, has_come
from exp.hooks.norms import norms, with_total
from exp.hooks.panels import BINS, Column, Healthy, Histogram, Panel, bin_counts, finite_range
from exp.hooks.step import Step
from exp.models.matching import matching
from exp.strategies.whole_state import local

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


NORM, CLIPPED, RATIO = "gradients/norm/", "gradients/norm_clipped/", "gradients/update_ratio/"
OWN_PERIODS = ("histogram_every_n_steps", "update_ratio_every_n_steps", "shares_every_n_steps")
PERIODS = ("every_n_steps", "heat_map_every_n_steps", *OWN_PERIODS)
# Below the first an optimizer such as Adam sees its own eps (1e-8 an entry), above the second losses use to diverge.
HEALTHY_NORM = Healthy(low=1e-6, high=100.0)
# Two orders of magnitude about the 0.001 that is the usual advice for weights: see UpdateRatio.
HEALTHY_RATIO = Healthy(low=1e-5, high=0.1)
# A gradient all of whose entries are zero teaches nothing, and none of them may be lost.
ANY_SHARE, NO_SHARE = Healthy(high=0.999, is_logarithmic=False), Healthy(high=0.0, is_logarithmic=False)


class Gradients(Hook):
    """Logs what follows, of the gradients of an optimizer step: accumulated, averaged over ranks, without a loss scale.

    `gradients/norm/total`, the 2-norm of all of them together, before clipping.
    `gradients/update_ratio/total`, the norm of the change of all parameters in the step over their norm before.
    `gradients/norm`, a heat map, parameters by steps, of the norm of each parameter's gradient, and
    `gradients/update_ratio`, one of the norm of each parameter's change over its own norm before. A parameter that got
        no gradient in a step has no number there. The numbers are in the run's table.csv.
    `gradients/histogram/<parameter>`, of the gradient's finite entries.

    With `each_parameter` the numbers of the heat maps are scalars, too: `gradients/norm/<parameter>` and
    `gradients/update_ratio/<parameter>`.
    Of clipping, where the run clips, on request: `gradients/norm_clipped/total` and, of each parameter,
        `gradients/norm_clipped/<parameter>`.
    With a period of their own, on request: `gradients/zeros` and `gradients/non_finite`, heat maps of the shares of
        entries that are, and scalars as above.

    every_n_steps: of the total norm, and of the norms that are scalars.
    each_parameter: whether what there is of each parameter is written as scalars, too.
    modules: patterns of modules whose parameters, and those of the modules below, are taken; the total is theirs.
    clipped: the norms after clipping: of all together, of each parameter, too, or none.
    heat_map_every_n_steps: of the norm of each parameter. This and the other periods: auto goes by the length of the
        run, and None is none of it.
    """

    longest = {"heat_map_every_n_steps": 100, "histogram_every_n_steps": 100, "update_ratio_every_n_steps": 100}
    # Of a small network a histogram takes as long as the norms of all parameters at a hundred steps.
    fewest = {"histogram_every_n_steps": 5}

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        each_parameter: bool = False,
        modules: Sequence[str] = ("*",),
        clipped: Literal["total", "each"] | None = None,
        heat_map_every_n_steps: Period | None = "auto",
        histogram_every_n_steps: Period | None = "auto",
        update_ratio_every_n_steps: Period | None = "auto",
        shares_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.each_parameter, self.clipped = each_parameter, clipped
        self.heat_map_every_n_steps = self._period("heat_map_every_n_steps", heat_map_every_n_steps)
        self.histogram_every_n_steps = self._period("histogram_every_n_steps", histogram_every_n_steps)
        self.update_ratio_every_n_steps = self._period("update_ratio_every_n_steps", update_ratio_every_n_steps)
        self.shares_every_n_steps = shares_every_n_steps
        self._parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._ratio = UpdateRatio()
        # By whether there are ratios; what a subclass has of its own is always asked.
        own = {
            name for name in ("after_step", "after_clipping") if getattr(type(self), name) is getattr(Gradients, name)
        }
        behind = own & {"after_clipping"} if clipped is None else set()
        self._idle = {True: frozenset(behind), False: frozenset(behind | (own & {"after_step"}))}

    def _period(self, setting: str, period: Period | None) -> int | None:
        return None if period is None else self.steps_of(setting, period)

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
        if planned.config["trainer"]["gradient_clip_val"]:
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

    def teardown(self) -> None:
        self._ratio.forget()

    @property
    def names(self) -> Sequence[str]:
        """The parameters that it looks at, once it is set up."""
        return self._names

    def norms_alone(self, index: int) -> bool:
        """Whether norms before clipping are all that it gives at step `index`."""
        return self.due(index) and not any(has_come(getattr(self, period), index) for period in OWN_PERIODS)

    def named(self, each: Sequence[float], index: int) -> dict[str, float | Panel]:
        """Name norms of step `index` that somebody else took, one of each of its parameters, and add the total."""
        # By squares, as with_total has it.
        total = math.sqrt(sum([number * number for number in each]))
        return self._shown_norms(NORM, self._names, each, total, index)

    def due(self, index: int) -> bool:
        """Whether any of the periods has come."""
        return any(has_come(getattr(self, period), index) for period in PERIODS)

    def idle_at(self, index: int) -> frozenset[str]:
        return self._idle[has_come(self.update_ratio_every_n_steps, index)]

    def after_backward(self, step: Step) -> Values | None:
        index = step.index
        values: dict[str, Any] = {}
        if has_come(self.every_n_steps, index) or has_come(self.heat_map_every_n_steps, index):
            values = self._norms(step, NORM)
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
                zeros, non_finite = shares(found, step)
                values |= self._shown("gradients/zeros/", zeros, healthy=ANY_SHARE)
                values |= self._shown("gradients/non_finite/", non_finite, healthy=NO_SHARE)
            if has_ratio:
                chosen = dict(zip(self._names, self._parameters, strict=True))
                self._ratio.remember({name: chosen[name] for name in names})
        return values or None

    def after_clipping(self, step: Step) -> Values | None:
        if self.clipped is None or not step.clips or not has_come(self.every_n_steps, step.index):
            return None
        return self._norms(step, CLIPPED)

    def after_step(self, step: Step) -> Values | None:
        if not has_come(self.update_ratio_every_n_steps, step.index):
            return None
        ratios, total = self._ratio.taken(step)
        return {**self._shown(RATIO, ratios, healthy=HEALTHY_RATIO), f"{RATIO}total": total} if ratios else None

    def _shown(
        self, beginning: str, numbers: Mapping[str, Tensor | float], *, healthy: Healthy
    ) -> dict[str, Tensor | float | Panel]:
        """A column of the heat map of numbers by parameter, and scalars where they are wanted."""
        if not numbers:
            return {}
        values: dict[str, Tensor | float | Panel] = {beginning.rstrip("/"): Column.of(numbers, healthy=healthy)}
        if self.each_parameter:
            values |= {beginning + name: one for name, one in numbers.items()}
        return values

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Of the parameters that have one, and their names."""
        pairs = [
            (name, gradient)
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if (gradient := parameter.grad) is not None
        ]
        return [name for name, _ in pairs], [gradient for _, gradient in pairs]

    def _norms(self, step: Step, beginning: str) -> dict[str, Any]:
        """Of all gradients together, and of each where it is wanted; the tags begin so."""
        names: Sequence[str] = self._names
        if step.parts is None:
            gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
            names = names if len(gradients) == len(names) else self._gradients()[0]
            each, total = with_total(norms(gradients))
        else:
            names, gradients = self._gradients()
            # Also without any here: other ranks may hold some.
            found = step.norms(dict(zip(names, gradients, strict=True)))
            names = list(found)
            each, total = with_total(list(found.values()))
        return self._shown_norms(beginning, names, each, total, step.index) if names else {}

    def _shown_norms(
        self, beginning: str, names: Sequence[str], each: Sequence[Any], total: Any, index: int
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if has_come(self.every_n_steps, index):
            values[beginning + "total"] = total
            if self.clipped == "each" if beginning == CLIPPED else self.each_parameter:
                values |= zip([beginning + name for name in names], each, strict=True)
        if beginning == NORM and has_come(self.heat_map_every_n_steps, index):
            numbers = dict(zip(names, each, strict=True))
            values[beginning.rstrip("/")] = Column.of(numbers, healthy=HEALTHY_NORM)
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


def shares(tensors: Mapping[str, Tensor], step: Step) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The share of each whole tensor's entries that are zero, and that are infinite or not a number: 0-d, on its
    device, by name. Where ranks have parts every one of them must call it."""
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        stored = part.coalesce().values() if part.is_sparse else part
        # What a sparse tensor does not store is zero.
        zeros = part.numel() - torch.count_nonzero(stored)
        finite = torch.count_nonzero(stored.isfinite())
        own[name] = torch.stack([zeros, stored.numel() - finite, torch.full_like(zeros, part.numel())])
    counts = own if step.parts is None else step.parts.sums(own, tensors)
    zero, lost = ({name: count[place] / count[2] for name, count in counts.items()} for place in (0, 1))
    return zero, lost


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
    def taken(self, step: Step) -> tuple[dict[str, Tensor], Tensor | float]:
        """The ratios, 0-d, by name, and that of all parameters together; forgets the copies.

        Where ranks have parts every one of them must call it.
        """
        held, self._before = self._before, {}
        before = step.norms({name: copy for name, (_, copy) in held.items()})
        changed = step.norms({name: parameter.detach() - copy for name, (parameter, copy) in held.items()})
        if not before:
            return {}, 0.0
        sizes, changes = torch.stack(list(before.values())), torch.stack(list(changed.values()))
        whole = torch.stack([torch.linalg.vector_norm(sizes), torch.linalg.vector_norm(changes)])
        ratios = _ratio(torch.cat([sizes, whole[:1]]), torch.cat([changes, whole[1:]])).unbind()
        return dict(zip(before, ratios[:-1], strict=True)), ratios[-1]

    def forget(self) -> None:
        """Frees the copies of a step that came to no end."""
        self._before = {}


def _ratio(sizes: Tensor, changes: Tensor) -> Tensor:
    """`[K]` each."""
    return torch.where(changes == 0, 0.0, changes / torch.where(sizes == 0, changes, sizes))
