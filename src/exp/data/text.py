"""Data set of text for language models that predict the next character."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.data_errors import data_error, fitted_entry
from exp.data.dataset_files import find_files
from exp.data.entries import TARGET, ValueNames
from exp.data.in_memory import Fitted, Gathered
from exp.data.randomness import seed_for
from exp.data.splits import contiguous_splits
from exp.shared_types import Stage

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# The key of the vocabulary in the statistics that Text.fit returns.
FITTED = "characters"


class Text(Dataset[object]):
    """Data set of the text in files. Characters are encoded as numbers from the vocabulary of the training split.

    Args:
        files: A path or glob pattern such as `books/**/*.txt`, or a list of them, relative to the current folder or to
            `directory`. The texts are joined in the order of the paths. Default: the modules at the top level of
            Python's standard library, because these 4.7 million characters exist on every machine.
        directory: The folder that is searched if a pattern matches no file in the current folder. Default: `data`.
        block_size: The number of characters in a sample, T. Default: 64.
        vocabulary_size: The number of characters in the vocabulary. The most frequent characters of the training split
            are kept, and all others become a single unknown character. Default: all characters of the training split.

    Attributes:
        codes: The Unicode code points of the text, uint32.

    Raises:
        ConfigError: A pattern matches no file, or a file is not UTF-8.
    """

    def __init__(
        self,
        *,
        files: str | Sequence[str] | None = None,
        directory: str = "data",
        block_size: Annotated[int, Ge(1)] = 64,
        vocabulary_size: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        self.codes = code_points("".join(read_text(path) for path in find_files(files, directory=directory)))
        self.block_size, self.vocabulary_size = block_size, vocabulary_size

    def __len__(self) -> int:
        """Return the number of blocks, which are the samples."""
        return max(0, (len(self.codes) - 1) // self.block_size)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Text]:
        """Return consecutive parts of the text as splits, by name. The splits do not overlap.

        Args:
            sizes: The size of each split: a fraction of the characters, or a whole number of blocks.
        """
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous_splits(sizes, len(self.codes), block_size=self.block_size).items():
            parts[name].codes = self.codes[place]
        return parts

    def fit(self) -> Fitted:
        """Return the statistics of this split: its characters, which are the vocabulary of all splits."""
        return {FITTED: Vocabulary.of(self.codes, size=self.vocabulary_size).characters}

    def prepare(self, fitted: Fitted) -> TextBlocks:
        """Return a data set of the blocks of the encoded text.

        Args:
            fitted: The statistics of the training split.

        Raises:
            ConfigError: The text is shorter than a block, or the training split is not a Text data set.
        """
        vocabulary = Vocabulary(characters=fitted_entry(fitted, FITTED, part=self))
        tokens = vocabulary.encode(self.codes)
        return TextBlocks(tokens=tokens, block_size=self.block_size, vocabulary=vocabulary)


class Vocabulary:
    """Mapping between the characters of a text and their numbers. The number 0 means the unknown character.

    Args:
        characters: The characters in the order of their numbers. The first one replaces unknown characters.
    """

    unit = "characters"
    unknown = 0

    def __init__(self, *, characters: str) -> None:
        self.characters = characters
        known = code_points(characters[1:])
        self._numbers = np.zeros(int(known.max(initial=0)) + 1, dtype=smallest_dtype(len(characters)))
        self._numbers[known] = np.arange(1, len(known) + 1)

    @classmethod
    def of(cls, codes: np.ndarray, *, size: int | None = None) -> Vocabulary:
        """Return the vocabulary of a text. The numbers 1, 2, 3, ... are in the order of Unicode.

        Args:
            codes: The code points of the text.
            size: The number of characters in the vocabulary. The most frequent characters are kept. Default: all
                characters.
        """
        counts = np.bincount(codes)
        known = np.flatnonzero(counts)
        if size is not None and size < len(known):
            # The sort is stable. If two characters are equally frequent, the first one in Unicode is therefore kept.
            known = np.sort(known[np.argsort(-counts[known], kind="stable")[:size]])
        return cls(characters=UNKNOWN + "".join(map(chr, known)))

    def __len__(self) -> int:
        return len(self.characters)

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

    def encode(self, codes: np.ndarray) -> Tensor:
        """Return the numbers of characters, `[T]`, in the smallest dtype that can represent the vocabulary.

        Args:
            codes: The code points of the characters, uint32 `[T]`.
        """
        numbers = np.append(self._numbers, self._numbers.dtype.type(0))
        return torch.from_numpy(numbers[np.minimum(codes, len(self._numbers))])


class Decoder(Protocol):
    """Interface of vocabularies, which convert the numbers of characters or tokens to text.

    Attributes:
        unit: The name of the elements of the vocabulary in the plural, such as "characters".
        unknown: The number that means an unknown element. None if the vocabulary has no such number.
    """

    unit: str

    @property
    def unknown(self) -> int | None: ...

    def __len__(self) -> int:
        """Return the number of elements in the vocabulary."""

    def decode(self, tokens: Tensor) -> str:
        """Return the text that consists of some elements.

        Args:
            tokens: The numbers of the elements, integers `[T]`.
        """


class TextBlocks(Gathered):
    """Data set of blocks of a text. A block has T characters or tokens.

    The input is int64 `[T]`: the numbers of the tokens. The target is int64 `[T]`: the token after each position.

    The training blocks of each epoch start at a different offset below T, so that the context of a token varies between
    epochs. If there is an offset, the last block may continue at the beginning of the text.

    Args:
        tokens: The numbers of all tokens in the text, `[N]`.
        block_size: The number of tokens in a block, T.
        vocabulary: The vocabulary of the numbers.
        offset: The position of the first block in the text. Default: 0.

    Raises:
        ConfigError: The text is too short for one block.
    """

    def __init__(self, *, tokens: Tensor, block_size: int, vocabulary: Decoder, offset: int = 0) -> None:
        self.tokens, self.block_size, self.vocabulary = tokens, block_size, vocabulary
        self.num_classes = len(vocabulary)
        if len(tokens) <= block_size:
            got = f"{block_size}, although a split has only {len(tokens)} {vocabulary.unit}"
            expected = f"at most {max(1, len(tokens) - 1)}, because the last position needs a target"
            raise data_error("dataset.block_size", got=got, expected=expected)
        # The windows are views of the tokens. Two neighboring windows share one token: the last target of the first
        # window is the first input of the second window.
        self._windows = tokens[offset:].unfold(0, block_size + 1, block_size)
        self._last: Tensor | None = None
        if len(self._windows) < len(self):
            rest = tokens[offset + len(self._windows) * block_size :]
            self._last = torch.cat([rest, tokens[: block_size + 1 - len(rest)]])

    @property
    def value_names(self) -> ValueNames:
        """The text of each element of the vocabulary in quotation marks, as names of the classes for display."""
        words = [repr(self.vocabulary.decode(torch.tensor([number]))) for number in range(len(self.vocabulary))]
        unknown = self.vocabulary.unknown
        return ValueNames(
            classes={"input": words, TARGET: words},
            unknown={} if unknown is None else {"input": unknown, TARGET: unknown},
        )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self._last is None:
            windows = self._windows.index_select(0, indices)
        else:
            windows = self._windows.index_select(0, indices.clamp_max(len(self._windows) - 1)).long()
            windows[indices == len(self._windows)] = self._last.long()
        # contiguous is required because long() does not copy tokens that already are int64.
        return windows[:, :-1].long().contiguous(), windows[:, 1:].long().contiguous()

    def at_epoch(self, *, seed: int, epoch: int) -> TextBlocks:
        offset = seed_for(seed, "offset", epoch) % self.block_size
        return TextBlocks(tokens=self.tokens, block_size=self.block_size, vocabulary=self.vocabulary, offset=offset)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise ConfigError if the file is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        got = f"{path}, which is not UTF-8 at byte {error.start}"
        raise data_error("dataset.files", got=got, expected="text in UTF-8") from error


def code_points(text: str) -> np.ndarray:
    """Return the Unicode code points of a text, uint32 `[T]`."""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def smallest_dtype(size: int) -> type[np.integer]:
    return np.uint8 if size <= 2**8 else np.int32
