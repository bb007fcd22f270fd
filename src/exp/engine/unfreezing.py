"""Parameters that begin to learn with an epoch, as the config's freeze.unfreeze says.

What learns is a function of the epoch alone, so a run that goes on has what an unbroken one has. An optimizer holds all
of them from the start, in their own groups; torch's leave out a parameter without a gradient, its decay and momentum,
too. So nothing of an optimizer changes with the epoch, and its state in a checkpoint has an entry for what has learnt.

Lightning's BackboneFinetuning adds groups to the optimizer in the epoch itself.
"""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.engine.module import TrainingModule
from exp.errors import ErrorDetails
from exp.models.freezing import Freezing, held_norms
from exp.spelling import among

log = logging.getLogger(__name__)


class Unfreezing(Callback):
    """Freezes and unfreezes as an epoch begins, also the one that a resumed run begins in; keeps norms held.

    freezing: what learns when.
    """

    def __init__(self, freezing: Freezing) -> None:
        self.freezing = freezing
        self._learning: frozenset[str] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning warns of every module that is in evaluation mode when it begins; these are meant to be.
        for norm in held_norms(pl_module):
            norm.training = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for norm in held_norms(pl_module):
            norm.training = False
        # A run that goes on within an epoch does not begin that one again.
        self._learning = None
        self._begin(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._learning = None

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        learning = self.freezing.learning(trainer.current_epoch)
        if learning == self._learning:
            return
        before, self._learning = self._learning, learning
        self.freezing.begin_epoch(pl_module.network, trainer.current_epoch)
        _tell_ranks(trainer, pl_module)
        if before is not None and trainer.is_global_zero:
            log.info("epoch %d: %s learn from now on", trainer.current_epoch, among(sorted(learning - before)))


def unfreezing_errors(network: nn.Module, freezing: Freezing) -> list[ErrorDetails]:
    """A first epoch in which nothing learns. network: as the check has it."""
    if not freezing.changes or freezing.learns_at_first(network):
        return []
    first = min(freezing.until.values())
    got = f"everything that learns at all, until epoch {first}"
    fix = "A head that learns from the start is left out of the patterns"
    return [
        ErrorDetails(key="freeze.parameters", got=got, expected="something that learns in the first epoch", fix=fix)
    ]


def _tell_ranks(trainer: Trainer, module: nn.Module) -> None:
    """Wrap anew what ddp wrapped: its reducer waits for the gradients of what learnt when it was made.

    Relied on, and tested: DDPStrategy.configure_ddp wraps `strategy.model` (seen in lightning 2.6.6).
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        assert strategy.lightning_module is module
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()
