"""strategy=fsdp trains what one process does."""

from __future__ import annotations

import pytest

COMMAND = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false")


def test_two_ranks(ranks):
    one = ranks.train(*COMMAND, "strategy=single")
    two = ranks.train(*COMMAND, "strategy=fsdp", ranks=2)
    print(max(abs(a - b) for a, b in zip(one.losses, two.losses)))
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
