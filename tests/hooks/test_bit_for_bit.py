"""A hook that observes changes nothing: each of conf/hooks on or off, the same run bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import exp

CONF = Path(exp.__file__).parent / "conf" / "hooks"
RUN = [
    "model=lenet",
    # Random numbers in the forward, so that a hook that draws some is found out.
    "+model.layers.drop={_target_: torch.nn.Dropout, p: 0.3}",
    "data.batch_size=32",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=5",
    "trainer.gradient_clip_val=1.0",
    "checkpoint.save_best=false",
]


def observing() -> list[str]:
    names = []
    for path in sorted(CONF.glob("*.yaml")):
        node = OmegaConf.load(path)[path.stem]
        module, _, name = node._target_.rpartition(".")
        if not getattr(importlib.import_module(module), name).transforms:
            names.append(path.stem)
    return names


def trained(ranks, name: str | None):
    hooks = [f"hooks=[{name or ''}]"]
    if name is not None and "every_n_steps" in OmegaConf.load(CONF / f"{name}.yaml")[name]:
        hooks.append(f"hooks.{name}.every_n_steps=2")
    run = ranks.train(*RUN, *hooks)
    losses = {tag: run.values[tag] for tag in ("loss/train", "loss/val", "accuracy/val", "loss/test")}
    return losses, run.checkpoint()["state_dict"]


KNOWN: dict[str, object] = {}


@pytest.mark.parametrize("name", observing())
def test_losses_and_weights_are_those_of_a_run_without_the_hook(ranks, name):
    if "plain" not in KNOWN:
        KNOWN["plain"] = trained(ranks, None)
    losses, weights = KNOWN["plain"]
    with_hook, its_weights = trained(ranks, name)
    assert with_hook == losses
    assert all(torch.equal(tensor, its_weights[key]) for key, tensor in weights.items())
