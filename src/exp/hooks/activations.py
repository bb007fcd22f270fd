"""The hook `activations`: a few numbers on the output of each layer."""

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

# Share of the range of a bounded module that counts as its bound.
MARGIN = 0.01
# Bounds of modules whose output is bounded. Hardtanh and its subclasses have attributes for them.
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
}
# The figures of a part: number of entries, mean, sum of squared deviations, number of zeros, number at a bound.
COUNT, MEAN, SQUARES, ZEROS, SATURATED = range(5)

# Layers in which a signal fades or grows by three orders of magnitude, half of whose units are dead, or half of whose
# entries are at their bounds.
HEALTHY: dict[str, Healthy] = {
    "std": Healthy(low=1e-3, high=1e3),
    "dead_units": Healthy(high=0.5, is_logarithmic=False),
    "saturated": Healthy(high=0.5, is_logarithmic=False),
    "zeros": Healthy(high=0.99, is_logarithmic=False),
    "mean": Healthy(is_logarithmic=False),
}


class Activations(Hook):
    """Draws five figures of the output of each module over the batch of a due step, of all ranks and micro-batches.

    Each is a heat map, layers by steps, whose numbers are in the run's table.csv. With `each_layer` they are scalars,
    too, under `activations/<figure>/<module>`:

    `activations/mean`, `activations/std`: over all entries of the output. The deviation divides by their number.
    `activations/zeros`: share of entries that are 0.
    `activations/dead_units`: share of units whose every entry is 0. A unit is a feature, the last axis of `[B, C]` and
    `[B, T, C]`, or a channel, axis 1 of `[B, C, H, W]`.
    `activations/saturated`, of bounded modules: share of entries within 1 per cent of the range of a bound. For ReLU6
    that is the upper bound.
    `activations/histogram/<module>`, on request: of the last micro-batch of rank 0.

    A module that is called several times in a step counts with all its calls, and with the first tensor that it
    returns. Functions in a forward program are no modules. Figures are computed in float32 and merged in float64.

    Args:
        every_n_steps: Period. `auto` depends on the length of the run.
        each_layer: Whether the figures are scalars, too.
        modules: Patterns of modules. `*` alone means layers, which are modules without submodules.
        histogram: Whether histograms are logged.
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
            # A rank without a share of the batch has a stand-in, which adds nothing to the sums.
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
    """The calls of a module in a step. live: bool by unit, for each number of units."""

    bounded: bool
    parts: list[Tensor] = field(default_factory=list)
    live: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


def figures(output: Tensor, module: nn.Module) -> Tensor:
    """Return five numbers on one output of a module, `[5]`, float64: COUNT, MEAN, SQUARES, ZEROS, SATURATED."""
    values = output.to(at_least_float32(output.dtype))
    count = float(values.numel())
    # In two passes: torch.var_mean takes fifteen times as long on a CPU.
    mean = values.mean()
    squares = (values - mean).square_().sum()
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    zeros = count - torch.count_nonzero(values).to(exact)
    mean, squares, at_bound = mean.to(exact), squares.to(exact), count_saturated(values, module).to(exact)
    return torch.stack([torch.full_like(mean, count), mean, squares, zeros, at_bound])


def merge_figures(parts: Sequence[Tensor]) -> Tensor:
    """Return the figures of the entries of all parts, `[5]`, from those of each. Chan, Golub and LeVeque 1979."""
    if len(parts) == 1:
        return parts[0]
    table = torch.stack(list(parts))
    whole = table.sum(0)
    mean = (table[:, COUNT] * table[:, MEAN]).sum() / whole[COUNT]
    whole[SQUARES] += (table[:, COUNT] * (table[:, MEAN] - mean) ** 2).sum()
    whole[MEAN] = mean
    return whole


def live_units(output: Tensor) -> Tensor:
    """Return whether each unit has an entry other than 0: bool `[C]`."""
    axis = 1 if output.dim() > 3 else output.dim() - 1
    others = [one for one in range(output.dim()) if one != axis]
    return (output.abs().amax(others) if others else output.abs().amax()[None]) != 0


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds of a module's output; None for a module without them."""
    if isinstance(module, nn.Hardtanh):  # and ReLU6, which derives from it
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in BOUNDS.items() if isinstance(module, kind)), None)


def count_saturated(values: Tensor, module: nn.Module) -> Tensor:
    """Return the number of entries at a bound, 0-d; 0 for a module without bounds."""
    bounds = bounds_of(module)
    if bounds is None:
        return values.new_zeros(())
    low, high = bounds
    margin = MARGIN * (high - low)
    at_bound = values >= high - margin
    if not isinstance(module, nn.ReLU6):  # its lower bound is counted as zeros
        at_bound |= values <= low + margin
    return at_bound.sum()
