"""The estimated memory of each rank.

parameters, gradients, optimizer     exact sizes of storages; the hook `memory` measures the same sizes in a run
activations                          for one micro-batch of a rank; the hook `memory` measures the same on a CPU
others                               the batch, buffers of the network, averages of the weights, communication buffers
                                     of the strategy, and temporary tensors of the step
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from exp.config.targets import resolve
from exp.construct import build_optimization, build_phases
from exp.data.randomness import preserve_generators
from exp.errors import one_line
from exp.hooks.saved_tensors import storages
from exp.nested import tensors_in
from exp.plan.fake_step import UNDECIDED, FakeNetwork, Ones, StepFigures
from exp.strategies.ddp import DDP
from exp.strategies.footprint import Footprint, Held, Load, Place
from exp.strategies.single import Single
from exp.strategies.strategy import Strategy, averages_weights

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.check.plan import Plan

LONG = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class PlaceMemory:
    """The memory of one device in bytes. Ranks with equal memory share one object.

    A size of None is unknown.

    Attributes:
        ranks: Ranks with this memory.
        device: Index of the device if a rank has several devices, otherwise None.
        parameters: Bytes of the parameters.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer state.
        activations: Bytes of the activations.
        others: Bytes of other tensors, by description such as "the batch".
        on_host: Names of the entries of `parts` that are in the memory of the host instead of the device.
    """

    ranks: tuple[int, ...]
    device: int | None
    parameters: int
    gradients: int | None
    optimizer: int | None
    activations: int | None
    others: Mapping[str, int] = field(default_factory=dict)
    on_host: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, int | None]:
        """Bytes of the four parts that the hook `memory` logs, by name."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
        }

    @property
    def total(self) -> int:
        """Sum of all known parts on the device in bytes, which is an upper bound of the peak memory."""
        known = (size or 0 for name, size in self.parts.items() if name not in self.on_host)
        return sum(known) + sum(self.others.values())


class OptimizerState:
    """Calculator of the size of the optimizer state, which runs an optimizer step on fake tensors.

    Args:
        plan: Plan of the run.
        fake: Network of the run.
        trained: Names of the parameters that get a gradient.

    Attributes:
        notes: Texts that explain why a size is unknown or approximate.
    """

    def __init__(self, plan: Plan, fake: FakeNetwork, *, trained: Collection[str]) -> None:
        self.notes: list[str] = []
        self._trained = trained
        self._settings, self._known = plan.settings, dict[tuple[Any, ...], int | None]()
        self._network, self._mode = fake.module, fake.mode

    def of(self, held: Mapping[str, Held]) -> int | None:
        """Return the bytes of the optimizer state on a rank.

        Args:
            held: The part of each parameter that the rank stores, by parameter name.

        Returns:
            The number of bytes. None if the optimizer cannot run on fake tensors.
        """
        key = tuple((name, one.shape) for name, one in held.items() if one.steps)
        if key not in self._known:
            self._known[key] = self._state_bytes(held)
        return self._known[key]

    def _state_bytes(self, held: Mapping[str, Held]) -> int | None:
        with preserve_generators(), self._mode:
            try:
                optimizers = list(self._make_optimizers())
                self._keep_part(held)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["params"] = [one for one in group["params"] if one.grad is not None]
                    with Ones():
                        optimizer.step()
            # NAdam divides by 0, because the mode Ones returns 1 for every number that NAdam reads.
            except (*UNDECIDED, ArithmeticError) as error:
                self.notes.append(f"the state of the optimizer is not known: {one_line(error)}")
                return None
            return sum(storages(tensors_in([list(one.state.values()) for one in optimizers])).values())

    def _make_optimizers(self) -> Iterable[Optimizer]:
        phases = build_phases(self._settings)
        for phase in phases:
            yield phase.make(self._network, total_steps=LONG, total_epochs=LONG)[0]
        if not phases:
            yield build_optimization(self._settings).make(self._network, total_steps=LONG, total_epochs=LONG)[0]

    def _keep_part(self, held: Mapping[str, Held]) -> None:
        for name, parameter in self._network.named_parameters():
            one, parameter.grad = held.get(name), None
            if one is not None and one.steps and name in self._trained:
                parameter.data = torch.empty(one.shape, dtype=parameter.dtype)
                parameter.grad = torch.empty(one.shape, dtype=parameter.dtype)


def footprint_of(load: Load, strategy: Strategy | LightningStrategy) -> Footprint:
    """Return the memory and communication of each rank under a strategy.

    A strategy of Lightning is estimated like DDP, with a whole copy of the network on each rank. A note in the result
    states this.
    """
    placement = load.placement
    if placement.world_size == 1 and placement.layers == 1 and placement.backend is None:
        return Single(name="single").footprint(load)  # one device without a process group does not communicate
    if isinstance(strategy, Strategy):
        return strategy.footprint(load)
    name = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
    note = f"the memory of each rank under {name} is unknown, and counted as a whole copy per rank, as in ddp"
    found = DDP(name="ddp").footprint(load)
    return replace(found, notes=(*found.notes, note))


def memory_of(
    plan: Plan, figures: StepFigures, footprint: Footprint, states: OptimizerState | None
) -> list[PlaceMemory]:
    """Return the memory of every device, in descending order.

    Args:
        plan: Plan of the run.
        figures: Memory and FLOPs of one micro-batch of a rank.
        footprint: Memory and communication of the strategy.
        states: Object that computes the size of the optimizer state. None if the optimizer is unknown.
    """
    found = [_place_memory(plan, figures, place, states) for place in footprint.places]
    return sorted(found, key=lambda one: -one.total)


def _place_memory(plan: Plan, figures: StepFigures, place: Place, states: OptimizerState | None) -> PlaceMemory:
    parameters = sum(one.stored for name, one in place.held.items() if figures.parameters[name].size)
    activations = None
    if figures.activations is not None:
        activations = round(sum(size * place.share_of(layer) for layer, size in figures.by_layer.items()))
    others = {
        "buffers of the network": figures.buffers if place.held else 0,
        "the batch": figures.batch,
        "averages of the weights": _averages(plan, figures, place),
        **place.buffers,
        "temporaries": figures.temporaries if place.held else 0,
    }
    return PlaceMemory(
        ranks=place.ranks,
        device=place.device,
        parameters=parameters,
        gradients=_gradients(figures, place),
        optimizer=None if states is None else states.of(place.held),
        activations=activations,
        others={name: size for name, size in others.items() if size},
        on_host=("parameters", "gradients", "optimizer") if place.offloaded else (),
    )


def _gradients(figures: StepFigures, place: Place) -> int | None:
    """Return the bytes of the gradients on a rank, for the phase with the largest gradients.

    The argument `place` determines the part of each gradient that the rank stores. Return None if the gradients are
    unknown.
    """
    if not figures.gradients:
        return None
    sums = []
    for found in figures.gradients:
        parts = ((size, figures.parameters[name], place.held.get(name)) for name, size in found.items())
        sums.append(
            sum(round(size * part.gradient / max(one.size, 1)) for size, one, part in parts if part is not None)
        )
    return max(sums)


def _averages(plan: Plan, figures: StepFigures, place: Place) -> int:
    """Return the bytes of averaged weights that callbacks store. Averages have at least 4 bytes per number."""
    nodes, allow = plan.settings.callbacks.values(), plan.settings.security.allow
    count = sum(averages_weights(resolve(node["_target_"], allow=allow)) for node in nodes)
    if not count:
        return 0
    copied = 0
    for name, one in place.held.items():
        itemsize = figures.parameters[name].itemsize
        copied += one.stored * max(4, itemsize) // itemsize
    return count * copied
