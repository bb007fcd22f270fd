"""strategy=deepspeed: an error without DeepSpeed, and with it the same training as one process."""

from __future__ import annotations

import pytest

from exp.cli.train import main
from exp.errors import is_installed

installed = pytest.mark.skipif(
    not is_installed("deepspeed"),
    reason="DeepSpeed is an extra: pip install 'exp-framework[deepspeed]', seen with 0.19.8",
)
COMMAND = (
    *("model=sequential", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false"),
    "hooks.gradients.each_parameter=true",
)
STAGES = {stage: ("strategy=deepspeed", f"strategy.stage={stage}") for stage in (1, 2)}


@pytest.mark.skipif(is_installed("deepspeed"), reason="DeepSpeed is installed")
def test_a_run_without_the_extra_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["strategy=deepspeed"]) == 2
    error = capsys.readouterr().err
    assert "strategy=deepspeed needs the package deepspeed, which is not installed" in error
    assert "pip install 'exp-framework[deepspeed]'" in error
    assert list(tmp_path.iterdir()) == []


@installed
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_process_trains(ranks, require_same_state, stage):
    settings = (
        "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "scheduler=cosine",
        "optimizer.exempt_from_decay=[biases]", "optimizer.weight_decay=0.5",
    )  # fmt: skip
    one = ranks.train(*COMMAND, *settings, "strategy=single")
    two = ranks.train(*COMMAND, *settings, *STAGES[stage], ranks=2)
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    for tag in ("gradients/norm/total", "gradients/norm/head.weight", "optimizer/lr/default"):
        assert two.values[tag] == pytest.approx(one.values[tag], abs=1e-4), tag
    require_same_state(one, two, tolerance=1e-5)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_resumes_in_another_strategy(ranks, stage):
    whole = ranks.train(*COMMAND, "test=true", "strategy=single")
    half = (*COMMAND, "trainer.max_steps=15")
    for first, second in ((STAGES[stage], ("strategy=single",)), (("strategy=single",), STAGES[stage])):
        begun = ranks.train(*half, *first, ranks=2 if first is STAGES[stage] else 1)
        path = begun.directory / "checkpoints" / "last.ckpt"
        ended = ranks.train(*COMMAND, "test=true", *second, f"resume={path}", ranks=2 if second is STAGES[stage] else 1)
        assert [*begun.losses, *ended.losses] == pytest.approx(whole.losses, abs=1e-5)
        assert ended.report["metrics"]["loss/test"] == pytest.approx(whole.report["metrics"]["loss/test"], abs=1e-5)
