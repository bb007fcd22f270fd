"""A hook that observes changes nothing: each of conf/hooks on or off, the same run bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import exp
from exp.check.signature import signature_of
from exp.config.targets import resolve

CONF = Path(exp.__file__).parent / "conf" / "hooks"
RUN = [
    "model=lenet",
    # Random numbers in the forward, so that a hook that draws some is found out.
    "+model.layers.drop={_target_: torch.nn.Dropout, p: 0.3}",
    "data.batch_size=32",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=5",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
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


# Statistics that a forward moves.
NORM = "model.layers.relu3._target_=torch.nn.BatchNorm1d"
# What refuses it, since it mixes the samples of a batch.
WITHOUT_NORM = ["per_sample_gradients"]


def trained(ranks, names: list[str], *more: str):
    hooks = [f"hooks=[{','.join(names)}]"]
    for name in names:
        target = OmegaConf.load(CONF / f"{name}.yaml")[name]._target_
        if "every_n_steps" in signature_of(resolve(target)).parameters:
            hooks.append(f"hooks.{name}.every_n_steps=2")
    run = ranks.train(*RUN, *hooks, *more)
    losses = {tag: run.values[tag] for tag in ("loss/train", "loss/val", "accuracy/val", "loss/test")}
    return losses, run.checkpoint()["state_dict"]


KNOWN: dict[str, object] = {}


@pytest.mark.parametrize("name", observing())
def test_losses_and_weights_are_those_of_a_run_without_the_hook(ranks, name):
    norm = [] if name in WITHOUT_NORM else [NORM]
    key = str(norm)
    if key not in KNOWN:
        KNOWN[key] = trained(ranks, [], *norm)
    assert any("running_mean" in name for name in KNOWN[key][1]) == bool(norm)
    same(trained(ranks, [name], *norm), KNOWN[key])


@pytest.mark.parametrize("more", [[NORM], []])
def test_under_a_loss_scale_all_of_them_together_change_nothing(ranks, more: list[str]):
    short = ["precision=fp16", "trainer.max_epochs=1", *more]
    names = [name for name in observing() if not more or name not in WITHOUT_NORM]
    same(trained(ranks, names, *short), trained(ranks, [], *short))


def same(found, expected) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in expected[1].items())
