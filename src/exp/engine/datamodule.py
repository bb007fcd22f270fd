"""A LightningDataModule over exp's data: each training epoch starts where the run is."""

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
from exp.data.loader import Loader
from exp.data.value_names import class_names
from exp.engine.checkpoint import read_checkpoint
from exp.engine.progress import next_batch, refuse_late_validation
from exp.errors import RunError
from exp.nested import move_tensors
from exp.shared_types import Batch, Stage

NO_BATCH = Batch(data=None, size=1, global_size=1, world_size=1)


class RunTrainer(Trainer):
    """Lightning's Trainer with the types of what its connectors give it, for a type checker: none is ever made."""

    callbacks: list[Callback]
    datamodule: RunData
    log_every_n_steps: int
    profiler: Profiler


class StagedData(LightningDataModule):
    """exp's data as Lightning asks for it: this rank's loaders, and where training stands in them.

    rank, world_size: which of how many shares of each global batch is this rank's; ranks of one model have the same.
    seconds_waited: an attribute, for how long training has waited for its batches, in this process.
    ahead: an attribute, the iterator that gave the last training batch.
    """

    ahead: Ahead

    # Of Lightning, without its None before there is one: it is there whenever a loader is asked for.
    trainer: Trainer

    def __init__(self, *, data: Data, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.data = data
        self.rank, self.world_size = rank, world_size
        self._all: list[Batches] = []
        self.seconds_waited = 0.0

    def setup(self, stage: str) -> None:
        """Leave validation out where the data has no val part; Lightning would ask for its loader."""
        if "val" not in self.data.stages:
            self.trainer.limit_val_batches = 0

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """The names of the classes by target."""
        return class_names(self.data.part(self.data.stages[0]), self.data.fitted)

    def batches(self, stage: Stage) -> int | None:
        """Return the global batches of an epoch; None where a stream does not know."""
        try:
            return len(self._loader(stage))
        except TypeError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """What the training part told, which Lightning keeps in checkpoints under this class's name."""
        return dict(self.data.fitted)

    def train_dataloader(self) -> Batches:
        """Return the batches to train on.

        Raises: RunError where there is none; ConfigError where a validation would never be due.
        """
        batches = self.batches("train")
        if batches == 0:
            raise RunError(
                "the training part has no batch; expected one or more. data.drop_last leaves out a short last batch: "
                "set it to false, or data.batch_size to fewer samples"
            )
        refuse_late_validation(self.trainer, batches)
        return self._given("train")

    def val_dataloader(self) -> Batches:
        return self._given("val")

    def test_dataloader(self) -> Batches:
        return self._given("test")

    def predict_dataloader(self) -> Batches:
        """Return the test part: there is none of its own for what has no answers."""
        return self._given("test")

    def teardown(self, stage: str) -> None:
        self._release()

    def on_exception(self, exception: BaseException) -> None:
        self._release()

    def _loader(self, stage: Stage) -> Loader:
        return self.data.loader(stage, rank=self.rank, world_size=self.world_size)

    def _given(self, stage: Stage) -> Batches:
        batches = Batches(functools.partial(self._loader, stage), stage=stage, module=self)
        self._all.append(batches)
        return batches

    def _release(self) -> None:
        for batches in self._all:
            batches.release()


class RunData(StagedData):
    """The data of a run of exp's own model, in exp's batches."""

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return placed(batch, device)


class PlainData(StagedData):
    """The data of a run of a LightningModule of the user's own: batches as the data set gives them, without a Batch.

    How a batch is moved is the module's affair, or Lightning's.

    shares: an attribute, of each batch of training that was given last its number and its share, without its data.
    """

    def __init__(self, *, data: Data, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(data=data, rank=rank, world_size=world_size)
        self.shares: dict[int, Batch] = {}
        self.current = NO_BATCH

    def begin(self, batch: Any, batch_idx: int) -> Batch:
        """Begin a batch of training; return its share."""
        self.current = self.shares[batch_idx].with_data(batch)
        return self.current

    def _given(self, stage: Stage) -> Batches:
        batches = PlainBatches(functools.partial(self._loader, stage), stage=stage, module=self)
        self._all.append(batches)
        return batches


def placed(batch: Batch, device: torch.device) -> Batch:
    """Move a batch; on CPU it stays itself, of which Lightning's own would make a copy."""
    return batch if device.type == "cpu" else batch.with_data(move_tensors(batch.data, device))


def fitted_in(checkpoint: Path) -> Mapping[str, Any] | None:
    """What the training part told in the run that wrote a checkpoint; None where that kept nothing.

    Raises: RunError where the file is not there or is damaged.
    """
    state = read_checkpoint(checkpoint)
    found: Mapping[str, Any] | None = state.get(RunData.__qualname__, state.get(PlainData.__qualname__))
    return found


class Batches:
    """A loader of one stage, as Lightning sees it: each pass of training starts where the Trainer says that the run is.

    Lightning asks for more iterators than it uses: counting them would be counting epochs wrongly.
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
        """Let the loader go, and its workers end.

        Lightning keeps this object as long as the Trainer lives, and workers that ignore signals would keep the
        interpreter from ending.
        """
        self._loader = self.ahead = None

    def __iter__(self) -> Iterator[Batch]:
        if self._stage != "train":
            return self._transformed(iter(self.loader), (0, 0))
        position = next_batch(self._module.trainer)
        self.loader.set_position(*position)
        self.ahead = Ahead(self._transformed(iter(self.loader), position), self.loader, self._module, position)
        return self.ahead

    def _transformed(self, batches: Iterator[Batch], position: tuple[int, int]) -> Iterator[Batch]:
        """The batches from a position, (epoch, batch), on, transformed on the device where transforms ask for that."""
        if not self._module.data.transforms_batches(self._stage):
            return batches
        return self._on_device(batches, *position)

    def _on_device(self, batches: Iterator[Batch], epoch: int, start: int) -> Iterator[Batch]:
        module, device = self._module, self._module.trainer.strategy.root_device
        for number, batch in enumerate(batches, start):
            there = placed(batch, device)
            yield module.data.transform_batch(there, stage=self._stage, rank=module.rank, epoch=epoch, number=number)

    def __len__(self) -> int:
        """Raises: TypeError where a stream does not know."""
        return len(self.loader)

    def state_dict(self) -> dict[str, object]:
        """Nothing: the position is the run's. With it and `load_state_dict` Lightning knows that a resume is exact."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing to load."""


class PlainBatches(Batches):
    """The same, which gives each batch's data alone; of training its share is kept beside it."""

    def __iter__(self) -> Iterator[Any]:
        module = self._module
        assert isinstance(module, PlainData)
        start = next_batch(module.trainer)[1] if self._stage == "train" else 0
        for number, batch in enumerate(super().__iter__(), start):
            if self._stage == "train":
                # Of a stream Lightning reads one ahead.
                module.shares.pop(number - 2, None)
                module.shares[number] = batch.with_data(None)
            yield batch.data


class Ahead(Iterator[Batch]):
    """The training batches from a position on, which a step over several micro-batches can read in advance."""

    def __init__(self, batches: Iterator[Batch], loader: Loader, module: StagedData, position: tuple[int, int]) -> None:
        self._batches, self._module, self._sampler = batches, module, loader.sampler
        self._epoch, self._next = position
        # The batches from number `_first` on: those that were read and not given, and those that a step may ask for.
        self._read: deque[Batch] = deque()
        self._first = self._next

    def __next__(self) -> Batch:
        self._module.ahead = self
        # Of a stream, Lightning itself reads one batch in advance.
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
        """Return this rank's shares of the batches from `start` to before `stop`, or to the end of the data.

        start: the number of the batch that training is at. with_data: whether their data is read.
        """
        if self._sampler is not None and not with_data:
            ranks, sizes = self._sampler.world_size, self._sampler.sizes(self._epoch, start)
            return [Batch(None, mine.size, size, ranks) for size, mine in islice(sizes, stop - start)]
        began = time.perf_counter()
        self._read.extend(islice(self._batches, max(0, stop - self._first - len(self._read))))
        self._module.seconds_waited += time.perf_counter() - began
        return list(islice(self._read, start - self._first, stop - self._first))
