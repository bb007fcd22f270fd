"""Ranks with parts of one network skip the same steps as one process."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.numeric

SPOILS = '''
import math

from lightning.pytorch import Callback

from exp.strategies.whole_state import local_part

class Spoils(Callback):
    """Makes a part of the last rank's gradients nan, in the third step."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            held = [local_part(p.grad) for p in module.network.parameters() if p.grad is not None]
            next(part for part in held if part.numel())[:1] = math.nan
'''
TWO = ("launch.accelerator=cpu", "launch.devices=2")
SKIPS = ("runtime.non_finite=skip", "security.allow=[spoils]", "+callbacks.spoils={_target_: spoils.Spoils}")


@pytest.mark.any_processor
@pytest.mark.parametrize(
    "strategy",
    ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.slow), pytest.param("pipeline", marks=pytest.mark.slow)],
)
def test_ranks_skip_a_step_with_a_nan(ranks, run, alone, require_same_state, tmp_path, monkeypatch, strategy):
    (tmp_path / "spoils.py").write_text(SPOILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    one = alone(*run, *SKIPS)
    assert list(one.values["precision/skipped_steps"].values()) == [0, 0, 1, 1]
    parts = ranks.train(*run, *SKIPS, f"strategy={strategy}", *TWO, ranks=2)
    assert parts.losses == pytest.approx(one.losses, rel=0, abs=1e-10)
    assert parts.values["precision/skipped_steps"] == one.values["precision/skipped_steps"]
    assert math.isnan(parts.values["gradients/norm/total"][3])
    require_same_state(one, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "scale"),
    # The scale is so large that the first gradients of one rank's shards or of the last stage are infinite.
    [
        (("model=transformer", "strategy=fsdp"), "1e6"),
        (*(("model=sequential", "strategy=pipeline", "strategy.schedule=gpipe", "strategy.microbatches=1"), "1e9"),),
    ],
)
def test_ranks_skip_a_step_that_overflows(ranks, strategy, scale):
    command = (
        *("trainer.max_epochs=null", "trainer.max_steps=12", "test=false", "data.batch_size=100", "logger=[]"),
        *("trainer.log_every_n_steps=1", "precision=fp16", f"precision.scaler.init_scale={scale}", *TWO),
    )
    parts = ranks.train(*command, *strategy, ranks=2)
    one = ranks.train(*command, strategy[0], "strategy=single", "launch.devices=1")
    assert 0 < one.values["precision/skipped_steps"][12] < 12
    for tag in ("precision/skipped_steps", "precision/loss_scale"):
        assert parts.values[tag] == one.values[tag]
    assert parts.losses == pytest.approx(one.losses, abs=1e-2)
