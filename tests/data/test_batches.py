"""data.batch_sampler and data.collate: which samples make a batch, and how; batches of several sizes, padded."""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import exp
from exp.data.batch_samplers import LengthBuckets, TokenBatches
from exp.data.collate import Pad
from exp.data.data import Data
from exp.errors import ConfigError, RunError

OWN = Path(__file__).with_name("own_samplers.py")
Words = runpy.run_path(str(OWN), run_name="own")["Words"]
WORDS = Words()
LENGTHS = torch.tensor([len(WORDS[index][0]) for index in range(len(WORDS))])


def data(batch_sampler=None, *, train=WORDS, **settings) -> Data:
    return Data(
        **{"train": train, "val": train, "batch_size": 6, "seed": 3, "num_classes": 5, "collate": "pad", **settings},
        batch_sampler=batch_sampler,
    )


def rows(loader) -> list[list[list[int]]]:
    """The samples of each batch that count, without their padding."""
    return [
        [row[mask].tolist() for row, mask in zip(batch.data["input"], batch.data["mask"], strict=True)][: batch.size]
        for batch in loader
    ]


KINDS = {
    "buckets": LengthBuckets,
    "boundaries": functools.partial(LengthBuckets, boundaries=[5, 8], batch_size=4),
    "tokens": functools.partial(TokenBatches, tokens=40),
    "few samples": functools.partial(TokenBatches, tokens=40, max_samples=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_each_batch_and_a_resumed_loader_goes_on(kind):
    made = functools.partial(data, KINDS[kind], collate=Pad(masks={"mask": "input"}))
    one = made().loader("train")
    epochs = [rows(one) for _ in range(3)]
    every = sorted(WORDS[index][0].tolist() for index in range(len(WORDS)))
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == every
    assert epochs[0] != epochs[1]
    # More ranks than the smallest batch has samples: as many batches for each, and each sample once.
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


def test_batches_keep_their_bounds():
    for batch in data(KINDS["tokens"]).loader("train"):
        assert batch.data[0].numel() <= 40
    for batch in data(KINDS["boundaries"]).loader("train"):
        assert batch.global_size <= 4
        lengths = {sum(LENGTHS_OF_ROW >= 0) for LENGTHS_OF_ROW in batch.data[1]}
        assert len({(int(length) >= 5) + (int(length) >= 8) for length in lengths}) == 1
    dropped = data(functools.partial(LengthBuckets, buckets=3), drop_last=True).loader("train")
    assert {batch.global_size for batch in dropped} == {6}
    # Less padding than in batches one after another.
    plain, sorted_ = (
        sum(batch.data[0].numel() for batch in data(kind).loader("train")) for kind in (None, LengthBuckets)
    )
    assert sorted_ < 0.8 * plain


def test_lengths_come_from_the_data_set_where_it_says_them_and_in_memory_data_are_gathered():
    table = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20) % 5)
    lengths = list(range(20))
    shared = data(functools.partial(LengthBuckets, lengths=lengths, buckets=4), train=table, collate=None)
    batches = [sorted(batch.data[0].flatten().tolist()) for batch in shared.loader("train")]
    assert sorted(batches) == [[float(5 * start + index) for index in range(5)] for start in range(4)]


FIVE = TensorDataset(torch.ones(5, 1), torch.arange(5))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([WORDS[index] for index in range(len(WORDS))])


@pytest.mark.parametrize(
    ("batch_sampler", "settings", "key", "told"),
    [
        (functools.partial(TokenBatches, tokens=10), {}, "batch_sampler.tokens", "has a length of 11; expected 11"),
        (functools.partial(LengthBuckets, boundaries=[8, 5]), {}, "batch_sampler.boundaries", "rising"),
        (functools.partial(LengthBuckets, lengths=[1, 2]), {}, "batch_sampler.lengths", "2 numbers; expected 48"),
        (functools.partial(LengthBuckets, entry="words"), {}, "batch_sampler.entry", "input, target"),
        (LengthBuckets, {"sampler": "balanced", "train": FIVE}, "batch_sampler", "one of the two"),
        (LengthBuckets, {"train": Stream()}, "batch_sampler", "stream"),
        (lambda: [0, 1], {}, "batch_sampler", "for data.sampler"),
        (lambda: [[0, 48]], {}, "batch_sampler", "numbers from 0 to 47"),
        (lambda: [[]], {}, "batch_sampler", "an empty batch"),
        (lambda: [[0, 1]], {}, "batch_sampler", "2 samples of an evaluation of 48"),
    ],
)  # fmt: skip
def test_what_no_batch_sampler_can_do_is_told_at_its_key(batch_sampler, settings, key, told):
    with pytest.raises(ConfigError) as caught:
        data(batch_sampler, **settings)
    assert any(fault.key == f"data.{key}" and told in str(fault) for fault in caught.value.faults), caught.value


def test_padding_is_torchs_for_each_entry_and_masks_and_lengths_have_names():
    samples = [{"left": torch.arange(n), "right": torch.ones(n + 1, 2), "target": [1.5] * n, "id": n} for n in (2, 4)]
    pad = Pad(padding_value={"right": -1}, masks={"mask": "right"}, lengths={"count": "left", "words": "target"})
    batch = pad(samples)
    expected = pad_sequence([sample["right"] for sample in samples], batch_first=True, padding_value=-1)
    assert torch.equal(batch["right"], expected)
    assert batch["left"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["target"].tolist() == [[1.5, 1.5, 0, 0], [1.5] * 4]
    assert batch["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert (batch["count"].tolist(), batch["words"].tolist(), batch["id"].tolist()) == ([2, 4], [2, 4], [2, 4])
    # Of a pair; class numbers are padded by what losses leave out; a length that is given; two axes.
    inputs, targets = Pad(length={"input": 9})([WORDS[0], WORDS[1]])
    assert inputs.shape == (2, 9)
    assert int((targets == -100).sum()) == abs(int(LENGTHS[0] - LENGTHS[1]))
    pictures = Pad()([(torch.ones(1, 2, 5), 0), (torch.ones(1, 3, 4), 1)])
    assert pictures[0].shape == (2, 1, 3, 5)
    assert pictures[0].sum() == 22
    assert Pad()([torch.ones(2), torch.ones(3)]).shape == (2, 3)


@pytest.mark.parametrize(
    ("pad", "key", "told"),
    [
        (Pad(masks={"mask": "imput"}), "data.collate.masks.mask", "Did you mean input?"),
        (Pad(padding_value={"tokens": 1}), "data.collate.padding_value.tokens", "input, target"),
        (Pad(length={"input": 5}), "data.collate.length.input", "5, and a sample whose input has the length"),
    ],
)
def test_a_wrong_padding_is_told_at_its_key(pad, key, told):
    with pytest.raises((ConfigError, RunError), match=told) as caught:
        list(data(num_classes=5, collate=pad).loader("train"))
    faults = [caught.value.fault] if isinstance(caught.value, RunError) else caught.value.faults
    assert [fault.key for fault in faults] == [key]


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones((2,) * (1 + index % 2)), 0


def test_unequal_samples_are_told_with_the_cure_and_unequal_axes_have_none():
    with pytest.raises(RunError, match=r"data\.collate=pad"):
        list(data(collate=None).loader("train"))
    with pytest.raises(RunError, match="input has 1 and 2 axes"):
        list(data(train=Ragged()).loader("train"))


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


WORDS_OF_A_RUN = (
    *("data=words", "model=tagger", "hooks=[]", "metrics=[]", "precision=fp64"),
    *("optimizer=sgd", "optimizer.lr=0.1", "trainer.max_epochs=2", "objective.cross_entropy.loss.ignore_index=-100"),
)


def test_tokens_a_batch_on_two_ranks_and_resumed_end_with_the_weights_of_one_process(place, ranks):
    whole = ranks.train(*WORDS_OF_A_RUN)
    killed = ranks.train(*WORDS_OF_A_RUN, "trainer.max_steps=7")
    rest = ranks.train(*WORDS_OF_A_RUN, f"resume={killed.directory}/checkpoints/last.ckpt")
    two = ranks.train(*WORDS_OF_A_RUN, "strategy=ddp", "launch.devices=2", ranks=2)
    expected = whole.checkpoint()["state_dict"]
    for name, value in rest.checkpoint()["state_dict"].items():
        assert torch.equal(value, expected[name])
    for name, value in two.checkpoint()["state_dict"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
    assert two.report["metrics"]["loss/test"] == pytest.approx(whole.report["metrics"]["loss/test"], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trainer.accumulate_grad_batches=2", "samples of a smaller one would count for more"),
        ("strategy=pipeline launch.devices=2", "a schedule is made for micro-batches of one size"),
    ],
)
def test_what_needs_equal_batches_refuses_a_batch_sampler(place, words, told):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*WORDS_OF_A_RUN, *words.split()]))
    found = [fault for fault in caught.value.faults if fault.key == "data.batch_sampler"]
    assert found, caught.value
    assert told in str(found[0])
