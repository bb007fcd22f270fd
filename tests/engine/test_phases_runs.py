"""Phases from the config: whole runs on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.check.stages import compose

pytestmark = pytest.mark.numeric

STEPS = ("trainer.max_epochs=null", "trainer.max_steps=4", "test=false", "optimizer=sgd", "logger=[]", "metrics=[]")
# Input of the generator. Noise would depend on the number of ranks.
SOURCE = "x.flatten(1)[:, :16]"
JUDGE = (
    f"fake = generator({SOURCE}).detach()\n"
    'return {"fake": fake, "real_score": discriminator(x), "fake_score": discriminator(fake)}'
)
IMITATE = f'return {{"fake_score": discriminator(generator({SOURCE}))}}'
GAN = (
    "experiment=gan",
    f"model.programs.judge='{JUDGE}'",
    f"model.programs.imitate='{IMITATE}'",
    "trainer.accumulate_grad_batches=2",
    "data.batch_size=48",
    "phases.discriminator.repeats=2",
    "phases.generator.every_n_steps=2",
    "trainer.max_epochs=null",
    "trainer.max_steps=4",
)


def buffers_after_a_broadcast(rank: Any) -> list[float]:
    import torch
    from torch import nn

    from exp.strategies.gradient_averaging import broadcast_buffers

    module = nn.BatchNorm1d(3)
    torch.nn.init.constant_(module.running_mean, 1.0 + rank.global_rank)
    torch.nn.init.constant_(module.weight, 1.0 + rank.global_rank)
    broadcast_buffers(module)
    return [module.running_mean.sum().item(), module.weight.sum().item()]


def test_ranks_share_buffers_but_not_parameters(ranks: Any) -> None:
    assert ranks.call(buffers_after_a_broadcast, ranks=2) == [[3.0, 3.0], [3.0, 6.0]]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("model=sequential", "phases=[body_and_head]", *STEPS), id="body_and_head"),
        pytest.param(GAN, id="gan", marks=pytest.mark.slow),
    ],
)
@pytest.mark.any_processor
def test_two_ranks_train_as_one(ranks: Any, command: tuple[str, ...]) -> None:
    one = ranks.train(*command, "precision=fp64", "strategy=single")
    two = ranks.train(*command, "precision=fp64", "strategy=ddp", ranks=2)
    assert len(two.losses) == 4
    assert two.losses == pytest.approx(one.losses, abs=1e-10)
    for tag in one.values:
        if tag.startswith(("loss/", "gradients/norm/total", "optimizer/")):
            assert two.values[tag] == pytest.approx(one.values[tag], abs=1e-9), tag
    weights = [run.checkpoint()["state_dict"] for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-9 for name in weights[0])
    assert list(two.checkpoint()["optimizer_states"][0]["phases"]) == list(
        one.checkpoint()["optimizer_states"][0]["phases"]
    )


def test_a_wasserstein_gan_with_gradient_penalty_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["precision=fp16", "trainer.max_epochs=1", "trainer.limit_train_batches=8", "test=false"]
    report = exp.fit(exp.compose(["experiment=wgan_gp", *words, "trainer.enable_progress_bar=false"]))
    assert {"optimizer/lr/discriminator", "optimizer/lr/generator", "loss/val/wgan_gp"} <= report.metrics.keys()


@pytest.mark.any_processor
def test_a_gan_resumes_with_the_same_phases_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["experiment=gan", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "scheduler=constant"]
    report = exp.fit(exp.compose([*command, "hydra.run.dir=first", "trainer.enable_progress_bar=false"]))
    assert {"loss/val/discriminator", "loss/val/generator", "optimizer/lr/generator"} <= report.metrics.keys()
    resumed = [*command, "resume=first/checkpoints/last.ckpt"]
    assert examine(resolve(compose(resumed))).errors == ()
    (error,) = examine(resolve(compose([*resumed, "phases.generator.optimizer.lr=1"]))).errors
    assert "phases.generator.optimizer.lr was 0.001 and is now 1" in str(error)
