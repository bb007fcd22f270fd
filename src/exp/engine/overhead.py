"""The adapter that takes out of Lightning's loop what a step pays for without a use.

Lightning asks every callback, the module and the strategy for every hook of every batch, whether or not it does anything,
and times each. It skips what is not callable: so a hook that nobody overrides becomes None.

Relied on, and tested: `_call_callback_hooks` and `_call_lightning_module_hook` ask `callable` of what they find by name;
`Profiler.profile` is used as a context; `_broadcast_sigterm_tensor` does nothing else (seen in lightning 2.6.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)
# One for all: it has no state.
NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Lightning's profiler that measures nothing, without a generator for each thing that it does not measure."""

    def profile(self, action_name: str) -> Any:
        return NOTHING


def trainer_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments with what exp's engine does itself turned off in Lightning."""
    own = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    if arguments.get("profiler") is None:
        own["profiler"] = NoProfiler()
    return {**arguments, **own}


def lighten(trainer: Trainer, module: LightningModule) -> None:
    """Removes, before fit or test, the per-batch hooks that nobody overrides, and Lightning's own look for signals."""
    for callback in trainer.callbacks:
        _remove_empty(callback, Callback)
    _remove_empty(module, LightningModule)
    # A broadcast and a wait for the device at every step of a distributed run; engine/stopping.py asks once a second.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing


def _remove_empty(owner: Any, base: type) -> None:
    for name in STEP_HOOKS:
        if getattr(type(owner), name) is getattr(base, name) and name not in vars(owner):
            setattr(owner, name, None)


def _nothing() -> None:
    pass
