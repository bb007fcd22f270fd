"""LightningDataModule for exp's data. Training batches start at the position of the run."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.profilers import Profiler

from exp.data.data import Data
from exp.data.entries import class_names
from exp.data.loader import Loader
from exp.engine.checkpoint import read_checkpoint
from exp.engine.progress import next_batch
from exp.errors import RunError
from exp.nested import move_tensors
from exp.shared_types import Batch, Stage

NO_BATCH = Batch(data=None, size=1, global_size=1, world_size=1)


class RunTrainer(Trainer):
    """Lightning's Trainer, with types for attributes that Lightning sets outside of the class.

    Only type checkers use this class. It is never constructed.
    """

    callbacks: list[Callback]
    datamodule: RunData
    log_every_n_steps: int
    profiler: Profiler


class StagedData(LightningDataModule):
    """LightningDataModule that returns the loaders of this rank.

    Args:
        data: Data of the run.
        rank: Index of the part of each global batch that this rank uses. Ranks that split one model use the same part.
            Default: 0.
        world_size: Number of parts of each global batch. Default: 1.

    Attributes:
        seconds_waited: Total seconds for which training has waited for batches in this process.
        ahead: Iterator that returned the last training batch.
    """

    ahead: Ahead

    # Lightning sets this attribute before it requests a loader.
    trainer: Trainer

    def __init__(self, *, data: Data, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.data = data
        self.rank, self.world_size = rank, world_size
        self._all: list[Batches] = []
        self.seconds_waited = 0.0

    def setup(self, stage: str) -> None:
        """Disable validation if the data has no validation split, because Lightning would request a loader for it."""
        if "val" not in self.data.stages:
            self.trainer.limit_val_batches = 0

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Names of the classes, by target."""
        return class_names(self.data.part(self.data.stages[0]), self.data.fitted)

    def batches(self, stage: Stage) -> int | None:
        """Return the number of global batches per epoch; None for a stream of unknown length."""
        try:
            return len(self._loader(stage))
        except TypeError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the values that were fitted to the training split, such as a mean.

        Lightning saves the values in checkpoints, under the name of this class.
        """
        return dict(self.data.fitted)

    def train_dataloader(self) -> Batches:
        """Return the training batches.

        Raises:
            RunError: The training split has no batch.
        """
        batches = self.batches("train")
        if batches == 0:
            raise RunError(
                "the training split has no batch; expected one or more. data.drop_last=true leaves out incomplete "
                "batches. Set it to false, or decrease data.batch_size"
            )
        return self._make_batches("train")

    def val_dataloader(self) -> Batches:
        return self._make_batches("val")

    def test_dataloader(self) -> Batches:
        return self._make_batches("test")

    def predict_dataloader(self) -> Batches:
        """Return the batches of the test split, because predictions use the test split."""
        return self._make_batches("test")

    def teardown(self, stage: str) -> None:
        self._release()

    def on_exception(self, exception: BaseException) -> None:
        self._release()

    def _loader(self, stage: Stage) -> Loader:
        return self.data.loader(stage, rank=self.rank, world_size=self.world_size)

    def _make_batches(self, stage: Stage) -> Batches:
        batches = Batches(functools.partial(self._loader, stage), stage=stage, module=self)
        self._all.append(batches)
        return batches

    def _release(self) -> None:
        for batches in self._all:
            batches.release()


class RunData(StagedData):
    """Data module for exp's TrainingModule. The batches are Batch objects."""

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return place_batch(batch, device)


class PlainData(StagedData):
    """Data module for a user's LightningModule. A batch contains only the collated samples, without a Batch object.

    The module or Lightning moves the batches to the device.

    Attributes:
        shares: Recent training batches by number, as Batch objects without data. They contain the sizes of the batches.
        current: Batch object of the current batch.
    """

    def __init__(self, *, data: Data, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(data=data, rank=rank, world_size=world_size)
        self.shares: dict[int, Batch] = {}
        self.current = NO_BATCH

    def begin(self, batch: Any, batch_idx: int) -> Batch:
        """Begin a training batch, and return it as a Batch object."""
        self.current = self.shares[batch_idx].with_data(batch)
        return self.current

    def _make_batches(self, stage: Stage) -> Batches:
        batches = PlainBatches(functools.partial(self._loader, stage), stage=stage, module=self)
        self._all.append(batches)
        return batches


def place_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device. On a CPU, return the same object, which Lightning's function would copy."""
    return batch if device.type == "cpu" else batch.with_data(move_tensors(batch.data, device))


def fitted_in(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the values in a checkpoint that were fitted to the training split, such as a mean.

    Returns:
        Fitted values by name; None if the checkpoint has no such entry.

    Raises:
        RunError: The file is missing or damaged.
    """
    state = read_checkpoint(checkpoint)
    found: Mapping[str, Any] | None = state.get(RunData.__qualname__, state.get(PlainData.__qualname__))
    return found


class Batches:
    """Batches of one stage. In training, the batches start at the Trainer's position.

    Each iterator reads the position from the Trainer, because Lightning creates iterators that it never uses.

    Attributes:
        ahead: Training iterator that was created last.
    """

    def __init__(self, make: Callable[[], Loader], *, stage: Stage, module: StagedData) -> None:
        self._make, self._stage, self._module = make, stage, module
        self._loader: Loader | None = None
        self.ahead: Ahead | None = None

    @property
    def loader(self) -> Loader:
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def release(self) -> None:
        """Delete the reference to the loader, so that the loader's worker processes end.

        Lightning keeps this object as long as the Trainer exists. Worker processes that ignore signals would then block
        the exit of the interpreter.
        """
        self._loader = self.ahead = None

    def __iter__(self) -> Iterator[Batch]:
        if self._stage != "train":
            return self._transform(iter(self.loader), (0, 0))
        position = next_batch(self._module.trainer)
        self.loader.set_position(*position)
        self.ahead = Ahead(self._transform(iter(self.loader), position), self.loader, self._module, position)
        return self.ahead

    def _transform(self, batches: Iterator[Batch], position: tuple[int, int]) -> Iterator[Batch]:
        """Return the batches, with the transforms that run on the device applied.

        Args:
            batches: Batches of the loader.
            position: Epoch, and number of the first batch in the epoch.
        """
        if not self._module.data.transforms_batches(self._stage):
            return batches
        return self._on_device(batches, *position)

    def _on_device(self, batches: Iterator[Batch], epoch: int, start: int) -> Iterator[Batch]:
        module, device = self._module, self._module.trainer.strategy.root_device
        for number, batch in enumerate(batches, start):
            there = place_batch(batch, device)
            yield module.data.transform_batch(there, stage=self._stage, rank=module.rank, epoch=epoch, number=number)

    def __len__(self) -> int:
        """Return the number of batches. Raise TypeError for a stream of unknown length."""
        return len(self.loader)

    def state_dict(self) -> dict[str, object]:
        """Return an empty state, because the position is saved elsewhere in the checkpoint.

        The method exists because Lightning treats loaders with this method as resumable.
        """
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing, because the state is empty."""


class PlainBatches(Batches):
    """Batches of a PlainData module. Iterating yields only the data, and stores the sizes in PlainData.shares."""

    def __iter__(self) -> Iterator[Any]:
        module = self._module
        assert isinstance(module, PlainData)
        start = next_batch(module.trainer)[1] if self._stage == "train" else 0
        for number, batch in enumerate(super().__iter__(), start):
            if self._stage == "train":
                # Lightning reads one batch of a stream ahead.
                module.shares.pop(number - 2, None)
                module.shares[number] = batch.with_data(None)
            yield batch.data


class Ahead(Iterator[Batch]):
    """Iterator over training batches that can read the micro-batches of an optimizer step in advance."""

    def __init__(self, batches: Iterator[Batch], loader: Loader, module: StagedData, position: tuple[int, int]) -> None:
        self._batches, self._module, self._sampler = batches, module, loader.sampler
        self._epoch, self._next = position
        # Batches from number `_first` on that were read in advance, and micro-batches of the current step.
        self._read: deque[Batch] = deque()
        self._first = self._next

    def __next__(self) -> Batch:
        self._module.ahead = self
        # Lightning reads one batch of a stream ahead.
        while self._read and self._first < self._next - (self._sampler is None):
            self._read.popleft()
            self._first += 1
        if self._next == self._first + len(self._read):
            start = time.perf_counter()
            self._read.append(next(self._batches))
            self._module.seconds_waited += time.perf_counter() - start
        self._next += 1
        return self._read[self._next - 1 - self._first]

    def micro_batches(self, start: int, stop: int, *, with_data: bool) -> Sequence[Batch]:
        """Return this rank's parts of the training batches `start` to `stop - 1`.

        The list is shorter if the data ends before `stop`.

        Args:
            start: Number of the current training batch.
            stop: Number of the last batch plus 1.
            with_data: Whether to return batches with data. If false, only the sizes of the batches are set.
        """
        if self._sampler is not None and not with_data:
            ranks, sizes = self._sampler.world_size, self._sampler.sizes(self._epoch, start)
            return [Batch(None, mine.size, size, ranks) for size, mine in islice(sizes, stop - start)]
        began = time.perf_counter()
        self._read.extend(islice(self._batches, max(0, stop - self._first - len(self._read))))
        self._module.seconds_waited += time.perf_counter() - began
        return list(islice(self._read, start - self._first, stop - self._first))
