"""What would save memory: the run with one change, each checked as a run of its own and estimated as the run was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.plan.layer_table import to_pattern
from exp.precision.words import WORDS
from exp.strategies.strategy import Strategy, traits_of
from exp.strategies.units import AUTO, choose_units

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.estimate import Estimate, Estimator

# Of the whole: less is not worth a line.
LEAST = 0.01
# A block is worth computing twice where most activations are kept in blocks.
REPEATED = "repeated blocks compute their activations twice"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of the run. overrides: to add to the command. saved: bytes of the device that has most."""

    what: str
    overrides: tuple[str, ...]
    saved: int


def changes(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What may be changed without another network or other data, with the overrides that do it."""
    word, placement = WORDS[plan.settings.precision.word], plan.placement
    traits = traits_of(plan.strategy)
    if word.compute.itemsize == 4:
        yield "matrix products and what they keep in bfloat16", ("precision=bf16",)
    if not word.half_parameters:
        yield "weights, gradients and optimizer state in bfloat16, too", ("precision=bf16_true",)
    if placement.world_size > 1 and not traits & {"shards_parameters", "splits_layers", "splits_tensors"}:
        yield f"weights, gradients and optimizer state in shards over {placement.world_size} ranks", ("strategy=fsdp",)
    blocks = repeated_blocks(plan)
    is_sharded, is_whole = "shards_parameters" in traits, traits <= {"splits_batch", "steps_once"}
    recomputes = isinstance(plan.strategy, Strategy) and plan.strategy.activation_checkpointing
    if blocks and not recomputes and (is_sharded or is_whole):
        patterns = f"strategy.activation_checkpointing=[{','.join(blocks)}]"
        name = () if type(plan.strategy).__name__ == "FSDP" else ("strategy=fsdp",)
        yield REPEATED, (*name, patterns)
    batch, count = plan.settings.batch_size, plan.settings.trainer.accumulate_grad_batches
    if batch is not None and batch // 2 >= placement.data_ranks:
        overrides = (f"data.batch_size={batch // 2}", f"trainer.accumulate_grad_batches={2 * count}")
        yield "half the batch at a time, twice a step", overrides


def repeated_blocks(plan: Plan) -> list[str]:
    """Patterns of the layers of lists of layers, as strategy.activation_checkpointing takes them."""
    if plan.network is None:
        return []
    found = choose_units(plan.network, AUTO, key="strategy.shard")
    return list(dict.fromkeys(to_pattern(name) for name in found))


def savings(estimate: Estimate, plan: Plan, other: Callable[[Sequence[str]], Estimator | None]) -> list[Saving]:
    """The changes that save more than a hundredth, those first that save most.

    other: the estimator of the run with more overrides; None where these are not allowed together.
    """
    found = []
    for what, overrides in changes(plan):
        changed = other(overrides)
        if changed is None:
            continue
        saved = estimate.total - changed.estimate().total
        if saved > LEAST * estimate.total:
            found.append(Saving(what=what, overrides=overrides, saved=saved))
    return sorted(found, key=lambda one: -one.saved)
