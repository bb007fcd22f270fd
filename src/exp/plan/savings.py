"""Changes of a run that save memory. Each change is checked and estimated as a separate run."""

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

# Smallest saving that is reported, as a fraction of the run's memory.
LEAST = 0.01
# Description of the change that recomputes activations.
REPEATED = "repeated blocks compute their activations twice"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of the run that saves memory.

    Attributes:
        what: Description of the change.
        overrides: Overrides to add to the command.
        saved: Saved bytes on the device with the most memory in use.
    """

    what: str
    overrides: tuple[str, ...]
    saved: int


def changes(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield possible changes that keep the network and the data: a description, and the overrides."""
    word, placement = WORDS[plan.settings.precision.word], plan.placement
    traits = traits_of(plan.strategy)
    if word.compute.itemsize == 4:
        yield "matrix products and their saved inputs in bfloat16", ("precision=bf16",)
    if not word.half_parameters:
        yield "also weights, gradients and optimizer state in bfloat16", ("precision=bf16_true",)
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
        yield "half the batch, accumulated twice per step", overrides


def repeated_blocks(plan: Plan) -> list[str]:
    """Return patterns for the repeated blocks of the network, for strategy.activation_checkpointing."""
    if plan.network is None:
        return []
    found = choose_units(plan.network, AUTO, key="strategy.shard")
    return list(dict.fromkeys(to_pattern(name) for name in found))


def savings(estimate: Estimate, plan: Plan, other: Callable[[Sequence[str]], Estimator | None]) -> list[Saving]:
    """Return the changes that save more than the fraction LEAST of the memory, the largest saving first.

    Args:
        estimate: Estimate of the run.
        plan: Plan of the run.
        other: Returns the estimator of the run with additional overrides, or None if they have an error.
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
