"""The batches of a module of the user's own: of exp's data, or of a LightningDataModule of the user's own.

A LightningDataModule has loaders that know no position. Here each pass of training begins where the run is: what is
drawn for it is derived from (seed, epoch, batch), and batches that a run has done before are read and put away. So a
run resumes exactly, whatever a data set draws. It takes the time to read them.

Relied on, and tested: Lightning hands every loader to `strategy.process_dataloader`, with its distributed sampler in
it; a loader with `state_dict` and `load_state_dict` is one from which it goes on (seen in lightning 2.6.6).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer

from exp.data.loader import set_epochs, wanting_epochs
from exp.data.randomness import reseed_batch, reseed_sampler, seed_for
from exp.engine.datamodule import NO_BATCH
from exp.engine.progress import next_batch
from exp.errors import RunError
from exp.nested import tensors_in
from exp.shared_types import Batch


class OwnBatches(Protocol):
    """The batch that the training is at.

    Attributes:
        current: The share under way.
        seconds_waited: Seconds for which training has waited for its batches in this process.
    """

    current: Batch
    seconds_waited: float

    def begin(self, batch: Any, batch_idx: int) -> Batch:
        """Begin a batch of training; return its share."""


class BatchesOfLoaders:
    """The batches of a LightningDataModule of the user: each rank has what its loaders give."""

    def __init__(self, data: LightningDataModule, *, seed: int, rank: int, world_size: int) -> None:
        self.data, self.seed, self.rank, self.world_size = data, seed, rank, world_size
        self.current = NO_BATCH
        self.seconds_waited = 0.0
        self._count = 0

    def begin(self, batch: Any, batch_idx: int) -> Batch:
        size = next((len(one) for one in tensors_in(batch) if one.dim()), 1)
        self.current = Batch(data=batch, size=size, global_size=size * self.world_size, world_size=self.world_size)
        return self.current

    def follow(self, trainer: Trainer) -> None:
        """Have each loader of training begin where the run is; before fit."""
        strategy, own = trainer.strategy, trainer.strategy.process_dataloader

        def process(loader: object) -> object:
            loader = own(loader)
            if trainer.validating or not trainer.training:
                return loader
            self._count += 1
            # Of several loaders each draws numbers of its own.
            seed = self.seed if self._count == 1 else seed_for(self.seed, "loader", self._count)
            return PositionedLoader(loader, trainer=trainer, batches=self, seed=seed)

        vars(strategy)["process_dataloader"] = process


class PositionedLoader:
    """A loader of the user's own, whose first pass in an epoch begins at the position of the run.

    Of several, a short one may be passed through more than once in an epoch.
    """

    def __init__(self, loader: Any, *, trainer: Trainer, batches: BatchesOfLoaders, seed: int) -> None:
        self.loader, self._trainer, self._batches = cast(Iterable[Any], loader), trainer, batches
        self._seed = seed
        self._seeds: dict[int, int] = {}
        self._epoch, self._pass = -1, 0

    def __len__(self) -> int:
        """Raises: TypeError where the loader does not know."""
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is drawn before the first batch is asked for, of iterators that nobody uses nothing.
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
            # The run stands in a further pass of this loader.
            start, self._pass = start - skipped, self._pass + 1

    def _one_pass(self) -> Iterator[Any]:
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
        """Tell samplers and data their epoch, and set generators of the loader's own to this epoch's numbers."""
        dataset = getattr(self.loader, "dataset", None)
        if (wanting := wanting_epochs(dataset)) and getattr(self.loader, "persistent_workers", False):
            raise RunError(
                f"{type(wanting[0]).__name__} has set_epoch, and its loader has persistent_workers=True; expected "
                "false: workers that persist keep the data set of their first epoch"
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
        """What else Lightning asks of a loader, such as its `sampler`."""
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, object]:
        """Nothing: the position is the run's."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing to load."""
