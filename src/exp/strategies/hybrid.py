"""Strategy in which groups of ranks split one model, and the groups have copies or shards of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge
from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import ErrorDetails, invalid_value, not_supported_with, raise_errors
from exp.strategies.footprint import Footprint, Load
from exp.strategies.pipeline import SCHEDULES, Layers, Pipeline
from exp.strategies.placement import CPU_RANKS, Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy
from exp.strategies.tensor_parallel import MEETS, TensorParallel
from exp.strategies.tensor_plan import AUTO
from exp.strategies.units import scalar_errors


class Hybrid(Strategy):
    """Strategy that combines data parallel with either tensor parallel or pipeline parallel.

    Args:
        name: Name of the strategy. Default: hybrid.
        tensor: Number of neighboring ranks that split each layer. Default: 1.
        pipeline: Number of neighboring ranks that have different layers. Either `tensor` or `pipeline` must be above 1.
            Default: 1.
        data: Use of several groups of ranks. `average` gives each group a copy and averages gradients, like DDP.
            `shard` shards each rank's part of the model over the groups, like FSDP, and requires `tensor`. Default:
            average.
        plan: See exp.strategies.tensor_parallel. Default: auto.
        divide: See exp.strategies.tensor_parallel. Default: auto.
        schedule: See exp.strategies.pipeline. Default: 1f1b.
        microbatches: See exp.strategies.pipeline. Default: auto.
        layers: See exp.strategies.pipeline. Default: None.

    Raises:
        ConfigError: `tensor`, `pipeline` and `data` contradict each other, or an option has no effect with their
            values.
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
        schedule: str = "1f1b",
        microbatches: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
        layers: Layers | None = None,
    ) -> None:
        super().__init__(name=name)
        tensor_options: dict[str, Any] = {"plan": plan, "divide": divide}
        pipeline_options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "layers": layers}
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
            each = SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1
            self.axis = Pipeline(name=name, stages=pipeline * each, **pipeline_options)
        else:
            self.axis = TensorParallel(name=name, **tensor_options)

    @property
    def demand(self) -> Demand:
        """Devices to use: groups of neighboring ranks. The ranks of a group split one copy of the model.

        A machine without a GPU starts two groups.
        """
        return Demand(
            dimensions=self.dimensions,
            rest="shard" if self.shards_parameters else "replicate",
            cpu_devices=CPU_RANKS * self.dimensions.model_ranks,
        )

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of tensor parallel or pipeline parallel, and of parameters that cannot be sharded."""
        scalars = scalar_errors(planned.network) if self.shards_parameters else []
        return [*scalars, *self.axis.errors(planned)]

    def footprint(self, load: Load) -> Footprint:
        """Return the footprint of the tensor parallel or pipeline parallel strategy that this strategy uses."""
        return self.axis.footprint(load)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's strategy for one rank of the mesh."""
        return self.axis.lightning(placement, rank)


def _unused_errors(options: Mapping[str, object], axis: str) -> list[ErrorDetails]:
    """Return an error for each option that is set without effect, because its dimension is 1."""
    defaults = {key: inspect.signature(Hybrid.__init__).parameters[key].default for key in options}
    return [
        not_supported_with(key, repr(value), f"{axis}=1", str(defaults[key]), f"Remove strategy.{key}")
        for key, value in options.items()
        if value != defaults[key]
    ]


def _dimension_errors(tensor: int, pipeline: int, data: str) -> list[ErrorDetails]:
    errors = []
    if tensor > 1 and pipeline > 1:
        fix = "Write strategy.tensor=1, or strategy.pipeline=1"
        errors.append(not_supported_with("pipeline", pipeline, f"tensor={tensor}", "1 for one of the two keys", fix))
    elif tensor == pipeline == 1:
        expected = "2 or more ranks that split one model: strategy.tensor=2 or strategy.pipeline=2"
        errors.append(invalid_value("tensor", tensor, expected, "Or write strategy=ddp", because="and pipeline is 1"))
    if data == "shard" and pipeline > 1:
        errors.append(not_supported_with("data", "shard", f"pipeline={pipeline}", "average, which supports pipeline"))
    return errors
