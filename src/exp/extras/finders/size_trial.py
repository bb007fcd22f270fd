"""Measures memory and speed of a batch size, with a callback in a run of a few steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge
from lightning.pytorch import Callback, LightningModule, Trainer

from exp.files import write_atomic
from exp.hooks.memory_use import is_out_of_memory, peak_of
from exp.shared_types import Batch

SUMMARY = "trial.json"
# The first steps are not timed, because they create optimizer state and libraries select algorithms in them.
UNTIMED = 2


class SizeTrial(Callback):
    """Callback that writes trial.json to the run directory: peak memory and samples per second, or out of memory.

    The peak memory is that of rank 0: the peak of the CUDA allocator, or the resident set of the process. Times are
    measured between the ends of steps and include data loading.

    Args:
        steps: Number of optimizer steps of the run. The first two are not timed.
    """

    def __init__(self, *, steps: Annotated[int, Ge(UNTIMED + 1)]) -> None:
        super().__init__()
        self.steps = steps
        self._samples, self._began = 0, 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step > UNTIMED or (trainer.global_step == UNTIMED and self._began):
            self._samples += batch.global_size
        elif trainer.global_step == UNTIMED:
            self._began = _now(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = _now(trainer) - self._began
        device = trainer.strategy.root_device
        # Memory in bytes that this process could use.
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if _is_cuda(trainer) else None
        self._write(
            trainer, fits=True, peak=peak_of(device).so_far(), room=free, samples_per_second=self._samples / seconds
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception):
            self._write(trainer, fits=False)

    def _write(self, trainer: Trainer, **found: float | bool | None) -> None:
        # All ranks write if they are out of memory, because a rank other than 0 may be the first.
        if trainer.is_global_zero or not found["fits"]:
            path = Path(trainer.default_root_dir) / SUMMARY
            write_atomic(path, json.dumps(found, indent=2) + "\n")


def _is_cuda(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _now(trainer: Trainer) -> float:
    if _is_cuda(trainer):
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()
