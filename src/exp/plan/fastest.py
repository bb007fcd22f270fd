"""The fastest way to run a plan that fits: over strategies, precisions, recomputed activations and accumulation.

The samples of a step and the number of devices stay what they are, so that the run learns alike. Of each strategy and
precision the fewest micro-batches that fit are taken, for more of them never make an estimated step shorter.
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
# What an accumulation may be multiplied by: 1, 2, 4 ...
MOST_DOUBLINGS = 10
# Estimates that differ by less do not tell which is faster.
ALIKE = 0.05
# By how much another precision has to be faster.
CLEARLY = 1.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run it. overrides: to add to the command.

    total: bytes of the device that has most. seconds: of a step, which `bound` takes most of.
    """

    overrides: tuple[str, ...]
    total: int
    seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """fitting: the fastest first, in the order of `ways` where estimates cannot tell which is.

    too_large: how many do not fit with one sample a rank. refused: how many are no run.
    """

    fitting: Sequence[Candidate]
    too_large: int
    refused: int


def ways(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Overrides of strategy, precision and activation checkpointing; what the run could not take is among them."""
    words = precisions(plan.settings.precision.word, accelerator=plan.placement.accelerator)
    for word in words:
        for strategy in ALONE if plan.placement.world_size * plan.placement.layers == 1 else SEVERAL:
            yield (f"strategy={strategy}", f"precision={word}")
        blocks = repeated_blocks(plan)
        if blocks:
            again = f"strategy.activation_checkpointing=[{','.join(blocks)}]"
            yield ("strategy=fsdp", again, f"precision={word}")


def precisions(word: str, *, accelerator: str) -> list[str]:
    """The run's own, and of float32 on a GPU bf16, which trains alike in most cases.

    On a CPU half precision is far from its peak in small products: a gpt of 0.1 million parameters took three times as
    long in bf16 as in fp32 where its peak is higher.
    """
    found = WORDS[word]
    if accelerator == "cpu":
        return [word]
    return [word] if found.half_parameters or found.double or found.autocast else [word, "bf16"]


def search(plan: Plan, *, limit: int | None, other: Callable[[Sequence[str]], Estimator | None]) -> Findings:
    """Try every way.

    limit: bytes of each device; None fits all. other: the estimator of the run with more overrides; None where these
    are refused.
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
    """The fastest first; where estimates cannot tell which is, the one that comes first in `ways`, then the others.

    word: of the run's own precision. Another one has to be clearly faster: it is other numbers, and small products are
    further from its peak.
    """
    weighed = [one.seconds * (1.0 if f"precision={word}" in one.overrides else CLEARLY) for one in candidates]
    fastest = min(weighed, default=0.0)
    best = [one for one, time in zip(candidates, weighed, strict=True) if time <= (1 + ALIKE) * fastest][:1]
    return [*best, *sorted((one for one in candidates if one not in best), key=lambda one: one.seconds)]


def fewest(estimator: Estimator, *, limit: int | None) -> Estimate | None:
    """With the fewest micro-batches that fit; None where not one sample a rank does."""
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
    """The overrides that make its micro-batches."""
    if estimate.micro_batches == estimator.micro_batches:
        return ()
    return (f"data.batch_size={estimate.batch}", f"trainer.accumulate_grad_batches={estimate.micro_batches}")
