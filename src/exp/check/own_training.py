"""The stages of a user's LightningModule and of the LightningDataModule next to it.

The module is built once without memory, for its names and classes. None of its steps runs before the run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from exp.config.settings import Settings
from exp.config.targets import resolve
from exp.construct import build_module
from exp.errors import ExpError
from exp.shared_types import Stage

STEPS: Mapping[Stage, str] = {"train": "training_step", "val": "validation_step", "test": "test_step"}
LOADERS: Mapping[Stage, str] = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
# Methods that may add layers after the check.
LATER = ("setup", "configure_model", "prepare_data")


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """A run's LightningModule and its LightningDataModule, if there is one. settings: Of the run."""

    settings: Settings

    @functools.cached_property
    def kind(self) -> type[LightningModule]:
        """The class of the module."""
        kind: type[LightningModule] = self.class_of("module")
        return kind

    @functools.cached_property
    def data_kind(self) -> type[LightningDataModule] | None:
        """The class of its loaders; None if exp's data gives the batches."""
        if not self.settings.has_own_loaders:
            return None
        kind = self.class_of("data")
        return kind if issubclass(kind, LightningDataModule) else None

    @functools.cached_property
    def network(self) -> LightningModule:
        """The module on the meta device, or on the CPU if it cannot be built there.

        Raises:
            ConfigError: Its constructor refuses its values.
        """
        try:
            return build_module(self.settings, device="meta")
        except ExpError:
            return build_module(self.settings)

    def has(self, stage: Stage) -> bool:
        """Return whether the module has a step for a stage, and the data module has loaders for it."""
        has_loader = self.data_kind is None or is_overridden(LOADERS[stage], self.data_kind, LightningDataModule)
        return has_loader and is_overridden(STEPS[stage], self.kind, LightningModule)

    @property
    def is_complete(self) -> bool:
        """Whether all layers exist before its setup."""
        return not any(is_overridden(method, self.kind, LightningModule) for method in LATER)

    def class_of(self, key: str) -> Any:
        """Return the class of the node `module` or `data`."""
        return resolve(getattr(self.settings, key)["_target_"], allow=self.settings.security.allow)
