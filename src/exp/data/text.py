"""Text data for a character model: each character is predicted from those before it."""

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
from exp.data.entries import TARGET
from exp.data.in_memory import Entries, Fitted
from exp.data.randomness import seed_for
from exp.data.splits import contiguous
from exp.data.value_names import ValueNames
from exp.shared_types import Stage

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# What fit() calls the known characters.
FITTED = "characters"


class Text(Dataset[object]):
    """The text of some files, of which the characters of the training split are numbered.

    Args:
        files: a file, a glob (`books/**/*.txt`), or several of them, relative to the current folder, or else to
            directory; None is the top level of Python's standard library, 4.7 million characters that are on every
            machine. They are joined in the order of their names.
        directory: the folder in which files are looked for after the current one.
        block_size: characters of a sample, T.
        vocabulary_size: how many characters to know, the most frequent ones of training; None for all of them. All
            others are one unknown character, which counts in addition.

    Raises:
        ConfigError: for a pattern without a file, and for a file that is not UTF-8.
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
        """Return contiguous splits, in the order of the text, so that no character of one is seen in another.

        sizes: fractions of the characters, or whole numbers of blocks.
        """
        parts = {name: copy.copy(self) for name in sizes}
        for name, place in contiguous(sizes, len(self.codes), block_size=self.block_size).items():
            parts[name].codes = self.codes[place]
        return parts

    def fit(self) -> Fitted:
        """Return the characters of this text that are known."""
        return {FITTED: Vocabulary.of(self.codes, size=self.vocabulary_size).characters}

    def prepare(self, fitted: Fitted) -> TextBlocks:
        """Return the blocks, encoded in the vocabulary of training.

        Raises: ConfigError for a text that is shorter than a block, and if training is no text.
        """
        vocabulary = Vocabulary(characters=fitted_entry(fitted, FITTED, part=self))
        tokens = vocabulary.encode_codes(self.codes)
        return TextBlocks(tokens=tokens, block_size=self.block_size, vocabulary=vocabulary)


class Vocabulary:
    """Characters by number. characters: in order; the first one, 0, stands for all that are not known."""

    unit = "characters"
    unknown = 0

    def __init__(self, *, characters: str) -> None:
        self.characters = characters
        known = code_points(characters[1:])
        self._numbers = np.zeros(int(known.max(initial=0)) + 1, dtype=smallest_dtype(len(characters)))
        self._numbers[known] = np.arange(1, len(known) + 1)

    @classmethod
    def of(cls, codes: np.ndarray, *, size: int | None = None) -> Vocabulary:
        """The characters of these code points in the order of Unicode, behind the unknown one.

        size: the most frequent ones only; None for all.
        """
        counts = np.bincount(codes)
        known = np.flatnonzero(counts)
        if size is not None and size < len(known):
            # A stable sort of the negative counts: of two equally frequent ones, the first in Unicode.
            known = np.sort(known[np.argsort(-counts[known], kind="stable")[:size]])
        return cls(characters=UNKNOWN + "".join(map(chr, known)))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Numbers of the characters, int64 `[T]`."""
        return self.encode_codes(code_points(text)).long()

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

    def encode_codes(self, codes: np.ndarray) -> Tensor:
        """Numbers of the code points in the smallest dtype that holds them, `[T]`."""
        beyond = len(self._numbers)
        numbers = np.append(self._numbers, self._numbers.dtype.type(0))
        return torch.from_numpy(numbers[np.minimum(codes, beyond)])


class Decoder(Protocol):
    """What the numbers in a text stand for.

    unit: what one of them is, in the plural. unknown: the number of what is not known; None where all is.
    """

    unit: str

    @property
    def unknown(self) -> int | None: ...

    def __len__(self) -> int:
        """How many there are, V."""

    def decode(self, tokens: Tensor) -> str:
        """The text of numbers `[T]`."""


class TextBlocks(Dataset[Entries]):
    """Blocks of a text: input int64 `[T]`, target int64 `[T]`, the same one character, or token, on.

    In training, every epoch cuts the text at another offset, below T, so that a token is not always seen with the same
    context; the last block then goes on at the beginning of the text.
    """

    def __init__(self, *, tokens: Tensor, block_size: int, vocabulary: Decoder, offset: int = 0) -> None:
        self.tokens, self.block_size, self.vocabulary = tokens, block_size, vocabulary
        self.num_classes = len(vocabulary)
        if len(tokens) <= block_size:
            raise data_error(
                "dataset.block_size",
                got=f"{block_size}, and a part of {len(tokens)} {vocabulary.unit}",
                expected=f"{max(1, len(tokens) - 1)} at most: a block and what follows it",
            )
        # Overlap by the one character that is a target in one block and an input in the next; a view, not a copy.
        self._windows = tokens[offset:].unfold(0, block_size + 1, block_size)
        self._last: Tensor | None = None
        if len(self._windows) < len(self):
            behind = tokens[offset + len(self._windows) * block_size :]
            self._last = torch.cat([behind, tokens[: block_size + 1 - len(behind)]])

    @property
    def value_names(self) -> ValueNames:
        """The text of each number, in quotes."""
        words = [repr(self.vocabulary.decode(torch.tensor([number]))) for number in range(len(self.vocabulary))]
        unknown = self.vocabulary.unknown
        return ValueNames(
            classes={"input": words, TARGET: words},
            unknown={} if unknown is None else {"input": unknown, TARGET: unknown},
        )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> Entries:
        inputs, targets = self.gather(torch.tensor([index]))
        return inputs[0], targets[0]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self._last is None:
            windows = self._windows.index_select(0, indices)
        else:
            windows = self._windows.index_select(0, indices.clamp_max(len(self._windows) - 1)).long()
            windows[indices == len(self._windows)] = self._last.long()
        # Whole numbers of their own: a slice of int64 would stay one.
        return windows[:, :-1].long().contiguous(), windows[:, 1:].long().contiguous()

    def at_epoch(self, *, seed: int, epoch: int) -> TextBlocks:
        offset = seed_for(seed, "offset", epoch) % self.block_size
        return TextBlocks(tokens=self.tokens, block_size=self.block_size, vocabulary=self.vocabulary, offset=offset)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise data_error(
            "dataset.files", got=f"{path}, which is not UTF-8 at byte {error.start}", expected="text in UTF-8"
        ) from error


def code_points(text: str) -> np.ndarray:
    """uint32 `[T]`"""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def smallest_dtype(size: int) -> type[np.integer]:
    return np.uint8 if size <= 2**8 else np.int32
