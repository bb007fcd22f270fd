"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches run through all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, cast

import torch.distributed as dist
from annotated_types import Ge
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.data.data import Data
from exp.errors import ErrorDetails, raise_errors
from exp.models.inference import example_arguments
from exp.models.partition import Split, split
from exp.spelling import did_you_mean
from exp.strategies.batch_norm import batch_norms
from exp.strategies.footprint import Footprint, Load, Transfer, gradient_transfers, merge_equal_places
from exp.strategies.layer_split import Layers, carried_bytes, part_place, split_errors
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.pipeline_stages import Stage, Stages, count_micro_batches
from exp.strategies.placement import Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, data_of, module_of, move_all_but_network, network_of


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One of torch.distributed.pipelining's.

    torch_name: its name there. stages_per_rank: how many stages a rank holds; None is two or more.
    is_v: whether the stages go down the ranks and up again, so that the first rank has the last one, too.
    needs_filling: whether it asks for a micro-batch a stage at least. in_rounds: for a multiple of the ranks.
    """

    torch_name: str
    stages_per_rank: int | None
    is_v: bool = False
    needs_filling: bool = False
    in_rounds: bool = False


SCHEDULES = {
    "gpipe": Schedule(torch_name="GPipe", stages_per_rank=1),
    "1f1b": Schedule(torch_name="1F1B", stages_per_rank=1, needs_filling=True),
    "looped_bfs": Schedule(torch_name="LoopedBFS", stages_per_rank=None),
    "interleaved_1f1b": Schedule(torch_name="Interleaved1F1B", stages_per_rank=None, in_rounds=True),
    "interleaved_zero_bubble": Schedule(torch_name="InterleavedZeroBubble", stages_per_rank=None, in_rounds=True),
    "zbv_zero_bubble": Schedule(torch_name="ZBVZeroBubble", stages_per_rank=2, is_v=True),
    "dualpipe_v": Schedule(torch_name="DualPipeV", stages_per_rank=2, is_v=True, needs_filling=True),
}


WAITING = (
    "activations of a pipeline are an estimate, of the micro-batches that are on their way at once; the hook memory "
    "counts all that went through"
)
KEPT = "of {} it is not known how many micro-batches are on their way at once; all of them are counted"


class Pipeline(Strategy):
    """The stages come from one split of the network; neighbouring ranks make one pipeline, and there may be several.

    schedule: a word of SCHEDULES.
    stages: into how many parts the network is cut; None is one for each of `layers`, else `stages_per_rank` a rank.
    stages_per_rank: None is 1, or 2 for a schedule of several stages a rank.
    microbatches: of a rank's share of a batch; `auto` takes a number that cuts it without a rest.
    layers: name patterns of the layers of each stage, in order; None balances them by the bytes of their parameters.
    """

    splits_layers = True
    schedules_step = True

    def __init__(
        self,
        *,
        name: str = "pipeline",
        schedule: str = "1f1b",
        stages: Annotated[int, Ge(1)] | None = None,
        stages_per_rank: Annotated[int, Ge(1)] | None = None,
        microbatches: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
        layers: Layers | None = None,
    ) -> None:
        super().__init__(name=name)
        raise_errors(_errors_of_words(schedule, stages, stages_per_rank, layers))
        self.schedule = SCHEDULES[schedule]
        self.schedule_word = schedule
        self.stages = len(layers) if layers is not None else stages
        # Else all ranks are one pipeline.
        self.splits_batch = self.stages is not None
        self.stages_per_rank = stages_per_rank or self.schedule.stages_per_rank or 2
        self.microbatches: int | Literal["auto"] = microbatches
        self.layers = layers

    @property
    def demand(self) -> Demand:
        """The ranks of one pipeline; all of the run where the number of stages is left open."""
        if self.stages is None:
            return Demand(rest="pipeline")
        ranks = self.stages // self.stages_per_rank
        return Demand(dimensions=Dimensions(pipeline=ranks), cpu_devices=ranks)

    def microbatches_of(self, batch_size: int, ranks: int) -> int:
        """Into how many micro-batches a rank's whole share of `batch_size` samples is cut."""
        return count_micro_batches(
            self.microbatches,
            batch_size=batch_size,
            ranks=ranks,
            least=ranks * self.stages_per_rank if self.schedule.needs_filling else ranks,
            multiple_of=ranks if self.schedule.in_rounds else 1,
        )

    def owners(self, ranks: int) -> list[int]:
        """Of each stage, in order, the place of its rank in the pipeline."""
        count = ranks * self.stages_per_rank
        down = [stage % ranks for stage in range(count)]
        return [*range(ranks), *reversed(range(ranks))] if self.schedule.is_v else down

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """What does not go through a pipeline, and a split that does not fit the network or the ranks."""
        ranks = planned.placement.model_ranks
        if planned.placement.world_size == 1:
            expected = "2 or more: each rank holds a part of the network"
            return [ErrorDetails(key="launch.devices", got="1 rank", expected=expected, fix="Write strategy=single")]
        errors = self._batch_errors(planned, ranks)
        return errors + split_errors(planned, count=ranks * self.stages_per_rank, layers=self.layers)

    def footprint(self, load: Load) -> Footprint:
        """The stages of each rank, and the activations of the micro-batches that are on their way at once."""
        placement, ranks = load.placement, load.placement.model_ranks
        owners = self.owners(ranks)
        parts = split(load.network, count=len(owners), layers=self.layers, inputs=list(load.inputs))
        count = self.microbatches_of(load.samples, ranks)
        places = []
        for rank in range(placement.world_size):
            own = [stage for stage, owner in enumerate(owners) if owner == rank % ranks]
            # One forward, one backward: a stage waits for as many as there are stages from it to the last.
            waiting = min(count, ranks - rank % ranks) if self.schedule_word == "1f1b" else count
            places.append(part_place(load, parts, own, ranks=(rank,), factor=waiting / max(count, 1)))
        edges = [carried_bytes(parts, stage, load) for stage in range(len(owners) - 1)]
        crossing = [edge for stage, edge in enumerate(edges) if owners[stage] != owners[stage + 1]]
        sent = 2 * max(crossing, default=0) * load.micro_batches
        what, calls = "activations to the next rank, gradients to the one before", 2 * count * load.micro_batches
        transfers = [Transfer(what=what, sent=sent, over=ranks, messages=calls)]
        if placement.data_ranks > 1:
            own_bytes = max(sum(one.stored for one in place.held.values()) for place in places)
            transfers += gradient_transfers(load, factor=own_bytes / max(load.parameter_bytes, 1))
        # The filling and emptying of the pipeline (Huang et al. 2019, GPipe).
        filled = (count + ranks - 1) / max(count, 1)
        notes = [WAITING]
        notes += [] if self.schedule_word in ("1f1b", "gpipe") else [KEPT.format(self.schedule_word)]
        return Footprint(
            places=merge_equal_places(places),
            transfers=transfers,
            work=1 / ranks,
            calls=count / ranks,
            waiting=filled,
            notes=tuple(notes),
        )

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One rank of a pipeline."""
        return PipelineStrategy(placement=placement, plan=self)

    def _batch_errors(self, planned: Blueprint, ranks: int) -> list[ErrorDetails]:
        share = planned.batch_size // planned.placement.data_ranks
        stages = ranks * self.stages_per_rank
        count = self.microbatches_of(share, ranks)
        each = f" in each of {planned.placement.data_ranks} pipelines" if planned.placement.data_ranks > 1 else ""
        errors = []
        if share < count:
            least = count * planned.placement.data_ranks
            expected = f"{least} or more: {count} micro-batches{each}"
            errors.append(ErrorDetails(key="data.batch_size", got=str(planned.batch_size), expected=expected))
        word = self.schedule_word
        if self.schedule.needs_filling and count < stages:
            expected = f"{stages} or more, one a stage, for {word}"
            fix = "Write strategy.schedule=gpipe"
            errors.append(ErrorDetails(key="strategy.microbatches", got=str(count), expected=expected, fix=fix))
        if self.schedule.in_rounds and count % max(1, count // ranks):
            expected = f"a multiple of the {ranks} ranks of a pipeline, for {word}"
            errors.append(ErrorDetails(key="strategy.microbatches", got=str(count), expected=expected))
        return errors + _batch_norm_errors(planned, count)


def _errors_of_words(
    schedule: str,
    stages: int | None,
    stages_per_rank: int | None,
    layers: Layers | None,
) -> list[ErrorDetails]:
    errors = []
    if schedule not in SCHEDULES:
        fix = did_you_mean(str(schedule), list(SCHEDULES))
        return [ErrorDetails(key="schedule", got=repr(schedule), expected=f"one of {', '.join(SCHEDULES)}", fix=fix)]
    takes = SCHEDULES[schedule].stages_per_rank
    if stages_per_rank is not None and stages_per_rank != takes and (takes is not None or stages_per_rank < 2):
        expected = f"{takes or '2 or more'}: {schedule} has so many stages a rank"
        errors.append(ErrorDetails(key="stages_per_rank", got=str(stages_per_rank), expected=expected))
    each = stages_per_rank or takes or 2
    if layers is not None and stages is not None and len(layers) != stages:
        expected = f"{len(layers)}, one for each part of strategy.layers, or null"
        errors.append(ErrorDetails(key="stages", got=str(stages), expected=expected))
    count = len(layers) if layers is not None else stages
    if count is not None and not errors and count % each:
        key = "stages" if layers is None else "layers"
        expected = f"a multiple of {each}, the stages of each rank"
        errors.append(ErrorDetails(key=key, got=str(count), expected=expected))
    return errors


def _batch_norm_errors(planned: Blueprint, count: int) -> list[ErrorDetails]:
    """Statistics of a part of the batch are others, and would find another network."""
    normed = [name for name, _ in batch_norms(planned.network)]
    if not normed:
        return []
    layers = f"{normed[0]} and {len(normed) - 1} more layers of batch normalisation"
    fix = "Or take a model with layer or group normalisation"
    if count > 1:
        expected = "1: they would normalise over each micro-batch (strategy.schedule=gpipe takes one)"
        return [ErrorDetails(key="strategy.microbatches", got=f"{count}, with {layers}", expected=expected, fix=fix)]
    pipelines = planned.placement.data_ranks
    if pipelines > 1:
        expected = "one pipeline: they would normalise over each one's share of the batch"
        return [
            ErrorDetails(key="launch.devices", got=f"{pipelines} pipelines, with {layers}", expected=expected, fix=fix)
        ]
    return []


class Pipelined(Protocol):
    """The module of a pipelined run."""

    def pipeline_over(self, stages: Stages, *, split: Split, count: int) -> None:
        """Takes what the strategy has cut. count: micro-batches of a share."""


class PipelineStrategy(ModelParallel):
    """One rank of a pipeline, or of several that share the data.

    Each reads the whole network, cuts it, and keeps the layers of its own stages: the parameters of the others are
    taken out, so that optimizer and memory are of these alone. Checkpoints are whole (whole_state.py).

    stages: what this rank does, once the model is placed.
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
        # The whole network may not fit on the device: only a rank's own layers go there, by place_model.
        move_all_but_network(module_of(self), self.root_device)

    def place_model(self) -> None:
        network = network_of(self)
        owners = self.plan.owners(self.placement.model_ranks)
        parts = split(
            network,
            count=len(owners),
            layers=self.plan.layers,
            inputs=example_arguments(network, self._data().spec),
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
        share = self._data().batch_size // self.placement.data_ranks
        count = self.plan.microbatches_of(share, self.placement.model_ranks)
        cast(Pipelined, module_of(self)).pipeline_over(self.stages, split=parts, count=count)

    def _data(self) -> Data:
        return data_of(module_of(self).trainer)


def keep_only(network: nn.Module, names: set[str]) -> None:
    """Takes all other parameters and buffers out of a network; its layers stay, without their numbers."""
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in tensors:
            if prefix + name not in names:
                setattr(module, name, None)
