"""Text in tokens: of a tokenizer that knows the training part alone, or of a file."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")

import exp
from exp.data.data import Data
from exp.data.tokens import Tokens
from exp.errors import ConfigError

TEXT = "".join(f"the cat sat on mat {number},\n and  the dog\u00e9 too\n\n" for number in range(300))
PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(TEXT + "zzz \u4e2d\u6587 " * 400, encoding="utf-8")
    return str(path)


def test_tokens_are_the_text_and_of_training_alone(story):
    data = Data(dataset=Tokens(files=story, vocabulary_size=300, block_size=8), parts=PARTS, batch_size=4)
    val = data.part("val")
    whole = TEXT + "zzz \u4e2d\u6587 " * 400
    assert val.vocabulary.decode(val.tokens) == whole[round(0.8 * len(whole)) : round(0.9 * len(whole))]
    assert data.spec.num_classes == data.spec.num_outputs == len(val.vocabulary) == 300
    inputs, targets = next(iter(data.loader("train"))).data
    assert (inputs.dtype, inputs.shape) == (torch.int64, (4, 8))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # Of words that training has not seen each byte is a token; of its own one token is a word.
    train = data.part("train")
    assert len(train.tokens) < 0.6 * round(0.8 * len(whole))
    assert len(data.part("test").tokens) > len("zzz \u4e2d\u6587 " * 400) * 0.8
    again = Data(dataset=Tokens(files=story, vocabulary_size=300, block_size=8), parts=PARTS)
    assert again.fitted == data.fitted


def test_a_tokenizer_of_a_file(story, tmp_path):
    made = Tokens(files=story, vocabulary_size=270).fit()["tokenizer"]
    (tmp_path / "tokenizer.json").write_text(made)
    data = Data(dataset=Tokens(files=story, tokenizer=str(tmp_path / "tokenizer.json")), parts=PARTS)
    assert data.spec.num_classes == 270
    words = ["data=tokens", f"data.dataset.files={story}", f"data.dataset.tokenizer={tmp_path}/tokenizer.json"]
    exp.validate(exp.compose(words))


@pytest.mark.parametrize(
    ("settings", "parts", "message"),
    [
        ({"block_size": 4000}, PARTS, r"data.dataset.block_size: 4000, and a part of \d+ tokens; expected \d+ at most"),
        ({}, {"train": 0.8, "val": 20}, r"data.parts.val: 20; expected a fraction: how many blocks there are"),
        ({"tokenizer": "story.txt"}, PARTS, r"data.dataset.tokenizer: story.txt \(.*\); expected a tokenizer.json"),
        ({"tokenizer": "stry.txt"}, PARTS, r"no file at .*stry.txt.*Did you mean story.txt"),
    ],
)
def test_faults_of_tokens(story, tmp_path, monkeypatch, settings, parts, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Data(dataset=Tokens(**{"files": story, "vocabulary_size": 300, **settings}), parts=parts)
