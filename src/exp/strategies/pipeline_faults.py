"""What a pipeline cannot do with a run, each said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exp.errors import ConfigError, Fault
from exp.models.parts import split
from exp.strategies.batch_norm import batch_norms
from exp.strategies.cut_faults import STAGES, cut_faults
from exp.strategies.strategy import Planned

if TYPE_CHECKING:
    from exp.strategies.pipeline import Pipeline


def pipeline_faults(plan: Pipeline, planned: Planned, *, inputs: Sequence[Tensor]) -> list[Fault]:
    """All of them.

    inputs: stand-ins for the network's inputs.
    """
    placement = planned.placement
    ranks = placement.model_ranks
    if placement.world_size == 1:
        expected = "2 or more: each rank holds a part of the network"
        return [Fault(key="launch.devices", got="1 rank", expected=expected, cure="Write strategy=single")]
    faults = [*cut_faults(planned, STAGES, name=plan.name), *_run_faults(planned)]
    faults += _batch_faults(plan, planned, ranks)
    try:
        split(planned.network, count=ranks * plan.stages_per_rank, layers=plan.layers, inputs=inputs)
    except ConfigError as error:
        faults += error.faults
    return faults


def _run_faults(planned: Planned) -> Iterator[Fault]:
    if planned.weighed:
        got = f"{', '.join(planned.weighed)} divides by weights of its targets (class weights, ignored targets)"
        cure = "exp.objectives.terms.CrossEntropy without class_weights and ignore_index counts samples"
        yield _refused("objective", got, "means over samples, which micro-batches add up to", cure=cure)
    if str(planned.config["optimizer"].get("_target_", "")).endswith(".LBFGS"):
        expected = "an optimizer that updates each parameter by itself: no rank has all of them"
        yield _refused("optimizer._target_", "LBFGS", expected)


def _batch_faults(plan: Pipeline, planned: Planned, ranks: int) -> list[Fault]:
    share = planned.batch_size // planned.placement.data_ranks
    stages = ranks * plan.stages_per_rank
    count = plan.microbatches_of(share, ranks)
    faults = []
    if share < count:
        least = count * planned.placement.data_ranks
        expected = f"{least} or more: {count} micro-batches" + _each(planned)
        faults.append(Fault(key="data.batch_size", got=str(planned.batch_size), expected=expected))
    word = plan.schedule_word
    if plan.schedule.needs_filling and count < stages:
        expected = f"{stages} or more, one a stage, for {word}"
        faults.append(
            Fault(key="strategy.microbatches", got=str(count), expected=expected, cure="Write strategy.schedule=gpipe")
        )
    if plan.schedule.in_rounds and count % max(1, count // ranks):
        expected = f"a multiple of the {ranks} ranks of a pipeline, for {word}"
        faults.append(Fault(key="strategy.microbatches", got=str(count), expected=expected))
    return faults + _batch_norm_faults(planned, count)


def _batch_norm_faults(planned: Planned, count: int) -> list[Fault]:
    """Statistics of a part of the batch are others, and would find another network."""
    normed = [name for name, _ in batch_norms(planned.network)]
    if not normed:
        return []
    layers = f"{normed[0]} and {len(normed) - 1} more layers of batch normalisation"
    cure = "Or take a model with layer or group normalisation"
    if count > 1:
        expected = "1: they would normalise over each micro-batch (strategy.schedule=gpipe takes one)"
        return [Fault(key="strategy.microbatches", got=f"{count}, with {layers}", expected=expected, cure=cure)]
    pipelines = planned.placement.data_ranks
    if pipelines > 1:
        expected = "one pipeline: they would normalise over each one's share of the batch"
        return [Fault(key="launch.devices", got=f"{pipelines} pipelines, with {layers}", expected=expected, cure=cure)]
    return []


def _each(planned: Planned) -> str:
    ranks = planned.placement.data_ranks
    return f" in each of {ranks} pipelines" if ranks > 1 else ""


def _refused(key: str, got: str, expected: str, *, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=f"{expected} (the network's layers are in several ranks)", cure=cure)
