"""The data sets hold what their sources hold, and take from the training part alone."""

import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
from hypothesis import given
from hypothesis import strategies as st

from exp.data import dataset_files, digits, tables
from exp.data.data import Data
from exp.data.digits import Digits
from exp.data.in_memory import tensors_of
from exp.data.letter_names import ALPHABET, SCRIPTS, LetterNames
from exp.data.tables import BreastCancer, Diabetes, ShippedTable, Table, Wine
from exp.data.text import UNKNOWN, Text, Vocabulary, code_points
from exp.errors import ConfigError
from exp.shared_types import DataSpec


def table(values, target, **settings) -> Table:
    return ShippedTable(
        features=np.asarray(values, dtype=float),
        targets=np.asarray(target),
        columns=tuple(f"c{i}" for i in range(len(values[0]))),
        **{"classes": None, "standardise": True, **settings},
    )


def test_letter_names_are_those_of_unicode_and_end_with_their_last_letter():
    names = LetterNames()
    rows, scripts = names.entries
    assert rows.shape[1] == 20
    texts = ["".join(ALPHABET[number] for number in row) for row in rows.tolist()]
    whole = [text.lstrip("\0") for text in texts]
    assert all(text.rjust(20, "\0") == row for text, row in zip(whole, texts, strict=True))
    greek = {text for text, script in zip(whole, scripts.tolist(), strict=True) if SCRIPTS[script] == "GREEK"}
    letters = {unicodedata.name(chr(code), "") for code in range(0x370, 0x400)}
    assert "ALPHA" in greek
    assert "GREEK SMALL LETTER OMEGA" in letters
    assert torch.bincount(scripts).min() > 100
    assert torch.bincount(LetterNames(most=50).entries[1]).max() <= 50


def test_digits_are_scikit_learns():
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
def test_tables_are_scikit_learns(ours, theirs):
    bunch = theirs()
    made = ours(standardise=False)
    features, targets = made.encoded(made.fit())["input"], made.entries["target.target"]
    assert np.array_equal(features.numpy(), bunch.data)
    assert np.array_equal(targets.flatten().numpy(), bunch.target)
    assert len(made.columns) == bunch.data.shape[1]
    if made.classes:
        assert list(made.classes["target"]) == list(bunch.target_names)


def test_the_column_names_are_in_the_files_order():
    assert list(tables.WINE_COLUMNS)[:11] == sklearn.datasets.load_wine().feature_names[:11]
    assert list(tables.DIABETES_COLUMNS) == sklearn.datasets.load_diabetes().feature_names
    theirs = [
        name.replace(" error", "").replace(" ", "_") for name in sklearn.datasets.load_breast_cancer().feature_names
    ]
    ours = [name.removeprefix("error_") for name in tables.BREAST_CANCER_COLUMNS]
    assert ours == theirs


@pytest.mark.parametrize("ours", [Digits, BreastCancer, Wine, Diabetes])
def test_scikit_learn_itself_is_asked_where_its_files_have_moved(ours, monkeypatch, caplog):
    expected = tensors_of(ours().entries)
    monkeypatch.setattr(dataset_files.importlib.util, "find_spec", lambda name: None)
    for mine, theirs in zip(tensors_of(ours().entries), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert "importing sklearn.datasets" in caplog.text


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (Digits, DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)),
        (BreastCancer, DataSpec(input_shape=(30,), input_dtype="float32", num_classes=2, num_outputs=2)),
        (Wine, DataSpec(input_shape=(13,), input_dtype="float32", num_classes=3, num_outputs=3)),
        (Diabetes, DataSpec(input_shape=(10,), input_dtype="float32", num_classes=None, num_outputs=1)),
    ],
)
def test_the_spec_is_read_from_the_data_and_agrees_with_the_one_declared(dataset, spec):
    assert Data(dataset=dataset()).spec == spec
    assert Data(dataset=dataset(), **vars(spec) | {"inputs": None}).spec == spec


def test_only_the_training_parts_rows_standardise():
    rows = np.random.default_rng(0).normal(5, 3, size=(100, 4))
    data = Data(dataset=table(rows, rows[:, 0]), parts={"train": 0.5, "val": 0.5})
    train, val = data.part("train").entries, data.part("val").entries
    assert torch.allclose(train[0].mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(train[0].std(0, correction=0), torch.ones(4), atol=1e-5)
    assert torch.allclose(train[1].mean(), torch.tensor(0.0), atol=1e-5)
    assert not torch.allclose(val[0].mean(0), torch.zeros(4), atol=1e-3)
    # One scaling for both: the rows together are an affine image of the raw ones.
    both = torch.cat([train[0][:, 0], val[0][:, 0]]).sort().values
    raw = torch.from_numpy(np.sort(rows[:, 0])).float()
    assert torch.corrcoef(torch.stack([both, raw]))[0, 1] > 0.99999
    assert torch.equal(train[0][:, :1], train[1])


def test_a_column_that_never_changes_in_training_becomes_zero():
    data = Data(dataset=table([[1e8, 3.0]] * 6 + [[1e8 + 1, 4.0]] * 6, range(12)), parts={"train": 1.0})
    assert data.part("train").entries[0].unique().tolist() == [-1.0, 1.0]
    constant = Data(dataset=table([[7.0]] * 4, range(4)), parts={"train": 1.0})
    assert constant.part("train").entries[0].unique().tolist() == [0.0]


def test_a_part_of_another_kind_than_training_is_refused():
    with pytest.raises(ConfigError, match=r"data.train: a training part that tells nothing, beside .* ShippedTable"):
        Data(train=torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1)), val=table([[1.0]], [1]))
    with pytest.raises(ConfigError, match="no training part"):
        Data(test=table([[1.0]], [1]))
    with pytest.raises(ConfigError, match="columns"):
        Data(train=table([[1.0]], [1]), val=table([[1.0, 2.0]], [1]))


def test_text_parts_are_contiguous_and_together_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 50)
    (tmp_path / "b.txt").write_text("klmnopqrst" * 50)
    data = Data(
        dataset=Text(files=str(tmp_path / "*.txt"), block_size=7), parts={"train": 0.5, "val": 0.25, "test": 0.25}
    )
    texts = [data.part(stage).vocabulary.decode(data.part(stage).tokens) for stage in ("train", "val", "test")]
    assert texts[0] == "abcdefghij" * 50
    assert data.part("val").tokens.unique().tolist() == [0], "val's characters are unknown to training"
    assert [len(text) for text in texts] == [500, 250, 250]


def test_a_block_is_followed_by_its_next_character_in_every_epoch(tmp_path):
    text = "".join(chr(33 + i) for i in range(90))
    (tmp_path / "a.txt").write_text(text)
    data = Data(dataset=Text(files=str(tmp_path / "a.txt"), block_size=8), parts={"train": 1.0}, batch_size=4, seed=1)
    vocabulary = data.part("train").vocabulary
    assert data.spec == DataSpec(input_shape=(8,), input_dtype="int64", num_classes=91, num_outputs=91)
    loader = data.loader("train")
    cuts = set()
    for _ in range(6):
        starts = []
        for batch in loader:
            inputs, targets = batch.data
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.is_contiguous()
            for row, following in zip(inputs, targets, strict=True):
                whole = vocabulary.decode(row) + vocabulary.decode(following)[-1]
                assert whole in text + text[:8], "a block reads on over the end of the text"
                assert torch.equal(row[1:], following[:-1])
                starts.append(text.index(whole[0]))
        assert len(starts) == len(set(starts)) == len(loader.dataset) == 11
        cuts.add(min(start % 8 for start in starts))
    assert len(cuts) > 1, "every epoch cuts at another offset"


def test_the_default_text_is_pythons_standard_library():
    text = Text(block_size=64, vocabulary_size=100)
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=str)
    assert "".join(map(chr, text.codes[:500])) == first.read_text()[:500]
    assert len(text.codes) > 3_000_000
    data = Data(dataset=text, parts={"train": 0.9, "val": 0.05, "test": 0.05})
    assert data.spec.num_classes == 101
    assert (data.part("val").tokens == 0).float().mean() < 0.01


@given(st.text(min_size=1))
def test_encoding_is_undone_by_decoding(text):
    vocabulary = Vocabulary.of(code_points(text))
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary) == len(set(text)) + 1


@given(st.text(min_size=1), st.text(), st.integers(1, 5))
def test_characters_outside_the_vocabulary_are_the_unknown_one(known, text, size):
    vocabulary = Vocabulary.of(code_points(known), size=size)
    assert len(vocabulary) == min(size, len(set(known))) + 1
    kept = set(vocabulary.characters[1:])
    counts = {character: known.count(character) for character in set(known)}
    assert all(counts[inside] >= counts[outside] for inside in kept for outside in set(known) - kept)
    expected = "".join(character if character in kept else UNKNOWN for character in text)
    assert vocabulary.decode(vocabulary.encode(text)) == expected


def test_text_faults(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"data.dataset.files: .*nothing.txt, which finds no file"):
        Text(files="nothing.txt")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        Text(files=str(tmp_path / "latin.txt"))
    with pytest.raises(
        ConfigError, match=r"data.dataset.block_size: 8, and a part of 3 characters; expected 2 at most"
    ):
        Data(train=Text(files=str(tmp_path / "short.txt"), block_size=8))


def test_the_digits_file_is_read_without_importing_scikit_learn():
    import subprocess
    import sys

    code = "import sys; from exp.data.digits import Digits; Digits(); sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_digits_constants_are_about_the_pixels_own():
    pixels = sklearn.datasets.load_digits().data
    assert abs(pixels.mean() - digits.CENTRE) < 0.2
    assert abs(pixels.std() - digits.SPREAD) < 0.2
