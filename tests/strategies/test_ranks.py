"""Two ranks of a run train what one does."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.numeric


def summed(rank, *, start):
    import torch
    import torch.distributed

    value = torch.tensor([start + rank.global_rank])
    torch.distributed.all_reduce(value)
    return value.item()


def test_call(ranks):
    assert ranks.call(summed, ranks=2, start=3) == [7, 7]


COMMAND = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false")


def test_ddp_of_two_ranks(ranks):
    one = ranks.train(*COMMAND, "strategy=single")
    two = ranks.train(*COMMAND, "strategy=ddp", ranks=2)
    assert two.report["world_size"] == 2
    assert len(two.losses) == 30
    assert two.losses == pytest.approx(one.losses, abs=1e-5)


DOUBLE = ("precision=fp64", "data.batch_size=100")  # a short last batch of 57


@pytest.mark.any_processor
def test_in_double_precision(ranks):
    one = ranks.train(*COMMAND, *DOUBLE, "strategy=single")
    for options in (["strategy=ddp"], ["strategy=ddp", "strategy.inner=layer_split", "launch.devices=4"]):
        two = ranks.train(*COMMAND, *DOUBLE, *options, ranks=2)
        assert two.losses == pytest.approx(one.losses, rel=0, abs=1e-10), options
