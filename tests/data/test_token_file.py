"""A file of tokens, mapped: its blocks, its parts, a file that is larger than memory, and its faults."""

import tracemalloc

import numpy as np
import pytest
import torch

from exp.data.data import Data
from exp.data.faults import SampleError
from exp.data.token_file import TokenFile
from exp.errors import ConfigError

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.fixture
def tokens(tmp_path):
    """Each its own place, so that a block says where it is from."""
    numbers = np.arange(1000, dtype=np.uint16)
    numbers.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", numbers.astype(np.int32))
    return tmp_path


def made(folder, name="tokens.bin", **choices):
    dataset = TokenFile(path=name, directory=str(folder), vocabulary_size=1000, block_size=16)
    return Data(**{"dataset": dataset, "parts": PARTS, "batch_size": 8, "seed": 1, **choices})


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_a_target_is_the_next_token_and_every_epoch_cuts_all_of_the_part_elsewhere(tokens, name):
    data = made(tokens, name)
    assert (data.spec.num_classes, data.spec.input_shape, data.spec.input_dtype) == (1000, (16,), "int64")
    loader = data.loader("train")
    firsts = []
    for _ in range(3):
        batches = list(loader)
        inputs, targets = (torch.cat([batch.data[place] for batch in batches]) for place in (0, 1))
        assert inputs.dtype == targets.dtype == torch.int64
        # Behind the last token of the part comes its first.
        assert torch.equal(targets, (inputs + 1) % 800)
        assert len(inputs) == 799 // 16
        assert len(inputs.unique()) == inputs.numel()
        firsts.append(int(inputs.min(1).values.min()) % 16)
    assert len(set(firsts)) > 1


def test_parts_are_contiguous_and_in_the_order_of_the_file(tokens):
    data = made(tokens)
    for stage, start, count in (("val", 800, 6), ("test", 900, 6)):
        inputs = torch.cat([batch.data[0] for batch in data.loader(stage)])
        assert inputs.flatten().tolist() == list(range(start, start + count * 16))
    assert len(made(tokens, parts={"train": 10, "val": 3}).part("train")) == 9


def test_workers_started_anew_map_the_file_themselves(tokens):
    settings = {"num_workers": 1, "multiprocessing_context": "spawn", "transforms": [torch.neg]}
    batches = list(made(tokens, **settings).loader("val"))
    assert torch.cat([batch.data[0] for batch in batches]).flatten().tolist() == [-n for n in range(800, 896)]


def test_a_file_larger_than_memory_is_opened_and_resumed_without_reading_it(tmp_path):
    size = 2**38  # of which the file system keeps nothing
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"\1\0" * 2**20)
    tracemalloc.start()
    dataset = TokenFile(path="tokens.bin", directory=str(tmp_path), vocabulary_size=1000, block_size=1024)
    data = Data(dataset=dataset, parts={"train": 1.0}, batch_size=8, shuffle_block=4)
    loader = data.loader("train")
    loader.set_position(3, len(loader) // 2)
    batch = next(iter(loader))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.data[0].shape == (8, 1024)
    assert len(data.part("train")) == (size // 2 - 1) // 1024
    assert int(data.part("train")[size // 4 // 1024][0].sum()) == 1024
    assert peak < 2**25


@pytest.mark.parametrize(
    ("content", "choices", "message"),
    [
        (b"123", {}, r"tokens.bin of 3 bytes; expected numbers of 2 bytes each, data.dataset.dtype=uint16"),
        (b"", {}, r"tokens.bin of 0 bytes"),
        (bytes(80), {"vocabulary_size": None}, r"data.dataset.vocabulary_size: null, without a tokenizer"),
        (bytes(80), {"block_size": 40}, r"data.dataset.block_size: 40, and a part of 40 tokens; expected 39 at most"),
    ],
)
def test_faults_of_a_file(tmp_path, content, choices, message):
    (tmp_path / "tokens.bin").write_bytes(content)
    settings = {"vocabulary_size": 5, "block_size": 4, **choices}
    with pytest.raises(ConfigError, match=message):
        Data(dataset=TokenFile(path="tokens.bin", directory=str(tmp_path), **settings), parts={"train": 1.0})


@pytest.mark.parametrize("array", [np.zeros((4, 4), dtype=np.int64), np.zeros(40)])
def test_an_array_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(ConfigError, match=r"tokens.npy of shape .*; expected whole numbers in a row"):
        TokenFile(path="tokens.npy", directory=str(tmp_path), vocabulary_size=5)


def test_a_token_outside_the_vocabulary_is_refused_where_it_is_read(tokens):
    small = TokenFile(path="tokens.bin", directory=str(tokens), vocabulary_size=700, block_size=16)
    with pytest.raises(SampleError, match=r"700; expected 701 or more"):
        list(Data(dataset=small, parts=PARTS, batch_size=8).loader("train"))
