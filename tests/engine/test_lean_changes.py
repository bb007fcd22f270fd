"""Changes by callbacks between two calls of the lean loop take effect at the next batch."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from exp.optim.optimizer import Optimization


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class AtValidation(Callback):
    """Callback that calls an action after the second validation, in the middle of the first epoch."""

    def __init__(self, action: Any) -> None:
        self._action, self._validations = action, 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._validations += 1
        if self._validations == 2:
            self._action(trainer, module)


class Reversing(Callback):
    """Callback of a user that acts at every step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.network[4].parameters():
            parameter.grad.mul_(-1.0)


def unfreeze(trainer: Any, module: Any) -> None:
    layer = module.network[4]
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    trainer.optimizers[0].add_param_group({"params": list(layer.parameters()), "fused": False})


def replace_a_weight(trainer: Any, module: Any) -> None:
    members = trainer.optimizers[0].param_groups[0]["params"]
    del trainer.optimizers[0].state[members[0]]
    module.network[0].weight = members[0] = torch.nn.Parameter(torch.ones_like(members[0]))


def replace_the_optimizer(trainer: Any, module: Any) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(module.network.parameters(), lr=0.1)]


def clear_the_state(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def clip_and_accumulate(trainer: Any, module: Any) -> None:
    trainer.gradient_clip_val, trainer.accumulate_grad_batches = 0.01, 2


def add_a_callback(trainer: Any, module: Any) -> None:
    trainer.callbacks.append(Reversing())


CHANGES = [
    clip_and_accumulate, unfreeze, replace_a_weight, replace_the_optimizer, clear_the_state, add_a_callback,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_at_the_next_batch(tmp_path: Path, small_run: ModuleType, change: Any) -> None:
    factory = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    weights = []
    for count, action in ((None, lambda *_: None), (1, change), (None, change)):
        network = small_run.network()
        if change is unfreeze:
            network[4].requires_grad_(False)
        small = small_run.Small(
            tmp_path / str(len(weights)), steps_per_execution=count, model=network, max_epochs=1,
            callbacks=(AtValidation(action),), val_check_interval=2, every_n_steps=None,
        )  # fmt: skip
        small.module.optimization = Optimization(optimizer_factory=factory)
        small.fit()
        assert small.is_lean == (count is None and not any(isinstance(c, Reversing) for c in small.trainer.callbacks))
        weights.append(small.weights())
    unchanged, own, lean = weights
    assert equal(own, lean)
    assert not equal(unchanged, lean)
