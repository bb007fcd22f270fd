"""Data set of a file of tokens. The file is memory-mapped, so it may be larger than memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.arrays import map_file
from exp.data.data_errors import data_error, require_extra
from exp.data.dataset_files import data_file
from exp.data.splits import contiguous_splits
from exp.data.text import Decoder, TextBlocks
from exp.extras.tokenizers.tokens import TokenVocabulary, read_tokenizer
from exp.shared_types import Stage

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]


class TokenFile(Dataset[object]):
    """Data set of blocks of the tokens in a file. A block has T tokens.

    The input is int64 `[T]`: the numbers of the tokens. The target is int64 `[T]`: the token after each position. The
    splits are consecutive parts of the file. Only the tokens of a batch are read from the file.

    Args:
        path: A .bin file of integers, as nanoGPT writes it, or a .npy file with an array `[N]`. The path is relative to
            the current folder or to `directory`.
        directory: The folder that is searched if the path does not exist in the current folder. Default: `data`.
        dtype: The dtype of a .bin file. Default: uint16. It is ignored for a .npy file, which contains its dtype.
        vocabulary_size: The number of different tokens. Default: None, which means the number of tokens of the
            tokenizer.
        tokenizer: The tokenizer.json with which the tokens were made, of the package tokenizers. It is used to show
            tokens as text. Default: None, which shows numbers.
        block_size: The number of tokens in a sample, T. Default: 64.

    Raises:
        ConfigError: A file does not exist or has the wrong content, or both vocabulary_size and tokenizer are None.
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
        self._count = len(map_tokens(self.file, dtype))

    def __len__(self) -> int:
        """Return the number of blocks, which are the samples."""
        return max(0, (self._count - 1) // self.block_size)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, FileBlocks]:
        """Return consecutive parts of the file as splits, by name. The splits do not overlap.

        Args:
            sizes: The size of each split: a fraction of the tokens, or a whole number of blocks.
        """
        places = contiguous_splits(sizes, self._count, block_size=self.block_size, unit="tokens")
        made = functools.partial(
            FileBlocks, file=self.file, dtype=self.dtype, block_size=self.block_size, vocabulary=self.vocabulary
        )
        return {name: made(place=place) for name, place in places.items()}


class FileBlocks(TextBlocks):
    """Data set of blocks of the tokens in a slice of a file.

    Worker processes map the file into their memory themselves.

    Args:
        file: The file.
        dtype: The dtype of a .bin file.
        place: The slice of the file, in tokens.
        block_size: The number of tokens in a block.
        vocabulary: The vocabulary of the tokens.
    """

    def __init__(self, *, file: Path, dtype: TokenDtype, place: slice, block_size: int, vocabulary: Decoder) -> None:
        self._file, self._dtype, self._place = file, dtype, place
        super().__init__(tokens=map_tokens(file, dtype)[place], block_size=block_size, vocabulary=vocabulary)

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes map the file themselves, because a pickled memory map would contain the whole file.
        made = functools.partial(FileBlocks, file=self._file, dtype=self._dtype, place=self._place)
        return functools.partial(made, block_size=self.block_size, vocabulary=self.vocabulary), ()


def map_tokens(file: Path, dtype: TokenDtype) -> Tensor:
    """Return the tokens in a file as a memory-mapped tensor `[N]`.

    Args:
        file: A .npy file, or a .bin file of integers.
        dtype: The dtype of a .bin file.

    Raises:
        ConfigError: The extension of the file is not supported, or the file does not contain integers `[N]`.
    """
    key, kind = "dataset.path", file.suffix.lower()
    if kind not in (".npy", ".bin"):
        raise data_error(key, got=str(file), expected="a .npy, or a .bin of raw numbers")
    if kind == ".npy":
        held = map_file(file)
        if held.ndim != 1 or held.dtype.kind not in "iu" or not held.dtype.isnative:
            got = f"{file} of shape {list(held.shape)} and {held.dtype.str}"
            raise data_error(key, got=got, expected="integers [N] in the byte order of this machine")
    else:
        size, each = file.stat().st_size, np.dtype(dtype).itemsize
        if size % each or not size:
            expected = f"numbers of {each} bytes each, data.dataset.dtype={dtype}"
            raise data_error(key, got=f"{file} of {size} bytes", expected=expected)
        held = np.memmap(file, dtype=dtype, mode="r")
    with warnings.catch_warnings():
        # torch warns that the array is read-only. It must be read-only, because the size of a writable memory map is
        # limited by the memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(held)


class TokenNumbers:
    """Vocabulary of tokens for which there is no tokenizer. The text of a token is its number.

    Args:
        size: The number of tokens in the vocabulary.
    """

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
            got = f"{size}, and a tokenizer with {len(found)} tokens"
            raise data_error("dataset.vocabulary_size", got=got, expected="null, or the size of the tokenizer")
        return found
    if size is None:
        expected = "the number of tokens, or a tokenizer"
        raise data_error("dataset.vocabulary_size", got="null, without a tokenizer", expected=expected)
    return TokenNumbers(size=size)
