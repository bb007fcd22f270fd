"""Search for the fastest configuration that fits, over strategies, precisions, checkpointing and accumulation.

The samples of a step and the number of devices do not change, so the run learns the same. Each strategy and precision
uses the fewest micro-batches that fit, because more of them never make an estimated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.plan.savings import repeated_blocks
from exp.precision.words import WORDS

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.estimate import Estimate, Estimator

ALONE = ("single",)
SEVERAL = ("ddp", "fsdp", "tensor_parallel", "pipeline")
# Number of micro-batch counts that are tried, each twice the one before.
MOST_DOUBLINGS = 10
# Estimates that differ by a smaller share count as equal.
ALIKE = 0.05
# Factor by which another precision must be faster.
CLEARLY = 1.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration of the run.

    Attributes:
        overrides: To add to the command.
        total: Bytes of the device with the most memory in use.
        seconds: Time of a step.
        bound: What takes most of the time.
    """

    overrides: tuple[str, ...]
    total: int
    seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a search.

    Attributes:
        fitting: Configurations that fit, the best first.
        too_large: Number of configurations that do not fit with one sample per rank.
        refused: Number of configurations with an error.
    """

    fitting: Sequence[Candidate]
    too_large: int
    refused: int


def ways(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield overrides of strategy, precision and activation checkpointing. Some of them may have errors."""
    words = precisions(plan.settings.precision.word, accelerator=plan.placement.accelerator)
    for word in words:
        for strategy in ALONE if plan.placement.world_size * plan.placement.layers == 1 else SEVERAL:
            yield (f"strategy={strategy}", f"precision={word}")
        blocks = repeated_blocks(plan)
        if blocks:
            again = f"strategy.activation_checkpointing=[{','.join(blocks)}]"
            yield ("strategy=fsdp", again, f"precision={word}")


def precisions(word: str, *, accelerator: str) -> list[str]:
    """Return the precision of the run, and bf16 in addition to float32 on a GPU, which trains the same in most cases.

    On a CPU, small products in half precision are far from their peak: a GPT of 0.1 million parameters took three times
    as long in bf16 as in fp32.
    """
    found = WORDS[word]
    if accelerator == "cpu":
        return [word]
    return [word] if found.half_parameters or found.double or found.autocast else [word, "bf16"]


def search(plan: Plan, *, limit: int | None, other: Callable[[Sequence[str]], Estimator | None]) -> Findings:
    """Estimate every configuration.

    Args:
        plan: Plan of the run.
        limit: Bytes of each device; None for no limit.
        other: Returns the estimator of the run with further overrides; None if they have an error.
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
    """Return the candidates, the fastest first. Of candidates that are about equally fast, the first of `ways` leads.

    Args:
        candidates: In the order of `ways`.
        word: Precision of the run. Another precision must be clearly faster, because it changes the numbers, and small
            products are further from its peak.
    """
    weighed = [one.seconds * (1.0 if f"precision={word}" in one.overrides else CLEARLY) for one in candidates]
    fastest = min(weighed, default=0.0)
    best = [one for one, time in zip(candidates, weighed, strict=True) if time <= (1 + ALIKE) * fastest][:1]
    return [*best, *sorted((one for one in candidates if one not in best), key=lambda one: one.seconds)]


def fewest(estimator: Estimator, *, limit: int | None) -> Estimate | None:
    """Return the estimate with the fewest micro-batches that fit; None if even one sample per rank does not fit."""
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
    """Return the overrides that set the micro-batches of an estimate."""
    if estimate.micro_batches == estimator.micro_batches:
        return ()
    return (f"data.batch_size={estimate.batch}", f"trainer.accumulate_grad_batches={estimate.micro_batches}")
