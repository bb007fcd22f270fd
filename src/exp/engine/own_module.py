"""A LightningModule of the user's own, as the engine's callbacks see one.

Lightning's Trainer runs the module itself, by its own loop and its own hooks. Around some of its methods is put what a
run of exp promises: for this object alone, and by what `functools.wraps` makes, so that Lightning still sees which of
them are the user's.

    _on_before_batch_transfer     random numbers are derived from (seed, rank, epoch, batch): a resume draws the same
    training_step                 hooks at the layers, and the loss; a short last share counts by its samples
    manual_backward               the same share, where the module steps by hand
    configure_gradient_clipping   hooks that look at clipped gradients
    on_save_checkpoint            nothing that is no plain value, and no number that is not finite, is saved

Private of Lightning (2.6.6), and tested: `_on_before_batch_transfer` is called for every batch before anything of the
module's sees it; `_log_hyperparams` of a module that saves its hyperparameters.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from exp.data.randomness import reseed
from exp.engine.checkpoint import State, is_plain, lay_out_optimizer_states, require_plain
from exp.engine.non_finite import OWN_FIXES, Kinds, kinds_by_design, require_finite
from exp.engine.observer import NO_RESULT, UNOBSERVED, StepObserver, StepResult
from exp.engine.own_data import OwnBatches
from exp.engine.progress import Limits, total_epochs, total_steps
from exp.errors import UserCodeError
from exp.optim.phase import Phase
from exp.shared_types import Stage
from exp.spelling import among

log = logging.getLogger(__name__)

# Where Lightning keeps what `save_hyperparameters` found, of a module and of a data module.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class OwnModule:
    """What hooks and recording ask of a module, of one of the user's own.

    network: the module itself. seed, rank, limits: as TrainingModule's. batches: what each batch's share is.
    saved: gives which checkpoint is good, in words.
    last, observer: attributes, as TrainingModule's.
    """

    phases: Sequence[Phase] = ()
    fixes = OWN_FIXES
    run_network = None
    loss_with = None

    def __init__(
        self,
        network: LightningModule,
        *,
        seed: int,
        rank: int,
        limits: Limits,
        batches: OwnBatches,
        saved: Callable[[], str],
    ) -> None:
        self.network, self.seed, self.rank, self.limits = network, seed, rank, limits
        self.batches, self._saved = batches, saved
        self.last = NO_RESULT
        self.observer: StepObserver = UNOBSERVED
        self._weight = 1.0
        self._by_design: Mapping[str, Kinds] = {}
        self._is_told = False
        around: dict[str, Callable[..., Any]] = {
            "_on_before_batch_transfer": self._before_batch_transfer,
            "training_step": self._training_step,
            "manual_backward": self._manual_backward,
            "configure_gradient_clipping": self._configure_gradient_clipping,
            "on_save_checkpoint": self._on_save_checkpoint,
            "on_load_checkpoint": self._on_load_checkpoint,
        }
        if not is_overridden("predict_step", network, LightningModule):
            around["predict_step"] = self._predict_step
        for name, method in around.items():
            inner = getattr(network, name)
            vars(network)[name] = functools.wraps(inner)(functools.partial(method, inner))
        # exp's loggers have what `module` says, among all that tells the run from another.
        vars(network)["_log_hyperparams"] = False

    def leave_out(self, data: LightningDataModule, *, step: str, loader: str) -> None:
        """Hide the step and the loader of a stage from Lightning, which would warn of a stage that lacks one."""
        vars(self.network)[step] = functools.partial(getattr(LightningModule, step), self.network)
        vars(data)[loader] = functools.partial(getattr(LightningDataModule, loader), data)

    def __deepcopy__(self, memo: object) -> OwnModule:
        """Leave a copy of the module to this one: callbacks that average weights make one, and never step it."""
        return self

    # --- what hooks and recording ask ---

    @property
    def trainer(self) -> Trainer:
        return self.network.trainer

    @property
    def seconds_waited(self) -> float:
        return self.batches.seconds_waited

    def metric_names(self, stage: Stage) -> Sequence[str]:
        """Return none: what it logs is its own affair."""
        return ()

    def lengths(self) -> tuple[int | None, int | None]:
        """Return optimizer steps and epochs of the whole run; None where they are not limited."""
        batches = self.trainer.num_training_batches
        known = int(batches) if batches not in (0, float("inf")) else None
        return total_steps(self.trainer, self.limits, known), total_epochs(self.trainer)

    def begin(self) -> None:
        """Remember which of its tensors hold numbers that are not finite by design; before the first step."""
        self._by_design = kinds_by_design(self.network)

    def require_finite(self, state: State) -> None:
        """Check what a checkpoint holds, or a state dict alone. Every rank must call it. Raises: NonFiniteError."""
        require_finite(state, self._by_design, self.trainer, saved=self.saved, fixes=self.fixes)

    @property
    def saved(self) -> str:
        return self._saved()

    def reseed(self, stage: Stage, *, epoch: int, batch: int) -> None:
        """Set the generators to the stream of one batch."""
        reseed(seed=self.seed, rank=self.rank, epoch=epoch, batch=batch, stage=stage)

    # --- what is put around its methods ---

    def _before_batch_transfer(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        trainer = self.trainer
        if trainer.training:
            position = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.reseed("train", epoch=trainer.current_epoch, batch=position)
        return inner(*arguments, **named)

    def _training_step(self, inner: Callable[..., Any], batch: Any, *arguments: Any, **named: Any) -> Any:
        self._weight = self.batches.current.weight
        observer = self.observer
        around = observer.around_forward(batch) if observer.watches_forward else nullcontext()
        try:
            with around:
                output = inner(batch, *arguments, **named)
        except StopIteration as error:
            # Lightning would take it for the end of the data.
            raise UserCodeError.of(error, what="training_step") from error
        observer.after_forward({})
        output = self._weighed(output)
        self.last = StepResult(_loss_of(output), {})
        return output

    def _predict_step(self, inner: Callable[..., Any], batch: Any, *arguments: Any, **named: Any) -> Any:
        """Lightning's own calls forward with the batch; of a single input that is the tensor."""
        data = next(iter(batch.values())) if isinstance(batch, Mapping) and len(batch) == 1 else batch
        return inner(data, *arguments, **named)

    def _weighed(self, output: Any) -> Any:
        """The loss of a share that has fewer samples than its part of a batch, so that the ranks' mean is right."""
        if self._weight == 1.0 or not self.network.automatic_optimization or output is None:
            return output
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * self._weight} if "loss" in output else output
        return output * self._weight

    def _manual_backward(self, inner: Callable[..., Any], loss: Tensor, *arguments: Any, **named: Any) -> None:
        inner(loss if self._weight == 1.0 else loss * self._weight, *arguments, **named)

    def _configure_gradient_clipping(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        inner(*arguments, **named)
        self.observer.after_clipping()

    def _on_save_checkpoint(self, inner: Callable[..., Any], checkpoint: State) -> None:
        earlier = set(checkpoint)
        inner(checkpoint)
        fix = f"Have on_save_checkpoint of {type(self.network).__name__} add its state_dict(), or plain values, instead"
        for key in (key for key in checkpoint if key not in earlier):
            require_plain(checkpoint[key], key=str(key), fix=fix)
        for key in HYPERPARAMETERS:
            if key in checkpoint:
                checkpoint[key] = self._plain(checkpoint[key])
        self.require_finite(checkpoint)

    def _on_load_checkpoint(self, inner: Callable[..., Any], checkpoint: State) -> None:
        lay_out_optimizer_states(checkpoint, self.network)
        inner(checkpoint)

    def _plain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Hyperparameters without layers, optimizers and other objects, which would be code in a checkpoint."""
        kept = {name: value for name, value in values.items() if is_plain(value)}
        left = [name for name in values if name not in kept]
        if left and not self._is_told:
            self._is_told = True
            log.info(
                "hyperparameters that are no plain values are not in checkpoints: %s. Give them to "
                "load_from_checkpoint, which finds the others",
                among(left),
            )
        return kept


def _loss_of(output: Any) -> Tensor | None:
    """The loss of a training step, 0-d and detached; None where it gave none."""
    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what Lightning keeps of self.log as numbers, by name."""
    return {name: float(cast(Any, value)) for name, value in values.items() if torch.as_tensor(value).numel() == 1}
