"""Parts are disjoint, seeded, and of the sizes asked for."""

import itertools
import shlex

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

import exp
from exp.data.data import Data
from exp.data.splits import lengths, random_splits
from exp.errors import ConfigError, RunError


def numbers(length: int = 40, classes: int = 2) -> TensorDataset:
    return TensorDataset(torch.arange(float(length))[:, None], torch.arange(length) % classes)


def values(part) -> list[float]:
    return part.gather(torch.arange(len(part)))[0].flatten().tolist()


def test_the_parts_are_disjoint_and_together_everything():
    data = Data(dataset=numbers())
    parts = [values(data.part(stage)) for stage in data.stages]
    assert sorted(itertools.chain(*parts)) == [float(i) for i in range(40)]
    assert [len(part) for part in parts] == [28, 6, 6]


def test_the_parts_are_chosen_by_parts_seed_and_not_by_the_runs_seed():
    def test_part(**settings):
        return values(Data(dataset=numbers(), **settings).part("test"))

    assert test_part(seed=0) == test_part(seed=1)
    assert test_part(parts_seed=0) != test_part(parts_seed=1)


def test_whole_numbers_count_samples_and_zero_is_no_part():
    data = Data(dataset=numbers(), parts={"train": 10, "val": 0.5, "test": 0})
    assert [len(data.part(stage)) for stage in data.stages] == [10, 20]
    assert data.stages == ("train", "val")
    with pytest.raises(RunError, match=r"no test part.*data.parts.test"):
        data.loader("test")


def test_a_data_set_of_its_own_for_a_stage():
    test = TensorDataset(torch.full((3, 1), -1.0), torch.tensor([0, 1, 1]))
    data = Data(dataset=numbers(), parts={"train": 0.8, "val": 0.2}, test=test)
    assert [len(data.part(stage)) for stage in data.stages] == [32, 8, 3]
    assert len(Data(dataset=numbers(), test=test).part("test")) == 3
    with pytest.raises(ConfigError, match=r"data.test: a data set of its own, and a part.*data.parts.test=0"):
        Data(dataset=numbers(), parts={"train": 0.5, "test": 0.5}, test=test)


def test_a_subset_of_tensors_is_batched_by_index_too():
    data = Data(train=Subset(numbers(), [3, 5, 9]), num_classes=2)
    assert values(data.part("train")) == [3.0, 5.0, 9.0]


@given(
    length=st.integers(3, 300),
    sizes=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).filter(lambda sizes: sum(sizes) > 0.1),
    whole=st.booleans(),
)
def test_fractions_are_rounded_along_their_sum(length, sizes, whole):
    total = sum(sizes) * (1 if whole else 1.5)
    fractions = dict(zip(("train", "val", "test"), (size / total for size in sizes), strict=True))
    assume(all(round(size * length) > 1 for size in fractions.values()))
    counts = lengths(fractions, length)
    assert all(abs(count - fractions[name] * length) <= 1 for name, count in counts.items())
    assert sum(counts.values()) == (length if whole else round(sum(fractions.values()) * length))
    indices = random_splits(fractions, length=length, seed=1)
    assert len(torch.cat(list(indices.values())).unique()) == sum(counts.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": {"train": 0.9, "val": 0.2}}, r"data.parts: fractions that add up to 1.1; expected 1 at most"),
        ({"parts": {"train": -0.1}}, r"data.parts.train: -0.1; expected a fraction"),
        ({"parts": {"train": 1.5}}, r"data.parts.train: 1.5; expected a fraction"),
        ({"parts": {"train": True}}, r"data.parts.train: true; expected"),
        ({"parts": {"training": 0.5}}, r"data.parts.training: no part; expected train, val or test"),
        ({"parts": {"train": 30, "val": 20}}, r"data.parts: 50 samples asked for; expected 40 at most"),
        ({"parts": {"train": 0.9, "val": 0.001}}, r"data.parts.val: 0.001 of 40 samples, an empty part"),
        ({"batch_size": 64, "drop_last": True}, r"data.batch_size: 64 with drop_last=true, and 28 training samples"),
        ({"input_shape": [2]}, r"data.input_shape: \[2\]; expected \[1\], which is what the data holds"),
        ({"input_dtype": "int64"}, r"data.input_dtype: int64; expected float32"),
        ({"num_classes": 1}, r"data.num_classes: 1; expected 2 or more: the data holds the class 1"),
        ({"dataset": None}, r"data.dataset: null; expected a data set"),
        ({"dataset": numbers(0)}, r"data.parts.train: 0.7 of 0 samples, an empty part"),
        ({"dataset": None, "train": numbers(0)}, r"data.train: an empty data set"),
    ],
)
def test_faults_name_their_key(settings, message):
    with pytest.raises(ConfigError, match=message):
        Data(**{"dataset": numbers(), **settings})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=0", r"data.batch_size: 0; expected an integer, 1 or more"),
        ("data.num_workers=-1", r"data.num_workers: -1; expected an integer between 0 and 1024"),
        ("data.prefetch_factor=0", r"data.prefetch_factor: 0; expected an integer, 1 or more, or null"),
        ("data.shuffle_buffer=-1", r"data.shuffle_buffer: -1; expected an integer, 0 or more"),
        ("data.multiprocessing_context=frok", r"data.multiprocessing_context: .frok.; expected .*mean fork\?"),
        ("data=text data.dataset.vocabulary_size=0", r"data.dataset.vocabulary_size: 0; expected an integer, 1"),
        ("data=text data.dataset.block_size=0", r"data.dataset.block_size: 0; expected an integer, 1 or more"),
        ("data=csv data.dataset.task=clustering", r"data.dataset.task: .clustering.; expected one of classification"),
        ("data=csv 'data.dataset.delimiter=\";;\"'", r"data.dataset.delimiter: .*; expected one character"),
        ("data=digit_domains data.train.change=rotated", r"data.train.change: .rotated.; expected one of lit, shifted"),
        ("data=digit_domains data.train.part=all", r"data.train.part: .all.; expected one of train, val, test"),
    ],
)
def test_bounds_are_told_by_the_check(override, message):
    with pytest.raises(ConfigError, match=message):
        exp.validate(exp.compose(shlex.split(override)))


def test_a_stream_cannot_be_divided():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(ConfigError, match=r"data.dataset: Stream, a stream of samples.*data.train"):
        Data(dataset=Stream())
    with pytest.raises(ConfigError, match=r"data.train: an empty stream"):
        Data(train=Stream())


def test_classes_that_the_data_cannot_tell_are_asked_for():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(2), index

    with pytest.raises(ConfigError, match=r"data.num_classes: null, and the data set does not say it"):
        Data(train=Rows())
    assert Data(train=Rows(), num_classes=4).spec.num_outputs == 4
    assert Data(train=Rows(), num_classes=2, num_outputs=1).spec.num_outputs == 1, "one output for two classes"


def test_pinning_without_a_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine can pin")
    with pytest.raises(ConfigError, match=r"data.pin_memory: true; expected a machine with a CUDA device"):
        Data(dataset=numbers(), pin_memory=True)


class Plain(torch.utils.data.Dataset):
    num_classes = 5

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.zeros(2), index % 3


def test_a_plain_data_set_says_its_classes_through_its_parts():
    assert Data(dataset=Plain()).spec.num_classes == 5
    assert Data(train=Subset(Subset(Plain(), range(8)), range(4))).spec.num_classes == 5


def test_what_takes_from_training_has_parts_of_its_kind():
    class Asking(Plain):
        def fit(self):
            return {"length": len(self)}

        def prepare(self, fitted):
            return self

    with pytest.raises(ConfigError, match=r"data.dataset: Asking with fit\(\) and prepare\(\), and neither select"):
        Data(dataset=Asking())
    assert Data(train=Asking()).fitted == {"length": 10}


class Doubles(Plain):
    """As NumPy gives its numbers."""

    def __getitem__(self, index):
        return {"input": torch.full((2,), index + 1e-12, dtype=torch.float64), "target": index % 3, "weight": 0.5}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, torch.float32), ({"input_dtype": "float32"}, torch.float32), ({"input_dtype": "float64"}, torch.float64),
     ({"keeps_doubles": True}, torch.float64)],
)  # fmt: skip
@pytest.mark.parametrize("by_index", [True, False])
def test_double_samples_become_what_a_network_computes_in(settings, dtype, by_index):
    indexed = TensorDataset(torch.ones(10, 2, dtype=torch.float64), torch.arange(10) % 3)
    data = Data(train=indexed if by_index else Doubles(), **settings)
    batch = next(iter(data.loader("train"))).data
    found = [batch[0]] if by_index else [batch["input"], batch["weight"]]
    assert {one.dtype for one in found} == {dtype}
    assert data.spec.input_dtype == str(dtype).removeprefix("torch.")
    named = ["input"] if by_index else ["input", "weight"]
    assert data.rounded == (named if dtype is torch.float32 else [])
