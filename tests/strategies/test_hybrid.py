"""strategy=hybrid: data times tensor, data times pipeline."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.numeric

BASE = (
    "model=transformer",
    "model.constants.width=16",
    "model.constants.hidden=32",
    "data.batch_size=200",
    "trainer.max_epochs=null",
    "trainer.max_steps=9",
    "test=false",
    "precision=fp64",
    "logger=[]",
)


@pytest.mark.any_processor
def test_a_mesh_trains_what_one_process_does(ranks):
    one = ranks.train(*BASE, "strategy=single")
    for options in (["strategy.data=average"], ["strategy.data=shard"], ["strategy.tensor=1", "strategy.pipeline=2"]):
        four = ranks.train(*BASE, "strategy=hybrid", *options, "launch.devices=4", ranks=4)
        assert len(four.losses) == 9
        assert four.losses == pytest.approx(one.losses, abs=1e-10), options
