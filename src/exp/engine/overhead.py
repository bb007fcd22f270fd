"""The adapter that takes out of Lightning's loop what a step pays for in vain.

Lightning asks every callback and the module for every hook of every batch, whether or not it does anything, and times
each. It skips what is not callable: so a hook that nobody overrides becomes None.

Processor time without it, over with it (benchmarks/loop.py, an MLP 64-128-10, six pairs): 1.07 of a step through
Lightning's own loop, 1.04 of a run that mostly validates, 1.00 of a step of the lean loop, which asks nobody in vain.

Relied on, and tested: `_call_callback_hooks` and `_call_lightning_module_hook` ask `callable` of what they find by
name; `Profiler.profile` is used as a context; `_broadcast_sigterm_tensor` does nothing else (seen in lightning 2.6.6).
docs/lean-loop.md says which test holds each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler

from exp.engine.datamodule import RunTrainer

TRAINING_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
# Lightning inspects the module's own of these, so they stay there.
EVALUATION_HOOKS = (
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)
# One for all: it has no state.
NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Lightning's profiler that measures nothing, without a generator for each thing that it does not measure."""

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]  # a context, as it is used
        return NOTHING


def lighten(trainer: RunTrainer, module: LightningModule | None = None) -> None:
    """Remove, before fit or test, the per-batch hooks that nobody overrides, timers that nobody reads, and Lightning's
    own look for signals.

    module: of exp's own, whose hooks are removed alike; one of the user's own stays as it is.
    """
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = NoProfiler()
    for callback in trainer.callbacks:
        _remove_empty(callback, Callback, TRAINING_HOOKS + EVALUATION_HOOKS)
    if module is not None:
        _remove_empty(module, LightningModule, TRAINING_HOOKS)
    # A broadcast and a wait for the device at every step of a distributed run; engine/stopping.py asks once a second.
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = _nothing


def overridden(owner: object, base: type, name: str) -> Callable[..., Any] | None:
    """Return the hook, where somebody gave it a body: the owner's class, or the owner itself."""
    found: Callable[..., Any] | None = getattr(owner, name)
    return None if name not in vars(owner) and getattr(type(owner), name) is getattr(base, name) else found


def _remove_empty(owner: object, base: type, names: Sequence[str]) -> None:
    for name in names:
        if overridden(owner, base, name) is None:
            setattr(owner, name, None)


def _nothing() -> None:
    pass
