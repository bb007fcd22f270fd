"""Batch samplers: samples of like length together, with so many samples or so many tokens in a global batch.

Each is made once for each part. exp seeds the generators from (seed, part, epoch) before each pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Sized
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, MinLen
from torch import Tensor
from torch.utils.data import Sampler

from exp.data.entries import TARGET
from exp.data.faults import data_fault
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.sample_values import entry_of, own_share, stated_values, values_of

KEY = "batch_sampler"
# What a data set may call the lengths of all its samples, which are then not read for them.
LENGTHS = "lengths"


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples whose lengths lie in one bucket; each bucket ends with a short batch.

    data_source: a part. inputs: the names of a sample's values.
    batch_size: samples of a global batch, data.batch_size where it is left out. drop_last: in training, leave out the
        short batches. shuffle: given by exp: in training, the samples of a bucket and the batches are shuffled.
    boundaries: the lengths at which the next bucket begins, rising. buckets: instead of boundaries, how many, of about
        as many samples each.
    lengths: of each sample of the part or of the whole data.dataset; None takes the data set's own `lengths`, or reads
        every sample once. entry: the entry of a sample whose length counts.

    Raises: ConfigError.
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
        if boundaries is None:
            by_length = found.argsort(stable=True)
            self.buckets = [piece for piece in by_length.tensor_split(buckets) if len(piece)]
        else:
            if sorted(set(boundaries)) != list(boundaries):
                raise data_fault(f"{KEY}.boundaries", got=str(list(boundaries)), expected="rising lengths")
            place = torch.tensor([bisect_right(list(boundaries), length) for length in found.tolist()])
            pieces = [(place == number).nonzero().flatten() for number in range(len(boundaries) + 1)]
            self.buckets = [piece for piece in pieces if len(piece)]

    def __len__(self) -> int:
        return sum(
            len(piece) // self.batch_size if self.drop_last else -(-len(piece) // self.batch_size)
            for piece in self.buckets
        )

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        for piece in self.buckets:
            order = piece[torch.randperm(len(piece))] if self.shuffle else piece
            cut = [batch.tolist() for batch in order.split(self.batch_size)]
            batches += [batch for batch in cut if len(batch) == self.batch_size or not self.drop_last]
        yield from shuffled(batches) if self.shuffle else batches


class TokenBatches(Sampler[list[int]]):
    """Batches of as many samples as `tokens` has room for, the padding counted: samples times the longest of them.

    Samples stand by length, so that little is padded; of those of one length each epoch of training takes others
    together, and it shuffles the batches.

    data_source, inputs, lengths, entry, shuffle: see LengthBuckets.
    tokens: of a global batch, over all ranks. max_samples: of a batch; None leaves that to the tokens.

    Raises: ConfigError for a sample that is longer than a batch.
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
            raise data_fault(f"{KEY}.tokens", got=got, expected=f"{longest} or more")
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
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


def lengths_of(part: AnyDataset, given: Sequence[int] | None, *, entry: str, inputs: Sequence[str]) -> Tensor:
    """The length of each sample along its first axis, int64 `[N]`.

    Raises: ConfigError where there are not as many as samples, and where an entry has no length.
    """
    if given is not None:
        found = own_share(torch.as_tensor(given), part)
        if found is None:
            expected = f"{samples_in(part)}, one for each sample"
            raise data_fault(f"{KEY}.lengths", got=f"{len(given)} numbers", expected=expected)
        return found.long()
    stated = stated_values(part, LENGTHS)
    if stated is not None:
        return stated.long()
    # Of several inputs none may be called so.
    name = inputs[0] if entry == "input" and inputs and entry not in inputs else entry

    def pick(sample: object) -> int:
        value = entry_of(sample, name, inputs=inputs, key=f"{KEY}.entry")
        try:
            return len(cast(Sized, value))
        except TypeError as error:
            expected = "an entry with a length" if name != TARGET else "an input"
            raise data_fault(f"{KEY}.entry", got=f"{name}, which is one number", expected=expected) from error

    return torch.tensor(values_of(part, pick, stage="train"), dtype=torch.int64)
