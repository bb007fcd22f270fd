from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split


def digits(folder: Path, *, train: bool) -> TensorDataset:
    """Return digits of scikit-learn with 28 x 28 pixels instead of MNIST, which needs a download."""
    images, targets = torch.load(folder / "digits.pt", weights_only=True)
    part = slice(None, 1500) if train else slice(1500, None)
    return TensorDataset((images[part] - 0.1307) / 0.3081, targets[part])


class MNISTDataModule(LightningDataModule):
    """Data module of the template, with its constructor, its hooks, and a batch size per rank."""

    def __init__(
        self,
        data_dir: str = "data/",
        train_val_test_split: tuple[int, int, int] = (55_000, 5_000, 10_000),
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Dataset | None = None
        self.data_val: Dataset | None = None
        self.data_test: Dataset | None = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self) -> int:
        return 10

    def prepare_data(self) -> None:
        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
        images = torch.nn.functional.interpolate(images, size=(28, 28), mode="bilinear")
        folder = Path(self.hparams.data_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((images, torch.tensor(found.target)), folder / "digits.pt")

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError(
                    f"Batch size ({self.hparams.batch_size}) is not divisible by the number of devices "
                    f"({self.trainer.world_size})."
                )
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            folder = Path(self.hparams.data_dir)
            dataset = ConcatDataset(datasets=[digits(folder, train=True), digits(folder, train=False)])
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=dataset,
                lengths=self.hparams.train_val_test_split,
                generator=torch.Generator().manual_seed(42),
            )

    def _loader(self, dataset: Dataset | None, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset=dataset,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            persistent_workers=self.hparams.num_workers > 0,
            shuffle=shuffle,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_val, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_test, shuffle=False)
