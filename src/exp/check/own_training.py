"""The checks of a user's LightningModule and of its LightningDataModule.

The LightningModule is built on the meta device, without memory, to read the names and classes of the layers. The check
calls neither training_step nor validation_step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from exp.config.settings import Settings
from exp.config.targets import resolve
from exp.construct import build_module
from exp.errors import ErrorDetails, ExpError, not_supported_with, unsuitable
from exp.shared_types import Stage
from exp.spelling import among, show

STEPS: Mapping[Stage, str] = {"train": "training_step", "val": "validation_step", "test": "test_step"}
LOADERS: Mapping[Stage, str] = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
# Methods of a LightningModule that may add layers after the check.
LATER = ("setup", "configure_model", "prepare_data")
# Stages that a run without training evaluates, by the config key that requests the evaluation.
EVALUATIONS: Mapping[str, Stage] = {"validate": "val", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """The user's LightningModule of a run, and its LightningDataModule if the run has one."""

    settings: Settings

    @functools.cached_property
    def kind(self) -> type[LightningModule]:
        """Class of the LightningModule."""
        kind: type[LightningModule] = self.class_of("module")
        return kind

    @functools.cached_property
    def data_kind(self) -> type[LightningDataModule] | None:
        """Class of the LightningDataModule. None if the run uses the data of exp."""
        if not self.settings.has_own_loaders:
            return None
        kind = self.class_of("data")
        return kind if issubclass(kind, LightningDataModule) else None

    @functools.cached_property
    def network(self) -> LightningModule:
        """The module on the meta device, or on the CPU if it cannot be built on the meta device.

        Raises:
            ConfigError: The constructor of the module rejects its values.
        """
        try:
            return build_module(self.settings, device="meta")
        except ExpError:
            return build_module(self.settings)

    def has(self, stage: Stage) -> bool:
        """Return whether the module has a step for a stage, and the data module has a loader for this stage."""
        has_loader = self.data_kind is None or is_overridden(LOADERS[stage], self.data_kind, LightningDataModule)
        return has_loader and is_overridden(STEPS[stage], self.kind, LightningModule)

    @property
    def is_complete(self) -> bool:
        """True if the constructor of the module creates all layers, because the module overrides no method in LATER."""
        return not any(is_overridden(method, self.kind, LightningModule) for method in LATER)

    def class_of(self, key: str) -> Any:
        """Return the class of the node `module` or `data`."""
        return resolve(getattr(self.settings, key)["_target_"], allow=self.settings.security.allow)


def module_errors(own: OwnTraining) -> Iterator[ErrorDetails]:
    """Yield the errors of settings that Lightning's Trainer would reject during the run, or would not apply."""
    settings, kind, data_kind = own.settings, own.kind, own.data_kind
    if settings.has_own_loaders and data_kind is None:
        expected = "exp.data.data.Data with your data set, or a LightningDataModule"
        yield not_supported_with("data._target_", settings.data["_target_"], "a module", expected)
    if settings.train:
        for method in ("training_step", "configure_optimizers"):
            if not is_overridden(method, kind, LightningModule):
                because = f"which has no {method}"
                expected = "a LightningModule that can train"
                yield unsuitable("module", kind.__name__, because, expected, "To only evaluate, write train=false")
        if data_kind is not None and not is_overridden(LOADERS["train"], data_kind, LightningDataModule):
            because, fix = "which has no train_dataloader", "To only evaluate, write train=false"
            yield unsuitable("data", data_kind.__name__, because, "a LightningDataModule with training data", fix)
    for key, stage in EVALUATIONS.items():
        if not settings.train and getattr(settings, key) and not own.has(stage):
            yield unsuitable(key, "true", f"and {_lacking(own, stage)}", "false, or a class with this method")
    loaders = [name for name in LOADERS.values() if is_overridden(name, kind, LightningModule)]
    if loaders:
        expected = "loaders only in the LightningDataModule of the node data"
        fix = "Move these methods to a LightningDataModule, and write data._target_=mine.LitData"
        other = f"the methods {among(loaders)}, which the loaders of data would replace"
        yield not_supported_with("module", kind.__name__, other, expected, fix)
    if "dataloader_iter" in inspect.signature(kind.training_step).parameters:
        expected = "training_step(self, batch, batch_idx), because exp must count the batches to resume the run"
        yield not_supported_with("module", "training_step", "the parameter dataloader_iter", expected)
    if not own.network.automatic_optimization:
        for name, off in (("gradient_clip_val", (None, 0)), ("accumulate_grad_batches", (1, None))):
            value = getattr(settings.trainer, name)
            if value not in off:
                expected = f"{show(off[0])}, because the training_step does this itself"
                other = f"{kind.__name__}, which uses manual optimization"
                yield not_supported_with(f"trainer.{name}", value, other, expected)


def module_notes(own: OwnTraining) -> Iterator[str]:
    """Yield remarks on keys of the config that have no effect, and on stages that are skipped."""
    settings, name = own.settings, f"{own.kind.__module__}.{own.kind.__qualname__}"
    yield (
        f"module {name} defines the network, losses, metrics and optimizers. The keys model, objective, metrics, "
        "optimizer and scheduler have no effect"
    )
    if settings.train and not own.has("val"):
        yield f"the run has no validation, because {_lacking(own, 'val')}"
    if settings.test and not own.has("test"):
        yield f"the run has no test stage, because {_lacking(own, 'test')}"
    if settings.train and settings.monitor is None and settings.checkpoint.save_best:
        yield "no best.ckpt is saved, because monitor is null. Name a tag of the module: monitor=val/acc mode=max"


def _lacking(own: OwnTraining, stage: Stage) -> str:
    if not is_overridden(STEPS[stage], own.kind, LightningModule):
        return f"{own.kind.__name__} has no {STEPS[stage]}"
    return f"{own.class_of('data').__name__} has no {LOADERS[stage]}"
