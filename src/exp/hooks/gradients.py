"""Hook `gradients`, which logs norms and histograms of gradients, and the relative change of parameters per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from exp.errors import ErrorDetails
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Period, Values, is_due_at
from exp.hooks.norms import norms, with_total
from exp.hooks.panels import BINS, Column, Healthy, Histogram, bin_counts, finite_range
from exp.hooks.step import Step
from exp.models.matching import find_modules
from exp.strategies.whole_state import local_part

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


NORM, CLIPPED, RATIO = "gradients/norm/", "gradients/norm_clipped/", "gradients/update_ratio/"
OWN_PERIODS = ("histogram_every_n_steps", "update_ratio_every_n_steps")
PERIODS = ("every_n_steps", "heat_map_every_n_steps", *OWN_PERIODS)
# Bounds of healthy gradient norms. Below the lower bound, the eps of optimizers such as Adam (1e-8 per entry)
# dominates. Above the upper bound, losses diverge.
HEALTHY_NORM = Healthy(low=1e-6, high=100.0)
# Bounds of healthy update ratios: two orders of magnitude below and above 0.001. See UpdateRatio.
HEALTHY_RATIO = Healthy(low=1e-5, high=0.1)


class Gradients(Hook):
    """Hook that logs the gradients of an optimizer step, and the changes of parameters.

    The gradients are accumulated over micro-batches, averaged over ranks, unscaled, and not clipped.

    Tags:

    - `gradients/norm/total`: 2-norm of all gradients together.
    - `gradients/norm`: heat map of the norm of each gradient, with one row per parameter and one column per step.
    - `gradients/histogram/<parameter>`: histogram of the finite entries of a gradient.
    - `gradients/update_ratio/total`: norm of the change of all parameters, divided by their norm before the step.
    - `gradients/update_ratio`: heat map of the same ratio for each parameter.
    - `gradients/norm/<parameter>`, `gradients/update_ratio/<parameter>`: numbers of the heat maps, if `each_parameter`
      is true.
    - `gradients/norm_clipped/total`: norm after clipping, if `clipped` is set and the run clips gradients.
    - `gradients/norm_clipped/<parameter>`: norm of each gradient after clipping, if `clipped` is `each`.

    If a parameter has no gradient in a step, its value is missing. The run saves the numbers of the heat maps in
    table.csv.

    Args:
        every_n_steps: Steps between two records of the total norm, and of norms that are scalars. Default: 1.
        each_parameter: Whether the values of each parameter are also logged as scalars. Default: False.
        modules: Patterns of modules. Only parameters of these modules and their submodules are logged, and the totals
            include only these parameters. Default: *.
        clipped: Norms after clipping: `total`, `each` (the total and each parameter), or None. Default: None.
        heat_map_every_n_steps: Steps between two records of the norm of each parameter. `auto` depends on the length of
            the run, and None disables the record. Default: auto.
        histogram_every_n_steps: Steps between two records of the histograms. Default: auto.
        update_ratio_every_n_steps: Steps between two records of the update ratios. Default: auto.
    """

    longest = {"heat_map_every_n_steps": 100, "histogram_every_n_steps": 100, "update_ratio_every_n_steps": 100}
    # Histograms are rare, because in a small network one record takes as long as the norms of a hundred steps.
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
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.each_parameter, self.clipped = each_parameter, clipped
        self.heat_map_every_n_steps = self._period("heat_map_every_n_steps", heat_map_every_n_steps)
        self.histogram_every_n_steps = self._period("histogram_every_n_steps", histogram_every_n_steps)
        self.update_ratio_every_n_steps = self._period("update_ratio_every_n_steps", update_ratio_every_n_steps)
        self._parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self._ratio = UpdateRatio()
        # Names of idle methods, by whether the step records update ratios. A method that a subclass overrides is never
        # idle.
        own = {
            name for name in ("after_step", "after_clipping") if getattr(type(self), name) is getattr(Gradients, name)
        }
        idle = frozenset(own - {"after_step"} if clipped is None else ())
        self._idle = {True: idle, False: idle | (own - {"after_clipping"})}

    def _period(self, setting: str, period: Period | None) -> int | None:
        return None if period is None else self.steps_of(setting, period)

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield errors for settings that need values to which hooks have no access in a run with DeepSpeed."""
        yield from super().errors(planned)
        if not {"owns_step", "shards_parameters"} <= planned.traits:
            return
        hidden = [*OWN_PERIODS, *(["clipped"] if planned.settings.trainer.gradient_clip_val else [])]
        for setting in hidden:
            if (value := getattr(self, setting)) is not None:
                expected = "null: with DeepSpeed, hooks can read only the norms before clipping"
                fix = f"Write hooks.{self.name}.{setting}=null"
                yield self.error(setting, got=value, expected=expected, fix=fix)

    def setup(self, network: nn.Module) -> None:
        chosen = {
            id(parameter)
            for module in find_modules(network, self.modules, key=f"hooks.{self.name}.modules").values()
            for parameter in module.parameters()
        }
        named = [
            (name, parameter)
            for name, parameter in network.named_parameters()
            if id(parameter) in chosen and parameter.requires_grad
        ]
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]

    def teardown(self) -> None:
        self._ratio.forget()

    def name_norms(self, each: Sequence[float]) -> dict[str, float]:
        """Return the norms of gradients by tag: the total norm and, with `each_parameter`, the norm of each parameter.

        Args:
            each: Norm of each parameter's gradient, in the order of `names`.
        """
        # Squares are added, because the total then has the same rounding as in with_total.
        values = {f"{NORM}total": math.sqrt(sum([number * number for number in each]))}
        if self.each_parameter:
            values |= zip([NORM + name for name in self.names], each, strict=True)
        return values

    def due(self, index: int) -> bool:
        return any(is_due_at(getattr(self, period), index) for period in PERIODS)

    def idle_at(self, index: int) -> frozenset[str]:
        return self._idle[is_due_at(self.update_ratio_every_n_steps, index)]

    def after_backward(self, step: Step) -> Values | None:
        index = step.index
        values: dict[str, Any] = {}
        if is_due_at(self.every_n_steps, index) or is_due_at(self.heat_map_every_n_steps, index):
            values = self._norms(step, NORM)
        has_histograms = is_due_at(self.histogram_every_n_steps, index)
        has_ratio = is_due_at(self.update_ratio_every_n_steps, index)
        if has_histograms or has_ratio:
            names, gradients = self._gradients()
            if has_histograms:  # runs even without gradients on this rank, because other ranks may have gradients
                found = histograms(dict(zip(names, gradients, strict=True)), step)
                values |= {f"gradients/histogram/{name}": one for name, one in found.items()}
            if has_ratio:
                chosen = dict(zip(self.names, self._parameters, strict=True))
                self._ratio.remember({name: chosen[name] for name in names})
        return values or None

    def after_clipping(self, step: Step) -> Values | None:
        if self.clipped is None or not step.clips or not is_due_at(self.every_n_steps, step.index):
            return None
        return self._norms(step, CLIPPED)

    def after_step(self, step: Step) -> Values | None:
        if not is_due_at(self.update_ratio_every_n_steps, step.index):
            return None
        ratios, total = self._ratio.take(step)
        if not ratios:
            return None
        values = {f"{RATIO}total": total, RATIO.rstrip("/"): Column.of(ratios, healthy=HEALTHY_RATIO)}
        return values | {RATIO + name: ratio for name, ratio in ratios.items()} if self.each_parameter else values

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Return the names of the parameters that have a gradient, and their gradients, in the same order."""
        pairs = [
            (name, gradient)
            for name, parameter in zip(self.names, self._parameters, strict=True)
            if (gradient := parameter.grad) is not None
        ]
        return [name for name, _ in pairs], [gradient for _, gradient in pairs]

    def _norms(self, step: Step, beginning: str) -> dict[str, Any]:
        """Return the norms of the current gradients by tag.

        Args:
            step: The step.
            beginning: First part of the tags.
        """
        names: Sequence[str] = self.names
        if step.parts is None:
            gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
            names = names if len(gradients) == len(names) else self._gradients()[0]
            each, total = with_total(norms(gradients))
        else:
            names, gradients = self._gradients()
            # The norms are computed even without a gradient on this rank, because other ranks may have gradients.
            found = step.norms(dict(zip(names, gradients, strict=True)))
            names = list(found)
            each, total = with_total(list(found.values()))
        return self._shown_norms(beginning, names, each, total, step.index) if names else {}

    def _shown_norms(
        self, beginning: str, names: Sequence[str], each: Sequence[Any], total: Any, index: int
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if is_due_at(self.every_n_steps, index):
            values[beginning + "total"] = total
            if self.clipped == "each" if beginning == CLIPPED else self.each_parameter:
                values |= zip([beginning + name for name in names], each, strict=True)
        if beginning == NORM and is_due_at(self.heat_map_every_n_steps, index):
            numbers = dict(zip(names, each, strict=True))
            values[beginning.rstrip("/")] = Column.of(numbers, healthy=HEALTHY_NORM)
        return values


def histograms(tensors: Mapping[str, Tensor], step: Step) -> dict[str, Histogram]:
    """Return a histogram of the finite entries of each tensor, by name. Entries of all shards are counted.

    If the tensors are sharded, every rank must call this function.
    """
    if step.parts is None:
        return {name: Histogram.of(_dense(tensor)) for name, tensor in tensors.items()}
    parts = {name: _flat(tensor) for name, tensor in tensors.items()}
    ranges = {name: finite_range(part) for name, part in parts.items()}
    # Low limits are negated, so that one maximum over ranks gives both limits.
    found = step.parts.maxima({name: torch.stack([high, -low]) for name, (low, high) in ranges.items()})
    limits = {name: (-pair[1], pair[0]) for name, pair in found.items()}
    counts = {name: bin_counts(part, *limits[name], bins=BINS) for name, part in parts.items()}
    totals = step.parts.sums(counts, tensors)
    return {name: Histogram.from_counts(totals[name], *limits[name]) for name in totals}


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return the shard of this rank as a vector `[K]`, in a dtype that torch.histc supports."""
    return _dense(local_part(tensor)).detach().reshape(-1).to(at_least_float32(tensor.dtype))


class UpdateRatio:
    """Ratio of the change of parameters in an optimizer step to their size before the step.

    The ratio of a parameter is the norm of its change divided by its norm before the step. The usual recommendation for
    weights is 0.001 (https://cs231n.github.io/neural-networks-3/#ratio). The ratio is 0 if the parameter did not
    change, for example because the loss scale skipped the step. The ratio is 1 if the parameter was 0 and changed.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    @torch.no_grad()
    def remember(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy parameters before their update. A parameter that is already copied in this step is skipped."""
        for name, parameter in parameters.items():
            if name not in self._before:
                self._before[name] = (parameter, parameter.detach().clone())

    @torch.no_grad()
    def take(self, step: Step) -> tuple[dict[str, Tensor], Tensor | float]:
        """Return the ratio of each parameter by name, and the ratio of all parameters together. Delete the copies.

        If the parameters are sharded, every rank must call this method.
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
        """Delete the copies of the parameters, after a step that was not completed."""
        self._before = {}


def _ratio(sizes: Tensor, changes: Tensor) -> Tensor:
    return torch.where(changes == 0, 0.0, changes / torch.where(sizes == 0, changes, sizes))
