"""strategy=hybrid trains what one process does."""

from __future__ import annotations

import pytest

STEPS = ("trainer.max_epochs=null", "trainer.max_steps=30", "test=false")
TRANSFORMER = ("model=transformer", *STEPS)


@pytest.mark.parametrize("data", ["average", "shard"])
def test_data_times_tensor(ranks, data):
    one = ranks.train(*TRANSFORMER, "strategy=single")
    four = ranks.train(*TRANSFORMER, "strategy=hybrid", "strategy.tensor=2", f"strategy.data={data}", "launch.devices=4", ranks=4)
    print(max(abs(a - b) for a, b in zip(one.losses, four.losses)))
    assert four.losses == pytest.approx(one.losses, abs=1e-5)
