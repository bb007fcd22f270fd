"""exp's data as Lightning asks for it, each training epoch from the position where the run is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from exp.data.data import Data
from exp.data.loader import Loader
from exp.engine.position import next_batch
from exp.errors import RunError
from exp.types import Batch, Stage


class RunData(LightningDataModule):
    """Gives Lightning this rank's loaders."""

    def __init__(self, *, data: Data) -> None:
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        """No validation where the data has no val part; Lightning would ask for its loader."""
        if "val" not in self.data.stages:
            self.trainer.limit_val_batches = 0

    def batches(self, stage: Stage) -> int | None:
        """Global batches of an epoch; None where a stream does not know."""
        try:
            return len(self._loader(stage))
        except TypeError:
            return None

    def train_dataloader(self) -> TrainingBatches:
        """Raises: RunError where there is nothing to train on."""
        loader = self._loader("train")
        if self.batches("train") == 0:
            raise RunError(
                "the training part has no batch; expected one or more. data.drop_last leaves out a short last batch: "
                "set it to false, or data.batch_size to fewer samples"
            )
        return TrainingBatches(loader, module=self)

    def val_dataloader(self) -> Loader:
        return self._loader("val")

    def test_dataloader(self) -> Loader:
        return self._loader("test")

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """The batch itself on CPU: a copy of what lies there already would be all that Lightning's own makes."""
        if device.type == "cpu":
            return batch
        return batch._replace(data=moved(batch.data, device))

    def _loader(self, stage: Stage) -> Loader:
        trainer = self.trainer
        return self.data.loader(stage, rank=trainer.global_rank, world_size=trainer.world_size)


class TrainingBatches:
    """The training loader, whose every pass starts where the Trainer says that the run is.

    Lightning asks for more iterators than it uses; counting them would be counting epochs wrongly.
    """

    def __init__(self, loader: Loader, *, module: RunData) -> None:
        self.loader = loader
        self._module = module

    def __iter__(self) -> Iterator[Batch]:
        epoch, batch = next_batch(self._module.trainer)
        self.loader.set_position(epoch, batch)
        return iter(self.loader)

    def __len__(self) -> int:
        """Raises: TypeError where a stream does not know."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the run's. With it and `load_state_dict` Lightning knows that a resume is exact."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def moved(data: Any, device: torch.device) -> Any:
    """The same structure on a device; copies from pinned memory run beside the computation."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {name: moved(value, device) for name, value in data.items()}
    if isinstance(data, tuple) and type(data) is not tuple:
        return type(data)(*(moved(value, device) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return type(data)(moved(value, device) for value in data)
    return data
