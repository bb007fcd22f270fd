"""Every sample exactly once an epoch, over any number of ranks, from any position."""

from hypothesis import given
from hypothesis import strategies as st

from exp.data.loader import GlobalBatches, ShareSampler, share

batches = st.builds(
    GlobalBatches,
    length=st.integers(1, 80),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
    block=st.none() | st.integers(1, 9),
    window=st.integers(1, 4),
)


@given(size=st.integers(1, 50), world_size=st.integers(1, 12))
def test_shares_of_a_batch_are_whole_disjoint_and_even(size, world_size):
    shares = [share(size=size, rank=rank, world_size=world_size) for rank in range(world_size)]
    counted = [index for mine in shares if mine.size for index in range(mine.start, mine.stop)]
    assert counted == list(range(size))
    assert max(mine.size for mine in shares) - min(mine.size for mine in shares) <= 1
    assert all(mine.stop - mine.start == max(1, mine.size) for mine in shares)


@given(batches=batches, world_size=st.integers(1, 5), epoch=st.integers(0, 3))
def test_every_sample_is_seen_once_an_epoch(batches, world_size, epoch):
    seen = []
    for rank in range(world_size):
        sampler = ShareSampler(batches=batches, rank=rank, world_size=world_size)
        sampler.epoch = epoch
        mine = list(sampler)
        assert len(mine) == len(batches)
        for number, pairs in enumerate(mine):
            assert {at for at, _ in pairs} == {epoch}
            if sampler.share_of(batches.size(number)).size:
                seen += [index for _, index in pairs]
    left_out = batches.length % batches.batch_size if batches.drop_last else 0
    assert len(seen) == len(set(seen)) == batches.length - left_out


@given(batches=batches, world_size=st.integers(1, 3), data=st.data())
def test_a_sampler_set_to_a_position_goes_on_as_the_unbroken_one(batches, world_size, data):
    start = data.draw(st.integers(0, len(batches)))
    whole = ShareSampler(batches=batches, rank=0, world_size=world_size)
    rest = ShareSampler(batches=batches, rank=0, world_size=world_size)
    rest.start = start
    assert list(rest) == list(whole)[start:]
    assert len(rest) == len(batches) - start


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return (
            GlobalBatches(length=50, batch_size=8, shuffle=True, drop_last=False, seed=seed)
            .order(epoch)
            .slice(0, 50)
            .tolist()
        )

    assert order(1, 2) == order(1, 2)
    assert sorted(order(1, 2)) == list(range(50))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6
