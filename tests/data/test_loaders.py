"""Tests of the three loaders: equal batches for any number of ranks and workers and from any position."""

import random

import numpy as np
import pytest
import torch
from torch.nn import Identity
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from exp.data.data import Data
from exp.data.digits import Digits
from exp.data.workers import as_batch
from exp.errors import ConfigError, RunError

SAMPLES = 23


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 2.0).reshape(SAMPLES, 2), torch.arange(SAMPLES) % 3)


class Rows(Dataset):
    """Data set of the samples of `pairs`, for torch's DataLoader."""

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
    """Stream that divides its samples among workers, as in torch's documentation."""

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([pairs()[index] for index in range(start, SAMPLES, step)])


class Noisy(Dataset):
    """Data set that draws from the global generators of Python, NumPy and torch."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([index, *noise]), torch.tensor(index % 3)


class Jitter:
    """Transform that uses torch's global random generator."""

    def __call__(self, value):
        return value + torch.randn(value.shape) + random.random()


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
    """Return the first number of each sample, without the copies that fill a batch."""
    return [row for batch in loader for row in batch.data[0][: batch.size, 0].tolist()]


KINDS = ["indexed", "workers", "stream"]
ALL = [row * 2.0 for row in range(SAMPLES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_batch(kind, world_size):
    shared = data(kind)
    for stage in ("train", "val"):
        ranks = [list(shared.loader(stage, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert {len(batches) for batches in ranks} == {5}
        assert sorted(x for batches in ranks for x in samples(batches)) == ALL
        # The last batch has 3 samples, and the fourth rank gets a copy with weight 0.
        sizes = [batches[-1].size for batches in ranks]
        assert sum(sizes) == 3
        assert max(sizes) - min(sizes) <= 1
        assert sum(batches[-1].weight for batches in ranks) == pytest.approx(world_size)
        for batches in ranks:
            assert [batch.global_size for batch in batches] == [5, 5, 5, 5, 3]
            assert len(batches[-1].data[0]) == max(1, batches[-1].size)
        for number, whole in enumerate(data(kind).loader(stage)):
            parts = [batches[number].data[0][: batches[number].size] for batches in ranks]
            assert torch.equal(torch.cat(parts), whole.data[0])


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_epoch_alone_shuffle_training(kind):
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
def test_a_loader_resumes_at_any_position(kind, workers):
    unbroken = data(kind).loader("train")
    epochs = [plain(unbroken) for _ in range(3)]
    resumed = data(kind, num_workers=workers).loader("train")
    for epoch, batch in [(1, 2), (0, 4), (1, 5), (2, 0)]:
        resumed.set_position(epoch, batch)
        assert plain(resumed) == epochs[epoch][batch:]
    resumed.set_position(1, 3)
    assert plain(resumed) == epochs[1][3:]
    assert plain(resumed) == epochs[2], "the epoch after a resumed epoch must be complete"


class Curriculum(Dataset):
    """Data set whose samples contain the epoch of the last `set_epoch` and a number drawn in it."""

    epoch, noise = -1, 0.0

    def set_epoch(self, epoch):
        self.epoch, self.noise = epoch, float(torch.rand(()))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index * 2.0, self.epoch, self.noise]), torch.tensor(0)


class Gathered(Curriculum):
    def gather(self, indices):
        rows = [self[index][0] for index in indices.tolist()]
        return torch.stack(rows), torch.zeros(len(rows), dtype=torch.int64)


class Growing(Curriculum):
    def __len__(self):
        return SAMPLES + max(0, self.epoch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "kind", [Curriculum, Gathered, lambda: ConcatDataset([Curriculum()]), lambda: Subset(Curriculum(), range(SAMPLES))]
)
def test_a_data_set_is_told_its_epoch(kind, workers):
    """Training gets the epoch of the run, also after an evaluation of the same data set, which gets epoch 0."""
    parts = {"train": 13, "val": 10}
    settings = {"num_classes": 1, "batch_size": 4, "seed": 7, "num_workers": workers, "parts": parts}
    made = Data(dataset=kind(), **settings)
    train, val = made.loader("train"), made.loader("val")
    seen = []
    for epoch in range(3):
        batches = iter(train)
        rows = [row for batch in (next(batches), *val, *batches) for row in batch.data[0].tolist()]
        assert {told for _, told, _ in rows[:4] + rows[14:]} == {epoch}
        assert {told for _, told, _ in rows[4:14]} == {0}
        assert len({noise for _, _, noise in rows[:4] + rows[14:]}) == 1
        seen.append(rows[:4] + rows[14:])
    assert len({rows[0][2] for rows in seen}) == 3
    later = Data(dataset=kind(), **settings).loader("train", world_size=1)
    later.set_position(2, 1)
    assert [row for batch in later for row in batch.data[0].tolist()] == seen[2][4:]


def test_a_data_set_keeps_its_length_over_epochs():
    loader = data("workers", train=Growing()).loader("train")
    list(loader)
    with pytest.raises(
        ConfigError, match=r"data\.train: 24 samples in epoch 1, but 23 samples before; expected the same number"
    ):
        list(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_beyond_the_data_are_refused(kind):
    loader = data(kind, train=SizedStream()).loader("train") if kind == "stream" else data(kind).loader("train")
    with pytest.raises(RunError, match=r"batch 6 of epoch 0, although train has 5 batches"):
        loader.set_position(0, 6)


def test_augmentation_does_not_depend_on_workers():
    def epochs(num_workers):
        loader = data("workers", train=Noisy(), num_workers=num_workers).loader("train")
        return [plain(loader) for _ in range(2)]

    alone = epochs(0)
    assert epochs(2) == alone
    drawn = {tuple(row[1:]) for epoch in alone for batch in epoch for row in batch[0][0]}
    assert len(drawn) == 2 * SAMPLES, "two samples have the same random numbers"


@pytest.mark.parametrize("kind", KINDS)
def test_random_transforms_are_reproducible(kind):
    def batches(**settings):
        loader = data(kind, train_transforms={"jitter": Jitter()}, **settings).loader("train")
        return [plain(loader) for _ in range(2)]

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    alone = batches()
    assert torch.equal(torch.rand(4), expected), "reading samples changed the generator of the model"
    assert batches(num_workers=2) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_drop_last_changes_training_only(kind):
    shared = data(kind, drop_last=True)
    assert [batch.global_size for batch in shared.loader("train")] == [5] * 4
    assert sorted(samples(shared.loader("val"))) == ALL


def test_lengths_are_known_if_the_data_state_them():
    assert [len(data(kind).loader("train")) for kind in ("indexed", "workers")] == [5, 5]
    assert len(data("stream", train=SizedStream()).loader("train")) == 5
    with pytest.raises(TypeError, match="length of this stream is unknown"):
        len(data("stream").loader("train"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_divided_among_workers_is_read_whole(workers):
    # exp uses `torch.utils.data._utils.worker._worker_info` of torch 2.13, a private name.
    shared = data("stream", train=SelfSharding(), num_workers=workers)
    assert sorted(samples(shared.loader("train"))) == ALL


def test_streams_get_their_epoch():
    class Told(Stream):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(torch.tensor([float(self.epoch)]), torch.tensor(0))] * 3)

    loader = data("stream", train=Told()).loader("train")
    loader.set_position(4, 0)
    assert samples(loader) == [4.0] * 3
    assert samples(loader) == [5.0] * 3


def test_a_data_set_may_gather_batches():
    class Squares:
        def __len__(self):
            return 10

        def gather(self, indices):
            return {"input": indices[:, None] ** 2.0, "target": indices % 2}

    shared = Data(dataset=Squares(), parts={"train": 6, "val": 4}, batch_size=4, num_classes=2)
    seen = [x for stage in ("train", "val") for batch in shared.loader(stage) for x in batch.data["input"].tolist()]
    assert sorted(seen) == [[x**2.0] for x in range(10)]


def test_a_pinned_batch_is_a_pair_again():
    assert as_batch([1, 2]) == (1, 2)
    assert as_batch({"input": 1}) == {"input": 1}


def test_another_start_method_gives_the_same_batches():
    # Workers of this method import all classes.
    def first(**settings):
        digits = Data(dataset=Digits(), batch_size=600, train_transforms={"same": Identity()}, **settings)
        return plain(digits.loader("train"))

    assert first(num_workers=1, multiprocessing_context="forkserver") == first()
