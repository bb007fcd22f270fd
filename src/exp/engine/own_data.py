"""Exact resume for the batches of a user's LightningDataModule.

Loaders of a LightningDataModule cannot start at a position. This module seeds the random generators from (seed, epoch,
batch) for each batch. A resumed run reads and skips the batches before its position. Therefore, the run resumes
exactly, even if the data set draws random numbers. Resuming takes the time to read the skipped batches.

The module depends on two properties of Lightning, tested with 2.6.6. Lightning passes each loader to
`strategy.process_dataloader` after adding a distributed sampler. Lightning resumes a loader that has the methods
`state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer

from exp.data.loader import find_epoch_aware, set_epochs
from exp.data.randomness import reseed_batch, reseed_sampler, seed_for
from exp.engine.datamodule import NO_BATCH
from exp.engine.progress import next_batch
from exp.errors import RunError
from exp.nested import tensors_in
from exp.shared_types import Batch


class BatchesOfLoaders:
    """Training batches of a user's LightningDataModule. The batch that a rank's loader returns is the rank's part.

    Attributes:
        current: This rank's part of the current batch.
        seconds_waited: Total seconds for which training has waited for batches in this process.
    """

    def __init__(self, data: LightningDataModule, *, seed: int, rank: int, world_size: int) -> None:
        self.data, self.seed, self.rank, self.world_size = data, seed, rank, world_size
        self.current = NO_BATCH
        self.seconds_waited = 0.0
        self._count = 0

    def begin(self, batch: object, batch_idx: int) -> Batch:
        """Begin a training batch, and return this rank's part as a Batch object."""
        size = next((len(one) for one in tensors_in(batch) if one.dim()), 1)
        self.current = Batch(data=batch, size=size, global_size=size * self.world_size, world_size=self.world_size)
        return self.current

    def follow(self, trainer: Trainer) -> None:
        """Make each training loader start at the run's position. Call this method before fit."""
        strategy, own = trainer.strategy, trainer.strategy.process_dataloader

        def process(loader: object) -> object:
            loader = own(loader)
            if trainer.validating or not trainer.training:
                return loader
            self._count += 1
            # Each loader has a separate random stream.
            seed = self.seed if self._count == 1 else seed_for(self.seed, "loader", self._count)
            return PositionedLoader(loader, trainer=trainer, batches=self, seed=seed)

        vars(strategy)["process_dataloader"] = process


class PositionedLoader:
    """Wrapper of a user's loader that starts at the position of the run in the first pass of an epoch.

    With several loaders, Lightning may iterate over a short loader several times in an epoch.
    """

    def __init__(self, loader: object, *, trainer: Trainer, batches: BatchesOfLoaders, seed: int) -> None:
        self.loader, self._trainer, self._batches = cast(Iterable[object], loader), trainer, batches
        self._seed = seed
        self._seeds: dict[int, int] = {}
        self._epoch, self._pass = -1, 0

    def __len__(self) -> int:
        """Return the number of batches. Raise TypeError if the loader has no length."""
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[object]:
        # This method is a generator, because Lightning creates iterators that it never uses. They draw no random
        # numbers.
        epoch, start = next_batch(self._trainer)
        if epoch == self._epoch:
            self._pass, start = self._pass + 1, 0
        else:
            self._epoch, self._pass = epoch, 0
        while True:
            skipped = 0
            for batch in self._one_pass():
                if skipped < start:
                    skipped += 1
                else:
                    yield batch
            if skipped == start or not skipped:
                break
            # All batches of this pass were skipped, so the position is in a later pass of this loader.
            start, self._pass = start - skipped, self._pass + 1

    def _one_pass(self) -> Iterator[object]:
        seed, rank, epoch = self._seed, self._batches.rank, self._epoch
        seed = seed if not self._pass else seed_for(seed, "pass", self._pass)
        self._begin_epoch(epoch)
        reseed_sampler(seed=seed, stage="train", epoch=epoch)
        batches = iter(self.loader)
        for number in itertools.count():
            began = time.perf_counter()
            reseed_batch(seed=seed, stage="train", rank=rank, epoch=epoch, batch=number)
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._batches.seconds_waited += time.perf_counter() - began
            yield batch

    def _begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and of the data set, and seed the random generators of the loader."""
        dataset = getattr(self.loader, "dataset", None)
        if (wanting := find_epoch_aware(dataset)) and getattr(self.loader, "persistent_workers", False):
            raise RunError(
                f"the data set {type(wanting[0]).__name__} has set_epoch, and its loader has persistent_workers=True; "
                "expected false, because persistent workers keep the data set of the first epoch"
            )
        set_epochs(wanting, epoch, seed=self._batches.seed)
        samplers = [getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")]
        samplers.append(getattr(samplers[1], "sampler", None))
        for part in samplers:
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        generators = [getattr(part, "generator", None) for part in (self.loader, dataset, *samplers)]
        for generator in {id(one): one for one in generators if isinstance(one, torch.Generator)}.values():
            own = self._seeds.setdefault(id(generator), generator.initial_seed())
            generator.manual_seed(own if epoch == 0 else seed_for(own, "loader", epoch))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped loader, such as `sampler`."""
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, object]:
        """Return an empty state, because the position is saved elsewhere in the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing, because the state is empty."""
