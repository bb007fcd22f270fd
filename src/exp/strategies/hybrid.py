"""A mesh of ranks: groups of ranks that hold one model each share the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge
from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import ErrorDetails, missing_value, not_supported_with, raise_errors
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
    """Data parallel times tensor parallel, or data parallel times pipeline parallel.

    Args:
        tensor: Neighboring ranks that have parts of each layer.
        pipeline: Neighboring ranks that have different layers. Either tensor or pipeline is above 1.
        data: What the groups of ranks do: `average` gradients like ddp, or `shard` their parts like fsdp (with tensor).
        plan, divide, vocabulary: Options of exp.strategies.tensor_parallel.
        schedule, stages_per_rank, microbatches, layers: Options of exp.strategies.pipeline.

    Raises:
        ConfigError: The dimensions contradict each other, or an option has no effect on them.
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
        tensor_options: dict[str, Any] = {"plan": plan, "divide": divide, "vocabulary": vocabulary}
        pipeline_options: dict[str, Any] = {
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "microbatches": microbatches,
            "layers": layers,
        }
        raise_errors(_dimension_errors(tensor, pipeline, data))
        is_pipeline = pipeline > 1
        unused, axis = (tensor_options, "tensor") if is_pipeline else (pipeline_options, "pipeline")
        raise_errors(_unused_errors(unused, axis))
        self.shards_parameters = data == "shard"
        self.dimensions = Dimensions(tensor=tensor, pipeline=pipeline)
        self.splits_tensors, self.splits_layers, self.schedules_step = not is_pipeline, is_pipeline, is_pipeline
        self.meets = frozenset() if is_pipeline or self.shards_parameters else MEETS
        self.axis: Strategy
        if is_pipeline:
            known = SCHEDULES.get(schedule)
            each = stages_per_rank or (known.stages_per_rank if known else None) or 2
            self.axis = Pipeline(name=name, stages=pipeline * each, **pipeline_options)
        else:
            self.axis = TensorParallel(name=name, **tensor_options)

    @property
    def demand(self) -> Demand:
        """Neighboring ranks that hold one model; a machine without a GPU tries two models."""
        return Demand(
            dimensions=self.dimensions,
            rest="shard" if self.shards_parameters else "replicate",
            cpu_devices=CPU_RANKS * self.dimensions.model_ranks,
        )

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of the model's ranks, and of parameters that cannot be sharded."""
        scalars = scalar_errors(planned.network) if self.shards_parameters else []
        return [*scalars, *self.axis.errors(planned)]

    def footprint(self, load: Load) -> Footprint:
        """Return the footprint of tensor parallel or pipeline parallel."""
        return self.axis.footprint(load)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank of the mesh."""
        return self.axis.lightning(placement, rank)


def _unused_errors(options: Mapping[str, object], axis: str) -> list[ErrorDetails]:
    """Return an error for each option that is set although its dimension is 1: it would have no effect."""
    defaults = {key: inspect.signature(Hybrid.__init__).parameters[key].default for key in options}
    return [
        not_supported_with(key, repr(value), f"{axis}=1", str(defaults[key]), f"Leave {key} out")
        for key, value in options.items()
        if value != defaults[key]
    ]


def _dimension_errors(tensor: int, pipeline: int, data: str) -> list[ErrorDetails]:
    errors = []
    if tensor > 1 and pipeline > 1:
        fix = "Write strategy.tensor=1, or strategy.pipeline=1"
        errors.append(not_supported_with("pipeline", pipeline, f"tensor={tensor}", "one of the two above 1", fix))
    elif tensor == pipeline == 1:
        expected = "2 or more ranks that hold one model together: strategy.tensor=2 or strategy.pipeline=2"
        errors.append(missing_value("tensor", expected, "Or write strategy=ddp", got="1, and pipeline is 1"))
    if data == "shard" and pipeline > 1:
        errors.append(not_supported_with("data", "shard", "pipeline", "average, or tensor instead of pipeline"))
    return errors
