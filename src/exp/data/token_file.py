"""Text that is in tokens already, in a file that is mapped into memory and may be larger than it."""

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
from exp.data.dataset_files import data_file
from exp.data.faults import data_fault, require_extra
from exp.data.splits import block_lengths
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
        self.block_size = block_size
        self.vocabulary = _vocabulary(vocabulary_size, tokenizer, directory=directory)
        self._file = MappedTokens(data_file(path, directory=directory), dtype=dtype)

    def __len__(self) -> int:
        """The number of blocks."""
        return max(0, (len(self._file) - 1) // self.block_size)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, FileBlocks]:
        """Splits into contiguous parts, so that no token of one is seen in another.

        sizes: fractions of the tokens, or whole numbers of blocks.
        """
        counts = block_lengths(sizes, len(self._file), block_size=self.block_size, unit="tokens")
        parts: dict[Stage, FileBlocks] = {}
        start = 0
        for name, count in counts.items():
            parts[name] = FileBlocks(
                file=self._file,
                start=start,
                stop=start + count,
                block_size=self.block_size,
                vocabulary=self.vocabulary,
            )
            start += count
        return parts


class MappedTokens:
    """The numbers of a file, read where they are looked at. dtype: of a file without a header.

    Raises: ConfigError where it holds no whole numbers in a row, or half of one.
    """

    def __init__(self, file: Path, *, dtype: TokenDtype) -> None:
        self.file, self.dtype = file, dtype
        self.numbers = self._mapped()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getstate__(self) -> dict[str, object]:
        # A worker maps the file itself: pickled, the mapping is its whole content.
        return {"file": self.file, "dtype": self.dtype}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.numbers = self._mapped()

    def _mapped(self) -> Tensor:
        key = "dataset.path"
        kind = self.file.suffix.lower()
        if kind not in (".npy", ".bin"):
            raise data_fault(key, got=str(self.file), expected="a .npy, or a .bin of numbers and nothing else")
        if kind == ".npy":
            held = map_file(self.file)
            if held.ndim != 1 or held.dtype.kind not in "iu" or not held.dtype.isnative:
                got = f"{self.file} of shape {list(held.shape)} and {held.dtype.str}"
                cure = "Write array.astype('uint16') into it" if not held.dtype.isnative else None
                raise data_fault(
                    key, got=got, expected="whole numbers in a row, [N], in this machine's order", cure=cure
                )
        else:
            size, each = self.file.stat().st_size, np.dtype(self.dtype).itemsize
            if size % each or not size:
                raise data_fault(
                    key,
                    got=f"{self.file} of {size} bytes",
                    expected=f"numbers of {each} bytes each, data.dataset.dtype={self.dtype}",
                )
            held = np.memmap(self.file, dtype=self.dtype, mode="r")
        with warnings.catch_warnings():
            # Nobody writes. Mapped for writing, a file larger than memory would be refused by the system.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(held)


class FileBlocks(TextBlocks):
    """Blocks of the tokens from start to stop of a file."""

    def __init__(self, *, file: MappedTokens, start: int, stop: int, block_size: int, vocabulary: Decoder) -> None:
        self._file, self._start, self._stop = file, start, stop
        super().__init__(tokens=file.numbers[start:stop], block_size=block_size, vocabulary=vocabulary)

    def __reduce__(self) -> tuple[object, ...]:
        # A worker maps the file itself.
        made = functools.partial(
            FileBlocks,
            file=self._file,
            start=self._start,
            stop=self._stop,
            block_size=self.block_size,
            vocabulary=self.vocabulary,
        )
        return made, ()


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
            raise data_fault("dataset.vocabulary_size", got=got, expected="null, or as many")
        return found
    if size is None:
        expected = "how many tokens there are, or a tokenizer that says it"
        raise data_fault("dataset.vocabulary_size", got="null, without a tokenizer", expected=expected)
    return TokenNumbers(size=size)
