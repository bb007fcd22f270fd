"""Batch samplers: samples of like length together, with so many samples or so many tokens in a global batch.

Each is made once for each split. exp seeds the generators from (seed, split, epoch) before each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, MinLen
from torch import Tensor
from torch.utils.data import Sampler

from exp.data.data_errors import data_error
from exp.data.in_memory import AnyDataset
from exp.data.loader import batch_count
from exp.data.sample_values import entry_of, given_values, stated_values, values_of

KEY = "batch_sampler"
# The attribute of a data set with the lengths of all its samples, which are then not read for them.
LENGTHS = "lengths"


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples whose lengths lie in one bucket; each bucket ends with a short batch.

    Args:
        data_source: a split.
        batch_size: samples of a global batch, by default data.batch_size.
        shuffle: whether the samples of a bucket and the batches are shuffled; given by exp: in training.
        drop_last: whether the short batches of training are left out.
        boundaries: the lengths at which the next bucket begins, rising.
        buckets: instead of boundaries, the number of buckets, of about as many samples each.
        lengths: of each sample of the split or of the whole data.dataset; None takes the data set's `lengths`, or reads
            every sample once.
        entry: the entry of a sample whose length counts.
        inputs: the names of a sample's values.

    Raises:
        ConfigError: as lengths_of.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        batch_size: Annotated[int, Ge(1)],
        shuffle: bool,
        drop_last: bool = False,
        boundaries: Annotated[Sequence[Annotated[int, Ge(1)]], MinLen(1)] | None = None,
        buckets: Annotated[int, Ge(1)] = 8,
        lengths: Sequence[Annotated[int, Ge(0)]] | None = None,
        entry: str = "input",
        inputs: Sequence[str] = (),
    ) -> None:
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        found = lengths_of(data_source, lengths, entry=entry, inputs=inputs)
        pieces = found.argsort(stable=True).tensor_split(buckets)
        if boundaries is not None:
            if sorted(set(boundaries)) != list(boundaries):
                raise data_error(f"{KEY}.boundaries", got=str(list(boundaries)), expected="rising lengths")
            place = torch.bucketize(found, torch.tensor(boundaries), right=True)
            pieces = tuple((place == number).nonzero().flatten() for number in range(len(boundaries) + 1))
        self.buckets = [piece for piece in pieces if len(piece)]

    def __len__(self) -> int:
        return sum(batch_count(len(piece), self.batch_size, drop_last=self.drop_last) for piece in self.buckets)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for piece in self.buckets:
            order = piece[torch.randperm(len(piece))] if self.shuffle else piece
            cut = [batch.tolist() for batch in order.split(self.batch_size)]
            batches += [batch for batch in cut if len(batch) == self.batch_size or not self.drop_last]
        yield from shuffled(batches) if self.shuffle else batches


class TokenBatches(Sampler[list[int]]):
    """Batches of as many samples as `tokens` has room for, the padding counted: samples times the longest of them.

    Samples are in the order of their lengths, so that little is padded. Of samples of one length each epoch of training
    takes others together, and it shuffles the batches.

    Args:
        data_source: see LengthBuckets.
        tokens: of a global batch, over all ranks.
        shuffle: see LengthBuckets.
        max_samples: of a batch; None leaves that to the tokens.
        lengths: see LengthBuckets.
        entry: see LengthBuckets.
        inputs: see LengthBuckets.

    Raises:
        ConfigError: for a sample that is longer than a batch.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        tokens: Annotated[int, Ge(1)],
        shuffle: bool,
        max_samples: Annotated[int, Ge(1)] | None = None,
        lengths: Sequence[Annotated[int, Ge(0)]] | None = None,
        entry: str = "input",
        inputs: Sequence[str] = (),
    ) -> None:
        self.shuffle = shuffle
        self.lengths = lengths_of(data_source, lengths, entry=entry, inputs=inputs)
        longest = int(self.lengths.max())
        if longest > tokens:
            got = f"{tokens}, and sample {int(self.lengths.argmax())} of the part has a length of {longest}"
            raise data_error(f"{KEY}.tokens", got=got, expected=f"{longest} or more")
        self.sizes: list[int] = []
        count = 0
        # Lengths rise, so that each sample is the longest of its batch so far.
        for length in self.lengths.sort().values.tolist():
            if count and ((count + 1) * length > tokens or count == max_samples):
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
        yield from shuffled(batches) if self.shuffle else batches


def shuffled(batches: Sequence[list[int]]) -> list[list[int]]:
    """Return batches in a random order."""
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def lengths_of(part: AnyDataset, given: Sequence[int] | None, *, entry: str, inputs: Sequence[str]) -> Tensor:
    """Return the length of each sample along its first axis, int64 `[N]`.

    Raises: ConfigError for another number of lengths, and for an entry without a length.
    """
    if given is not None:
        return given_values(part, given, key=f"{KEY}.lengths", inputs=inputs).long()
    if (stated := stated_values(part, LENGTHS)) is not None:
        return stated.long()
    # Of several inputs none may be called so.
    name = inputs[0] if entry == "input" and inputs and entry not in inputs else entry

    def pick(sample: object) -> int:
        value = entry_of(sample, name, inputs=inputs, key=f"{KEY}.entry")
        try:
            return len(cast(Sized, value))
        except TypeError as error:
            got = f"{name}, which is one number"
            raise data_error(f"{KEY}.entry", got=got, expected="an entry with a length") from error

    return torch.tensor(values_of(part, pick), dtype=torch.int64)
