"""The hook `activations`: logs statistics of the output of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Boundary, Hook, Period, Values
from exp.hooks.panels import Column, Healthy, Histogram
from exp.hooks.step import Step
from exp.nested import tensors_in

# An output counts as saturated if its distance to a bound is at most this fraction of the range between the bounds.
MARGIN = 0.01
# Bounds of modules with a bounded output. Hardtanh and its subclasses have attributes for their bounds.
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
}
# Indices of the statistics: number of entries, mean, sum of squared deviations, number of zeros, number at a bound.
COUNT, MEAN, SQUARES, ZEROS, SATURATED = range(5)

# Limits of healthy layers: the signal changes by less than three orders of magnitude, fewer than half of the units are
# dead, and fewer than half of the entries are at their bounds.
HEALTHY: dict[str, Healthy] = {
    "std": Healthy(low=1e-3, high=1e3),
    "dead_units": Healthy(high=0.5, is_logarithmic=False),
    "saturated": Healthy(high=0.5, is_logarithmic=False),
    "zeros": Healthy(high=0.99, is_logarithmic=False),
    "mean": Healthy(is_logarithmic=False),
}


class Activations(Hook):
    """Hook that logs statistics of the output of each module.

    The statistics cover the batch of a recorded step, over all ranks and micro-batches. Each statistic is shown as a
    heat map of layers by steps. The numbers are also saved in table.csv of the run directory. If `each_layer` is true,
    they are also logged as scalars, `activations/<statistic>/<module>`. The tags of the heat maps are:

    `activations/mean`, `activations/std`: mean and standard deviation over all entries of the output. The variance
    divides by the number of entries.
    `activations/zeros`: fraction of entries that are 0.
    `activations/dead_units`: fraction of units with only zero entries. A unit is a feature (last axis of `[B, C]` and
    `[B, T, C]`) or a channel (axis 1 of `[B, C, H, W]`).
    `activations/saturated`: for modules with a bounded output, fraction of entries near a bound, closer than 1 percent
    of the range. For ReLU6 only the upper bound counts.
    `activations/histogram/<module>`: if `histogram` is true, histogram of the last micro-batch of rank 0.

    If a module is called several times in a step, all its calls count. If it returns several tensors, the first one
    counts. Functions in a forward program are not modules. Statistics are computed in float32 and merged in float64.

    Args:
        every_n_steps: Optimizer steps between two records. `auto`: the number depends on the length of the run.
            Default: auto.
        each_layer: Whether the statistics are also logged as scalars. Default: False.
        modules: Name patterns of modules. `*` alone selects layers: modules without submodules. Default: *.
        histogram: Whether histograms are logged. Default: False.
    """

    needs = frozenset({"whole_outputs", "all_layers", "one_thread"})
    longest = {"every_n_steps": 100}

    def __init__(
        self,
        *,
        every_n_steps: Period = "auto",
        each_layer: bool = False,
        modules: Sequence[str] = ("*",),
        histogram: bool = False,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.each_layer, self.histogram = each_layer, histogram
        self._seen: dict[str, _Seen] = {}
        self._counts = True

    def passed(self, boundary: Boundary, step: Step) -> None:
        if boundary == "batch":
            # A rank without samples computes a placeholder batch, which must not add to the statistics.
            self._counts = step.weight != 0.0

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self.modules == ("*",) and next(module.children(), None) is not None:
            return
        found = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim()), None)
        if found is None:
            return
        found = found.detach()
        seen = self._seen.setdefault(name, _Seen(bounded=bounds_of(module) is not None))
        part, live = figures(found, module), live_units(found)
        if not self._counts:
            part, live = torch.zeros_like(part), torch.zeros_like(live)
        seen.parts.append(part)
        units = len(live)
        seen.live[units] = seen.live[units] | live if units in seen.live else live
        seen.last = found if self.histogram else None

    def after_step(self, step: Step) -> Values | None:
        seen, self._seen = self._seen, {}
        if not seen:
            return None
        device = step.device
        parts = torch.stack([merge_figures([part.to(device) for part in one.parts]) for one in seen.values()])
        lives = [torch.cat([live.to(device) for live in one.live.values()]) for one in seen.values()]
        ranks, alive = step.gather(parts), step.gather(torch.cat(lives).to(torch.uint8)).amax(0)
        found: dict[str, dict[str, Tensor]] = {figure: {} for figure in HEALTHY}
        values: dict[str, Any] = {}
        for place, ((name, one), units) in enumerate(zip(seen.items(), alive.split([*map(len, lives)]), strict=True)):
            whole = merge_figures(list(ranks[:, place]))
            name = name or "network"
            found["mean"][name] = whole[MEAN]
            found["std"][name] = (whole[SQUARES] / whole[COUNT]).sqrt()
            found["zeros"][name] = whole[ZEROS] / whole[COUNT]
            found["dead_units"][name] = 1 - units.float().mean()
            if one.bounded:
                found["saturated"][name] = whole[SATURATED] / whole[COUNT]
            if one.last is not None:
                values[f"activations/histogram/{name}"] = Histogram.of(one.last)
        for figure, numbers in found.items():
            if numbers:
                values[f"activations/{figure}"] = Column.of(numbers, healthy=HEALTHY[figure])
            if self.each_layer:
                values |= {f"activations/{figure}/{name}": number for name, number in numbers.items()}
        return values


@dataclass(slots=True)
class _Seen:
    """Record of the calls of one module in a step.

    Attributes:
        bounded: Whether the module's output has bounds.
        parts: Statistics of each call.
        live: Bool vectors by their length, which is the number of units. True marks a unit with a nonzero entry in any
            call.
        last: Output of the last call. None: no histogram is requested.
    """

    bounded: bool
    parts: list[Tensor] = field(default_factory=list)
    live: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


def figures(output: Tensor, module: nn.Module) -> Tensor:
    """Return five statistics of a module's output, at the indices COUNT, MEAN, SQUARES, ZEROS and SATURATED.

    Returns:
        Vector `[5]`, float64 (float32 on mps).
    """
    values = output.to(at_least_float32(output.dtype))
    count = float(values.numel())
    # Mean and squares are computed in two passes, because torch.var_mean takes fifteen times as long on a CPU.
    mean = values.mean()
    squares = (values - mean).square_().sum()
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    zeros = count - torch.count_nonzero(values).to(exact)
    mean, squares, at_bound = mean.to(exact), squares.to(exact), count_saturated(values, module).to(exact)
    return torch.stack([torch.full_like(mean, count), mean, squares, zeros, at_bound])


def merge_figures(parts: Sequence[Tensor]) -> Tensor:
    """Return the statistics of several parts together (Chan, Golub and LeVeque 1979).

    Args:
        parts: Statistics of each part: vectors `[5]`, as `figures` returns them.

    Returns:
        Vector `[5]`.
    """
    if len(parts) == 1:
        return parts[0]
    table = torch.stack(list(parts))
    whole = table.sum(0)
    mean = (table[:, COUNT] * table[:, MEAN]).sum() / whole[COUNT]
    whole[SQUARES] += (table[:, COUNT] * (table[:, MEAN] - mean) ** 2).sum()
    whole[MEAN] = mean
    return whole


def live_units(output: Tensor) -> Tensor:
    """Return a bool vector `[C]` that is True for each unit with a nonzero entry."""
    axis = 1 if output.dim() > 3 else output.dim() - 1
    others = [one for one in range(output.dim()) if one != axis]
    return (output.abs().amax(others) if others else output.abs().amax()[None]) != 0


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the lower and upper bound of a module's output; None if the output has no bounds."""
    if isinstance(module, nn.Hardtanh):  # also covers ReLU6, a subclass
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in BOUNDS.items() if isinstance(module, kind)), None)


def count_saturated(values: Tensor, module: nn.Module) -> Tensor:
    """Return the number of entries at a bound, 0-d. The number is 0 for a module without bounds."""
    bounds = bounds_of(module)
    if bounds is None:
        return values.new_zeros(())
    low, high = bounds
    margin = MARGIN * (high - low)
    at_bound = values >= high - margin
    if not isinstance(module, nn.ReLU6):  # the lower bound of ReLU6 is 0, which the statistic zeros counts
        at_bound |= values <= low + margin
    return at_bound.sum()
