"""Tests of data.sampler, data.batch_sampler and data.collate: draws, ranks, resuming, padding and errors."""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import exp
from exp.data.batch_samplers import LengthBuckets, TokenBatches
from exp.data.collate import Pad
from exp.data.data import Data
from exp.data.samplers import SubsetSampler, WeightedSampler
from exp.errors import ConfigError, RunError

OWN = Path(__file__).with_name("own_samplers.py")
USER = runpy.run_path(str(OWN), run_name="own")
WORDS = USER["Words"]()
LENGTHS = [len(WORDS[index][0]) for index in range(len(WORDS))]
SAMPLES = 40
# 30 samples of class 0, 8 of class 1, 2 of class 2.
TARGETS = torch.tensor([0] * 30 + [1] * 8 + [2] * 2)


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None], TARGETS)


class Rows(Dataset):
    """Data set of the same samples, with named entries and a weight."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input": torch.tensor([float(index)]), "target": TARGETS[index], "importance": float(index == 7)}


def data(sampler, *, train=None, **settings) -> Data:
    return Data(train=train or pairs(), batch_size=6, seed=3, sampler=sampler, **settings)


def numbers(loader) -> list[list[int]]:
    """Return the samples of each batch, without the copies that fill it."""
    found = []
    for batch in loader:
        values = batch.data["input"] if isinstance(batch.data, dict) else batch.data[0]
        found.append(values[: batch.size, 0].long().tolist())
    return found


def drawn(sampler, *, epochs: int = 1, **settings) -> torch.Tensor:
    """Return the number of draws of each sample."""
    loader = data(sampler, **settings).loader("train")
    return torch.tensor([one for _ in range(epochs) for batch in numbers(loader) for one in batch]).bincount(
        minlength=SAMPLES
    )


KINDS = {
    "balanced": "balanced",
    "weighted": functools.partial(WeightedSampler, class_weights=[1, 2, 3]),
    "subset": functools.partial(SubsetSampler, size=17),
    "torch's": functools.partial(WeightedRandomSampler, weights=[1.0] * SAMPLES, num_samples=23),
    "torch's with the part": RandomSampler,
    "stateful": functools.partial(USER["Growing"], stride=2),
}


@pytest.mark.parametrize(("kind", "rows"), [*((kind, False) for kind in KINDS), ("balanced", True), ("stateful", True)])
def test_ranks_and_resumed_loaders_share_the_draw(kind, rows):
    made = functools.partial(data, KINDS[kind], train=Rows() if rows else None, num_classes=3)
    one = made().loader("train")
    epochs = [numbers(one) for _ in range(3)]
    assert epochs[0] != epochs[1]
    shared = [made().loader("train", rank=rank, world_size=2) for rank in range(2)]
    for whole in epochs:
        assert [first + second for first, second in zip(*map(numbers, shared), strict=True)] == whole
    later = made().loader("train")
    for epoch, batch in ((2, 1), (1, 2)):  # a later and then an earlier position
        later.set_position(epoch, batch)
        assert numbers(later) == epochs[epoch][batch:]


def test_balanced_draws_all_classes_equally():
    counts = drawn("balanced", epochs=50)
    by_class = [int(counts[number == TARGETS].sum()) for number in range(3)]
    # 2,000 draws, a third of each class, within 5 standard deviations.
    assert all(abs(count - 2000 / 3) < 105 for count in by_class), by_class


def test_draws_are_proportional_to_weights():
    weights = torch.arange(float(SAMPLES))
    counts = drawn(functools.partial(WeightedSampler, weights=weights.tolist(), num_samples=4000))
    expected = 4000 * weights / weights.sum()
    assert counts[0] == 0
    # Chi-squared statistic of 39 counts, below its mean of 38 plus 3 standard deviations.
    assert float(((counts - expected)[1:] ** 2 / expected[1:]).sum()) < 38 + 3 * (2 * 38) ** 0.5


@pytest.mark.parametrize("weights", ["importance", [float(index == 7) for index in range(SAMPLES)]])
def test_weights_may_be_an_entry_of_samples(weights):
    assert drawn(functools.partial(WeightedSampler, weights=weights), train=Rows(), num_classes=3)[7] == SAMPLES


def test_weights_of_the_whole_data_set_are_divided():
    settings = {"dataset": pairs(), "num_classes": 3, "seed": 3, "parts": {"train": 30, "val": 10}}
    kept = sorted(one for batch in numbers(Data(**settings).loader("train")) for one in batch)
    sampler = functools.partial(WeightedSampler, weights=[float(index == kept[5]) for index in range(SAMPLES)])
    assert {one for batch in numbers(Data(**settings, sampler=sampler).loader("train")) for one in batch} == {kept[5]}


def test_a_subset_does_not_depend_on_the_seed():
    def taken(seed, **settings):
        made = Data(train=pairs(), sampler=functools.partial(SubsetSampler, **settings), seed=seed, num_classes=3)
        return sorted(one for batch in numbers(made.loader("train")) for one in batch)

    assert taken(0, size=0.25) == taken(1, size=0.25)
    assert len(taken(0, size=0.25)) == 10
    assert taken(0, size=0.25) != taken(0, size=0.25, subset_seed=1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(pairs())


MISSPELLED = functools.partial(WeightedSampler, weights="importanse")


@pytest.mark.parametrize(
    ("sampler", "settings", "key", "told"),
    [
        (functools.partial(WeightedSampler, weights=[1.0, -1.0] * 20), {}, "sampler.weights", "-1 for sample 1"),
        (functools.partial(WeightedSampler, weights=[0.0] * 40), {}, "sampler.weights", "expected a weight above 0"),
        (functools.partial(WeightedSampler, weights=[1.0] * 39), {}, "sampler.weights", "39 numbers; expected 40"),
        (MISSPELLED, {"train": Rows(), "num_classes": 3}, "sampler.weights", "importance?"),
        (WeightedSampler, {}, "sampler", "neither weights nor class_weights"),
        (functools.partial(WeightedSampler, class_weights=[1, 2]), {}, "sampler.class_weights", "has the class 2"),
        ("balanced", {"num_classes": 5}, "sampler", "no sample of the class 3"),
        ("balanced", {"train": TensorDataset(torch.ones(4, 1), torch.ones(4, 1))}, "sampler", "one class number for"),
        ("balanced", {"train": Stream(), "num_classes": 3}, "sampler", "a stream is the train split"),
        ("balanced", {"shuffle": False}, "shuffle", "the sampler decides"),
        (functools.partial(SubsetSampler, size=41), {}, "sampler.size", "1 to 40"),
        (lambda: [0, 1.5], {}, "sampler", "returns the index 1.5 in epoch 0"),
        (lambda: [40], {}, "sampler", "integers from 0 to 39"),
        (list, {}, "sampler", "returns no items"),
    ],
)
def test_errors_of_samplers_name_their_key(sampler, settings, key, told):
    with pytest.raises(ConfigError) as caught:
        data(sampler, **settings)
    assert any(error.key == f"data.{key}" and told in str(error) for error in caught.value.errors), caught.value


def test_epochs_of_different_lengths_are_reported():
    loader = data(USER["Shrinking"]).loader("train")
    numbers(loader)
    with pytest.raises(RunError, match="returns 38 items in epoch 1; expected 39 items, as in epoch 0"):
        numbers(loader)


def batched(batch_sampler=None, *, train=WORDS, **settings) -> Data:
    """Return Data of sequences with different lengths."""
    given = {"train": train, "val": train, "batch_size": 6, "seed": 3, "num_classes": 5, "collate": "pad", **settings}
    return Data(**given, batch_sampler=batch_sampler)


def rows(loader) -> list[list[list[int]]]:
    """Return the samples of each batch without padding and without the copies that fill it."""
    return [
        [row[mask].tolist() for row, mask in zip(batch.data["input"], batch.data["mask"], strict=True)][: batch.size]
        for batch in loader
    ]


BATCHES = {
    "buckets": LengthBuckets,
    "small": functools.partial(LengthBuckets, buckets=3, batch_size=4),
    "tokens": functools.partial(TokenBatches, tokens=40),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_ranks_and_resumed_loaders_share_batches(kind):
    made = functools.partial(batched, BATCHES[kind], collate=Pad(masks={"mask": "input"}))
    one = made().loader("train")
    epochs = [rows(one) for _ in range(3)]
    every = sorted(WORDS[index][0].tolist() for index in range(len(WORDS)))
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == every
    assert epochs[0] != epochs[1]
    # The smallest batch has fewer than seven samples.
    for ranks in (2, 7):
        shared = [made().loader("train", rank=rank, world_size=ranks) for rank in range(ranks)]
        found = [rows(loader) for loader in shared]
        assert [[row for part in batch for row in part] for batch in zip(*found, strict=True)] == epochs[0]
    later = made().loader("train")
    later.set_position(2, 3)
    assert rows(later) == epochs[2][3:]
    validated = [rows(made().loader("val")) for _ in range(2)]
    assert validated[0] == validated[1]
    assert sorted(row for batch in validated[0] for row in batch) == every


def test_batches_keep_their_limits():
    for batch in batched(BATCHES["tokens"]).loader("train"):
        assert batch.data[0].numel() <= 40
    assert all(batch.global_size <= 4 for batch in batched(BATCHES["small"]).loader("train"))
    dropped = batched(functools.partial(LengthBuckets, buckets=3), drop_last=True).loader("train")
    assert {batch.global_size for batch in dropped} == {6}
    # Buckets have less padding than batches of consecutive samples.
    plain, sorted_ = (
        sum(batch.data[0].numel() for batch in batched(kind).loader("train")) for kind in (None, LengthBuckets)
    )
    assert sorted_ < 0.8 * plain


class Measured(TensorDataset):
    lengths = tuple(range(20))


def test_lengths_may_be_an_attribute():
    table = Measured(torch.arange(20.0)[:, None], torch.arange(20) % 5)
    shared = batched(functools.partial(LengthBuckets, buckets=4), train=table, collate=None)
    batches = [sorted(batch.data[0].flatten().tolist()) for batch in shared.loader("train")]
    assert sorted(batches) == [[float(5 * start + index) for index in range(5)] for start in range(4)]


FIVE = TensorDataset(torch.ones(5, 1), torch.arange(5))


class WordStream(IterableDataset):
    def __iter__(self):
        return iter([WORDS[index] for index in range(len(WORDS))])


@pytest.mark.parametrize(
    ("batch_sampler", "settings", "key", "told"),
    [
        (functools.partial(TokenBatches, tokens=10), {}, "batch_sampler.tokens", "has a length of 11; expected 11"),
        (functools.partial(LengthBuckets, entry="words"), {}, "batch_sampler.entry", "input, target"),
        (LengthBuckets, {"sampler": "balanced", "train": FIVE}, "batch_sampler", "one of the two"),
        (LengthBuckets, {"train": WordStream()}, "batch_sampler", "stream"),
        (lambda: [0, 1], {}, "batch_sampler", "Set data.sampler for"),
        (lambda: [[0, 48]], {}, "batch_sampler", "integers from 0 to 47"),
        (lambda: [[0, 1]], {}, "batch_sampler", "2 indices, 2 of them different, for a split of 48"),
    ],
)  # fmt: skip
def test_errors_of_batch_samplers_name_their_key(batch_sampler, settings, key, told):
    with pytest.raises(ConfigError) as caught:
        batched(batch_sampler, **settings)
    assert any(error.key == f"data.{key}" and told in str(error) for error in caught.value.errors), caught.value


def test_padding_equals_that_of_torch():
    samples = [{"left": torch.arange(n), "right": torch.ones(n + 1, 2), "target": [1.5] * n, "id": n} for n in (2, 4)]
    pad = Pad(padding_value={"right": -1}, masks={"mask": "right"}, lengths={"count": "left", "words": "target"})
    batch = pad(samples)
    expected = pad_sequence([sample["right"] for sample in samples], batch_first=True, padding_value=-1)
    assert torch.equal(batch["right"], expected)
    assert batch["left"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["target"].tolist() == [[1.5, 1.5, 0, 0], [1.5] * 4]
    assert batch["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert (batch["count"].tolist(), batch["words"].tolist(), batch["id"].tolist()) == ([2, 4], [2, 4], [2, 4])
    # Classes are padded with the value that losses ignore.
    _, targets = Pad()([WORDS[0], WORDS[1]])
    assert int((targets == -100).sum()) == abs(LENGTHS[0] - LENGTHS[1])
    named = Pad(padding_value={"target": 5})
    pictures = named([(torch.ones(1, 2, 5), 0), (torch.ones(1, 3, 4), 1)])
    assert pictures[0].shape == (2, 1, 3, 5)
    assert pictures[0].sum() == 22
    assert Pad()([torch.ones(2), torch.ones(3)]).shape == (2, 3)
    with pytest.raises(
        ConfigError, match=r"mask: target; expected an entry of the samples with a length. Available: input$"
    ):
        Pad(masks={"mask": "target"})([(torch.ones(2), 0), (torch.ones(3), 1)])


@pytest.mark.parametrize(
    ("pad", "key", "told"),
    [
        (Pad(masks={"mask": "imput"}), "data.collate.masks.mask", "Did you mean input?"),
        (Pad(padding_value={"tokens": 1}), "data.collate.padding_value.tokens", "input, target"),
    ],
)
def test_errors_of_padding_name_their_key(pad, key, told):
    with pytest.raises((ConfigError, RunError), match=told) as caught:
        list(batched(num_classes=5, collate=pad).loader("train"))
    errors = [caught.value.error] if isinstance(caught.value, RunError) else caught.value.errors
    assert [error.key for error in errors] == [key]


def test_unequal_samples_need_padding():
    with pytest.raises(RunError, match=r"data\.collate=pad"):
        list(batched(collate=None).loader("train"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_samplers", raising=False)
    shutil.copy(OWN, tmp_path)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "model").mkdir()
    (tmp_path / "conf" / "model" / "tagger.yaml").write_text("# Own\n_target_: own_samplers.Tagger\n")
    (tmp_path / "conf" / "data" / "words.yaml").write_text("""# Own: data=words
defaults: [_loader, _self_]
dataset: {_target_: own_samplers.Words}
num_classes: 5
batch_sampler: {_target_: exp.data.batch_samplers.TokenBatches, tokens: 60}
collate: {_target_: exp.data.collate.Pad, masks: {mask: input}}
inputs:
  input: {shape: [null], dtype: int64}
  mask: {shape: [null], dtype: bool}
""")
    return tmp_path


@pytest.mark.parametrize(
    ("sampler", "key", "told"),
    [
        ("weighted", "data.sampler", "balanced or null"),
        ("{_target_: exp.data.samplers.WeightedSampler, weight: [1]}", "data.sampler.weight", "data.sampler.weights"),
        ("{_target_: exp.data.samplers.WeightedSampler, weights: [-1]}", "data.sampler.weights", "0 or more"),
        ("{_target_: torch.nn.Linear, in_features: 1}", "data.sampler._target_", "torch.utils.data.Sampler"),
        ("{_target_: exp.data.samplers.SubsetSampler, size: 1000000}", "data.sampler.size", "1 to 1258"),
    ],
)
def test_the_check_refuses_wrong_samplers(place, sampler, key, told):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([f"data.sampler={sampler}"]))
    assert any(error.key == key and told in str(error) for error in caught.value.errors), caught.value


RUN = ("hooks=[]", "metrics=[]", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.1", "trainer.max_epochs=2")
SAMPLED = ("data.sampler={_target_: own_samplers.Growing, stride: 3}", "data.batch_size=128")
TOKENS = ("data=words", "model=tagger", "objective.cross_entropy.loss.ignore_index=-100")


@pytest.mark.parametrize(("words", "steps"), [(SAMPLED, 13), (TOKENS, 7)], ids=["sampler", "batch_sampler"])
def test_ranks_and_resumed_runs_end_with_the_same_weights(place, ranks, words, steps):
    words = (*words, *RUN)
    whole = ranks.train(*words)
    killed = ranks.train(*words, f"trainer.max_steps={steps}", "test=false")
    rest = ranks.train(*words, f"resume={killed.directory}/checkpoints/last.ckpt", "test=false")
    two = ranks.train(*words, "strategy=ddp", "launch.devices=2", ranks=2)
    expected = whole.checkpoint()["state_dict"]
    for name, value in rest.checkpoint()["state_dict"].items():
        assert torch.equal(value, expected[name])
    for name, value in two.checkpoint()["state_dict"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
    assert two.report["metrics"]["loss/test"] == pytest.approx(whole.report["metrics"]["loss/test"], rel=1e-9)


def test_a_pipeline_refuses_batch_samplers(place):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*TOKENS, *RUN, "strategy=pipeline", "launch.devices=2"]))
    assert any(error.key == "data.batch_sampler" for error in caught.value.errors)
