"""One line on how a run that ran out of memory may fit, from what its memory was used for."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Use:
    """Bytes of this process, and what there is to divide them by.

    gradients: of all parameters that learn, whether or not they are there yet.
    activations: those that a forward had no room for included.
    halves: of the activations, those that are in a float of 16 bits already.
    samples: of this process's micro-batch. holders: modules that keep activations.
    devices: that could share the run; 1 where they have one memory, as ranks on one CPU.
    is_sharded: whether parameters lie in shards over the ranks already.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    halves: int = 0
    samples: int = 1
    holders: int = 1
    devices: int = 1
    is_sharded: bool = False


def advice(use: Use) -> str:
    """What saves most of these bytes, and of which."""
    kept = use.activations
    state = use.parameters + use.gradients + use.optimizer
    of_kept, of_state = f"of {_mib(kept)} of activations", f"of {_mib(state)} of parameters, gradients and optimizer"
    smaller = (
        "a smaller data.batch_size and trainer.accumulate_grad_batches as many times larger: the step stays the same, "
        f"and half the samples at a time save half {of_kept}"
    )
    choices = [
        # Down to one sample at a time.
        (kept * (1 - 1 / use.samples), smaller),
        (
            state * (1 - 1 / use.devices) if not use.is_sharded else 0,
            f"strategy=fsdp over {use.devices} devices: each holds its share {of_state}",
        ),
        # A network of n alike layers keeps the ends of about sqrt(n) segments (Chen et al. 2016, arXiv:1604.06174).
        (
            kept * (1 - 1 / math.sqrt(use.holders)) if use.is_sharded else 0,
            f"strategy.activation_checkpointing=[...], the repeated blocks: it computes most {of_kept} again",
        ),
        ((kept - use.halves) / 2, f"precision=bf16: it saves up to half {of_kept}"),
    ]
    saved, line = max(choices, key=lambda choice: choice[0])
    if saved <= 0:
        return (
            f"a smaller network, or a device with more memory: there is no batch to make smaller, and {_mib(state)} "
            "are parameters, gradients and optimizer"
        )
    return line


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
