"""Tests of the order of samples in an epoch, the samples of each rank, and random generators."""

import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exp.data.data import Data
from exp.data.loader import LISTED, GlobalBatches, Permuted, ShareSampler, shuffle_order
from exp.data.randomness import (
    initialisation,
    permutation,
    preserve_generators,
    reseed,
    reseed_sample,
    sample_generator,
    seed_for,
)

made = st.builds(Permuted, length=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))


@given(order=made, data=st.data())
def test_an_order_is_a_permutation_read_from_anywhere(order, data):
    whole = order.slice(0, order.length)
    assert whole.dtype == torch.int64
    assert sorted(whole.tolist()) == list(range(order.length))
    start = data.draw(st.integers(0, order.length))
    stop = data.draw(st.integers(start, order.length))
    assert order.slice(start, stop).tolist() == whole[start:stop].tolist()


def test_orders_of_old_checkpoints_are_unchanged():
    # A change of the order would change resumed runs.
    assert Permuted(length=11, seed=7).slice(0, 11).tolist() == [1, 4, 6, 0, 10, 5, 9, 8, 2, 3, 7]


def test_only_long_epochs_are_computed():
    assert torch.equal(shuffle_order(1000, seed=1, epoch=2).slice(0, 1000), permutation(seed=1, epoch=2, length=1000))
    computed = [shuffle_order(LISTED + 1, seed=seed, epoch=epoch) for seed, epoch in ((1, 2), (1, 3), (2, 2))]
    assert {type(order) for order in computed} == {Permuted}
    assert len({tuple(order.slice(0, 9).tolist()) for order in computed}) == 3


def test_an_order_takes_the_memory_of_a_page():
    length = 10**12
    tracemalloc.start()
    batches = GlobalBatches(length=length, batch_size=64, shuffle=True, drop_last=False, seed=0)
    sampler = ShareSampler(batches=batches, rank=1, world_size=2)
    sampler.start = len(batches) // 2
    found = [index for _, pairs in zip(range(3), sampler, strict=False) for _, index in pairs]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found)) == 3 * 32
    assert max(found) > length // 2
    assert peak < 20 * 2**20


def correlation(one, other):
    """Return the correlation, in units of its standard deviation for independent random numbers."""
    return abs(float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])) * len(one) ** 0.5


def test_the_computed_order_looks_random():
    length = 100_000
    orders = [Permuted(length=length, seed=seed).slice(0, length) for seed in (1, 2)]
    order = orders[0]
    assert correlation(order, torch.arange(length)) < 4
    assert correlation(*orders) < 4
    assert all(correlation(order[:-lag], order[lag:]) < 4 for lag in (1, 2, 64, 4096))
    # In a random order, on average one pair of consecutive samples stays together in each direction.
    steps = order.diff()
    assert ((steps == 1).sum() < 7) & ((steps == -1).sum() < 7)
    # Each eighth of the epoch has about equally many samples of each eighth of the data.
    for part in order[: length // 8 * 8].view(8, -1):
        counts = torch.bincount(part * 8 // length, minlength=8).double()
        assert float(((counts - len(part) / 8) ** 2 / (len(part) / 8)).sum()) < 30


class Numbers(torch.utils.data.Dataset):
    """Data set of numbers, which records the numbers that are read in `read`."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([float(index)]), 0


def test_a_resumed_loader_reads_no_earlier_samples():
    data = Data(train=Numbers(500), num_classes=1, batch_size=16, seed=2)
    whole = [batch.data[0].flatten().tolist() for batch in data.loader("train")]
    assert sorted(index for batch in whole for index in batch) == list(range(500))
    data.part("train").read.clear()
    loader = data.loader("train")
    loader.set_position(0, 20)
    assert [batch.data[0].flatten().tolist() for batch in loader] == whole[20:]
    assert data.part("train").read == [int(index) for batch in whole[20:] for index in batch]


plans = st.builds(
    GlobalBatches,
    length=st.integers(1, 80),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
)


@given(batches=plans, world_size=st.integers(1, 5), epoch=st.integers(0, 3))
def test_ranks_see_each_sample_once(batches, world_size, epoch):
    seen = []
    for rank in range(world_size):
        sampler = ShareSampler(batches=batches, rank=rank, world_size=world_size)
        sampler.epoch = epoch
        mine = list(sampler)
        assert len(mine) == len(batches)
        for number, pairs in enumerate(mine):
            assert {at for at, _ in pairs} == {epoch}
            if sampler.share_of(min(batches.batch_size, batches.length - number * batches.batch_size)).size:
                seen += [index for _, index in pairs]
    left_out = batches.length % batches.batch_size if batches.drop_last else 0
    assert len(seen) == len(set(seen)) == batches.length - left_out


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeds_of_old_checkpoints_are_unchanged():
    # A change of the seed would change resumed runs.
    assert seed_for(0, "order", 1) == 7553898737722790512
    assert seed_for(np.int64(0), "order", torch.tensor(1)) == 7553898737722790512
    assert permutation(seed=3, epoch=2, length=6).tolist() == [1, 2, 4, 3, 5, 0]


def test_seeds_of_different_words_differ():
    assert len({seed_for(1, 23), seed_for(12, 3), seed_for(1, "23"), seed_for("1", 23), seed_for(123)}) == 5
    with pytest.raises(TypeError):
        seed_for(0.5)


@pytest.mark.parametrize("change", [{"seed": 9}, {"rank": 9}, {"epoch": 9}, {"batch": 9}, {"stage": "val"}])
def test_random_numbers_depend_on_the_position_only(change):
    position = {"seed": 1, "rank": 0, "epoch": 2, "batch": 3}
    reseed(**position)
    first = draws()
    reseed(**position)
    assert draws() == first
    reseed(**{**position, **change})
    assert all(a != b for a, b in zip(first, draws(), strict=True))


def test_samples_and_initialization_have_separate_generators():
    seen = set()
    for start in (
        lambda: initialisation(5),
        lambda: reseed(seed=5, rank=0, epoch=0, batch=0),
        lambda: reseed_sample(seed=5, epoch=0, index=0),
        lambda: reseed_sample(seed=5, epoch=0, index=1),
        lambda: reseed_sample(seed=5, epoch=1, index=0),
        lambda: reseed_sample(seed=5, epoch=0, index=0, stage="val"),
        lambda: reseed_sample(seed=5, epoch=0, index=0, stage="test"),
    ):
        start()
        seen.add(draws())
    assert len(seen) == 7
    one = sample_generator(seed=5, epoch=1, index=2**33).random(3)
    assert (one == sample_generator(seed=5, epoch=1, index=2**33).random(3)).all()
    assert (one != sample_generator(seed=5, epoch=1, index=2**33 + 1).random(3)).all()


def test_reading_samples_preserves_the_generators():
    reseed(seed=0, rank=0, epoch=0, batch=0)
    expected = draws()
    reseed(seed=0, rank=0, epoch=0, batch=0)
    with preserve_generators():
        reseed_sample(seed=1, epoch=1, index=1)
        draws()
    assert draws() == expected
