"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches run through all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from exp.errors import ConfigError, Fault
from exp.spelling import did_you_mean
from exp.strategies.layer_split import refuse_shapeless, stand_ins
from exp.strategies.microbatches import number_of
from exp.strategies.placement import Demand
from exp.strategies.strategy import Planned, Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


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


class Pipeline(Strategy):
    """The stages come from one split of the network; neighbouring ranks make one pipeline, and there may be several.

    schedule: a word of SCHEDULES.
    stages: into how many parts the network is cut; None is one for each of `layers`, else `stages_per_rank` a rank.
    stages_per_rank: None is 1, or 2 for a schedule of several stages a rank.
    microbatches: of a rank's share of a batch; `auto` takes a number that cuts it without a rest.
    layers: name patterns of the layers of each stage, in order; None balances them by the bytes of their parameters.
    """

    replicates = False
    splits_layers = True
    schedules_step = True

    def __init__(
        self,
        *,
        name: str = "pipeline",
        schedule: str = "1f1b",
        stages: int | None = None,
        stages_per_rank: int | None = None,
        microbatches: int | Literal["auto"] = "auto",
        layers: Sequence[Sequence[str]] | None = None,
    ) -> None:
        super().__init__(name=name)
        refuse_shapeless(layers)
        faults = _faults_of_words(schedule, stages, stages_per_rank, microbatches, layers)
        if faults:
            raise ConfigError(faults)
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
            return Demand(model_ranks=None)
        ranks = self.stages // self.stages_per_rank
        return Demand(model_ranks=ranks, cpu_devices=ranks)

    def microbatches_of(self, batch_size: int, ranks: int) -> int:
        """Into how many micro-batches a rank's whole share of `batch_size` samples is cut."""
        return number_of(
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

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """What does not go through a pipeline, and a split that does not fit the network or the ranks."""
        from exp.strategies.pipeline_faults import pipeline_faults

        return pipeline_faults(self, planned, inputs=stand_ins(planned.config))

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One rank of a pipeline."""
        from exp.strategies.lightning_pipeline import PipelineStrategy

        return PipelineStrategy(placement=placement, plan=self)


def _faults_of_words(schedule: Any, stages: Any, stages_per_rank: Any, microbatches: Any, layers: Any) -> list[Fault]:
    faults = []
    if schedule not in SCHEDULES:
        cure = did_you_mean(str(schedule), list(SCHEDULES))
        return [Fault(key="schedule", got=repr(schedule), expected=f"one of {', '.join(SCHEDULES)}", cure=cure)]
    for key, value in (("stages", stages), ("stages_per_rank", stages_per_rank)):
        if value is not None and not _is_count(value):
            faults.append(Fault(key=key, got=repr(value), expected="null, or an integer, 1 or more"))
    if microbatches != "auto" and not _is_count(microbatches):
        faults.append(Fault(key="microbatches", got=repr(microbatches), expected="auto, or an integer, 1 or more"))
    if faults:
        return faults
    takes = SCHEDULES[schedule].stages_per_rank
    if stages_per_rank is not None and stages_per_rank != takes and (takes is not None or stages_per_rank < 2):
        expected = f"{takes or '2 or more'}: {schedule} has so many stages a rank"
        faults.append(Fault(key="stages_per_rank", got=str(stages_per_rank), expected=expected))
    each = stages_per_rank or takes or 2
    if layers is not None and stages is not None and len(layers) != stages:
        expected = f"{len(layers)}, one for each part of strategy.layers, or null"
        faults.append(Fault(key="stages", got=str(stages), expected=expected))
    count = len(layers) if layers is not None else stages
    if count is not None and not faults and count % each:
        key = "stages" if layers is None else "layers"
        expected = f"a multiple of {each}, the stages of each rank"
        faults.append(Fault(key=key, got=str(count), expected=expected))
    return faults


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
