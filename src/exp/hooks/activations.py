"""The hook `activations`: what the layers of a network give, in a few numbers each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Boundary, Hook, Period, Values
from exp.hooks.panels import Column, Healthy, Histogram
from exp.hooks.step import Step
from exp.nested import tensors_in

# Of the way from one bound to the other.
MARGIN = 0.01
# Of modules that are bounded; Hardtanh, and what derives from it, says its own bounds.
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
}
# The figures of a part: how many entries, their mean, the sum of squares about it, how many are zero; and of how many
# it was asked whether they are saturated, and how many are.
COUNT, MEAN, SQUARES, ZEROS, ASKED, SATURATED = range(6)

# Layers that a signal fades or grows in by three orders of magnitude, half of whose units give nothing, or which are
# at their bounds in half of what they give.
HEALTHY: dict[str, Healthy] = {
    "std": Healthy(low=1e-3, high=1e3),
    "dead_units": Healthy(high=0.5, is_logarithmic=False),
    "saturated": Healthy(high=0.5, is_logarithmic=False),
    "zeros": Healthy(high=0.99, is_logarithmic=False),
    "mean": Healthy(is_logarithmic=False),
}


class Activations(Hook):
    """Draws five figures of each module's output over the batch of a due step, of all ranks and micro-batches together.

    Each is a heat map, layers by steps, whose numbers are in the run's table.csv: `activations/std` and so on. With
    `each_layer` they are scalars, too:

    `activations/mean/<module>`, `activations/std/<module>`: of all entries of the output, the deviation by their number
    (not by one less).
    `activations/zeros/<module>`: share of the entries that are 0.
    `activations/dead_units/<module>`: share of the units whose every entry is 0, for each sample and place of the
    batch. A unit is a feature, the last axis of `[B, C]` and `[B, T, C]`, or a channel, axis 1 of `[B, C, H, W]`.
    `activations/saturated/<module>`, of modules that are bounded: share of the entries within 1 per cent of the range
    of a bound of Tanh, Softsign, Sigmoid, Hardsigmoid, Hardtanh; of the upper bound of ReLU6, for its lower one is
    what zeros count; of Softmax the share of its distributions whose largest probability is above 0.99.
    `activations/histogram/<module>`, where wanted: of the last micro-batch's entries, of the first rank.

    A module that is called several times in a step counts with all its calls, and a unit is dead if it is in all of
    them; of several tensors that it returns the first one counts. Functions in a forward program are no modules. The
    figures are taken in float32, and put together in float64.

    each_layer: whether the figures are scalars, too.
    modules: `*` alone means layers, the modules without others below them.
    unit_axis: the axis of the units, for outputs that are laid out in another way: 1 for `[B, C, T]` of Conv1d.
    """

    needs = frozenset({"whole_outputs", "all_layers", "one_thread"})
    longest = {"every_n_steps": 100}

    def __init__(
        self,
        *,
        every_n_steps: Period = "auto",
        each_layer: bool = False,
        modules: Sequence[str] = ("*",),
        unit_axis: int | None = None,
        histogram: bool = False,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.each_layer, self.unit_axis, self.histogram = each_layer, unit_axis, histogram
        self._seen: dict[str, _Seen] = {}
        self._counts = True

    def passed(self, boundary: Boundary, step: Step) -> None:
        if boundary == "batch":
            # A rank without a share of the batch holds a stand-in, and takes part in the sums with nothing.
            self._counts = step.weight != 0.0

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self.modules == ("*",) and next(module.children(), None) is not None:
            return
        found = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim()), None)
        if found is None:
            return
        found = found.detach()
        seen = self._seen.setdefault(name, _Seen(bounded=is_bounded(module)))
        part = figures(found, module)
        seen.parts.append(part if self._counts else torch.zeros_like(part))
        if self.unit_axis is not None and not -found.dim() <= self.unit_axis < found.dim():
            raise RunError(
                f"hooks.{self.name}.unit_axis is {self.unit_axis}; {name} gives {list(found.shape)}, which has no such "
                f"axis. Leave the module out of hooks.{self.name}.modules, or choose another axis"
            )
        live = live_units(found, axis=self.unit_axis)
        live = live if self._counts else torch.zeros_like(live)
        units = len(live)
        seen.live[units] = seen.live[units] | live if units in seen.live else live
        seen.last = found if self.histogram else None

    def after_step(self, step: Step) -> Values | None:
        seen, self._seen = self._seen, {}
        if not seen:
            return None
        device = step.device
        parts = torch.stack([merged([part.to(device) for part in one.parts]) for one in seen.values()])
        lives = [torch.cat([live.to(device) for live in one.live.values()]) for one in seen.values()]
        ranks, alive = step.gather(parts), step.gather(torch.cat(lives).to(torch.uint8)).amax(0)
        found: dict[str, dict[str, Tensor]] = {figure: {} for figure in HEALTHY}
        values: dict[str, Any] = {}
        for place, ((name, one), units) in enumerate(zip(seen.items(), alive.split([*map(len, lives)]), strict=True)):
            whole = merged(list(ranks[:, place]))
            name = name or "network"
            found["mean"][name] = whole[MEAN]
            found["std"][name] = (whole[SQUARES] / whole[COUNT]).sqrt()
            found["zeros"][name] = whole[ZEROS] / whole[COUNT]
            found["dead_units"][name] = 1 - units.float().mean()
            if one.bounded:
                found["saturated"][name] = whole[SATURATED] / whole[ASKED]
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
    """A module's calls in a step. live: bool by unit, of calls with one number of units together."""

    bounded: bool
    parts: list[Tensor] = field(default_factory=list)
    live: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


def figures(output: Tensor, module: nn.Module) -> Tensor:
    """Six numbers of one output of a module, `[6]`, float64: COUNT, MEAN, SQUARES, ZEROS, ASKED, SATURATED."""
    values = output.to(at_least_float32(output.dtype))
    count = float(values.numel())
    # In two passes: torch.var_mean takes fifteen times as long on a CPU.
    mean = values.mean()
    squares = (values - mean).square_().sum()
    saturated, asked = saturation(values, module)
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    zeros = count - torch.count_nonzero(values).to(exact)
    mean, squares, saturated = mean.to(exact), squares.to(exact), saturated.to(exact)
    return torch.stack([torch.full_like(mean, count), mean, squares, zeros, torch.full_like(mean, asked), saturated])


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The figures of all entries of several parts, from those of each: `[6]`. Chan, Golub and LeVeque 1979."""
    if len(parts) == 1:
        return parts[0]
    table = torch.stack(list(parts))
    whole = table.sum(0)
    mean = (table[:, COUNT] * table[:, MEAN]).sum() / whole[COUNT]
    whole[SQUARES] += (table[:, COUNT] * (table[:, MEAN] - mean) ** 2).sum()
    whole[MEAN] = mean
    return whole


def live_units(output: Tensor, *, axis: int | None) -> Tensor:
    """Whether a unit gives anything but 0, for each of C units: bool `[C]`. axis: of the units; None as Activations."""
    if axis is None:
        axis = 1 if output.dim() > 3 else -1
    others = [one for one in range(output.dim()) if one != axis % output.dim()]
    return (output.abs().amax(others) if others else output.abs().amax()[None]) != 0


def is_bounded(module: nn.Module) -> bool:
    """Whether `saturated` is asked of it."""
    return isinstance(module, (nn.Softmax, nn.Softmax2d, nn.Hardtanh, *BOUNDS))


def saturation(values: Tensor, module: nn.Module) -> tuple[Tensor, float]:
    """How many entries of a bounded module's output (of Softmax: distributions) are saturated, 0-d; and of how many."""
    if isinstance(module, (nn.Softmax, nn.Softmax2d)):
        largest = values.amax(-3 if isinstance(module, nn.Softmax2d) else softmax_axis(values, module.dim))
        return (largest > 1 - MARGIN).sum(), float(largest.numel())
    at_bound = _at_bound(module)
    if at_bound is None:
        return values.new_zeros(()), 1.0
    return at_bound(values).sum(), float(values.numel())


def softmax_axis(values: Tensor, axis: int | None) -> int:
    """Along which Softmax sums; not told, torch goes by the number of axes (torch.nn.functional.softmax)."""
    return axis if axis is not None else 0 if values.dim() in (0, 1, 3) else 1


def _at_bound(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What says of each entry whether it is at a bound; None of a module that has none."""
    if isinstance(module, nn.Hardtanh):  # and ReLU6, which derives from it
        low, high = float(module.min_val), float(module.max_val)
    else:
        bounds = next((bounds for kind, bounds in BOUNDS.items() if isinstance(module, kind)), None)
        if bounds is None:
            return None
        low, high = bounds
    margin = MARGIN * (high - low)
    if isinstance(module, nn.ReLU6):
        return lambda values: values >= high - margin
    return lambda values: (values >= high - margin) | (values <= low + margin)
