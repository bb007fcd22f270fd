"""What a decided run takes: its layers, the memory of each rank, the time of a step, and what is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.models.inference import example_arguments
from exp.plan.device_peaks import Device
from exp.plan.fake_step import Setting, StepFigures, sizes_of, take_step
from exp.plan.rank_memory import OptimizerState, PlaceMemory, footprint_of, largest_total, load_of, memory_of
from exp.plan.step_time import StepTime, step_time
from exp.strategies.footprint import Footprint
from exp.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

    from exp.check.plan import Plan

# Guesses of the largest batch that are tried before the largest that was seen to fit is taken.
GUESSES = 4
OWN_MODULE = (
    "module: what a training_step of your own computes and keeps nobody knows; its parameters are counted alone"
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one run.

    network: on the meta device. places: the memory of each rank, those first that have most. time: None where no device
    is known. batch: data.batch_size, of the whole run. micro_batches: that are accumulated in a step.
    notes: what is an estimate, or not known, and why.
    """

    network: nn.Module
    figures: StepFigures
    footprint: Footprint
    places: Sequence[PlaceMemory]
    time: StepTime | None
    batch: int
    micro_batches: int
    notes: Sequence[str]

    @property
    def total(self) -> int:
        """Bytes of the device that has most."""
        return largest_total(self.places)


class Estimator:
    """Estimates a plan's run, and the same run with other batches.

    device: None where it is not known. Raises: RunError where the plan's network cannot be built without numbers.
    """

    def __init__(self, plan: Plan, *, device: Device | None) -> None:
        self.plan, self.device = plan, device
        self.word = plan.settings.precision.word
        self._states: OptimizerState | None = None
        self._known: dict[tuple[int, int], Estimate] = {}

    @property
    def batch(self) -> int:
        """data.batch_size; 1 where loaders of the user's own do not say."""
        return self.plan.settings.batch_size or 1

    @property
    def micro_batches(self) -> int:
        return self.plan.settings.trainer.accumulate_grad_batches

    def estimate(self, *, batch: int | None = None, micro_batches: int | None = None) -> Estimate:
        """Of the run, or with another data.batch_size, or other trainer.accumulate_grad_batches."""
        key = (batch or self.batch, micro_batches or self.micro_batches)
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def _estimate(self, batch: int, micro_batches: int) -> Estimate:
        plan, network = self.plan, self.plan.network
        assert network is not None
        recomputed = plan.strategy.activation_checkpointing if isinstance(plan.strategy, Strategy) else ()
        # The ranks that have most where a batch does not come out even.
        samples = max(1, -(-batch // plan.placement.data_ranks))
        setting = Setting(samples=samples, word=self.word, recomputed=recomputed)
        figures = take_step(plan, setting) if plan.own is None else parameters_alone(network, setting)
        if self._states is None and figures.fake is not None:
            self._states = OptimizerState(plan, figures.fake, trained=figures.trained)
        inputs = example_arguments(network, plan.spec) if self._is_cut else ()
        load = load_of(plan, figures, micro_batches=micro_batches, network=network, inputs=inputs)
        footprint = footprint_of(load, plan.strategy)
        places = memory_of(plan, figures, footprint, self._states)
        time = None
        if self.device is not None and figures.operators:
            time = step_time(figures, footprint, places, device=self.device, micro_batches=micro_batches)
        notes = [*figures.notes, *footprint.notes, *(self._states.notes if self._states else [])]
        return Estimate(
            network=network,
            figures=figures,
            footprint=footprint,
            places=places,
            time=time,
            batch=batch,
            micro_batches=micro_batches,
            notes=list(dict.fromkeys(notes)),
        )

    @property
    def _is_cut(self) -> bool:
        placement = self.plan.placement
        return self.plan.own is None and placement.model_ranks * placement.layers > 1

    def largest_batch(self, limit: int) -> int | None:
        """The largest data.batch_size with which every device has room, by whole samples a rank.

        None where not one sample a rank fits, or what grows with the batch is not known.
        limit: bytes of each device.
        """
        ranks = self.plan.placement.data_ranks
        own = max(1, -(-self.batch // ranks))
        seen = {own: self.estimate().total}
        if self.estimate().figures.activations is None:
            return None
        other = own // 2 if own > 1 else 2
        seen[other] = self._total(other, ranks)
        for _ in range(GUESSES):
            guess = guess_batch(seen, limit)
            if guess is None or guess in seen:
                break
            seen[guess] = self._total(guess, ranks)
        fitting = [samples for samples, total in seen.items() if total <= limit]
        return max(fitting) * ranks if fitting else None

    def _total(self, samples: int, ranks: int) -> int:
        return self.estimate(batch=samples * ranks).total


def guess_batch(seen: Mapping[int, int], limit: int) -> int | None:
    """Where a line through the sizes around the limit, or the last two below it, meets it; None where it does not.

    seen: bytes by samples.
    """
    fitting = sorted(size for size, total in seen.items() if total <= limit)
    others = sorted(size for size, total in seen.items() if total > limit)
    if fitting and others:
        one, two = fitting[-1], others[0]
    else:
        one, two = (fitting or others)[-2:] if fitting else (others or fitting)[:2]
    rise = (seen[two] - seen[one]) / (two - one)
    if rise <= 0:
        return None
    met = max(1, int(one + (limit - seen[one]) / rise))
    # Between the two, where rounding would find one of them again.
    return met if not (fitting and others) else min(max(met, one), two - 1)


def parameters_alone(network: nn.Module, setting: Setting) -> StepFigures:
    """Of a module whose step is its own."""
    parameters = sizes_of(network)
    gradients = {name: one.size for name, one in parameters.items() if one.learns}
    return StepFigures(setting=setting, parameters=parameters, gradients=[gradients], notes=[OWN_MODULE])
