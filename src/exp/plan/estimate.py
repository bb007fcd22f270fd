"""The estimate of a run: layers, memory of each rank, time of a step, and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.models.inference import example_arguments
from exp.plan.device_peaks import Device
from exp.plan.fake_step import Setting, StepFigures, sizes_of, take_step
from exp.plan.rank_memory import OptimizerState, PlaceMemory, footprint_of, memory_of
from exp.plan.step_time import StepTime, step_time
from exp.strategies.footprint import Footprint, Load
from exp.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

    from exp.check.plan import Plan

# Number of batch sizes that the search for the largest batch tries. The result is the largest one that fits.
GUESSES = 4
OWN_MODULE = (
    "module: only the parameters are counted, because the FLOPs and activations of your training_step are not known"
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated memory and time of a run.

    Attributes:
        network: Network on the meta device.
        figures: Memory and FLOPs of one micro-batch of a rank.
        footprint: Memory and communication of the strategy.
        places: Memory of each device, in descending order.
        time: Time of an optimizer step. None if the device is unknown.
        batch: Value of data.batch_size for which the estimate is computed.
        micro_batches: Number of micro-batches in an optimizer step.
        notes: Texts that name approximate or unknown values, with the reasons.
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
        """Bytes in use on the device that uses the most memory."""
        return self.places[0].total


class Estimator:
    """Estimator of the memory and time of a run, also for other batch sizes.

    Args:
        plan: Plan of the run. It must be possible to build the network on the meta device.
        device: Device of the ranks. None if it is unknown.
    """

    def __init__(self, plan: Plan, *, device: Device | None) -> None:
        self.plan, self.device = plan, device
        self.word = plan.settings.precision.word
        self._states: OptimizerState | None = None
        self._known: dict[tuple[int, int], Estimate] = {}

    @property
    def batch(self) -> int:
        """Value of data.batch_size. 1 if the user's loaders determine the batch size."""
        return self.plan.settings.batch_size or 1

    @property
    def micro_batches(self) -> int:
        return self.plan.settings.trainer.accumulate_grad_batches

    def estimate(self, *, batch: int | None = None, micro_batches: int | None = None) -> Estimate:
        """Return the estimate of the run.

        Args:
            batch: Value of data.batch_size. None: the value of the run.
            micro_batches: Number of micro-batches in an optimizer step. None: the value of the run.
        """
        key = (batch or self.batch, micro_batches or self.micro_batches)
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def _estimate(self, batch: int, micro_batches: int) -> Estimate:
        plan, network = self.plan, self.plan.network
        assert network is not None
        recomputed = plan.strategy.activation_checkpointing if isinstance(plan.strategy, Strategy) else ()
        # The number is rounded up, so if ranks have different numbers of samples, the largest number is used.
        samples = max(1, -(-batch // plan.placement.data_ranks))
        setting = Setting(samples=samples, word=self.word, recomputed=recomputed)
        figures = take_step(plan, setting) if plan.own is None else parameters_alone(network, setting)
        if self._states is None and figures.fake is not None:
            self._states = OptimizerState(plan, figures.fake, trained=figures.trained)
        inputs = example_arguments(network, plan.spec) if self._is_cut else ()
        load = Load(
            network=network,
            sizes=figures.parameters,
            placement=plan.placement,
            inputs=inputs,
            buffers=figures.buffers,
            outputs=figures.output_bytes,
            micro_batches=micro_batches,
            samples=samples,
        )
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
        """Return the largest data.batch_size that fits into memory and is a multiple of the number of ranks.

        Args:
            limit: Memory of each device in bytes.

        Returns:
            The batch size. None if not even one sample per rank fits, or if the memory of activations is unknown.
        """
        if self.estimate().figures.activations is None:
            return None
        ranks = self.plan.placement.data_ranks
        own = max(1, -(-self.batch // ranks))
        seen = {samples: self._total(samples, ranks) for samples in (own, own // 2 or 2)}
        for _ in range(GUESSES):
            # Extrapolate with the line through the two sizes with the memory closest to the limit.
            one, two = sorted(seen, key=lambda samples: abs(seen[samples] - limit))[:2]
            rise = (seen[two] - seen[one]) / (two - one)
            if rise <= 0:
                break
            guess = max(1, int(one + (limit - seen[one]) / rise))
            if guess in seen and seen[guess] > limit:
                guess -= 1
            if guess == 0 or guess in seen:
                break
            seen[guess] = self._total(guess, ranks)
        fitting = [samples for samples, total in seen.items() if total <= limit]
        return max(fitting) * ranks if fitting else None

    def _total(self, samples: int, ranks: int) -> int:
        return self.estimate(batch=samples * ranks).total


def parameters_alone(network: nn.Module, setting: Setting) -> StepFigures:
    """Return the figures of a user's LightningModule, which are only the sizes of parameters and gradients."""
    parameters = sizes_of(network)
    gradients = {name: one.size for name, one in parameters.items() if one.learns}
    return StepFigures(setting=setting, parameters=parameters, gradients=[gradients], notes=[OWN_MODULE])
