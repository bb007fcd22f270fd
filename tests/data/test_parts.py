"""Tests of splits: they are disjoint, depend on the seed, and have the requested sizes."""

import itertools
import pickle
import shlex

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

import exp
from exp.data.data import Data
from exp.data.delimited import Csv
from exp.data.splits import lengths, random_splits
from exp.errors import ConfigError, RunError


def numbers(length: int = 40, classes: int = 2) -> TensorDataset:
    return TensorDataset(torch.arange(float(length))[:, None], torch.arange(length) % classes)


def values(part) -> list[float]:
    return part.gather(torch.arange(len(part)))[0].flatten().tolist()


def test_splits_are_disjoint_and_complete():
    data = Data(dataset=numbers())
    parts = [values(data.part(stage)) for stage in data.stages]
    assert sorted(itertools.chain(*parts)) == [float(i) for i in range(40)]
    assert [len(part) for part in parts] == [28, 6, 6]


def test_parts_seed_alone_chooses_the_splits():
    def test_part(**settings):
        return values(Data(dataset=numbers(), **settings).part("test"))

    assert test_part(seed=0) == test_part(seed=1)
    assert test_part(parts_seed=0) != test_part(parts_seed=1)


def test_sizes_may_count_samples():
    data = Data(dataset=numbers(), parts={"train": 10, "val": 0.5, "test": 0})
    assert [len(data.part(stage)) for stage in data.stages] == [10, 20]
    assert data.stages == ("train", "val")
    with pytest.raises(RunError, match=r"no test split.*data.parts.test"):
        data.loader("test")


def test_a_stage_may_have_a_separate_data_set():
    test = TensorDataset(torch.full((3, 1), -1.0), torch.tensor([0, 1, 1]))
    data = Data(dataset=numbers(), parts={"train": 0.8, "val": 0.2}, test=test)
    assert [len(data.part(stage)) for stage in data.stages] == [32, 8, 3]
    assert len(Data(dataset=numbers(), test=test).part("test")) == 3
    with pytest.raises(ConfigError, match=r"data.test: a data set, although data.parts.test makes.*data.parts.test=0"):
        Data(dataset=numbers(), parts={"train": 0.5, "test": 0.5}, test=test)


ROWS = [
    f"{index},p{index // 5},{'abc'[index % 7 % 3]},{['train', 'valid', 'TEST'][index % 4 % 3]}" for index in range(210)
]


def table(tmp_path, ignore=("group", "split"), **split) -> Data:
    """Return 210 rows in 42 groups of 5, with the classes a, b and c in the ratio 3 : 2 : 2."""
    (tmp_path / "rows.csv").write_text("\n".join(["number,group,kind,split", *ROWS]))
    made = Csv(path=str(tmp_path / "rows.csv"), target="kind", ignore=ignore, standardise=False)
    return Data(dataset=made, split=split)


def rows_of(data: Data, column: int) -> dict[str, list[str]]:
    return {stage: [ROWS[int(row)].split(",")[column] for row in data.part(stage).indices] for stage in data.stages}


def test_a_stratified_split_keeps_the_shares_of_the_classes(tmp_path):
    kinds = rows_of(table(tmp_path, stratify=True), 2)
    assert {stage: len(some) for stage, some in kinds.items()} == {"train": 147, "val": 31, "test": 32}
    for some in kinds.values():
        assert all(
            abs(some.count(kind) - len(some) * share / 7) <= 1 for kind, share in zip("abc", (3, 2, 2), strict=True)
        )


@pytest.mark.parametrize("stratify", [False, True])
def test_a_group_is_in_one_split(tmp_path, stratify):
    groups = rows_of(table(tmp_path, group="group", stratify=stratify), 1)
    assert sum(len(set(some)) for some in groups.values()) == 42
    assert sum(map(len, groups.values())) == 210
    assert {stage: len(some) for stage, some in groups.items()} == pytest.approx(
        {"train": 147, "val": 31, "test": 32}, abs=6
    )


@pytest.mark.parametrize("rules", [{}, {"stratify": True}, {"group": "group"}, {"group": "group", "stratify": True}])
def test_each_sample_is_validated_in_one_fold(tmp_path, rules):
    folds = [rows_of(table(tmp_path, folds=4, fold=fold, **rules), 0) for fold in range(4)]
    assert all(one["test"] == folds[0]["test"] for one in folds)
    assert sorted([*folds[0]["test"], *(row for one in folds for row in one["val"])], key=int) == list(
        map(str, range(210))
    )
    assert all(
        sorted(one["train"] + one["val"], key=int) == sorted(folds[0]["train"] + folds[0]["val"], key=int)
        for one in folds
    )


def test_a_column_may_name_the_split_of_each_row(tmp_path):
    named = rows_of(table(tmp_path, column="split"), 3)
    assert {stage: set(some) for stage, some in named.items()} == {
        "train": {"train"},
        "val": {"valid"},
        "test": {"TEST"},
    }
    assert sum(map(len, named.values())) == 210
    tensors = TensorDataset(torch.zeros(6, 1), torch.arange(6) % 2)
    assert [len(Data(dataset=tensors, parts={"train": 4, "val": 2}, split={"stratify": True}).part("val"))] == [2]


@pytest.mark.parametrize(("split", "words"), [
    ({"grup": "a"}, "data.split.grup: grup; expected a rule.*Did you mean group"),
    ({"fold": 3, "folds": 3}, "data.split.fold: 3; expected 0 to 2"),
    ({"folds": 500}, "data.split: Cannot have number of splits n_splits=500"),
    ({"column": "kind"}, "data.split.column: kind, which is 'a' in sample 0"),
    ({"group": "number"}, r"data.split.group: number, which is an input.*Add number to data.dataset.ignore"),
    ({"group": "nobody"}, "data.split.group: nobody; expected a column of"),
])  # fmt: skip
def test_rules_that_cannot_be_followed_are_refused(tmp_path, split, words):
    with pytest.raises(ConfigError, match=words):
        table(tmp_path, **split)
    with pytest.raises(ConfigError, match=r"data.split: rules, although each split has a data set"):
        Data(train=numbers(), val=numbers(), split={"folds": 3})


def test_a_subset_of_tensors_is_gathered():
    data = Data(train=Subset(numbers(), [3, 5, 9]), num_classes=2)
    assert values(data.part("train")) == [3.0, 5.0, 9.0]
    assert pickle.loads(pickle.dumps(data)).spec == data.spec


@given(
    length=st.integers(3, 300),
    sizes=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).filter(lambda sizes: sum(sizes) > 0.1),
    whole=st.booleans(),
)
def test_fractions_are_rounded_cumulatively(length, sizes, whole):
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
        (
            {"parts": {"train": 0.9, "val": 0.2}},
            r"data.parts: fractions that add up to 1.1; expected a sum of at most 1",
        ),
        ({"parts": {"train": True}}, r"data.parts.train: true; expected"),
        ({"parts": {"training": 0.5}}, r"data.parts.training: training; expected train, val or test"),
        ({"parts": {"train": 30, "val": 20}}, r"data.parts: splits of 50 samples in total; expected at most 40"),
        ({"parts": {"train": 0.9, "val": 0.001}}, r"data.parts.val: 0.001 of 40 samples, which is an empty split"),
        (
            {"batch_size": 64, "drop_last": True},
            r"data.batch_size: 64 with data.drop_last=true, although there are only 28 training samples",
        ),
        ({"input_shape": [2]}, r"data.input_shape: \[2\]; expected \[1\], the value of the data"),
        ({"input_dtype": "int64"}, r"data.input_dtype: int64; expected float32"),
        ({"num_classes": 1}, r"data.num_classes: 1; expected 2 or more, because .* has the class 1"),
        ({"dataset": None}, r"data.dataset: null; expected a data set"),
        ({"dataset": None, "train": numbers(0)}, r"data.train: an empty data set"),
        ({"pin_memory": True}, r"data.pin_memory: true; expected a machine with a CUDA device"),
    ],
)
def test_errors_name_their_key(settings, message):
    with pytest.raises(ConfigError, match=message):
        Data(**{"dataset": numbers(), **settings})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=0", r"data.batch_size: 0; expected an integer, 1 or more"),
        ("data.num_workers=-1", r"data.num_workers: -1; expected an integer between 0 and 1024"),
        ("data.multiprocessing_context=frok", r"data.multiprocessing_context: .frok.; expected .*mean fork\?"),
        ("data=text data.dataset.block_size=0", r"data.dataset.block_size: 0; expected an integer, 1 or more"),
        ("data=csv 'data.dataset.delimiter=\";;\"'", r"data.dataset.delimiter: .*; expected one character"),
        ("data=digit_domains data.train.change=rotated", r"data.train.change: .rotated.; expected one of lit, shifted"),
    ],
)
def test_the_check_refuses_values_out_of_range(override, message):
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


def test_unknown_numbers_of_classes_are_requested():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(2), index

    with pytest.raises(ConfigError, match=r"data.num_classes: null, although the data set does not state"):
        Data(train=Rows())
    assert Data(train=Rows(), num_classes=4).spec.num_outputs == 4
    assert Data(train=Rows(), num_classes=2, num_outputs=1).spec.num_outputs == 1, "two classes may have one output"


class Plain(torch.utils.data.Dataset):
    num_classes = 5

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.zeros(2), index % 3


def test_num_classes_of_a_data_set_is_used():
    assert Data(dataset=Plain()).spec.num_classes == 5
    assert Data(train=Subset(Subset(Plain(), range(8)), range(4))).spec.num_classes == 5


def test_data_sets_with_fit_need_select():
    class Asking(Plain):
        def fit(self):
            return {"length": len(self)}

        def prepare(self, fitted):
            return self

    with pytest.raises(ConfigError, match=r"data.dataset: Asking with fit\(\) and prepare\(\), but neither select"):
        Data(dataset=Asking())
    assert Data(train=Asking()).fitted == {"length": 10}


class Doubles(Plain):
    """Data set with samples in float64, as NumPy arrays give."""

    def __getitem__(self, index):
        return {"input": torch.full((2,), index + 1e-12, dtype=torch.float64), "target": index % 3, "weight": 0.5}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, torch.float32), ({"input_dtype": "float32"}, torch.float32), ({"input_dtype": "float64"}, torch.float64),
     ({"keeps_doubles": True}, torch.float64)],
)  # fmt: skip
@pytest.mark.parametrize("by_index", [True, False])
def test_double_samples_get_the_dtype_of_the_network(settings, dtype, by_index):
    indexed = TensorDataset(torch.ones(10, 2, dtype=torch.float64), torch.arange(10) % 3)
    data = Data(train=indexed if by_index else Doubles(), **settings)
    batch = next(iter(data.loader("train"))).data
    found = [batch[0]] if by_index else [batch["input"], batch["weight"]]
    assert {one.dtype for one in found} == {dtype}
    assert data.spec.input_dtype == str(dtype).removeprefix("torch.")
