"""The callback that runs the hooks of a LightningModule of the user's own, and keeps what it logs for the report.

`self.log` goes to the loggers by Lightning's own way. What hooks give is written beside it, on Lightning's axis: the
first step is 0 there, and a batch is one step, however many optimizers it steps.

Relied on, and tested: `trainer.callback_metrics` has all that `self.log` was given, by the name under which callbacks
know it (seen in lightning 2.6.6).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.engine.buffer import Recorded, on_host_values
from exp.engine.checkpoint import State
from exp.engine.datamodule import RunTrainer
from exp.engine.non_finite import OWN_CURES, refuse_lost
from exp.engine.observer import WHOLE_STEP, Turn
from exp.engine.own_module import OwnModule, as_numbers
from exp.engine.recording import LATEST, STATE, StepRecording
from exp.engine.runtime import operator_at_most, set_threads, threads_of
from exp.errors import RunError
from exp.hooks.hook import Hook
from exp.nested import tensors_in
from exp.optim.phase import rate_names
from exp.precision.plugin import RunPrecision
from exp.shared_types import Stage

log = logging.getLogger(__name__)


class OwnRecording(StepRecording):
    """A callback that runs hooks on a module of the user's own, and writes what they give to every logger.

    It must stand before callbacks that look at random numbers. hooks, directory: as StepRecording's.
    chooses_threads: whether the first batch says how many threads its operators take, for nothing else knows its size.
    """

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
        self._has_told_nothing = False
        # The optimizer step of the weights that a test loaded.
        self._loaded_step: int | None = None
        self._module = module

    def shown(self) -> dict[str, float]:
        """What the module gave to self.log with prog_bar=True."""
        return as_numbers(self._trainer.progress_bar_metrics)

    # --- the run ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = cast(RunTrainer, trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._module.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here, for now it is known how long an epoch is.
        self._step_hooks.attach(trainer, self._module)
        self._first = self._index
        self._values, self._size, self._rates = None, 0, {}
        self._begin_writing(self._index)
        self._reseed(-1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._end_writing(trainer)
        self._keep(trainer)
        self._module.require_finite({"state_dict": pl_module.state_dict()})
        self._step_hooks.ended()
        if not self._index and not self._module.batches_seen:
            raise _no_batch(trainer)  # an IterableDataset's, whose length nobody knew

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.num_training_batches == 0:
            raise _no_batch(trainer)  # Lightning does not begin, and says so in its log alone

    # --- the step ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        share = self._module.batches.begin(batch, batch_idx)
        if self._chooses_threads:
            self._chooses_threads = False
            positions = max((one.numel() // max(share.size, 1) for one in tensors_in(batch)), default=1)
            most = share.size * operator_at_most(pl_module, positions=positions)
            set_threads(threads_of(None, operator=most))
        self._size += share.global_size
        self._step_hooks.start_batch(share, batch_idx, index=self._index + 1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """See true gradients, of one of several optimizers those of its own parameters."""
        if self._values is not None and len(trainer.optimizers) == 1 and pl_module.automatic_optimization:
            return  # an optimizer that evaluates its closure several times in a step
        turn = WHOLE_STEP
        if len(trainer.optimizers) > 1:
            turn = Turn(phase=str(trainer.optimizers.index(optimizer)))
        self._step_hooks.begin_turn(turn)
        with _alone(pl_module, optimizer) if turn.phase is not None else nullcontext():
            found = self._step_hooks.before_step()
        self._step_hooks.begin_turn(WHOLE_STEP)
        self._add_rates(found, optimizer, phase=turn.phase)
        if self._values is None:
            # The same mapping: what hooks give after clipping comes into it, too.
            self._values = found
        else:
            self._values.update(found)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        self._step_hooks.end_batch()
        if self._values is None and pl_module.automatic_optimization:
            return  # batches are accumulated
        values = self._values or {}
        values.update(self._step_hooks.end_step())
        loss = self._module.last.loss
        losses = [torch.zeros((), device=pl_module.device) if loss is None else loss.float().reshape(())]
        self._index += 1
        self._buffer.add(Recorded(self._index, self._size, losses, values))
        self._values, self._size = None, 0
        if self._is_flush(self._index):
            self.flush(trainer)

    def _rate_names(self, optimizer: Optimizer, phase: str | None) -> list[str]:
        names = rate_names(optimizer)
        if phase is None:
            return names
        return [f"{phase}/{name}" for name in names] if len(names) > 1 else [phase]

    def flush(self, trainer: Trainer) -> None:
        if not len(self._buffer):
            return
        precision = trainer.precision_plugin if isinstance(trainer.precision_plugin, RunPrecision) else None
        is_scaled = precision is not None and precision.is_scaled
        if precision is not None and is_scaled:
            last = self._buffer.last.values
            last["precision/skipped_steps"] = precision.skipped_steps
            last["precision/loss_scale"] = precision.loss_scale
        for step, losses in self._buffer.take(trainer.strategy):
            refuse_lost(losses[0], step.index, is_scaled=is_scaled, saved=self._module.saved, cures=OWN_CURES)
            self._write(step.values, step.index - 1, step.panels)
            if precision is not None:
                precision.written(step.values, step=step.index)

    # --- epochs ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._step_hooks.pause()
        self._keep(trainer)
        self.stage_steps["train"] = trainer.global_step
        seen = self._module.batches_seen
        is_automatic = pl_module.automatic_optimization
        if seen and is_automatic and not self._module.losses_seen and not self._has_told_nothing:
            self._has_told_nothing = True
            if trainer.is_global_zero:
                name = type(pl_module).__name__
                log.warning(
                    "nothing is trained: training_step of %s returned None, and no loss, in all %d batches", name, seen
                )

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._module.reseed("val", epoch=dataloader_idx, batch=batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
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
        """Keep what was given to self.log for the report."""
        if not trainer.sanity_checking:
            self.latest.update(as_numbers(trainer.callback_metrics))

    # --- checkpoints ---

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[STATE] = {"index": self._index}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self._loaded_step = None if trainer.state.fn == "fit" else checkpoint["global_step"]
        if STATE in checkpoint:
            self._index = checkpoint[STATE]["index"]
        if trainer.state.fn == "fit" and LATEST in checkpoint:
            self.latest.update(checkpoint[LATEST])


def _no_batch(trainer: Trainer) -> RunError:
    name = type(vars(trainer)["datamodule"]).__name__ if "datamodule" in vars(trainer) else "data"
    return RunError(
        f"the train_dataloader of {name} gives no batch; expected at least one to train on. Look at how many "
        "samples it has, at its batch_size and drop_last, and at the samplers"
    )


@contextmanager
def _alone(module: LightningModule, optimizer: Optimizer) -> Iterator[None]:
    """Leave gradients to the parameters of one optimizer alone: others may hold some of a step of their own."""
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
