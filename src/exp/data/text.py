"""Text data for character models, which predict the next character."""

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
# The key of the vocabulary in the statistics that fit() returns.
FITTED = "characters"


class Text(Dataset[object]):
    """The text of files, encoded as numbers of the characters in the training split.

    Args:
        files: One or several files or glob patterns (`books/**/*.txt`), relative to the current folder or to
            `directory`. None reads the top level of Python's standard library: 4.7 million characters that exist on
            every machine. The files are joined in the order of their names.
        directory: The folder that is searched if a pattern matches no file in the current folder.
        block_size: The number of characters in a sample, T.
        vocabulary_size: The number of characters in the vocabulary; None for all characters of the training split.
            The most frequent characters are kept. All others become a single unknown character.

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
        """Return the number of blocks."""
        return max(0, (len(self.codes) - 1) // self.block_size)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, Text]:
        """Return contiguous splits in the order of the text. The splits share no characters.

        Args:
            sizes: The size of each split: a fraction of the characters, or a whole number of blocks.
        """
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous_splits(sizes, len(self.codes), block_size=self.block_size).items():
            parts[name].codes = self.codes[place]
        return parts

    def fit(self) -> Fitted:
        """Return the characters of this split, which become the vocabulary of all splits."""
        return {FITTED: Vocabulary.of(self.codes, size=self.vocabulary_size).characters}

    def prepare(self, fitted: Fitted) -> TextBlocks:
        """Return the blocks of the text, encoded with the characters of the training split.

        Raises:
            ConfigError: The text is shorter than a block, or the training split is not text.
        """
        vocabulary = Vocabulary(characters=fitted_entry(fitted, FITTED, part=self))
        tokens = vocabulary.encode(self.codes)
        return TextBlocks(tokens=tokens, block_size=self.block_size, vocabulary=vocabulary)


class Vocabulary:
    """The characters of a text in the order of their numbers. Number 0 is the unknown character."""

    unit = "characters"
    unknown = 0

    def __init__(self, *, characters: str) -> None:
        self.characters = characters
        known = code_points(characters[1:])
        self._numbers = np.zeros(int(known.max(initial=0)) + 1, dtype=smallest_dtype(len(characters)))
        self._numbers[known] = np.arange(1, len(known) + 1)

    @classmethod
    def of(cls, codes: np.ndarray, *, size: int | None = None) -> Vocabulary:
        """Return the vocabulary of a text: the unknown character, followed by the others in the order of Unicode.

        Args:
            codes: The code points of the text.
            size: The number of characters to keep, the most frequent first; None for all characters.
        """
        counts = np.bincount(codes)
        known = np.flatnonzero(counts)
        if size is not None and size < len(known):
            # The sort is stable, so that of two equally frequent characters the first in Unicode is kept.
            known = np.sort(known[np.argsort(-counts[known], kind="stable")[:size]])
        return cls(characters=UNKNOWN + "".join(map(chr, known)))

    def __len__(self) -> int:
        return len(self.characters)

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

    def encode(self, codes: np.ndarray) -> Tensor:
        """Return the numbers of code points, `[T]`, in the smallest dtype."""
        numbers = np.append(self._numbers, self._numbers.dtype.type(0))
        return torch.from_numpy(numbers[np.minimum(codes, len(self._numbers))])


class Decoder(Protocol):
    """Converts numbers to text.

    Attributes:
        unit: The name of the numbered elements in the plural, such as "characters".
        unknown: The number of the unknown element; None if there is no unknown element.
    """

    unit: str

    @property
    def unknown(self) -> int | None: ...

    def __len__(self) -> int:
        """Return the number of elements, V."""

    def decode(self, tokens: Tensor) -> str:
        """Return the text of numbers `[T]`."""


class TextBlocks(Gathered):
    """Blocks of a text.

    Input and target are int64 `[T]`; the target is the next character or token of each position.

    In training, the blocks of each epoch start at a different offset below T, so that the context of a token varies.
    The last block then wraps around to the beginning of the text.
    """

    def __init__(self, *, tokens: Tensor, block_size: int, vocabulary: Decoder, offset: int = 0) -> None:
        self.tokens, self.block_size, self.vocabulary = tokens, block_size, vocabulary
        self.num_classes = len(vocabulary)
        if len(tokens) <= block_size:
            got = f"{block_size}, although a split has only {len(tokens)} {vocabulary.unit}"
            expected = f"at most {max(1, len(tokens) - 1)}, because the last position needs a target"
            raise data_error("dataset.block_size", got=got, expected=expected)
        # A view of the tokens. Windows overlap by one token, which is a target in one block and an input in the next.
        self._windows = tokens[offset:].unfold(0, block_size + 1, block_size)
        self._last: Tensor | None = None
        if len(self._windows) < len(self):
            rest = tokens[offset + len(self._windows) * block_size :]
            self._last = torch.cat([rest, tokens[: block_size + 1 - len(rest)]])

    @property
    def value_names(self) -> ValueNames:
        """The text of each number, in quotation marks."""
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
        # contiguous is required because for int64 tokens, long() returns a view and not a copy.
        return windows[:, :-1].long().contiguous(), windows[:, 1:].long().contiguous()

    def at_epoch(self, *, seed: int, epoch: int) -> TextBlocks:
        offset = seed_for(seed, "offset", epoch) % self.block_size
        return TextBlocks(tokens=self.tokens, block_size=self.block_size, vocabulary=self.vocabulary, offset=offset)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise ConfigError for any other encoding."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        got = f"{path}, which is not UTF-8 at byte {error.start}"
        raise data_error("dataset.files", got=got, expected="text in UTF-8") from error


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, uint32 `[T]`."""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def smallest_dtype(size: int) -> type[np.integer]:
    return np.uint8 if size <= 2**8 else np.int32
