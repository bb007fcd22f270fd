"""Tests of memory-mapped token files, and of texts split by a tokenizer."""

import io
import tracemalloc

import numpy as np
import pytest
import torch

import exp
from exp.data.data import Data
from exp.data.data_errors import SampleError
from exp.errors import ConfigError
from exp.extras.tokenizers.token_file import TokenFile
from exp.extras.tokenizers.tokens import Tokens

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.fixture
def tokens(tmp_path):
    """A file of tokens, where each token is its position."""
    numbers = np.arange(1000, dtype=np.uint16)
    numbers.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", numbers.astype(np.int32))
    return tmp_path


def made(folder, name="tokens.bin", **choices):
    dataset = TokenFile(path=name, directory=str(folder), vocabulary_size=1000, block_size=16)
    return Data(**{"dataset": dataset, "parts": PARTS, "batch_size": 8, "seed": 1, **choices})


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_targets_are_the_next_tokens(tokens, name):
    data = made(tokens, name)
    assert (data.spec.num_classes, data.spec.input_shape, data.spec.input_dtype) == (1000, (16,), "int64")
    loader = data.loader("train")
    firsts = []
    for _ in range(3):
        batches = list(loader)
        inputs, targets = (torch.cat([batch.data[place] for batch in batches]) for place in (0, 1))
        assert inputs.dtype == targets.dtype == torch.int64
        # The target of the last token is the first token.
        assert torch.equal(targets, (inputs + 1) % 800)
        assert len(inputs) == 799 // 16
        assert len(inputs.unique()) == inputs.numel()
        firsts.append(int(inputs.min(1).values.min()) % 16)
    assert len(set(firsts)) > 1


def test_splits_are_contiguous(tokens):
    data = made(tokens)
    for stage, start, count in (("val", 800, 6), ("test", 900, 6)):
        inputs = torch.cat([batch.data[0] for batch in data.loader(stage)])
        assert inputs.flatten().tolist() == list(range(start, start + count * 16))
    counted = made(tokens, parts={"train": 10, "val": 3, "test": 1})
    assert [len(counted.part(stage)) for stage in counted.stages] == [10, 3, 1]


def test_a_large_file_is_not_read_into_memory(tmp_path):
    size = 2**38  # a sparse file
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"\1\0" * 2**20)
    tracemalloc.start()
    dataset = TokenFile(path="tokens.bin", directory=str(tmp_path), vocabulary_size=1000, block_size=1024)
    data = Data(dataset=dataset, parts={"train": 1.0}, batch_size=8)
    loader = data.loader("train")
    loader.set_position(3, len(loader) // 2)
    batch = next(iter(loader))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.data[0].shape == (8, 1024)
    assert len(data.part("train")) == (size // 2 - 1) // 1024
    assert int(data.part("train")[size // 4 // 1024][0].sum()) == 1024
    assert peak < 2**25


def array(made) -> bytes:
    raw = io.BytesIO()
    np.save(raw, made)
    return raw.getvalue()


NPY = {"path": "tokens.npy"}


@pytest.mark.parametrize(
    ("content", "choices", "message"),
    [
        (b"123", {}, r"tokens.bin of 3 bytes; expected numbers of 2 bytes each, data.dataset.dtype=uint16"),
        (b"", {}, r"tokens.bin of 0 bytes"),
        (bytes(80), {"vocabulary_size": None}, r"data.dataset.vocabulary_size: null, without a tokenizer"),
        (b"\x93NUMPY" + bytes(80), {"path": "tokens.pt"}, r"tokens.pt; expected a .npy, or a .bin of raw numbers"),
        (
            bytes(80),
            {"block_size": 40},
            r"data.dataset.block_size: 40, although a split has only 40 tokens; expected at most 39",
        ),
        (array(np.zeros((4, 4), dtype=np.int64)), NPY, r"tokens.npy of shape .*; expected integers"),
        (array(np.zeros(40)), NPY, r"tokens.npy of shape .*; expected integers"),
        (array(np.zeros(40, dtype=">u2")), NPY, r"tokens.npy of shape .*; expected integers"),
    ],
)
def test_errors_of_files(tmp_path, content, choices, message):
    settings = {"path": "tokens.bin", "vocabulary_size": 5, "block_size": 4, **choices}
    (tmp_path / settings["path"]).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Data(dataset=TokenFile(directory=str(tmp_path), **settings), parts={"train": 1.0})


def test_tokens_outside_the_vocabulary_are_refused(tokens):
    small = TokenFile(path="tokens.bin", directory=str(tokens), vocabulary_size=700, block_size=16)
    with pytest.raises(SampleError, match=r"700; expected 701 or more"):
        list(Data(dataset=small, parts=PARTS, batch_size=8).loader("train"))


TEXT = "".join(f"the cat sat on mat {number},\n and  the dog\u00e9 too\n\n" for number in range(300))


@pytest.fixture
def story(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    path = tmp_path / "story.txt"
    path.write_text(TEXT + "zzz \u4e2d\u6587 " * 400, encoding="utf-8")
    return str(path)


def test_the_tokenizer_is_fitted_to_the_training_split(story):
    data = Data(dataset=Tokens(files=story, vocabulary_size=300, block_size=8), parts=PARTS, batch_size=4)
    val = data.part("val")
    whole = TEXT + "zzz \u4e2d\u6587 " * 400
    assert val.vocabulary.decode(val.tokens) == whole[round(0.8 * len(whole)) : round(0.9 * len(whole))]
    assert data.spec.num_classes == data.spec.num_outputs == len(val.vocabulary) == 300
    inputs, targets = next(iter(data.loader("train"))).data
    assert (inputs.dtype, inputs.shape) == (torch.int64, (4, 8))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # Each byte of an unknown word is a token.
    train = data.part("train")
    assert len(train.tokens) < 0.6 * round(0.8 * len(whole))
    assert len(data.part("test").tokens) > len("zzz \u4e2d\u6587 " * 400) * 0.8
    again = Data(dataset=Tokens(files=story, vocabulary_size=300, block_size=8), parts=PARTS)
    assert again.fitted == data.fitted


def test_a_tokenizer_is_read_from_a_file(story, tmp_path):
    made = Tokens(files=story, vocabulary_size=270).fit()["tokenizer"]
    (tmp_path / "tokenizer.json").write_text(made)
    data = Data(dataset=Tokens(files=story, tokenizer=str(tmp_path / "tokenizer.json")), parts=PARTS)
    assert data.spec.num_classes == 270
    words = ["data=tokens", f"data.dataset.files={story}", f"data.dataset.tokenizer={tmp_path}/tokenizer.json"]
    exp.validate(exp.compose(words))


@pytest.mark.parametrize(
    ("settings", "parts", "message"),
    [
        (
            {"block_size": 4000},
            PARTS,
            r"data.dataset.block_size: 4000, although a split has only \d+ tokens; expected at most \d+",
        ),
        ({}, {"train": 0.8, "val": 20}, r"data.parts.val: 20; expected a fraction: the number of blocks"),
        ({"tokenizer": "story.txt"}, PARTS, r"data.dataset.tokenizer: story.txt \(.*\); expected a tokenizer.json"),
        ({"tokenizer": "stry.txt"}, PARTS, r"no file at .*stry.txt.*Did you mean story.txt"),
    ],
)
def test_errors_of_tokens(story, tmp_path, monkeypatch, settings, parts, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Data(dataset=Tokens(**{"files": story, "vocabulary_size": 300, **settings}), parts=parts)
