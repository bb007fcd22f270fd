"""Two ranks of a run train what one does."""

from __future__ import annotations

import pytest


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
