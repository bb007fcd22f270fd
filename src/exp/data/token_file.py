"""Text that is in tokens already, in a file that is mapped into memory and may be larger than it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.arrays import map_file
from exp.data.data_errors import data_error, require_extra
from exp.data.dataset_files import data_file
from exp.data.splits import contiguous
from exp.data.text import Decoder, TextBlocks
from exp.data.tokens import TokenVocabulary, read_tokenizer
from exp.shared_types import Stage

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]


class TokenFile(Dataset[object]):
    """The tokens of a file in blocks: input int64 `[T]`, target int64 `[T]`, the same one token on.

    What a batch needs is read, and no more. The parts are contiguous, in the order of the file.

    path: a file of numbers and nothing else, .bin as nanoGPT and others write it; or .npy, `[N]`. Relative to the
        current folder, or else to directory.
    dtype: of the numbers in a .bin; a .npy says its own.
    vocabulary_size: how many tokens there are, V; None where a tokenizer says it.
    tokenizer: the tokenizer.json of the package tokenizers that made them, for people to read them; found as the file
        is.
    block_size: tokens of a sample, T.

    Raises: ConfigError for a file that is not there or holds something else, and where nobody says V.
    """

    def __init__(
        self,
        *,
        path: str,
        directory: str = "data",
        dtype: TokenDtype = "uint16",
        vocabulary_size: Annotated[int, Ge(1)] | None = None,
        tokenizer: str | None = None,
        block_size: Annotated[int, Ge(1)] = 64,
    ) -> None:
        self.block_size, self.dtype = block_size, dtype
        self.vocabulary = _vocabulary(vocabulary_size, tokenizer, directory=directory)
        self.file = data_file(path, directory=directory)
        self._count = len(mapped_tokens(self.file, dtype))

    def __len__(self) -> int:
        """Return the number of blocks."""
        return max(0, (self._count - 1) // self.block_size)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, FileBlocks]:
        """Return contiguous splits, so that no token of one is seen in another.

        sizes: fractions of the tokens, or whole numbers of blocks.
        """
        places = contiguous(sizes, self._count, block_size=self.block_size, unit="tokens")
        options: dict[str, Any] = {"block_size": self.block_size, "vocabulary": self.vocabulary}
        return {
            name: FileBlocks(file=self.file, dtype=self.dtype, place=place, **options) for name, place in places.items()
        }


class FileBlocks(TextBlocks):
    """Blocks of the tokens at a place of a file, which each process maps into memory."""

    def __init__(self, *, file: Path, dtype: TokenDtype, place: slice, block_size: int, vocabulary: Decoder) -> None:
        self._file, self._dtype, self._place = file, dtype, place
        super().__init__(tokens=mapped_tokens(file, dtype)[place], block_size=block_size, vocabulary=vocabulary)

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled, the mapping is its whole content.
        options: dict[str, Any] = {"block_size": self.block_size, "vocabulary": self.vocabulary}
        made = functools.partial(FileBlocks, file=self._file, dtype=self._dtype, place=self._place, **options)
        return made, ()


def mapped_tokens(file: Path, dtype: TokenDtype) -> Tensor:
    """Return the numbers of a file, read where they are looked at. dtype: of a file without a header.

    Raises: ConfigError for a file that holds no whole numbers in a row, or half of one.
    """
    key, kind = "dataset.path", file.suffix.lower()
    if kind not in (".npy", ".bin"):
        raise data_error(key, got=str(file), expected="a .npy, or a .bin of numbers and nothing else")
    if kind == ".npy":
        held = map_file(file)
        if held.ndim != 1 or held.dtype.kind not in "iu" or not held.dtype.isnative:
            got = f"{file} of shape {list(held.shape)} and {held.dtype.str}"
            raise data_error(key, got=got, expected="whole numbers in a row, [N], in this machine's order")
    else:
        size, each = file.stat().st_size, np.dtype(dtype).itemsize
        if size % each or not size:
            expected = f"numbers of {each} bytes each, data.dataset.dtype={dtype}"
            raise data_error(key, got=f"{file} of {size} bytes", expected=expected)
        held = np.memmap(file, dtype=dtype, mode="r")
    with warnings.catch_warnings():
        # Mapped for writing, a file larger than memory would be refused by the system.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(held)


class TokenNumbers:
    """Tokens of which nobody has told what they stand for. size: how many there are, V."""

    unit = "tokens"
    unknown = None

    def __init__(self, *, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, tokens: Tensor) -> str:
        return " ".join(map(str, tokens.tolist()))


def _vocabulary(size: int | None, tokenizer: str | None, *, directory: str) -> Decoder:
    if tokenizer is not None:
        require_extra("tokenizers", feature="data.dataset.tokenizer", extra="tokenizers", key="dataset.tokenizer")
        found = TokenVocabulary(json=read_tokenizer(data_file(tokenizer, directory=directory)).to_str())
        if size not in (None, len(found)):
            got = f"{size}, and a tokenizer of {len(found)} tokens"
            raise data_error("dataset.vocabulary_size", got=got, expected="null, or as many")
        return found
    if size is None:
        expected = "how many tokens there are, or a tokenizer that says it"
        raise data_error("dataset.vocabulary_size", got="null, without a tokenizer", expected=expected)
    return TokenNumbers(size=size)
