"""The three loaders give the same batches: once an epoch, over any ranks, from any position, with any workers."""

import random

import numpy as np
import pytest
import torch
from torch.nn import Identity
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from exp.data.data import Data
from exp.data.digits import Digits
from exp.data.streams import hide_worker
from exp.errors import RunError

SAMPLES = 23


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 2.0).reshape(SAMPLES, 2), torch.arange(SAMPLES) % 3)


class Rows(Dataset):
    """The same samples, which torch's DataLoader has to collate."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return pairs()[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([pairs()[index] for index in range(SAMPLES)])


class SizedStream(Stream):
    def __len__(self):
        return SAMPLES


class SelfSharding(IterableDataset):
    """Splits itself over workers, as torch's own documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([pairs()[index] for index in range(start, SAMPLES, step)])


class Noisy(Dataset):
    """Augments with all three global generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([index, *noise]), torch.tensor(index % 3)


class Jitter:
    """A transform without a random generator of its own."""

    def __call__(self, value):
        return value + torch.randn(value.shape) + random.random()


class Plus:
    def __init__(self, amount):
        self.amount = amount

    def __call__(self, value):
        return value + self.amount


def data(kind, **settings) -> Data:
    sets = {
        "indexed": lambda: {"train": pairs(), "val": pairs()},
        "workers": lambda: {"train": Rows(), "val": Rows()},
        "stream": lambda: {"train": Stream(), "val": Stream()},
    }
    return Data(**{"batch_size": 5, "num_classes": 3, "seed": 7, **sets[kind](), **settings})


def plain(batches) -> list:
    return [([part.tolist() for part in batch.data], *batch[1:]) for batch in batches]


def samples(loader) -> list[float]:
    """The first number of every input that counts."""
    return [row for batch in loader for row in batch.data[0][: batch.size, 0].tolist()]


KINDS = ["indexed", "workers", "stream"]
ALL = [row * 2.0 for row in range(SAMPLES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_is_seen_once_an_epoch_over_the_ranks(kind, world_size):
    shared = data(kind)
    for stage in ("train", "val"):
        ranks = [list(shared.loader(stage, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert {len(batches) for batches in ranks} == {5}
        seen = [x for batches in ranks for batch in batches for x in batch.data[0][: batch.size, 0].tolist()]
        assert sorted(seen) == ALL
        # The last batch holds 3 samples: with four ranks the last of them stands in, and counts for nothing.
        sizes = [batches[-1].size for batches in ranks]
        assert sum(sizes) == 3
        assert max(sizes) - min(sizes) <= 1
        assert sum(batches[-1].weight for batches in ranks) == pytest.approx(world_size)
        for batches in ranks:
            assert all(batch.global_size == 5 for batch in batches[:-1])
            assert batches[-1].global_size == 3
            assert len(batches[-1].data[0]) == max(1, batches[-1].size)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_hold_the_batch_that_one_process_holds(kind):
    shared = data(kind)
    one = [batch.data[0] for batch in shared.loader("train")]
    ranks = [list(shared.loader("train", rank=rank, world_size=2)) for rank in range(2)]
    for number, whole in enumerate(one):
        parts = [batches[number].data[0][: batches[number].size] for batches in ranks]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_shuffled_by_seed_and_epoch_alone_and_evaluation_is_not(kind):
    loader = data(kind).loader("train")
    first, second = samples(loader), samples(loader)
    assert first != second
    assert first != ALL
    again = data(kind).loader("train")
    assert [samples(again), samples(again)] == [first, second]
    assert samples(data(kind, seed=8).loader("train")) != first
    assert samples(data(kind, shuffle=False).loader("train")) == ALL
    evaluation = data(kind).loader("val")
    assert [samples(evaluation), samples(evaluation)] == [ALL, ALL]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_set_to_a_position_goes_on_exactly(kind, workers):
    unbroken = data(kind).loader("train")
    epochs = [plain(unbroken) for _ in range(3)]
    resumed = data(kind, num_workers=workers).loader("train")
    for epoch, batch in [(1, 2), (0, 4), (1, 5), (2, 0)]:
        resumed.set_position(epoch, batch)
        assert plain(resumed) == epochs[epoch][batch:]
    resumed.set_position(1, 3)
    assert plain(resumed) == epochs[1][3:]
    assert plain(resumed) == epochs[2], "the pass after a resumed one is the epoch that follows, whole"


def test_a_pass_that_was_left_early_does_not_show_in_the_next():
    unbroken = data("workers").loader("train")
    epochs = [plain(unbroken) for _ in range(2)]
    loader = data("workers", num_workers=2).loader("train")
    abandoned = iter(loader)
    next(abandoned)
    del abandoned
    assert plain(loader) == epochs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_outside_the_data_is_refused(kind):
    loader = data(kind, train=SizedStream()).loader("train") if kind == "stream" else data(kind).loader("train")
    with pytest.raises(RunError, match=r"batch 6 of epoch 0.*5 batches of the train part"):
        loader.set_position(0, 6)


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_the_workers(workers):
    def epochs(num_workers):
        loader = data("workers", train=Noisy(), num_workers=num_workers).loader("train")
        return [plain(loader) for _ in range(2)]

    alone = epochs(0)
    assert epochs(workers) == alone
    drawn = {tuple(row[1:]) for epoch in alone for batch in epoch for row in batch[0][0]}
    assert len(drawn) == 2 * SAMPLES, "each sample of each epoch has a stream of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_random_transforms_are_derived_too(kind):
    def batches(**settings):
        loader = data(kind, train_transforms={"jitter": Jitter()}, **settings).loader("train")
        return [plain(loader) for _ in range(2)]

    alone = batches()
    assert batches(num_workers=2) == alone
    assert batches() == alone


def test_fetching_in_this_process_leaves_a_models_dropout_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    for kind in KINDS:
        torch.manual_seed(3)
        noisy = data(kind, train_transforms={"jitter": Jitter()})
        list(noisy.loader("train"))
        assert torch.equal(torch.rand(4), expected), kind


def test_transforms_apply_to_the_input_in_order_and_training_has_more():
    shared = data(
        "indexed",
        transforms={"times": lambda x: x * 10},
        train_transforms={"plus": Plus(1.0)},
        shuffle=False,
    )
    assert samples(shared.loader("train")) == [(x + 1) * 10 for x in ALL]
    assert samples(shared.loader("val")) == [x * 10 for x in ALL]


@pytest.mark.parametrize("kind", KINDS)
def test_drop_last_leaves_the_short_batch_out_of_training_alone(kind):
    shared = data(kind, drop_last=True)
    assert [batch.global_size for batch in shared.loader("train")] == [5] * 4
    assert sorted(samples(shared.loader("val"))) == ALL


def test_a_batch_smaller_than_the_world_still_reaches_every_rank():
    shared = data("indexed", batch_size=2)
    ranks = [list(shared.loader("train", rank=rank, world_size=3)) for rank in range(3)]
    assert [batch.size for batch in ranks[2]] == [0] * 12
    assert all(len(batch.data[0]) == 1 for batch in ranks[2])
    assert sorted(x for batches in ranks for b in batches for x in b.data[0][: b.size, 0].tolist()) == ALL


def test_chunks_of_a_large_data_set_change_nothing(monkeypatch):
    whole = plain(data("indexed").loader("train"))
    monkeypatch.setattr("exp.data.in_memory.CHUNK_BYTES", 2 * 5 * 16)
    loader = data("indexed").loader("train")
    assert plain(loader) == whole
    for batch in range(6):
        loader.set_position(0, batch)
        assert plain(loader) == whole[batch:]


def test_lengths():
    assert [len(data(kind).loader("train")) for kind in ("indexed", "workers")] == [5, 5]
    assert len(data("stream", train=SizedStream()).loader("train")) == 5
    with pytest.raises(TypeError, match="does not know its length"):
        len(data("stream").loader("train"))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_that_shards_itself_over_workers_is_read_whole(workers):
    shared = data("stream", train=SelfSharding(), num_workers=workers)
    assert sorted(samples(shared.loader("train"))) == ALL


def test_the_private_place_where_torch_keeps_its_worker():
    """Relied on by streams.hide_worker: get_worker_info returns _utils.worker._worker_info. Seen in torch 2.13."""
    from torch.utils.data import _utils

    _utils.worker._worker_info = "something"
    try:
        assert get_worker_info() == "something"
        hide_worker()
        assert get_worker_info() is None
    finally:
        _utils.worker._worker_info = None


def test_a_stream_is_told_its_epoch():
    class Told(Stream):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(torch.tensor([float(self.epoch)]), torch.tensor(0))] * 3)

    loader = data("stream", train=Told()).loader("train")
    loader.set_position(4, 0)
    assert samples(loader) == [4.0] * 3
    assert samples(loader) == [5.0] * 3


def test_mappings_travel_by_name_by_index_and_through_workers():
    class Named(Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return {"input": torch.tensor([float(index)]), "target": torch.tensor(index % 2), "weight": index}

    loaded = Data(train=Named(), num_classes=2, batch_size=3, shuffle=False).loader("train")
    assert [batch.data["weight"].tolist() for batch in loaded] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_gather_of_your_own_is_all_that_batching_by_index_needs():
    class Squares:
        def __len__(self):
            return 10

        def gather(self, indices):
            return {"input": indices[:, None] ** 2.0, "target": indices % 2}

    shared = Data(dataset=Squares(), parts={"train": 6, "val": 4}, batch_size=4, num_classes=2)
    seen = [x for stage in ("train", "val") for batch in shared.loader(stage) for x in batch.data["input"].tolist()]
    assert sorted(seen) == [[x**2.0] for x in range(10)]


def test_another_start_method_gives_the_same_batches():
    # Of importable classes alone: a fresh process has to find them.
    def first(**settings):
        digits = Data(dataset=Digits(), batch_size=600, train_transforms={"same": Identity()}, **settings)
        return plain(digits.loader("train"))

    assert first(num_workers=1, multiprocessing_context="forkserver") == first()
