"""Text in tokens of a tokenizer, trained on the training part or read from a file. By tokenizers, an extra."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.data_errors import data_error, fitted_entry, require_extra
from exp.data.dataset_files import data_file, find_files
from exp.data.in_memory import Fitted
from exp.data.splits import contiguous
from exp.data.text import TextBlocks, read_text
from exp.shared_types import Stage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What fit() calls the tokenizer, as the JSON of its file.
FITTED = "tokenizer"
# Bytes are tokens of their own, so that none is unknown.
BYTES = 256


class Tokens(Dataset[object]):
    """The text of some files in tokens: input int64 `[T]`, target int64 `[T]`, the same one token on.

    files: a file, a glob (`books/**/*.txt`), or several, relative to the current folder, or else to directory; None is
        the top level of Python's own standard library. They are joined in the order of their names.
    tokenizer: a file of the tokenizers package (tokenizer.json), found as the files are; None trains byte-level
        byte-pair encoding on the training part.
    vocabulary_size: of the one that is trained, V. block_size: tokens of a sample, T.

    Raises: ConfigError where no file is found, one is not UTF-8 or no tokenizer; where tokenizers is not installed.
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
        """The number of characters, as long as there are no tokens."""
        return len(self.text)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Self]:
        """Splits into contiguous parts, in the order of the text, so that no character of one is seen in another.

        sizes: fractions of the characters.
        Raises: ConfigError for a number of samples, which nobody knows before there is a tokenizer.
        """
        for name, size in sizes.items():
            if isinstance(size, int):
                expected = "a fraction: how many blocks there are, the tokenizer decides"
                raise data_error(f"parts.{name}", got=str(size), expected=expected)
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous({name: float(size) for name, size in sizes.items()}, len(self.text)).items():
            parts[name].text = self.text[place]
        return parts

    def fit(self) -> Fitted:
        """The tokenizer: that of the file, or one that is trained on this part."""
        return {
            FITTED: (
                _trained(self.text, self.vocabulary_size) if self.file is None else read_tokenizer(self.file)
            ).to_str()
        }

    def prepare(self, fitted: Fitted) -> TextBlocks:
        """Encodes this part by the tokenizer.

        Raises: ConfigError where it is shorter than a block.
        """
        vocabulary = TokenVocabulary(json=fitted_entry(fitted, FITTED, part=self))
        tokens = vocabulary.encode(self.text)
        return TextBlocks(tokens=tokens, block_size=self.block_size, vocabulary=vocabulary)


class TokenVocabulary:
    """The tokens of a tokenizer. json: the content of its file."""

    unit = "tokens"

    def __init__(self, *, json: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(json)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def unknown(self) -> int | None:
        # A model of bytes, or of pieces, has none.
        name = getattr(self._tokenizer.model, "unk_token", None)
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> Tensor:
        """Numbers of the tokens, int32 `[T]`."""
        # Line by line, for whole books are more than an encoding should hold; each token lies within a line.
        lines = self._tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
        numbers = [number for line in lines for number in line.ids]
        return torch.tensor(numbers, dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def _trained(text: str, size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a file.

    Raises: ConfigError where it is none.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # what tokenizers raises has no class of its own
        got = f"{file} ({str(error).splitlines()[0]})"
        raise data_error("dataset.tokenizer", got=got, expected="a tokenizer.json of the package tokenizers") from error
