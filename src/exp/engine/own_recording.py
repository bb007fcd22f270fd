"""Callback that runs hooks on a user's LightningModule and stores the values of `self.log` for the report.

`self.log` writes to the loggers as in Lightning. Values of hooks have the same x axis as values of Lightning, in which
the first step is 0. A batch counts as one step, even if several optimizers make a step on the batch.

The callback reads `trainer.callback_metrics`. Tested with Lightning 2.6.6: this dict contains all values of `self.log`,
under the names that callbacks use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.engine.buffer import Recorded, on_host_values
from exp.engine.checkpoint import State
from exp.engine.observer import WHOLE_STEP, Turn
from exp.engine.own_module import OwnModule, as_numbers
from exp.engine.recording import STATE, StepRecording
from exp.engine.runtime import operator_at_most, set_threads, threads_of
from exp.errors import RunError
from exp.hooks.hook import Hook
from exp.nested import tensors_in
from exp.shared_types import Stage

log = logging.getLogger(__name__)


class OwnRecording(StepRecording):
    """Callback that runs hooks on a user's LightningModule and writes the hooks' values to all loggers.

    The callback must precede callbacks that use random numbers in the Trainer's list.

    Args:
        module: Adapter of the LightningModule.
        hooks: Hooks by name. None: no hooks. Default: None.
        directory: Run directory, in which hooks write files. Default: None.
        chooses_threads: Whether to choose the number of CPU threads by the size of the first batch. Default: False.
    """

    first_point = 0
    _module: OwnModule

    def __init__(
        self,
        *,
        module: OwnModule,
        hooks: Mapping[str, Hook] | None = None,
        directory: Path | None = None,
        chooses_threads: bool = False,
    ) -> None:
        super().__init__(hooks=hooks, directory=directory)
        self._chooses_threads = chooses_threads
        # Optimizer step of the checkpoint that a test loaded. None if no checkpoint was loaded.
        self._loaded_step: int | None = None
        self._module = module

    def progress_values(self) -> dict[str, float]:
        """Return the values of self.log with prog_bar=True, by name."""
        return as_numbers(self._trainer.progress_bar_metrics)

    # --- the run ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._module.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Hooks are attached at this point, because the length of an epoch is not known earlier.
        self._step_hooks.attach(trainer, self._module)
        super().on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._keep(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If the data has no batch, Lightning starts no epoch and only logs a message.
        if not trainer.fit_loop.epoch_loop.batch_progress.total.ready:
            raise RunError(
                "the train_dataloader of the data returned no batch; expected one or more. Check its number of "
                "samples, its batch_size and drop_last, and its samplers"
            )

    # --- the step ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        share = self._module.batches.begin(batch, batch_idx)
        if self._chooses_threads:
            self._chooses_threads = False
            positions = max((one.numel() // max(share.size, 1) for one in tensors_in(batch)), default=1)
            most = share.size * operator_at_most(pl_module, positions=positions)
            set_threads(threads_of(None, operator=most))
        self._step_hooks.start_batch(share, batch_idx, index=self._index + 1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Run the hooks on unscaled gradients.

        With several optimizers, hooks get only the gradients of the parameters of this optimizer.
        """
        hooks, several = self._step_hooks, len(trainer.optimizers) > 1
        if hooks.record is not None and hooks.record.is_stepped and not several and pl_module.automatic_optimization:
            return  # the optimizer calls its closure several times in a step
        if several:
            hooks.begin_turn(Turn(phase=str(trainer.optimizers.index(optimizer))))
        with _hide_other_gradients(pl_module, optimizer) if several else nullcontext():
            self._record_update(optimizer)
        hooks.begin_turn(WHOLE_STEP)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        record = self._step_hooks.end_batch(ends_step=not pl_module.automatic_optimization)
        if record is not None:
            loss = self._module.last.loss
            zero = torch.zeros((), device=pl_module.device)
            self._add(record, [zero if loss is None else loss.float().reshape(())])

    def _take(self, step: Recorded, losses: Sequence[float]) -> None:
        """Do nothing, because the module logs its own losses."""

    # --- epochs ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._step_hooks.pause()
        self._keep(trainer)
        self.stage_steps["train"] = trainer.global_step

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._module.reseed("val", epoch=dataloader_idx, batch=batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._module.reseed("test", epoch=dataloader_idx, batch=batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer)

    def _finish(self, stage: Stage, trainer: Trainer) -> None:
        values, panels = on_host_values(self._step_hooks.finish(stage, trainer))
        if not trainer.sanity_checking:
            self._write_stage(stage, values, panels)
            self.stage_steps[stage] = trainer.global_step if self._loaded_step is None else self._loaded_step

    def _keep(self, trainer: Trainer) -> None:
        """Store the latest values of self.log for the report."""
        if not trainer.sanity_checking:
            self.latest.update(as_numbers(trainer.callback_metrics))

    # --- checkpoints ---

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[STATE] = {"index": self._index}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._loaded_step = None if trainer.state.fn == "fit" else checkpoint["global_step"]
        if STATE in checkpoint:
            self._index = checkpoint[STATE]["index"]


@contextmanager
def _hide_other_gradients(module: LightningModule, optimizer: Optimizer) -> Iterator[None]:
    """Hide the gradients of parameters of other optimizers, because other losses may have computed these gradients."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    hidden: list[tuple[torch.nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        if parameter.grad is not None and id(parameter) not in own:
            hidden.append((parameter, parameter.grad))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient
