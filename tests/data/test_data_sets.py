"""Tests of the data sets of exp: values, names, specs, and statistics of the training split."""

import numpy as np
import pytest
import sklearn.datasets
import torch
from hypothesis import given
from hypothesis import strategies as st

from exp.data.data import Data
from exp.data.digits import Digits
from exp.data.tables import BreastCancer, Diabetes, Table, Wine
from exp.data.text import UNKNOWN, Text, Vocabulary, code_points
from exp.errors import ConfigError
from exp.extras.gallery.letter_names import ALPHABET, SCRIPTS, LetterNames
from exp.shared_types import DataSpec


def table(values, target) -> Table:
    names = tuple(f"c{i}" for i in range(len(values[0])))
    targets = np.asarray(target, dtype=float)[:, None]
    return Table(columns=names, numbers=np.asarray(values, dtype=float), targets={"target": targets})


def test_letter_names_are_those_of_unicode():
    names = LetterNames()
    rows, scripts = names.entries
    assert rows.shape[1] == 20
    texts = ["".join(ALPHABET[number] for number in row) for row in rows.tolist()]
    greek = {text.lstrip("\0") for text, script in zip(texts, scripts, strict=True) if SCRIPTS[script] == "GREEK"}
    assert "ALPHA" in greek
    assert torch.bincount(scripts).min() > 100
    assert torch.bincount(LetterNames(most=50).entries[1]).max() <= 50


def test_digits_equal_those_of_scikit_learn():
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    ours = Digits()
    assert torch.equal(ours.entries[1], torch.from_numpy(labels))
    assert torch.allclose(ours.entries[0].flatten(1) * 6 + 5, torch.from_numpy(images).float(), atol=1e-5)
    assert abs(ours.entries[0].mean()) < 0.05
    assert abs(ours.entries[0].std() - 1) < 0.05


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BreastCancer, sklearn.datasets.load_breast_cancer),
        (Wine, sklearn.datasets.load_wine),
        (Diabetes, lambda **_: sklearn.datasets.load_diabetes(scaled=False, **_)),
    ],
)
def test_tables_equal_those_of_scikit_learn(ours, theirs):
    bunch = theirs()
    made = ours(standardise=False)
    features, targets = made.encode(made.fit())["input"], made.targets["target"]
    assert np.array_equal(features.numpy(), bunch.data)
    assert np.array_equal(targets.codes if made.classes else targets[:, 0], bunch.target)
    assert len(made.columns) == bunch.data.shape[1]
    if made.classes:
        assert list(made.classes["target"]) == list(bunch.target_names)
    names = [name.replace(" error", "").replace(" ", "_") for name in bunch.feature_names]
    assert [name.removeprefix("error_") for name in made.columns][:11] == names[:11]


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (Digits, DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)),
        (Diabetes, DataSpec(input_shape=(10,), input_dtype="float32", num_classes=None, num_outputs=1)),
    ],
)
def test_the_spec_is_read_from_the_data(dataset, spec):
    assert Data(dataset=dataset()).spec == spec
    assert Data(dataset=dataset(), **vars(spec) | {"inputs": None}).spec == spec


def test_statistics_come_from_the_training_split():
    rows = np.random.default_rng(0).normal(5, 3, size=(100, 4))
    data = Data(dataset=table(rows, rows[:, 0]), parts={"train": 0.5, "val": 0.5})
    train, val = data.part("train").entries, data.part("val").entries
    assert torch.allclose(train[0].mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(train[0].std(0, correction=0), torch.ones(4), atol=1e-5)
    assert torch.allclose(train[1].mean(), torch.tensor(0.0), atol=1e-5)
    assert not torch.allclose(val[0].mean(0), torch.zeros(4), atol=1e-3)
    assert torch.equal(train[0][:, :1], train[1])


def test_a_constant_column_becomes_zero():
    data = Data(dataset=table([[1e8, 3.0]] * 6 + [[1e8 + 1, 4.0]] * 6, range(12)), parts={"train": 1.0})
    assert data.part("train").entries[0].unique().tolist() == [-1.0, 1.0]
    constant = Data(dataset=table([[7.0]] * 4, range(4)), parts={"train": 1.0})
    assert constant.part("train").entries[0].unique().tolist() == [0.0]


def test_splits_of_different_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"data.train: a training split with no statistics, and .* Table"):
        Data(train=torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1)), val=table([[1.0]], [1]))
    with pytest.raises(ConfigError, match="no training split"):
        Data(test=table([[1.0]], [1]))
    with pytest.raises(ConfigError, match="columns"):
        Data(train=table([[1.0]], [1]), val=table([[1.0, 2.0]], [1]))


def test_text_splits_are_contiguous(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 50)
    (tmp_path / "b.txt").write_text("klmnopqrst" * 50)
    parts = {"train": 0.5, "val": 0.25, "test": 0.25}
    data = Data(dataset=Text(files=str(tmp_path / "*.txt"), block_size=7), parts=parts)
    texts = [data.part(stage).vocabulary.decode(data.part(stage).tokens) for stage in ("train", "val", "test")]
    assert texts[0] == "abcdefghij" * 50
    assert data.part("val").tokens.unique().tolist() == [0], "the vocabulary has a character of val"
    assert [len(text) for text in texts] == [500, 250, 250]


def test_targets_are_the_next_characters(tmp_path):
    text = "".join(chr(33 + i) for i in range(90))
    (tmp_path / "a.txt").write_text(text)
    data = Data(dataset=Text(files=str(tmp_path / "a.txt"), block_size=8), parts={"train": 1.0}, batch_size=4, seed=1)
    vocabulary = data.part("train").vocabulary
    assert data.spec == DataSpec(input_shape=(8,), input_dtype="int64", num_classes=91, num_outputs=91)
    loader = data.loader("train")
    cuts = set()
    for _ in range(6):
        starts = []
        for inputs, targets in (pair for batch in loader for pair in zip(*batch.data, strict=True)):
            whole = vocabulary.decode(inputs) + vocabulary.decode(targets)[-1]
            assert whole in text + text[:8], "a block is not a part of the text"
            assert torch.equal(inputs[1:], targets[:-1])
            starts.append(text.index(whole[0]))
        assert len(starts) == len(set(starts)) == len(loader.dataset) == 11
        cuts.add(min(start % 8 for start in starts))
    assert len(cuts) > 1, "blocks start at the same characters in each epoch"


@given(st.text(min_size=1), st.text(), st.integers(1, 5))
def test_rare_characters_are_unknown(known, text, size):
    vocabulary = Vocabulary.of(code_points(known), size=size)
    assert len(vocabulary) == min(size, len(set(known))) + 1
    kept = set(vocabulary.characters[1:])
    counts = {character: known.count(character) for character in set(known)}
    assert all(counts[inside] >= counts[outside] for inside in kept for outside in set(known) - kept)
    expected = "".join(character if character in kept else UNKNOWN for character in text)
    assert vocabulary.decode(vocabulary.encode(code_points(text))) == expected


def test_errors_of_texts(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"data.dataset.files: .*nothing.txt, which matches no file"):
        Text(files="nothing.txt")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        Text(files=str(tmp_path / "latin.txt"))
    with pytest.raises(ConfigError, match=r"block_size: 8, although a split has only 3 characters; expected at most 2"):
        Data(train=Text(files=str(tmp_path / "short.txt"), block_size=8))
