"""strategy=deepspeed: refused where DeepSpeed is not there or cannot do a run; else it trains what one process does."""

from __future__ import annotations

import pytest
import torch

import exp
from exp.check.plan import examine, resolve
from exp.errors import is_installed
from exp.train import main

installed = pytest.mark.skipif(
    not is_installed("deepspeed"),
    reason="DeepSpeed is an extra: pip install 'exp-framework[deepspeed]', seen with 0.19.8",
)
COMMAND = (
    *("model=sequential", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false"),
    "hooks.gradients.each_parameter=true",
)
# What has no place in stage 3: only norms can be told there.
NORMS_ALONE = (
    *("~hooks.memory", "hooks.gradients.histogram_every_n_steps=null"),
    "hooks.gradients.update_ratio_every_n_steps=null",
)
STAGES = {
    stage: ("strategy=deepspeed", f"strategy.stage={stage}", *(NORMS_ALONE if stage == 3 else ()))
    for stage in (1, 2, 3)
}


@pytest.mark.skipif(is_installed("deepspeed"), reason="DeepSpeed is installed")
def test_without_the_extra_it_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["strategy=deepspeed"]) == 2
    told = capsys.readouterr().err
    assert "strategy=deepspeed needs the package deepspeed, which is not installed" in told
    assert "pip install 'exp-framework[deepspeed]'" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["precision=fp16"], "precision.word"),
        (["precision=bf16_true"], "precision.word"),
        (["trainer.gradient_clip_val=1", "trainer.gradient_clip_algorithm=value"], "trainer.gradient_clip_algorithm"),
        (["optimizer._target_=torch.optim.Adafactor"], "optimizer._target_"),
        (["strategy.offload_optimizer=true"], "strategy.offload_optimizer"),
        (["strategy.stage=4"], "strategy.stage"),
        (["strategy.stage=3"], "hooks.memory"),
        (["strategy.stage=3", "~hooks.memory"], "hooks.gradients.histogram_every_n_steps"),
        (["strategy.stage=3", *NORMS_ALONE, "+callbacks=ema"], "callbacks.ema"),
        (["strategy.show_gradients=false"], "strategy.show_gradients"),
        (["strategy.reduce_bucket_size=0"], "strategy.reduce_bucket_size"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(overrides, key):
    keys = [fault.key for fault in examine(resolve(exp.compose(["strategy=deepspeed", *overrides]))).faults]
    assert key in keys


@installed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_what_one_process_does(ranks, stage):
    settings = (
        "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "scheduler=cosine",
        "optimizer.exempt_from_decay=[biases]", "optimizer.weight_decay=0.5",
    )  # fmt: skip
    one = ranks.train(*COMMAND, *settings, "strategy=single")
    two = ranks.train(*COMMAND, *settings, *STAGES[stage], ranks=2)
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    for tag in ("gradients/norm/total", "gradients/norm/head.weight", "optimizer/lr/default"):
        assert two.values[tag] == pytest.approx(one.values[tag], abs=1e-4), tag
    mine, theirs = two.checkpoint(), one.checkpoint()
    assert mine["state_dict"].keys() == theirs["state_dict"].keys()
    for name, tensor in theirs["state_dict"].items():
        assert torch.allclose(mine["state_dict"][name], tensor, atol=1e-5), name
    mine, theirs = mine["optimizer_states"][0], theirs["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.allclose(mine["state"][number][key], value, atol=1e-5), (number, key)


@installed
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_goes_on_in_another_strategy_and_back(ranks, stage):
    whole = ranks.train(*COMMAND, "strategy=single")
    half = (*COMMAND, "trainer.max_steps=15")
    for first, second in ((STAGES[stage], ("strategy=single",)), (("strategy=single",), STAGES[stage])):
        begun = ranks.train(*half, *first, ranks=2 if first is STAGES[stage] else 1)
        path = begun.directory / "checkpoints" / "last.ckpt"
        ended = ranks.train(*COMMAND, *second, f"resume={path}", ranks=2 if second is STAGES[stage] else 1)
        assert [*begun.losses, *ended.losses] == pytest.approx(whole.losses, abs=1e-5)


@installed
def test_a_checkpoint_of_weights_in_parts_is_evaluated_alike_everywhere(ranks):
    trained = ranks.train(*COMMAND, "test=true", *STAGES[3], ranks=2)
    best = trained.directory / "checkpoints" / "best.ckpt"
    again = ranks.train("model=sequential", "train=false", "test=true", f"resume={best}", "strategy=single")
    assert again.report["metrics"]["loss/test"] == pytest.approx(trained.report["metrics"]["loss/test"], abs=1e-5)


@installed
def test_bf16_is_autocast_as_elsewhere(ranks):
    one = ranks.train(*COMMAND, "precision=bf16", "strategy=single")
    two = ranks.train(*COMMAND, "precision=bf16", *STAGES[2], ranks=2)
    assert two.losses == pytest.approx(one.losses, abs=1e-2)
    assert all(tensor.dtype == torch.float32 for tensor in two.checkpoint()["state_dict"].values())
