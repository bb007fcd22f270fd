"""Batch samplers that group samples of similar length. A batch has a number of samples or of tokens.

exp makes a batch sampler for each split. Before each epoch, it seeds the generators from (seed, split, epoch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Sampler

from exp.data.data_errors import data_error
from exp.data.in_memory import AnyDataset
from exp.data.loader import batch_count
from exp.data.sample_values import attribute_values, entry_of, values_of

KEY = "batch_sampler"
# The attribute of a data set that has the lengths of all its samples.
LENGTHS = "lengths"


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples of similar length: the samples are divided by length into buckets, and a batch is from one
    bucket.

    The last batch of a bucket may have fewer samples.

    Args:
        data_source: The split to sample from.
        batch_size: The number of samples in a global batch. The default is data.batch_size.
        shuffle: Whether to shuffle the samples in each bucket, and the batches. exp passes True for training.
        drop_last: Whether to drop the short last batch of each bucket. exp passes True only for training.
        buckets: The number of buckets, which have about the same number of samples.
        entry: The name of the value of a sample that has the length. It is used if the data set has no attribute
            `lengths`; every sample is then read once.
        inputs: The names of a sample's values.

    Raises:
        ConfigError: The entry does not exist or has no length.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        batch_size: Annotated[int, Ge(1)],
        shuffle: bool,
        drop_last: bool = False,
        buckets: Annotated[int, Ge(1)] = 8,
        entry: str = "input",
        inputs: Sequence[str] = (),
    ) -> None:
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        found = lengths_of(data_source, entry=entry, inputs=inputs)
        self.buckets = [piece for piece in found.argsort(stable=True).tensor_split(buckets) if len(piece)]

    def __len__(self) -> int:
        return sum(batch_count(len(piece), self.batch_size, drop_last=self.drop_last) for piece in self.buckets)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for piece in self.buckets:
            order = piece[torch.randperm(len(piece))] if self.shuffle else piece
            cut = [batch.tolist() for batch in order.split(self.batch_size)]
            batches += [batch for batch in cut if len(batch) == self.batch_size or not self.drop_last]
        yield from shuffle_batches(batches) if self.shuffle else batches


class TokenBatches(Sampler[list[int]]):
    """Batches with a limited number of tokens, including padding.

    The number of tokens is the number of samples times the length of the longest sample. Samples are sorted by length,
    which minimizes padding. In training, samples of equal length are shuffled, and so are the batches.

    Args:
        data_source: The split to sample from.
        tokens: The maximum number of tokens in a global batch, over all ranks.
        shuffle: Whether to shuffle. exp passes True for training.
        entry: See LengthBuckets.
        inputs: The names of a sample's values.

    Raises:
        ConfigError: A sample has more than `tokens` tokens, or the entry has no length.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        tokens: Annotated[int, Ge(1)],
        shuffle: bool,
        entry: str = "input",
        inputs: Sequence[str] = (),
    ) -> None:
        self.shuffle = shuffle
        self.lengths = lengths_of(data_source, entry=entry, inputs=inputs)
        longest = int(self.lengths.max())
        if longest > tokens:
            got = f"{tokens}, and sample {int(self.lengths.argmax())} of the split has a length of {longest}"
            raise data_error(f"{KEY}.tokens", got=got, expected=f"{longest} or more, the length of the longest sample")
        self.sizes: list[int] = []
        count = 0
        # The lengths are sorted, so the current sample is the longest of its batch.
        for length in self.lengths.sort().values.tolist():
            if count and (count + 1) * length > tokens:
                self.sizes.append(count)
                count = 0
            count += 1
        self.sizes.append(count)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths)) if self.shuffle else torch.arange(len(self.lengths))
        order = order[self.lengths[order].argsort(stable=True)]
        batches = [batch.tolist() for batch in order.split(self.sizes)]
        yield from shuffle_batches(batches) if self.shuffle else batches


def shuffle_batches(batches: Sequence[list[int]]) -> list[list[int]]:
    """Return batches in a random order."""
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def lengths_of(part: AnyDataset, *, entry: str, inputs: Sequence[str]) -> Tensor:
    """Return the length of each sample along its first axis, int64 `[N]`.

    Args:
        part: The split.
        entry: The name of the value of a sample that has the length.
        inputs: The names of a sample's values.

    Raises:
        ConfigError: The entry does not exist or has no length.
    """
    if (found := attribute_values(part, LENGTHS)) is not None:
        return found.long()
    # If data.inputs has no name `input`, the first input replaces the default entry.
    name = inputs[0] if entry == "input" and inputs and entry not in inputs else entry

    def pick(sample: object) -> int:
        value = entry_of(sample, name, inputs=inputs, key=f"{KEY}.entry")
        try:
            return len(cast(Sized, value))
        except TypeError as error:
            got = f"{name}, which is a single number"
            raise data_error(f"{KEY}.entry", got=got, expected="an entry with a length") from error

    return torch.tensor(values_of(part, pick), dtype=torch.int64)
