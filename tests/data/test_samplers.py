"""data.sampler: which samples an epoch takes, drawn from (seed, epoch), shared out over ranks, resumed exactly."""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import exp
from exp.data.data import Data
from exp.data.samplers import BalancedSampler, SubsetSampler, WeightedSampler
from exp.errors import ConfigError, RunError

OWN = Path(__file__).with_name("own_samplers.py")
Growing, Shrinking = (runpy.run_path(str(OWN), run_name="own")[name] for name in ("Growing", "Shrinking"))
SAMPLES = 40
# 30 of class 0, 8 of class 1, 2 of class 2.
TARGETS = torch.tensor([0] * 30 + [1] * 8 + [2] * 2)


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None], TARGETS)


class Rows(Dataset):
    """The same, one by one, with a weight for each by name."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input": torch.tensor([float(index)]), "target": TARGETS[index], "importance": float(index == 7)}


def data(sampler, *, train=None, **settings) -> Data:
    return Data(train=train or pairs(), batch_size=6, seed=3, sampler=sampler, **settings)


def numbers(loader) -> list[list[int]]:
    """The samples of each batch that count."""
    found = []
    for batch in loader:
        values = batch.data["input"] if isinstance(batch.data, dict) else batch.data[0]
        found.append(values[: batch.size, 0].long().tolist())
    return found


def drawn(sampler, *, epochs: int = 1, **settings) -> torch.Tensor:
    """How often each sample is seen."""
    loader = data(sampler, **settings).loader("train")
    return torch.tensor([one for _ in range(epochs) for batch in numbers(loader) for one in batch]).bincount(
        minlength=SAMPLES
    )


KINDS = {
    "balanced": "balanced",
    "weighted": functools.partial(WeightedSampler, class_weights=[1, 2, 3]),
    "without replacement": functools.partial(WeightedSampler, class_weights=[1, 2, 3], replacement=False),
    "subset": functools.partial(SubsetSampler, size=17),
    "torch's": functools.partial(WeightedRandomSampler, weights=[1.0] * SAMPLES, num_samples=23),
    "torch's with the part": RandomSampler,
    "stateful": functools.partial(Growing, stride=2),
}


@pytest.mark.parametrize("rows", [False, True], ids=["in memory", "one by one"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_the_global_draw_and_a_resumed_loader_goes_on_with_it(kind, rows):
    made = functools.partial(data, KINDS[kind], train=Rows() if rows else None, num_classes=3)
    one = made().loader("train")
    epochs = [numbers(one) for _ in range(3)]
    assert epochs[0] != epochs[1]
    shared = [made().loader("train", rank=rank, world_size=2) for rank in range(2)]
    for whole in epochs:
        assert [first + second for first, second in zip(*map(numbers, shared), strict=True)] == whole
    later = made().loader("train")
    later.set_position(2, 1)
    assert numbers(later) == epochs[2][1:]
    earlier = made().loader("train")
    list(earlier), list(earlier), list(earlier)
    earlier.set_position(1, 2)
    assert numbers(earlier) == epochs[1][2:]


def test_balanced_draws_each_class_alike():
    counts = drawn("balanced", epochs=50)
    by_class = [int(counts[number == TARGETS].sum()) for number in range(3)]
    # 2,000 draws; 5 standard deviations of a third of them.
    assert all(abs(count - 2000 / 3) < 105 for count in by_class), by_class


def test_weights_are_those_of_torchs_own_sampler():
    weights = torch.arange(float(SAMPLES))
    counts = drawn(functools.partial(WeightedSampler, weights=weights.tolist(), num_samples=4000))
    expected = 4000 * weights / weights.sum()
    assert counts[0] == 0
    # Chi-squared of 39 numbers; 3 standard deviations beyond its mean of 38.
    assert float(((counts - expected)[1:] ** 2 / expected[1:]).sum()) < 38 + 3 * (2 * 38) ** 0.5
    once = drawn(functools.partial(WeightedSampler, weights=weights.tolist(), num_samples=39, replacement=False))
    assert once.tolist() == [0] + [1] * 39


@pytest.mark.parametrize("weights", ["importance", [float(index == 7) for index in range(SAMPLES)]])
def test_weights_by_name_and_as_numbers(weights):
    assert drawn(functools.partial(WeightedSampler, weights=weights), train=Rows(), num_classes=3)[7] == SAMPLES


def test_weights_of_the_whole_data_set_and_targets_that_it_states():
    class Stating(Rows):
        targets = TARGETS.tolist()
        read = 0

        def __getitem__(self, index):
            Stating.read += 1
            return super().__getitem__(index)

    settings = {"num_classes": 3, "seed": 3, "parts": {"train": 30, "val": 10}}
    kept = sorted(one for batch in numbers(Data(dataset=pairs(), **settings).loader("train")) for one in batch)
    whole = [float(index == kept[5]) for index in range(SAMPLES)]
    taken = {
        index
        for batch in numbers(
            Data(dataset=pairs(), sampler=functools.partial(WeightedSampler, weights=whole), **settings).loader("train")
        )
        for index in batch
    }
    assert taken == {kept[5]}
    Data(dataset=Stating(), sampler=BalancedSampler, **settings)
    assert Stating.read == 1  # for its shape


def test_a_subset_is_the_same_under_any_seed():
    def taken(seed, **settings):
        made = Data(train=pairs(), sampler=functools.partial(SubsetSampler, **settings), seed=seed, num_classes=3)
        return sorted(one for batch in numbers(made.loader("train")) for one in batch)

    assert taken(0, size=0.25) == taken(1, size=0.25)
    assert len(taken(0, size=0.25)) == 10
    assert taken(0, size=0.25) != taken(0, size=0.25, subset_seed=1)
    assert taken(0, indices=[5, 3, 8]) == [3, 5, 8]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(pairs())


@pytest.mark.parametrize(
    ("sampler", "settings", "key", "told"),
    [
        (functools.partial(WeightedSampler, weights=[1.0, -1.0] * 20), {}, "sampler.weights", "-1 for sample 1"),
        (functools.partial(WeightedSampler, weights=[0.0] * 40), {}, "sampler.weights", "0 for every sample"),
        (functools.partial(WeightedSampler, weights=[1.0] * 39), {}, "sampler.weights", "39 numbers; expected 40"),
        (
            functools.partial(WeightedSampler, weights="importanse"),
            {"train": Rows(), "num_classes": 3},
            "sampler.weights",
            "importance?",
        ),
        (WeightedSampler, {}, "sampler", "neither weights nor class_weights"),
        (functools.partial(WeightedSampler, class_weights=[1, 2]), {}, "sampler.class_weights", "holds the class 2"),
        (functools.partial(WeightedSampler, class_weights=[1, 2, 3, 4]), {}, "sampler.class_weights", "no sample"),
        (
            functools.partial(WeightedSampler, class_weights=[0, 1, 1], replacement=False),
            {},
            "sampler.num_samples",
            "10 samples have a weight",
        ),
        ("balanced", {"num_classes": 5}, "sampler", "without a sample of the class 3"),
        ("balanced", {"train": Rows(), "num_classes": 4}, "sampler", "without a sample of the class 3"),
        ("balanced", {"train": TensorDataset(torch.ones(4, 1), torch.ones(4, 1))}, "sampler", "a class number for"),
        ("balanced", {"train": Stream(), "num_classes": 3}, "sampler", "a stream of samples"),
        ("balanced", {"shuffle": False}, "shuffle", "the sampler decides"),
        (functools.partial(SubsetSampler, indices=[1, 40]), {}, "sampler.indices", "the sample 40"),
        (functools.partial(SubsetSampler, indices=[1, 1]), {}, "sampler.indices", "twice"),
        (functools.partial(SubsetSampler, size=41), {}, "sampler.size", "1 to 40"),
        (functools.partial(SubsetSampler, size=1.5), {}, "sampler.size", "1 to 40"),
        (functools.partial(SubsetSampler, size=3), {"drop_last": True}, "batch_size", "3 training samples"),
        (lambda: [0, 1.5], {}, "sampler", "a float"),
        (lambda: [[0, 1]], {}, "sampler", "lists of samples"),
        (lambda: [40], {}, "sampler", "numbers from 0 to 39"),
        (list, {}, "sampler", "no sample"),
    ],
)
def test_what_no_sampler_can_do_is_told_at_its_key(sampler, settings, key, told):
    with pytest.raises(ConfigError) as caught:
        data(sampler, **settings)
    assert any(fault.key == f"data.{key}" and told in str(fault) for fault in caught.value.faults), caught.value


def test_a_sampler_whose_epochs_differ_in_length_is_told():
    loader = data(Shrinking).loader("train")
    numbers(loader)
    with pytest.raises(RunError, match="gives 38 samples in epoch 1, and gave 39 in epoch 0"):
        numbers(loader)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(OWN, tmp_path)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "own_samplers", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("sampler", "key", "told"),
    [
        ("weighted", "data.sampler", "balanced or null"),
        ("{_target_: exp.data.samplers.WeightedSampler, weight: [1]}", "data.sampler.weight", "data.sampler.weights"),
        ("{_target_: exp.data.samplers.WeightedSampler, weights: [-1]}", "data.sampler.weights", "0 or more"),
        ("{_target_: torch.nn.Linear, in_features: 1}", "data.sampler._target_", "torch.utils.data.Sampler"),
        ("{_target_: own_samplers.Beyond}", "data.sampler", "Beyond, which gives the sample 1258"),
        ("{_target_: exp.data.samplers.SubsetSampler, size: 1000000}", "data.sampler.size", "1 to 1258"),
    ],
)
def test_a_wrong_sampler_in_a_config(place, sampler, key, told):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([f"data.sampler={sampler}"]))
    assert any(fault.key == key and told in str(fault) for fault in caught.value.faults), caught.value


def test_a_run_with_a_sampler_goes_on_bit_for_bit_and_two_ranks_are_one(place, ranks):
    words = (
        *("data.sampler={_target_: own_samplers.Growing, stride: 3}", "hooks=[]", "metrics=[]"),
        *("trainer.max_epochs=2", "data.batch_size=128", "optimizer=sgd", "precision=fp64", "test=false"),
    )
    whole = ranks.train(*words)
    killed = ranks.train(*words, "trainer.max_steps=13")
    rest = ranks.train(*words, f"resume={killed.directory}/checkpoints/last.ckpt")
    two = ranks.train(*words, "strategy=ddp", "launch.devices=2", ranks=2)
    expected = whole.checkpoint()["state_dict"]
    for name, value in rest.checkpoint()["state_dict"].items():
        assert torch.equal(value, expected[name])
    for name, value in two.checkpoint()["state_dict"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
