"""A search for the fastest configuration of a run that fits into memory.

The search varies strategy, precision, activation checkpointing and gradient accumulation. The number of samples per
step and the number of devices do not change, so the training is equivalent. Each combination uses the smallest number
of micro-batches that fits, because more micro-batches never make an estimated step shorter.
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
# Number of micro-batch counts to try for a configuration. Each count is twice the previous count.
MOST_DOUBLINGS = 10
# Estimated times that differ by less than this fraction are treated as equal.
ALIKE = 0.05
# Factor by which a configuration with another precision must be faster to be preferred.
CLEARLY = 1.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration of the run that fits into memory, with its estimate.

    Attributes:
        overrides: Overrides that the user adds to the command.
        total: Bytes in use on the device that uses the most memory.
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
        fitting: Configurations that fit into memory. The first one is the best.
        too_large: Number of configurations that do not fit even with one sample per rank.
        refused: Number of configurations with an error.
    """

    fitting: Sequence[Candidate]
    too_large: int
    refused: int


def ways(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each configuration to try. The config may have errors with some of these overrides."""
    for word in precisions(plan.settings.precision.word):
        for strategy in ALONE if plan.placement.world_size * plan.placement.layers == 1 else SEVERAL:
            yield (f"strategy={strategy}", f"precision={word}")
        blocks = repeated_blocks(plan)
        if blocks:
            again = f"strategy.activation_checkpointing=[{','.join(blocks)}]"
            yield ("strategy=fsdp", again, f"precision={word}")


def repeated_blocks(plan: Plan) -> list[str]:
    """Return patterns that match the repeated blocks of the network, as values of strategy.activation_checkpointing."""
    if plan.network is None:
        return []
    found = choose_units(plan.network, AUTO, key="strategy.shard")
    return list(dict.fromkeys(to_pattern(name) for name in found))


def precisions(word: str) -> list[str]:
    """Return the names of the precisions to try.

    These are the precision of the run and, for a float32 run, bf16, which gives similar results in most cases.

    Args:
        word: Precision of the run.
    """
    found = WORDS[word]
    return [word] if found.half_parameters or found.double or found.autocast else [word, "bf16"]


def search(plan: Plan, *, limit: int | None, other: Callable[[Sequence[str]], Estimator | None]) -> Findings:
    """Estimate every configuration to try, and return those that fit into memory.

    Args:
        plan: Plan of the run.
        limit: Memory of each device in bytes. None: no limit.
        other: Function that returns the estimator of the run with additional overrides. It returns None if the config
            then has an error.
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
    """Sort candidates so that the best is the first, and the others follow by time.

    The best candidate is the fastest. If several candidates are about equally fast, the first one in the order of
    `ways` is the best.

    Args:
        candidates: Candidates in the order of `ways`.
        word: Precision of the run. A candidate with another precision must be faster by the factor CLEARLY. The reasons
            are that the precision changes the results, and that small matrix products do not reach its peak rate.
    """
    weighed = [one.seconds * (1.0 if f"precision={word}" in one.overrides else CLEARLY) for one in candidates]
    fastest = min(weighed, default=0.0)
    best = [one for one, time in zip(candidates, weighed, strict=True) if time <= (1 + ALIKE) * fastest][:1]
    return [*best, *sorted((one for one in candidates if one not in best), key=lambda one: one.seconds)]


def fewest(estimator: Estimator, *, limit: int | None) -> Estimate | None:
    """Return the estimate with the smallest number of micro-batches that fits into memory.

    Return None if no number of micro-batches fits.

    Args:
        estimator: Estimator of the configuration.
        limit: Memory of each device in bytes. None: no limit.
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
    """Return the overrides that set the number of micro-batches of an estimate.

    The result is empty if the run already has this number.
    """
    if estimate.micro_batches == estimator.micro_batches:
        return ()
    return (f"data.batch_size={estimate.batch}", f"trainer.accumulate_grad_batches={estimate.micro_batches}")
