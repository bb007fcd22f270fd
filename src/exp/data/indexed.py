"""Batches of data in memory: many at once in one gather, then handed out as views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from exp.data.in_memory import Entries, Indexed, Renewed, mapped, tensors_of
from exp.data.loader import Loader
from exp.data.sampler import GlobalBatches, share
from exp.types import Batch, Stage

# Bytes gathered at once. Large enough that a small data set is permuted once an epoch, small enough to stay in cache:
# with 32 MiB, fresh pages made batches of text seven times slower.
CHUNK_BYTES = 4 * 2**20


class IndexedLoader(Loader):
    """Gathers this rank's samples in the epoch's order, a chunk of batches at a time.

    A chunk's edges depend on the batch's number alone, so that a resumed run reads from the same addresses within it:
    vectorised kernels may differ in the last bit with the alignment of their operands.
    """

    def __init__(
        self,
        *,
        stage: Stage,
        dataset: Indexed,
        batches: GlobalBatches,
        rank: int,
        world_size: int,
        pin_memory: bool,
    ) -> None:
        super().__init__(stage=stage)
        self.dataset = dataset
        self.batches = batches
        self.rank, self.world_size = rank, world_size
        self.pin_memory = pin_memory
        first = tensors_of(dataset.gather(torch.zeros(1, dtype=torch.int64)))
        sample_bytes = sum(tensor.nbytes for tensor in first)
        mine = share(size=batches.batch_size, rank=rank, world_size=world_size)
        self._chunk = max(1, CHUNK_BYTES // max(1, sample_bytes * (mine.stop - mine.start)))

    def _length(self) -> int:
        return len(self.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset = self.dataset
        if self.stage == "train" and isinstance(dataset, Renewed):
            dataset = dataset.at_epoch(seed=self.batches.seed, epoch=epoch)
        order = self.batches.order(epoch)
        full = self.batches.length // self.batches.batch_size
        world_size, size = self.world_size, self.batches.batch_size
        mine = share(size=size, rank=self.rank, world_size=world_size)
        grid = order[: full * size].view(full, size)[:, mine.start : mine.stop]
        for first in range(start - start % self._chunk, full, self._chunk):
            rows = grid[first : first + self._chunk]
            skipped = max(0, start - first)
            for data in self._views(dataset, rows.reshape(-1), each=rows.shape[1])[skipped:]:
                yield Batch(data, mine.size, size, world_size)
        if start <= full < len(self.batches):
            size = self.batches.size(full)
            mine = share(size=size, rank=self.rank, world_size=world_size)
            indices = order[full * self.batches.batch_size :][mine.start : mine.stop]
            for data in self._views(dataset, indices, each=len(indices)):
                yield Batch(data, mine.size, size, world_size)

    def _views(self, dataset: Indexed, indices: Tensor, *, each: int) -> list[Entries]:
        """The samples at indices as batches of `each`, which share one storage."""
        entries = dataset.gather(indices)
        if self.pin_memory:
            entries = mapped(entries, Tensor.pin_memory)
        if isinstance(entries, Mapping):
            columns = [tensor.split(each) for tensor in entries.values()]
            return [dict(zip(entries, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(tensor.split(each) for tensor in entries), strict=True))
