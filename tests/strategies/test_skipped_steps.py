"""runtime.non_finite=skip where ranks hold parts of a network: one that finds nan has all of them skip the step."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.numeric

SPOILS = '''
import math

from lightning.pytorch import Callback

from exp.strategies.whole_state import local

class Spoils(Callback):
    """Makes a part of the last rank's gradients nan, in the third step."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            held = [local(p.grad) for p in module.network.parameters() if p.grad is not None]
            next(part for part in held if part.numel())[:1] = math.nan
'''
RUN = (
    *("model=transformer", "data.batch_size=100", "trainer.max_epochs=null", "trainer.max_steps=6", "precision=fp64"),
    *("trainer.log_every_n_steps=1", "trainer.limit_val_batches=1", "test=false", "logger=[]", "hooks=[gradients]"),
    *("runtime.non_finite=skip", "security.allow=[spoils]", "+callbacks.spoils={_target_: spoils.Spoils}"),
)


@pytest.mark.any_processor
def test_ranks_skip_a_step_that_one_of_them_must_skip(ranks, tmp_path, monkeypatch):
    (tmp_path / "spoils.py").write_text(SPOILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    one = ranks.train(*RUN, "strategy=single")
    skipped = [one.values["precision/skipped_steps"][step] for step in range(1, 7)]
    assert skipped == [0, 0, 1, 1, 1, 1]
    for strategy in ("fsdp", "tensor_parallel", "pipeline"):
        parts = ranks.train(*RUN, f"strategy={strategy}", "launch.devices=2", ranks=2)
        assert parts.losses == pytest.approx(one.losses, abs=1e-10), strategy
        assert parts.values["precision/skipped_steps"] == one.values["precision/skipped_steps"], strategy
        assert math.isnan(parts.values["gradients/norm/total"][3]), strategy
        for name, value in one.checkpoint()["state_dict"].items():
            torch.testing.assert_close(parts.checkpoint()["state_dict"][name], value, rtol=0, atol=1e-10)
