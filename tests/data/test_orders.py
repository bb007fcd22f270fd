"""Orders of an epoch: a permutation of any length, found from any position, random enough, and small."""

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exp.data import orders
from exp.data.data import Data
from exp.data.loader import GlobalBatches, ShareSampler
from exp.data.orders import Listed, Permuted, PermutedBlocks, shuffled, shuffled_blocks
from exp.data.randomness import permutation

made = st.one_of(
    st.builds(Permuted, length=st.integers(1, 300), seed=st.integers(0, 2**64 - 1)),
    st.builds(
        PermutedBlocks,
        length=st.integers(1, 300),
        block=st.integers(1, 40),
        window=st.integers(1, 6),
        seed=st.integers(0, 2**64 - 1),
    ),
)


@settings(deadline=None)
@given(order=made, data=st.data())
def test_every_order_is_a_permutation_and_any_stretch_of_it_is_the_same(order, data):
    whole = order.slice(0, len(order))
    assert whole.dtype == torch.int64
    assert sorted(whole.tolist()) == list(range(len(order)))
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order)))
    assert order.slice(start, stop).tolist() == whole[start:stop].tolist()


def test_the_computed_order_is_the_one_that_old_checkpoints_were_written_with():
    # Literal on purpose: another order would change every resumed run.
    assert Permuted(length=11, seed=7).slice(0, 11).tolist() == [1, 4, 6, 0, 10, 5, 9, 8, 2, 3, 7]
    blocks = shuffled_blocks(11, seed=7, epoch=1, block=2, window=2)
    assert blocks.slice(0, 11).tolist() == [10, 5, 9, 6, 4, 3, 7, 8, 2, 0, 1]


def test_short_epochs_are_listed_as_they_were_and_long_ones_computed(monkeypatch):
    listed = shuffled(1000, seed=1, epoch=2)
    assert isinstance(listed, Listed)
    assert torch.equal(listed.slice(0, 1000), permutation(seed=1, epoch=2, length=1000))
    monkeypatch.setattr(orders, "LISTED", 999)
    computed = [shuffled(1000, seed=seed, epoch=epoch).slice(0, 1000) for seed, epoch in ((1, 2), (1, 3), (2, 2))]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in computed)
    assert not any(torch.equal(computed[0], other) for other in computed[1:])


@pytest.mark.parametrize("length", [2**31 + 11, 10**12])
def test_an_order_of_any_length_takes_the_memory_of_a_page_wherever_it_is_read(length):
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
    """In standard deviations of what chance gives."""
    return abs(float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])) * len(one) ** 0.5


def test_the_computed_order_looks_random():
    length = 100_000
    orders = [Permuted(length=length, seed=seed).slice(0, length) for seed in (1, 2)]
    order = orders[0]
    assert correlation(order, torch.arange(length)) < 4
    assert correlation(*orders) < 4
    assert all(correlation(order[:-lag], order[lag:]) < 4 for lag in (1, 2, 64, 4096))
    # Neighbours that stay neighbours: one on average in each direction, by chance seldom more than six.
    steps = order.diff()
    assert ((steps == 1).sum() < 7) & ((steps == -1).sum() < 7)
    # Of any eighth of the epoch, an eighth comes from each eighth of the data.
    for part in order[: length // 8 * 8].view(8, -1):
        counts = torch.bincount(part * 8 // length, minlength=8).double()
        assert float(((counts - len(part) / 8) ** 2 / (len(part) / 8)).sum()) < 30


def test_blocks_are_mixed_over_the_data_and_within_their_window():
    # Sorted by class, as files often are: ten classes of 1000 samples, blocks of 20, windows of 32 of them.
    order = PermutedBlocks(length=10_000, block=20, window=32, seed=3).slice(0, 10_000)
    classes = order // 1000
    runs = int((classes.diff() != 0).sum()) + 1
    assert runs > 0.85 * 10_000 * 0.9  # of a whole shuffle 9,000 on average
    # A batch of 64 out of 32 blocks: no class has more than half of one, and none is alone.
    for batch in classes[: 10_000 // 64 * 64].view(-1, 64):
        assert torch.bincount(batch, minlength=10).max() <= 40
    # Read from few places: a window of 640 samples touches 33 stretches of 20 that follow each other, or a few more.
    for window in order[:9_600].view(-1, 640):
        assert len((window // 20).unique()) <= 64
    others = PermutedBlocks(length=10_000, block=20, window=32, seed=4).slice(0, 10_000)
    assert correlation(order, others) < 4


def test_blocks_begin_elsewhere_in_every_epoch():
    batches = GlobalBatches(length=1000, batch_size=10, shuffle=True, drop_last=False, seed=0, block=50, window=1)
    first = [set(batches.order(epoch).slice(0, 50).tolist()) for epoch in range(20)]
    assert len({min(block) % 50 for block in first}) > 5


class Numbers(torch.utils.data.Dataset):
    """The numbers themselves, and which have been asked for."""

    def __init__(self, length, block=None):
        self.length, self.read = length, []
        if block is not None:
            self.block = block

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([float(index)]), 0


@pytest.mark.parametrize("choices", [{"shuffle_block": 8, "shuffle_window": 4}, {}])
def test_a_resumed_loader_reads_its_own_samples_alone(choices):
    data = Data(train=Numbers(500, block=8 if not choices else None), num_classes=1, batch_size=16, seed=2, **choices)
    whole = [batch.data[0].flatten().tolist() for batch in data.loader("train")]
    assert sorted(index for batch in whole for index in batch) == list(range(500))
    data.part("train").read.clear()
    loader = data.loader("train")
    loader.set_position(0, 20)
    assert [batch.data[0].flatten().tolist() for batch in loader] == whole[20:]
    assert data.part("train").read == [int(index) for batch in whole[20:] for index in batch]
