"""Phases from the config: whole runs on one rank and on two, and every mistake told before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exp.check.plan import examine, resolve
from exp.check.stages import compose

pytestmark = pytest.mark.numeric

STEPS = ("trainer.max_epochs=null", "trainer.max_steps=30", "test=false", "optimizer=sgd")
# What the generator makes its samples from: noise would differ with the number of ranks.
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
    "trainer.max_steps=30",
)


@pytest.mark.parametrize(
    "command",
    [("model=sequential", "phases=[body_and_head]", *STEPS), GAN],
    ids=["body_and_head", "gan"],
)
@pytest.mark.any_processor
def test_two_ranks_train_what_one_does(ranks: Any, command: tuple[str, ...]) -> None:
    one = ranks.train(*command, "precision=fp64", "strategy=single")
    two = ranks.train(*command, "precision=fp64", "strategy=ddp", ranks=2)
    assert len(two.losses) == 30
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


def buffers_after_a_broadcast(rank: Any) -> list[float]:
    import torch
    from torch import nn

    from exp.strategies.gradient_averaging import broadcast_buffers

    module = nn.BatchNorm1d(3)
    torch.nn.init.constant_(module.running_mean, 1.0 + rank.global_rank)
    torch.nn.init.constant_(module.weight, 1.0 + rank.global_rank)
    broadcast_buffers(module)
    return [module.running_mean.sum().item(), module.weight.sum().item()]


def test_ranks_take_the_first_ones_buffers_and_keep_their_parameters(ranks: Any) -> None:
    assert ranks.call(buffers_after_a_broadcast, ranks=2) == [[3.0, 3.0], [3.0, 6.0]]


def broadcasts(rank: Any, *, directory: str) -> int:
    """How many tensors ranks take from rank 0 while they live a run."""
    import torch.distributed as dist

    from exp import run

    real, count = dist.broadcast, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return real(*arguments, **named)

    dist.broadcast = counted
    run.run(directory, rank=rank)
    return count


@pytest.mark.any_processor
def test_buffers_are_sent_at_each_step_unless_the_strategy_is_told_not_to(ranks: Any) -> None:
    command = (
        *("model=resnet", "phases=[body_and_head]", "phases.body.parameters=['*']", "strategy=ddp", "test=false"),
        *("trainer.max_epochs=null", "trainer.limit_val_batches=1", "hooks=[]", "logger=[]"),
    )
    counts = {}
    for words in ("true", "false"):
        for steps in (2, 4):
            flag = f"strategy.broadcast_buffers={words}"
            directory = ranks.freeze(*command, flag, f"trainer.max_steps={steps}")
            counts[words, steps] = ranks.call(broadcasts, ranks=2, directory=str(directory))[1]
    assert counts["true", 4] > counts["true", 2]
    assert counts["false", 4] == counts["false", 2]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_wasserstein_gan_with_gradient_penalty_trains(ranks: Any, precision: str) -> None:
    run = ranks.train(
        "experiment=wgan_gp", f"precision={precision}", "trainer.max_epochs=1", "trainer.limit_train_batches=8"
    )
    penalty = [value for _, value in sorted(run.values["loss/train/wgan_gp"].items())]
    # The slope of a fresh critic is far below 1, and is drawn there.
    assert penalty[-1] < penalty[0]
    assert {"optimizer/lr/discriminator", "optimizer/lr/generator", "loss/val/wgan_gp"} <= run.values.keys()


@pytest.mark.any_processor
def test_the_command_trains_a_gan_and_another_config_may_not_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Any
) -> None:
    command = ["experiment=gan", "trainer.max_epochs=2", "scheduler=constant", "hydra.run.dir=first"]
    done = commands.run(*command, "trainer.enable_progress_bar=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "first" / "report.json").read_text())
    assert report["status"] == "completed"
    assert {"loss/val/discriminator", "loss/val/generator", "optimizer/lr/generator"} <= report["metrics"].keys()
    monkeypatch.chdir(tmp_path)
    resumed = [*command, "resume=first/checkpoints/last.ckpt"]
    assert examine(resolve(compose(resumed))).faults == ()
    (fault,) = examine(resolve(compose([*resumed, "phases.generator.optimizer.lr=1"]))).faults
    assert "phases.generator.optimizer.lr was 0.001 and is 1" in str(fault)


GAN_PARTS = ["model=gan", "objective=[discriminator,generator]", "metrics=[]", "phases=[adversarial]"]
# What is wrong, and the faults that all come at once: keys, and words of each message.
FAULTS: list[tuple[list[str], dict[str, str]]] = [
    (
        [
            "+phases.generator.reapets=2",
            "phases.generator.repeats=0",
            "phases.generator.gradient_clip_val=-1",
            "phases.generator.gradient_clip_algorithm=both",
            "phases.generator.forward=[a]",
            "phases.discriminator.terms=[discriminatr]",
            "phases.discriminator.optimizer.lr=-1",
            "+phases.discriminator.optimizer.lrr=1",
            "trainer.gradient_clip_val=1.0",
        ],
        {
            "phases.generator.reapets": "Did you mean phases.generator.repeats?",
            "phases.generator.repeats": "an integer between 1 and 10000",
            "phases.generator.gradient_clip_val": "a number above 0",
            "phases.generator.gradient_clip_algorithm": "norm, value",
            "phases.generator.forward": "text",
            "phases.discriminator.terms": "Did you mean discriminator?",
            "phases.discriminator.optimizer.lr": "a number, 0 or more",
            "phases.discriminator.optimizer.lrr": "Did you mean phases.discriminator.optimizer.lr?",
            "trainer.gradient_clip_val": "Write phases.discriminator.gradient_clip_val",
        },
    ),
    (
        ["~phases.generator.terms", "phases.generator.optimizer=adam", "phases.discriminator=null"],
        {
            "phases.generator.terms": "no such key",
            "phases.generator.optimizer": "a node with a _target_",
            "phases.discriminator": "~phases.discriminator",
        },
    ),
    (
        [
            "+objective=r1",
            "phases.discriminator.every_n_steps=2",
            "phases.generator.every_n_steps=3",
            "metrics=[accuracy]",
            "metric_stages=[train]",
        ],
        {
            "objective.r1": "in the terms of no phase",
            "phases.discriminator.every_n_steps": "no phase runs at every step",
            "metric_stages": "the network's own output",
        },
    ),
    (
        [
            "phases.generator.optimizer._target_=torch.nn.Linear",
            "phases.discriminator.optimizer._target_=os.system",
            "phases.generator.scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}",
        ],
        {
            "phases.generator.optimizer._target_": "Optimizer",
            "phases.discriminator.optimizer._target_": "os.system",
            "phases.generator.scheduler.monitor": "the tag to watch",
            "phases.generator.scheduler.interval": "epoch",
        },
    ),
    (
        ["phases.generator.parameters=generatr.*", "phases.generator.forward=imitat"],
        {"phases.generator.parameters": "generator.first.weight", "phases.generator.forward": "Did you mean imitate?"},
    ),
    (
        [
            "phases.generator.parameters=generator.head.*",
            "phases.generator.optimizer._target_=torch.optim.LBFGS",
            "~phases.generator.optimizer.betas",
            "+phases.discriminator.optimizer.groups={a: {parameters: 'generator.*'}}",
        ],
        {
            "phases": "no phase trains generator.first.weight",
            "phases.generator.optimizer": "steps once",
            "phases.discriminator.optimizer.groups.a.parameters": "matches no parameter",
        },
    ),
    (
        ["phases.generator.scheduler={_target_: exp.optim.schedules.Cosine, warmup_steps: -1}"],
        {"phases.generator.scheduler.warmup_steps": "0 or more"},
    ),
    (
        ["model.programs.judge=return x +", "model.programs.imitate='return discriminater(x)'"],
        {"model.programs.judge": "syntax", "model.programs.imitate": "`discriminator`"},
    ),
    (["model.programs.judge='return discriminator.head(x)'"], {"model.layers.discriminator.layers.head": "floats"}),
    (["model.programs.judge='return x.view(3, 1)'"], {"model.programs.judge": "line 1"}),
    (["+model.programs.generator='return x'"], {"model.programs.generator": "has already"}),
    (
        ["strategy=ddp", "strategy.communication_hook=bf16", "strategy.sync_batchnorm=true"],
        {"strategy.communication_hook": "with phases", "strategy.sync_batchnorm": "with phases"},
    ),
    (["strategy=fsdp", "launch.devices=2"], {"strategy": "ddp, single or auto"}),
]


@pytest.mark.any_processor
@pytest.mark.parametrize(("overrides", "expected"), FAULTS, ids=[fault[0][0] for fault in FAULTS])
def test_mistakes_are_told_before_the_run_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = {fault.key: str(fault) for fault in examine(resolve(compose([*GAN_PARTS, *overrides]))).faults}
    assert expected.keys() <= faults.keys()
    for key, words in expected.items():
        assert words in faults[key]
