"""Batch samplers that group samples of similar length.

LengthBuckets makes batches with the same number of samples. TokenBatches makes batches with at most a given number of
tokens.

exp constructs a batch sampler for each split. Before each epoch, exp seeds the random generators from (seed, split,
epoch).
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
# The name of the optional attribute of a data set that contains the lengths of all its samples.
LENGTHS = "lengths"


class LengthBuckets(Sampler[list[int]]):
    """Batch sampler that takes all samples of a batch from the same bucket of similar lengths.

    The sampler sorts the samples by length and divides them into buckets with about the same number of samples. The
    last batch of a bucket may have fewer samples than the other batches.

    Args:
        data_source: The split to sample from.
        batch_size: The number of samples in a global batch. exp passes data.batch_size if the config does not set it.
        shuffle: Whether to shuffle the samples within each bucket, and the order of the batches. exp passes
            data.shuffle for training, and False for the other splits.
        drop_last: Whether to drop the last batch of a bucket if it has fewer samples. exp passes data.drop_last for
            training, and False for the other splits.
        buckets: The number of buckets. Default: 8.
        entry: The name of the value of a sample that is measured. Default: `input`. The sampler ignores this option if
            the data set has an attribute `lengths`. If it does not, the sampler reads every sample once.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: The samples do not have the value named `entry`, or this value has no length.
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
    """Batch sampler that makes batches with a limited number of tokens, including padding.

    The number of tokens in a batch is the number of samples times the length of its longest sample. The samples are
    sorted by length, because samples of similar length need little padding.

    Args:
        data_source: The split to sample from.
        tokens: The maximum number of tokens in a global batch, over all ranks.
        shuffle: Whether to shuffle samples of equal length, and the order of the batches. exp passes data.shuffle for
            training, and False for the other splits.
        entry: The name of the value of a sample that is measured; see LengthBuckets. Default: `input`.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: A sample has more than `tokens` tokens, the samples do not have the value named `entry`, or this
            value has no length.
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
        # `length` is the longest sample of the current batch, because the lengths are in ascending order.
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
    """Return the batches in a random order. The samples within a batch keep their order."""
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def lengths_of(part: AnyDataset, *, entry: str, inputs: Sequence[str]) -> Tensor:
    """Return the lengths of all samples of a split, int64 `[N]`.

    The lengths are read from the attribute `lengths` of the data set. If there is no such attribute, every sample is
    read, and the length of one of its values is taken.

    Args:
        part: The split.
        entry: The name of the value of a sample that is measured.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: The samples do not have the value named `entry`, or this value has no length.
    """
    if (found := attribute_values(part, LENGTHS)) is not None:
        return found.long()
    # The default `input` means the first name in data.inputs if data.inputs does not contain the name `input`.
    name = inputs[0] if entry == "input" and inputs and entry not in inputs else entry

    def pick(sample: object) -> int:
        value = entry_of(sample, name, inputs=inputs, key=f"{KEY}.entry")
        try:
            return len(cast(Sized, value))
        except TypeError as error:
            got = f"{name}, which is a single number"
            raise data_error(f"{KEY}.entry", got=got, expected="an entry with a length") from error

    return torch.tensor(values_of(part, pick), dtype=torch.int64)
