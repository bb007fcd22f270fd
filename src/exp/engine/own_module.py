"""Adapter from a user's LightningModule to the engine's callbacks.

Lightning's Trainer runs the user's module in Lightning's loop with Lightning's hooks. OwnModule wraps some methods of
the module object. It uses `functools.wraps`, so that Lightning still detects which methods the user's class overrides.

    _on_before_batch_transfer     seeds the random generators from (seed, rank, epoch, batch), for an exact resume
    training_step                 runs hooks at the layers, and weights the loss of a short last batch by its samples
    manual_backward               applies the same weight, if the module calls its optimizers in training_step
    configure_gradient_clipping   runs hooks that read clipped gradients
    on_save_checkpoint            raises an error for objects that are not plain values, and for non-finite numbers

The adapter uses two private names of Lightning (2.6.6), which tests check. `_on_before_batch_transfer` is called for
each batch before other methods of the module. The attribute `_log_hyperparams` decides whether Lightning logs the
hyperparameters of a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from exp.data.randomness import reseed
from exp.engine.checkpoint import State, is_plain, require_plain
from exp.engine.datamodule import PlainData
from exp.engine.non_finite import finite_names, require_finite
from exp.engine.observer import NO_RESULT, UNOBSERVED, StepObserver, StepResult
from exp.engine.own_data import BatchesOfLoaders
from exp.engine.progress import Limits, total_epochs, total_steps
from exp.errors import UserCodeError
from exp.optim.phase import Phase
from exp.shared_types import Stage

# Checkpoint entries with the hyperparameters of a module and of a data module.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
Method = Callable[..., object]


class OwnModule:
    """Adapter that gives hooks and recording a common interface to a user's LightningModule.

    Args:
        network: The LightningModule.
        seed: Seed of the run.
        rank: Index of the part of each global batch that this process uses.
        limits: Limits of the run.
        batches: Object that provides this rank's part of each batch.

    Attributes:
        last: Result of the last training step.
        observer: Observer of training and evaluation.
    """

    phases: Sequence[Phase] = ()
    run_network = None
    loss_with = None

    def __init__(
        self,
        network: LightningModule,
        *,
        seed: int,
        rank: int,
        limits: Limits,
        batches: PlainData | BatchesOfLoaders,
    ) -> None:
        self.network, self.seed, self.rank, self.limits = network, seed, rank, limits
        self.batches = batches
        self.last = NO_RESULT
        self.observer: StepObserver = UNOBSERVED
        self._weight = 1.0
        self._finite: frozenset[str] = frozenset()
        around: dict[str, Method] = {
            "_on_before_batch_transfer": self._before_batch_transfer,
            "training_step": self._training_step,
            "manual_backward": self._manual_backward,
            "configure_gradient_clipping": self._configure_gradient_clipping,
            "on_save_checkpoint": self._on_save_checkpoint,
        }
        if not is_overridden("predict_step", network, LightningModule):
            around["predict_step"] = self._predict_step
        for name, method in around.items():
            inner = getattr(network, name)
            vars(network)[name] = functools.wraps(inner)(functools.partial(method, inner))
        # Hyperparameters are not logged, because exp's loggers already have the settings of `module`.
        vars(network)["_log_hyperparams"] = False

    def __deepcopy__(self, memo: object) -> OwnModule:
        """Return this object. Callbacks that average weights copy the module, but never train the copy."""
        return self

    # --- the interface for hooks and recording ---

    @property
    def trainer(self) -> Trainer:
        return self.network.trainer

    @property
    def seconds_waited(self) -> float:
        return self.batches.seconds_waited

    def metric_names(self, stage: Stage) -> Sequence[str]:
        """Return an empty list, because the module logs its own metrics."""
        return ()

    def lengths(self) -> tuple[int | None, int | None]:
        """Return the number of optimizer steps and of epochs of the whole run. An unlimited number is None."""
        batches = self.trainer.num_training_batches
        known = int(batches) if batches not in (0, float("inf")) else None
        return total_steps(self.trainer, self.limits, known), total_epochs(self.trainer)

    def begin(self) -> None:
        """Store the names of the tensors that must stay finite. Call this method before the first step."""
        self._finite = finite_names(self.network)

    def require_finite(self, state: State) -> None:
        """Raise NonFiniteError if a checkpoint or a state dict contains unexpected non-finite numbers.

        Every rank must call this method.
        """
        require_finite(state, self._finite, self.trainer)

    def reseed(self, stage: Stage, *, epoch: int, batch: int) -> None:
        """Seed the random generators for one batch."""
        reseed(seed=self.seed, rank=self.rank, epoch=epoch, batch=batch, stage=stage)

    # --- the wrapped methods ---

    def _before_batch_transfer(self, inner: Method, *arguments: object, **named: object) -> object:
        trainer = self.trainer
        if trainer.training:
            position = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.reseed("train", epoch=trainer.current_epoch, batch=position)
        return inner(*arguments, **named)

    def _training_step(self, inner: Method, batch: object, *arguments: object, **named: object) -> object:
        self._weight = self.batches.current.weight
        observer = self.observer
        around = observer.around_forward(batch) if observer.watches_forward else nullcontext()
        try:
            with around:
                output = inner(batch, *arguments, **named)
        except StopIteration as error:
            # Lightning would treat the StopIteration as the end of the data.
            raise UserCodeError.of(error, what="training_step") from error
        observer.after_forward({})
        output = self._weight_loss(output)
        self.last = StepResult(_loss_of(output), {})
        return output

    def _predict_step(self, inner: Method, batch: object, *arguments: object, **named: object) -> object:
        """Call Lightning's predict_step. If the batch is a mapping with one input, pass this input."""
        data = next(iter(batch.values())) if isinstance(batch, Mapping) and len(batch) == 1 else batch
        return inner(data, *arguments, **named)

    def _weight_loss(self, output: object) -> object:
        """Weight the loss by this rank's samples, so that the mean over ranks equals the mean over samples."""
        if self._weight == 1.0 or not self.network.automatic_optimization:
            return output
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * self._weight} if "loss" in output else output
        return output * self._weight if isinstance(output, Tensor) else output

    def _manual_backward(self, inner: Method, loss: Tensor, *arguments: object, **named: object) -> None:
        inner(loss if self._weight == 1.0 else loss * self._weight, *arguments, **named)

    def _configure_gradient_clipping(self, inner: Method, *arguments: object, **named: object) -> None:
        inner(*arguments, **named)
        self.observer.after_clipping()

    def _on_save_checkpoint(self, inner: Method, checkpoint: State) -> None:
        earlier = set(checkpoint)
        inner(checkpoint)
        fix = f"Have on_save_checkpoint of {type(self.network).__name__} add its state_dict(), or plain values, instead"
        for key, value in checkpoint.items():
            if key not in earlier:
                require_plain(value, key=str(key), fix=fix)
        for key in HYPERPARAMETERS:
            if key in checkpoint:
                # Layers and other objects are left out, because loading such objects would execute code. Users pass
                # them to load_from_checkpoint as arguments.
                checkpoint[key] = {name: value for name, value in checkpoint[key].items() if is_plain(value)}
        self.require_finite(checkpoint)


def _loss_of(output: object) -> Tensor | None:
    """Return the loss of a training step, 0-d and detached; None if the step returned no loss."""
    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def as_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values of self.log that are single numbers, by name."""
    found = {name: torch.as_tensor(value) for name, value in values.items()}
    return {name: float(value) for name, value in found.items() if value.numel() == 1}
