"""strategy=tensor_parallel trains what one process does."""

from __future__ import annotations

import pytest

STEPS = ("trainer.max_epochs=null", "trainer.max_steps=30", "test=false")
TRANSFORMER = ("model=transformer", *STEPS)


def test_two_ranks(ranks):
    one = ranks.train(*TRANSFORMER, "strategy=single")
    two = ranks.train(*TRANSFORMER, "strategy=tensor_parallel", ranks=2)
    print(max(abs(a - b) for a, b in zip(one.losses, two.losses)))
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
