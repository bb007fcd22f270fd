"""A mesh of ranks: a model shared by some of them, and several such models that share the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge
from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import ErrorDetails, raise_errors
from exp.spelling import show
from exp.strategies.footprint import Footprint, Load
from exp.strategies.layer_split import Layers
from exp.strategies.pipeline import SCHEDULES, Pipeline
from exp.strategies.placement import CPU_RANKS, Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy
from exp.strategies.tensor_parallel import MEETS, TensorParallel
from exp.strategies.tensor_plan import AUTO
from exp.strategies.units import scalar_errors


class Hybrid(Strategy):
    """Data times tensor, or data times pipeline: groups of ranks that hold one model each share the batch.

    tensor, pipeline: neighbouring ranks that hold one model together; one of the two is more than 1.
    data: what the groups of them do: `average` gradients, as ddp does, or `shard` their parts again, as fsdp does
        (with tensor).
    plan, divide, vocabulary: with tensor, see exp.strategies.tensor_parallel.
    schedule, stages_per_rank, microbatches, layers: with pipeline, see exp.strategies.pipeline.

    Raises: ConfigError, also for an option of the one that is not used.
    """

    def __init__(
        self,
        *,
        name: str = "hybrid",
        tensor: Annotated[int, Ge(1)] = 1,
        pipeline: Annotated[int, Ge(1)] = 1,
        data: Literal["average", "shard"] = "average",
        plan: str | Mapping[str, str] = AUTO,
        divide: str | Sequence[str] = AUTO,
        vocabulary: bool = False,
        schedule: str = "1f1b",
        stages_per_rank: Annotated[int, Ge(1)] | None = None,
        microbatches: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
        layers: Layers | None = None,
    ) -> None:
        super().__init__(name=name)
        of_tensor: dict[str, Any] = {"plan": plan, "divide": divide, "vocabulary": vocabulary}
        of_pipeline: dict[str, Any] = {
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "microbatches": microbatches,
            "layers": layers,
        }
        errors = _errors_of_factors(tensor, pipeline, data)
        errors = errors or (_idle("tensor", of_tensor) if pipeline > 1 else _idle("pipeline", of_pipeline))
        raise_errors(errors)
        self.shards_parameters = data == "shard"
        self.dimensions = Dimensions(tensor=tensor, pipeline=pipeline)
        self.splits_tensors, self.splits_layers = tensor > 1, pipeline > 1
        self.schedules_step = pipeline > 1
        self.meets = MEETS if data == "average" and tensor > 1 else frozenset()
        self.axis: Strategy = TensorParallel(name=name, **of_tensor)
        if pipeline > 1:
            known = SCHEDULES.get(schedule)
            each = stages_per_rank or (known.stages_per_rank if known else None) or 2
            self.axis = Pipeline(name=name, stages=pipeline * each, **of_pipeline)

    @property
    def demand(self) -> Demand:
        """Return a demand in which neighboring ranks hold one model; a machine without a GPU tries two models."""
        return Demand(
            dimensions=self.dimensions,
            rest="shard" if self.shards_parameters else "replicate",
            cpu_devices=CPU_RANKS * self.dimensions.model_ranks,
        )

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of the axis that is used, and those of shards."""
        scalars = scalar_errors(planned.network) if self.shards_parameters else []
        return [*scalars, *self.axis.errors(planned)]

    def footprint(self, load: Load) -> Footprint:
        """Return the footprint of the axis that is used."""
        return self.axis.footprint(load)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank of the mesh."""
        return self.axis.lightning(placement, rank)


def _idle(axis: str, options: Mapping[str, object]) -> list[ErrorDetails]:
    """The options of the axis that is not used, where they ask for something: they would be ignored in silence."""
    defaults = inspect.signature(Hybrid.__init__).parameters
    factors = {"tensor": 1, "pipeline": 1, axis: 2}
    fix = "Leave it out, or write " + " ".join(f"strategy.{name}={factor}" for name, factor in factors.items())
    return [
        ErrorDetails(key=key, got=f"{value!r}, with {axis}=1", expected=show(defaults[key].default).strip("'"), fix=fix)
        for key, value in options.items()
        if value != defaults[key].default
    ]


def _errors_of_factors(tensor: int, pipeline: int, data: str) -> list[ErrorDetails]:
    errors = []
    if tensor > 1 and pipeline > 1:
        fix = "Write strategy.tensor=1, or strategy.pipeline=1"
        got = f"{pipeline} with tensor={tensor}"
        errors.append(ErrorDetails(key="pipeline", got=got, expected="one of the two above 1", fix=fix))
    elif tensor == pipeline == 1:
        expected = "how many ranks hold one model together, 2 or more: strategy.tensor=2 or strategy.pipeline=2"
        errors.append(
            ErrorDetails(key="tensor", got="1, and pipeline is 1", expected=expected, fix="Or write strategy=ddp")
        )
    if data == "shard" and pipeline > 1:
        errors.append(
            ErrorDetails(key="data", got="shard with pipeline", expected="average, or tensor in the place of pipeline")
        )
    return errors
