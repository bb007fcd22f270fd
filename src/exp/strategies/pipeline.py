"""Pipeline parallel strategy: ranks have consecutive layers, and compute different micro-batches at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, cast

import torch.distributed as dist
from annotated_types import Ge, Predicate
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.errors import ConfigError, ErrorDetails, invalid_value, raise_errors, unknown_word
from exp.models.inference import example_arguments
from exp.models.partition import Split, split
from exp.nested import tensors_in
from exp.shared_types import DataSpec
from exp.strategies.batch_norm import batch_norms
from exp.strategies.footprint import OBJECTIVE, Footprint, Load, Place, Transfer, merge_equal_places
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.pipeline_stages import Stage, Stages, count_micro_batches
from exp.strategies.placement import Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, data_of, module_of, move_all_but_network, network_of


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of torch.distributed.pipelining.

    Attributes:
        torch_name: Name of the schedule in torch.
        stages_per_rank: Number of stages per rank. Default: 1.
        needs_filling: Whether the schedule needs at least one micro-batch per stage. Default: False.
        in_rounds: Whether the number of micro-batches must be a multiple of the number of ranks. Default: False.
    """

    torch_name: str
    stages_per_rank: int = 1
    needs_filling: bool = False
    in_rounds: bool = False


SCHEDULES = {
    "gpipe": Schedule(torch_name="GPipe"),
    "1f1b": Schedule(torch_name="1F1B", needs_filling=True),
    "interleaved_1f1b": Schedule(torch_name="Interleaved1F1B", stages_per_rank=2, in_rounds=True),
}


def _has_names(layers: Sequence[Sequence[str]]) -> bool:
    return bool(layers) and all(part and all(part) for part in layers)


# Name patterns of the layers of each part, in the order of the forward.
Layers = Annotated[
    Sequence[Sequence[str]], 'a list, each a list of texts, such as [[stem, "stage.*"], [head]]', Predicate(_has_names)
]


MICROBATCHES = "strategy.microbatches"
ESTIMATE = (
    "activations of a pipeline are an estimate: with 1f1b those of the micro-batches in progress, with other schedules "
    "those of all micro-batches"
)


class Pipeline(Strategy):
    """Strategy in which neighboring ranks form a pipeline.

    The stages of a pipeline are consecutive parts of the network. A run may have several pipelines.

    Args:
        name: Name of the strategy. Default: pipeline.
        schedule: Key of SCHEDULES. Default: 1f1b.
        stages: Number of stages of each pipeline. None uses one stage per entry of `layers`. If `layers` is also None,
            all ranks form one pipeline, and the schedule determines the number of stages per rank. Default: None.
        microbatches: Number of micro-batches into which the samples of a rank are split. `auto` selects a number that
            divides the samples evenly. Default: auto.
        layers: Name patterns of the layers of each stage, in the order of the forward. None splits the network into
            stages with similar parameter bytes. Default: None.
    """

    splits_layers = True
    schedules_step = True

    def __init__(
        self,
        *,
        name: str = "pipeline",
        schedule: str = "1f1b",
        stages: Annotated[int, Ge(1)] | None = None,
        microbatches: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
        layers: Layers | None = None,
    ) -> None:
        super().__init__(name=name)
        raise_errors(_option_errors(schedule, stages, layers))
        self.schedule = SCHEDULES[schedule]
        self.schedule_word = schedule
        self.stages = len(layers) if layers is not None else stages
        # If the number of stages is not set, all ranks form one pipeline.
        self.splits_batch = self.stages is not None
        self.stages_per_rank = self.schedule.stages_per_rank
        self.microbatches: int | Literal["auto"] = microbatches
        self.layers = layers

    @property
    def demand(self) -> Demand:
        """Devices to use: the ranks of one pipeline. If the number of stages is not set, these are all ranks."""
        if self.stages is None:
            return Demand(rest="pipeline")
        ranks = self.stages // self.stages_per_rank
        return Demand(dimensions=Dimensions(pipeline=ranks), cpu_devices=ranks)

    def microbatches_of(self, batch_size: int, ranks: int) -> int:
        """Return the number of micro-batches into which the samples of a rank are split.

        Args:
            batch_size: Number of samples of the rank.
            ranks: Number of ranks of the pipeline.
        """
        return count_micro_batches(
            self.microbatches,
            batch_size=batch_size,
            ranks=ranks,
            least=ranks * self.stages_per_rank if self.schedule.needs_filling else ranks,
            multiple_of=ranks if self.schedule.in_rounds else 1,
        )

    def owners(self, ranks: int) -> list[int]:
        """Return the rank of each stage, as an index within the pipeline."""
        return [stage % ranks for stage in range(ranks * self.stages_per_rank)]

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return errors for batches and layers that a pipeline does not support."""
        ranks = planned.placement.model_ranks
        if planned.placement.world_size == 1:
            return [invalid_value("launch.devices", 1, "2 or more ranks", "Or write strategy=single")]
        errors = self._batch_errors(planned, ranks)
        return errors + split_errors(planned, count=ranks * self.stages_per_rank, layers=self.layers)

    def footprint(self, load: Load) -> Footprint:
        """Return the memory of each rank's stages and of the activations of the micro-batches in progress."""
        placement, ranks = load.placement, load.placement.model_ranks
        owners = self.owners(ranks)
        parts = split(load.network, count=len(owners), layers=self.layers, inputs=list(load.inputs))
        count = self.microbatches_of(load.samples, ranks)
        places = []
        for rank in range(placement.world_size):
            own = [stage for stage, owner in enumerate(owners) if owner == rank % ranks]
            # In 1F1B, the last stage keeps the activations of one micro-batch. Each stage keeps those of one
            # micro-batch more than the next stage.
            waiting = min(count, ranks - rank % ranks) if self.schedule_word == "1f1b" else count
            places.append(part_place(load, parts, own, ranks=(rank,), factor=waiting / max(count, 1)))
        edges = [carried_bytes(parts, stage, load) for stage in range(len(owners) - 1)]
        crossing = [edge for stage, edge in enumerate(edges) if owners[stage] != owners[stage + 1]]
        sent = 2 * max(crossing, default=0) * load.micro_batches
        what, calls = "activations to the next rank, gradients to the previous one", 2 * count * load.micro_batches
        transfers = [Transfer(what=what, sent=sent, over=ranks, messages=calls)]
        if placement.data_ranks > 1:
            own_bytes = max(sum(one.stored for one in place.held.values()) for place in places)
            transfers += load.gradient_transfers(factor=own_bytes / max(load.parameter_bytes, 1))
        return Footprint(
            places=merge_equal_places(places),
            transfers=transfers,
            work=1 / ranks,
            calls=count / ranks,
            # Ranks are idle while the pipeline fills and drains (Huang et al. 2019, GPipe).
            waiting=(count + ranks - 1) / max(count, 1),
            notes=(ESTIMATE,),
        )

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return a Lightning strategy for one rank of a pipeline."""
        return PipelineStrategy(placement=placement, plan=self)

    def _batch_errors(self, planned: Blueprint, ranks: int) -> list[ErrorDetails]:
        pipelines = planned.placement.data_ranks
        share, stages = planned.batch_size // pipelines, ranks * self.stages_per_rank
        count, word = self.microbatches_of(share, ranks), self.schedule_word
        errors = []
        if share < count:
            expected = f"{count * pipelines} or more: {count} micro-batches on each of {pipelines} pipelines"
            errors.append(invalid_value("data.batch_size", planned.batch_size, expected))
        if self.schedule.needs_filling and count < stages:
            expected = f"{stages} or more, one micro-batch per stage, for the schedule {word}"
            errors.append(invalid_value(MICROBATCHES, count, expected, "Write strategy.schedule=gpipe"))
        if self.schedule.in_rounds and count % max(1, count // ranks):
            expected = f"a multiple of {ranks}, the number of ranks of a pipeline, for the schedule {word}"
            errors.append(invalid_value(MICROBATCHES, count, expected))
        normed = [name for name, _ in batch_norms(planned.network)]
        if normed and (count > 1 or pipelines > 1):
            because = f"with {len(normed)} layers of batch normalization, such as {normed[0]}"
            fix = "Or use a model with layer or group normalization"
            # Statistics over a micro-batch differ from statistics over the batch.
            if count > 1:
                expected = "1, so that these layers normalize over the whole batch (strategy.schedule=gpipe supports 1)"
                errors.append(invalid_value(MICROBATCHES, count, expected, fix, because=because))
            else:
                expected = f"{ranks}, for a single pipeline, so that these layers normalize over the whole batch"
                got = planned.placement.world_size
                errors.append(invalid_value("launch.devices", got, expected, fix, because=because))
        return errors


def _option_errors(schedule: str, stages: int | None, layers: Layers | None) -> list[ErrorDetails]:
    if schedule not in SCHEDULES:
        return [unknown_word("schedule", str(schedule), SCHEDULES)]
    errors = []
    each = SCHEDULES[schedule].stages_per_rank
    if layers is not None and stages is not None and len(layers) != stages:
        errors.append(invalid_value("stages", stages, f"null, or {len(layers)}: a stage per list in strategy.layers"))
    key, count = ("stages", stages) if layers is None else ("layers", len(layers))
    if count is not None and not errors and count % each:
        errors.append(invalid_value(key, count, f"a multiple of {each}, the number of stages of each rank"))
    return errors


def split_errors(planned: Blueprint, *, count: int, layers: Layers | None) -> list[ErrorDetails]:
    """Return the reasons why the network cannot be split into `count` parts. The list is empty if it can be split."""
    try:
        inputs = example_arguments(planned.network, DataSpec.of(planned.settings.data))
        split(planned.network, count=count, layers=layers, inputs=inputs)
    except ConfigError as error:
        return list(error.errors)
    return []


def carried_bytes(parts: Split, part: int, load: Load) -> int:
    """Return the bytes that are passed from a part to later parts for one rank's micro-batch.

    Args:
        parts: Split of the network.
        part: Index of the part.
        load: Properties of the run.
    """
    values = [parts.values[name] for name in parts.values_after(part)]
    stand_ins = max(len(load.inputs[0]) if load.inputs and load.inputs[0].dim() else 1, 1)
    return sum(tensor.nbytes for value in values for tensor in tensors_in(value)) * load.samples // stand_ins


def part_place(load: Load, parts: Split, own: Sequence[int], *, ranks: tuple[int, ...], factor: float = 1.0) -> Place:
    """Return the memory contents of a device that computes some parts of a network.

    Args:
        load: Properties of the run.
        parts: Split of the network.
        own: Indices of the parts on the device.
        ranks: Ranks whose devices have these contents.
        factor: Fraction of a whole micro-batch's activations that are in memory at the same time. Default: 1.
    """
    everything, names = load.whole_parameters(), {name for part in own for name in parts.parts[part].tensors}
    layers = {layer: factor if index in own else 0.0 for index, part in enumerate(parts.parts) for layer in part.layers}
    last = factor if len(parts.parts) - 1 in own else 0.0
    return Place(
        ranks=ranks,
        held={name: one for name, one in everything.items() if name in names},
        # Activations of operations outside of layers are assumed to be equal in all parts.
        activations={**layers, OBJECTIVE: last},
        rest=factor * len(own) / len(parts.parts),
    )


class Pipelined(Protocol):
    """Interface of the training module of a pipelined run."""

    def pipeline_over(self, stages: Stages, *, split: Split, count: int) -> None:
        """Make the module run its network in stages.

        Args:
            stages: Stages of this rank.
            split: Split of the network.
            count: Number of micro-batches into which the samples of a rank are split.
        """


class PipelineStrategy(ModelParallel):
    """Lightning strategy of one rank of a pipeline.

    Each rank builds the whole network, splits it, and keeps only the parameters of its stages. Checkpoints contain
    whole tensors (whole_state.py).

    Attributes:
        stages: Stages of this rank. None before the model is placed.
    """

    holds_every_name = False

    def __init__(self, *, placement: Placement, plan: Pipeline) -> None:
        super().__init__(placement=placement)
        self.plan = plan
        self.stages: Stages | None = None

    def model_to_device(self) -> None:
        if self.stages is not None:
            super().model_to_device()
            return
        # The whole network may not fit on the device. Later, place_model moves only the layers of this rank.
        move_all_but_network(module_of(self), self.root_device)

    def place_model(self) -> None:
        network = network_of(self)
        data, owners = data_of(module_of(self).trainer), self.plan.owners(self.placement.model_ranks)
        parts = split(
            network,
            count=len(owners),
            layers=self.plan.layers,
            inputs=example_arguments(network, data.spec),
        )
        place = dist.get_rank(self.model_group)
        mine = [index for index, owner in enumerate(owners) if owner == place]
        keep_only(network, {name for index in mine for name in parts.parts[index].tensors})
        network.to(self.root_device)
        stages = [Stage(network, parts, index, around=self.precision_plugin.train_step_context) for index in mine]
        self.stages = Stages(
            stages,
            owner=owners,
            group=self.model_group,
            device=self.root_device,
            schedule=self.plan.schedule.torch_name,
        )
        share = data.batch_size // self.placement.data_ranks
        count = self.plan.microbatches_of(share, self.placement.model_ranks)
        cast(Pipelined, module_of(self)).pipeline_over(self.stages, split=parts, count=count)


def keep_only(network: nn.Module, names: set[str]) -> None:
    """Set all parameters and buffers to None except those in `names`. The network still contains all its layers."""
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in tensors:
            if prefix + name not in names:
                setattr(module, name, None)
