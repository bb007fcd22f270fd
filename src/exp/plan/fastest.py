"""A search for the fastest configuration that fits into memory: strategies, precisions, checkpointing and accumulation.

The samples per step and the number of devices stay the same, so the run learns the same. Each strategy and precision
uses the fewest micro-batches that fit, because more micro-batches never shorten an estimated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.plan.layer_table import to_pattern
from exp.precision.words import WORDS
from exp.strategies.units import AUTO, choose_units

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.estimate import Estimate, Estimator

ALONE = ("single",)
SEVERAL = ("ddp", "fsdp", "tensor_parallel", "pipeline")
# Number of micro-batch counts to try. Each count is twice the previous count.
MOST_DOUBLINGS = 10
# Estimated times that differ by less than this fraction count as equal.
ALIKE = 0.05
# Factor by which another precision must be faster than the precision of the run.
CLEARLY = 1.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration of the run that fits into memory.

    Attributes:
        overrides: Overrides to add to the command.
        total: Bytes in use on the device that uses most.
        seconds: Time of an optimizer step in seconds.
        bound: Part of the step that takes most of the time.
    """

    overrides: tuple[str, ...]
    total: int
    seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a search.

    Attributes:
        fitting: Configurations that fit into memory, the best first.
        too_large: Number of configurations that do not fit even with one sample per rank.
        refused: Number of configurations with an error.
    """

    fitting: Sequence[Candidate]
    too_large: int
    refused: int


def ways(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield overrides of strategy, precision and activation checkpointing. Some combinations may have errors."""
    for word in precisions(plan.settings.precision.word):
        for strategy in ALONE if plan.placement.world_size * plan.placement.layers == 1 else SEVERAL:
            yield (f"strategy={strategy}", f"precision={word}")
        blocks = repeated_blocks(plan)
        if blocks:
            again = f"strategy.activation_checkpointing=[{','.join(blocks)}]"
            yield ("strategy=fsdp", again, f"precision={word}")


def repeated_blocks(plan: Plan) -> list[str]:
    """Return patterns for the repeated blocks of the network, for strategy.activation_checkpointing."""
    if plan.network is None:
        return []
    found = choose_units(plan.network, AUTO, key="strategy.shard")
    return list(dict.fromkeys(to_pattern(name) for name in found))


def precisions(word: str) -> list[str]:
    """Return the names of the precisions to try.

    A float32 run also tries bf16, which trains the same in most cases.

    Args:
        word: Precision of the run.
    """
    found = WORDS[word]
    return [word] if found.half_parameters or found.double or found.autocast else [word, "bf16"]


def search(plan: Plan, *, limit: int | None, other: Callable[[Sequence[str]], Estimator | None]) -> Findings:
    """Estimate every configuration.

    Args:
        plan: Plan of the run.
        limit: Bytes of each device. None is no limit.
        other: Returns the estimator of the run with additional overrides, or None if they have an error.
    """
    fitting, too_large, refused = [], 0, 0
    for overrides in ways(plan):
        found = other(overrides)
        if found is None:
            refused += 1
            continue
        estimate = fewest(found, limit=limit)
        if estimate is None or estimate.time is None:
            too_large += 1
            continue
        more = accumulation(found, estimate)
        if more and other([*overrides, *more]) is None:
            refused += 1
            continue
        fitting.append(
            Candidate(
                overrides=(*overrides, *more),
                total=estimate.total,
                seconds=estimate.time.seconds,
                bound=estimate.time.bound,
            )
        )
    return Findings(
        fitting=rank_candidates(fitting, word=plan.settings.precision.word), too_large=too_large, refused=refused
    )


def rank_candidates(candidates: Sequence[Candidate], *, word: str) -> list[Candidate]:
    """Return the candidates, the fastest first.

    If several candidates are about equally fast, the one that `ways` yields first is the best.

    Args:
        candidates: Candidates in the order of `ways`.
        word: Precision of the run. Another precision must be faster by the factor CLEARLY, because it changes the
            numbers, and because small products are further from its peak.
    """
    weighed = [one.seconds * (1.0 if f"precision={word}" in one.overrides else CLEARLY) for one in candidates]
    fastest = min(weighed, default=0.0)
    best = [one for one, time in zip(candidates, weighed, strict=True) if time <= (1 + ALIKE) * fastest][:1]
    return [*best, *sorted((one for one in candidates if one not in best), key=lambda one: one.seconds)]


def fewest(estimator: Estimator, *, limit: int | None) -> Estimate | None:
    """Return the estimate with the fewest micro-batches that fit into memory.

    Return None if one sample per rank is too large.

    Args:
        estimator: Estimator of the configuration.
        limit: Bytes of each device. None is no limit.
    """
    batch, count = estimator.batch, estimator.micro_batches
    ranks = estimator.plan.placement.data_ranks
    for _ in range(MOST_DOUBLINGS):
        estimate = estimator.estimate(batch=batch, micro_batches=count)
        if limit is None or estimate.total <= limit:
            return estimate
        if batch % 2 or batch // 2 < ranks:
            return None
        batch, count = batch // 2, 2 * count
    return None


def accumulation(estimator: Estimator, estimate: Estimate) -> tuple[str, ...]:
    """Return the overrides for the number of micro-batches of an estimate; none if it is that of the run."""
    if estimate.micro_batches == estimator.micro_batches:
        return ()
    return (f"data.batch_size={estimate.batch}", f"trainer.accumulate_grad_batches={estimate.micro_batches}")
