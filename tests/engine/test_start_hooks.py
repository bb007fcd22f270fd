"""Changes that callbacks of users make at the start of training or of an epoch are the same after a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback


class ByEpoch(Callback):
    """Callback that sets the dropout of a layer to a function of the epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[3].p = 0.2 * trainer.current_epoch


class ByCount(Callback):
    """Callback that counts epochs and batches, saves the counts, and scales gradients by them."""

    count = batches = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.count += 1

    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad *= self.count + 0.1 * self.batches

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self.batches = state["count"], state["batches"]


class ByChance(Callback):
    """Callback that draws the dropout of a layer at each epoch, and an unsaved factor of gradients at the start."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor = torch.rand(())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[3].p = float(torch.rand(()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad *= self.factor


class Changes(Callback):
    """Callback that changes weights, statistics, rate and momenta at the start of training and of each epoch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.nn.init.zeros_(pl_module.network[4].weight)

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[0].weight *= 0.9
        pl_module.network[1].running_mean = pl_module.network[1].running_mean / 2
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.7
        trainer.optimizers[0].state.clear()


class Freezes(Callback):
    """Callback that trains the first layer in every second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[0].requires_grad_(trainer.current_epoch % 2 == 1)


ACTING: dict[str, Any] = {
    "by_epoch": ByEpoch,
    "by_count": ByCount,
    "by_chance": ByChance,
    "changes": Changes,
    "freezes": Freezes,
}


@pytest.mark.parametrize("name", ACTING)
def test_start_hooks_act_once_in_a_resumed_run(tmp_path: Path, small_run: ModuleType, name: str) -> None:
    def run(directory: str, *more: Any) -> Any:
        callbacks = (ACTING[name](), *more)
        return small_run.Small(
            tmp_path / directory, callbacks=callbacks, max_epochs=3, every_n_steps=2, schedule="steps"
        )

    whole = run("whole")
    whole.fit()
    # Kills within the first epoch, after its last batch, within the second and within the third epoch.
    for hook, count in (("on_train_batch_end", 5), ("on_train_epoch_end", 1), ("on_train_batch_end", 5), ("", 0)):
        part = run("parts", *([small_run.At(hook, count)] if hook else []))
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
    found, expected = small_run.saved(part.last), small_run.saved(whole.last)
    assert found == expected
