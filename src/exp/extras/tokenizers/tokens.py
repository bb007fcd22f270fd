"""Data set of text that a tokenizer encodes. The tokenizer is trained on the training split, or read from a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.data_errors import data_error, file_error, fitted_entry, require_extra
from exp.data.dataset_files import data_file, find_files
from exp.data.in_memory import Fitted
from exp.data.splits import contiguous_splits
from exp.data.text import TextBlocks, read_text
from exp.shared_types import Stage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The key of the tokenizer's JSON text in the statistics that Tokens.fit returns.
FITTED = "tokenizer"
# The minimum number of tokens in the vocabulary. All 256 bytes are tokens, so that every text can be encoded.
BYTES = 256


class Tokens(Dataset[object]):
    """Data set of blocks of the text in files, encoded as tokens. A block has T tokens.

    The input is int64 `[T]`: the numbers of the tokens. The target is int64 `[T]`: the token after each position.

    Args:
        files: See Text.
        directory: The folder that is searched if a pattern matches no file in the current folder. Default: `data`.
        tokenizer: A tokenizer.json of the package tokenizers. Default: None, which trains a tokenizer on the training
            split, with byte-level byte-pair encoding.
        vocabulary_size: The number of tokens of a trained tokenizer. Default: 1000. It is ignored if `tokenizer` is
            set.
        block_size: The number of tokens in a sample, T. Default: 64.

    Raises:
        ConfigError: A file does not exist, a text is not UTF-8, or the package tokenizers is not installed.
    """

    def __init__(
        self,
        *,
        files: str | Sequence[str] | None = None,
        directory: str = "data",
        tokenizer: str | None = None,
        vocabulary_size: Annotated[int, Ge(BYTES)] = 1000,
        block_size: Annotated[int, Ge(1)] = 64,
    ) -> None:
        require_extra("tokenizers", feature="data=tokens", extra="tokenizers")
        self.text = "".join(read_text(path) for path in find_files(files, directory=directory))
        self.vocabulary_size, self.block_size = vocabulary_size, block_size
        self.file = None if tokenizer is None else data_file(tokenizer, directory=directory)

    def __len__(self) -> int:
        """Return the number of characters, because the number of blocks is unknown before `prepare`."""
        return len(self.text)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Self]:
        """Return consecutive parts of the text as splits, by name. The splits do not overlap.

        Args:
            sizes: The size of each split: a fraction of the characters.

        Raises:
            ConfigError: A size is a number of blocks. Blocks cannot be counted before the tokenizer is trained.
        """
        for name, size in sizes.items():
            if isinstance(size, int):
                expected = "a fraction: the number of blocks depends on the tokenizer"
                raise data_error(f"parts.{name}", got=str(size), expected=expected)
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous_splits(
            {name: float(size) for name, size in sizes.items()}, len(self.text)
        ).items():
            parts[name].text = self.text[place]
        return parts

    def fit(self) -> Fitted:
        """Return the statistics of this split: the tokenizer as JSON text.

        The tokenizer is read from the file in the option `tokenizer`. If the option is not set, a tokenizer is trained
        on the text of this split.
        """
        found = _train(self.text, self.vocabulary_size) if self.file is None else read_tokenizer(self.file)
        return {FITTED: found.to_str()}

    def prepare(self, fitted: Fitted) -> TextBlocks:
        """Return a data set of the blocks of the encoded text.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: The text is shorter than a block.
        """
        vocabulary = TokenVocabulary(json=fitted_entry(fitted, FITTED, part=self))
        tokens = vocabulary.encode(self.text)
        return TextBlocks(tokens=tokens, block_size=self.block_size, vocabulary=vocabulary)


class TokenVocabulary:
    """Vocabulary of a tokenizer, which encodes text as tokens and decodes tokens.

    Args:
        json: The content of the tokenizer.json file.
    """

    unit = "tokens"

    def __init__(self, *, json: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(json)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def unknown(self) -> int | None:
        # A byte-level tokenizer has no unknown token.
        name = getattr(self._tokenizer.model, "unk_token", None)
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> Tensor:
        """Return the numbers of the tokens of a text, int32 `[N]`."""
        # Lines are encoded separately, because the encoding of a whole book needs much memory. A token therefore never
        # contains parts of two lines.
        lines = self._tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
        numbers = [number for line in lines for number in line.ids]
        return torch.tensor(numbers, dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def _train(text: str, size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer in a file. Raise ConfigError if the file is not a tokenizer."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # The package tokenizers raises errors of the class Exception.
        expected = "a tokenizer.json of the package tokenizers"
        raise file_error(file, error, expected, key="dataset.tokenizer") from error
