"""Callback that freezes and unfreezes parameters at the epochs in the config key `freeze.unfreeze`.

The trained parameters depend only on the epoch, so a resumed run trains the same parameters. The optimizer has all
parameters from the start. For parameters without a gradient, torch skips the update, including weight decay and
momentum. In contrast, Lightning's BackboneFinetuning adds parameter groups to the optimizer when it unfreezes
parameters.
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
    """Callback that freezes and unfreezes parameters at the start of each epoch. Frozen norm layers stay in eval mode.

    Args:
        freezing: Rules that determine the trained parameters of each epoch.
    """

    def __init__(self, freezing: Freezing) -> None:
        self.freezing = freezing
        self._learning: frozenset[str] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Norm layers are temporarily in train mode, because Lightning warns about modules in eval mode after this hook.
        for norm in held_norms(pl_module):
            norm.training = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for norm in held_norms(pl_module):
            norm.training = False
        # Lightning does not call on_train_epoch_start for a run that resumes within an epoch.
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
        _wrap_again(trainer, pl_module)
        if before is not None and trainer.is_global_zero:
            log.info("epoch %d: %s are trained from now on", trainer.current_epoch, among(sorted(learning - before)))


def unfreezing_errors(network: nn.Module, freezing: Freezing) -> list[ErrorDetails]:
    """Return a list with an error if no parameter is trained in the first epoch; an empty list otherwise."""
    if not freezing.changes or freezing.learns_at_first(network):
        return []
    first = min(freezing.until.values())
    got = f"the patterns freeze all parameters until epoch {first}"
    fix = "Leave one layer, such as the head, out of the patterns"
    return [ErrorDetails("freeze.parameters", got, "a parameter that is trained in the first epoch", fix)]


def _wrap_again(trainer: Trainer, module: nn.Module) -> None:
    """Wrap the module in DistributedDataParallel again.

    The old wrapper would wait for gradients of the parameters that were trained in the previous epoch. Tested with
    Lightning 2.6.6: DDPStrategy.configure_ddp wraps `strategy.model`.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        assert strategy.lightning_module is module
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()
