"""What the plan knows of a LightningModule of the user's own: which stages it has, and what it cannot do here.

It is built once without memory, for its names and its classes alone; none of its steps is run before the run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from exp.config.module_key import brings_data, target_of
from exp.config.targets import resolve
from exp.construct import build_module
from exp.errors import ExpError, Fault
from exp.shared_types import Stage
from exp.spelling import among, show

STEPS: Mapping[Stage, str] = {"train": "training_step", "val": "validation_step", "test": "test_step"}
# Of an evaluation: the key that asks for it, and the stage.
EVALUATIONS: Mapping[str, Stage] = {"validate": "val", "test": "test"}
LOADERS: Mapping[Stage, str] = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
# What a module makes before its first step, when the check has looked at it already.
LATER = ("setup", "configure_model", "prepare_data")


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """A run's LightningModule and the LightningDataModule beside it, where there is one.

    plain: the config's values, its `module` a node.
    """

    plain: Mapping[str, Any]

    @functools.cached_property
    def kind(self) -> type[LightningModule]:
        kind: type[LightningModule] = self._class_of("module")
        return kind

    @functools.cached_property
    def data_kind(self) -> type[LightningDataModule] | None:
        """The class of its loaders; None where exp's own data give the batches."""
        if not brings_data(self.plain):
            return None
        kind = self._class_of("data")
        return kind if issubclass(kind, LightningDataModule) else None

    @functools.cached_property
    def network(self) -> LightningModule:
        """The module without memory; where it cannot be made so, with it.

        Raises: ConfigError where its constructor refuses its values.
        """
        try:
            return build_module(self.plain, device="meta")
        except ExpError:
            return build_module(self.plain)

    def has(self, stage: Stage) -> bool:
        """Whether the module has a step for a stage, and the data module loaders for it."""
        has_loader = self.data_kind is None or is_overridden(LOADERS[stage], self.data_kind, LightningDataModule)
        return has_loader and is_overridden(STEPS[stage], self.kind, LightningModule)

    @property
    def is_complete(self) -> bool:
        """Whether all layers are there before its setup."""
        return not any(is_overridden(method, self.kind, LightningModule) for method in LATER)

    def faults(self) -> Iterator[Fault]:
        """What Lightning's Trainer would refuse later, or do other than the config says."""
        yield from self._missing()
        loaders = [name for name in LOADERS.values() if is_overridden(name, self.kind, LightningModule)]
        if loaders:
            yield Fault(
                key="module",
                got=f"{self.kind.__name__} with {among(loaders)}, which would lose against data",
                expected="loaders of a LightningDataModule, named by data",
                cure="Move them there: data._target_=mine.LitData",
            )
        if "dataloader_iter" in inspect.signature(self.kind.training_step).parameters:
            expected = (
                "training_step(self, batch, batch_idx): a run that fetches for itself has no position to go on from"
            )
            yield Fault(key="module", got="a training_step that takes dataloader_iter", expected=expected)
        if not self.network.automatic_optimization:
            yield from self._manual()

    def notes(self) -> Iterator[str]:
        """What is left out without a fault."""
        yield (
            f"module {target_of(self.plain)} brings its own network, losses, metrics and optimizers: the model, "
            "objective, metrics, optimizer and scheduler of exp's defaults do not apply"
        )
        if self.plain["train"] and not self.has("val"):
            yield f"nothing is validated: {self._lacking('val')}"
        if self.plain["test"] and not self.has("test"):
            yield f"the test stage is left out: {self._lacking('test')}"
        if self.plain["train"] and self.plain["monitor"] is None and self.plain["checkpoint"]["save_best"]:
            yield "no best.ckpt is kept, for monitor is null: name a tag that the module logs, monitor=val/acc mode=max"

    def _class_of(self, key: str) -> Any:
        return resolve(self.plain[key]["_target_"], allow=self.plain["security"]["allow"])

    def _lacking(self, stage: Stage) -> str:
        if not is_overridden(STEPS[stage], self.kind, LightningModule):
            return f"{self.kind.__name__} has no {STEPS[stage]}"
        return f"{self._class_of('data').__name__} has no {LOADERS[stage]}"

    def _missing(self) -> Iterator[Fault]:
        if brings_data(self.plain) and self.data_kind is None:
            got = f"{self.plain['data']['_target_']} beside module"
            expected = "exp.data.data.Data, around a Dataset of yours, or a LightningDataModule"
            yield Fault(key="data._target_", got=got, expected=expected)
        if self.plain["train"]:
            for method in ("training_step", "configure_optimizers"):
                if not is_overridden(method, self.kind, LightningModule):
                    got = f"{self.kind.__name__} without {method}"
                    yield Fault(key="module", got=got, expected="a LightningModule that trains", cure="Or train=false")
            if self.data_kind is not None and not is_overridden(LOADERS["train"], self.data_kind, LightningDataModule):
                got = f"{self.data_kind.__name__} without train_dataloader"
                yield Fault(key="data", got=got, expected="loaders to train on", cure="Or write train=false")
        for key, stage in EVALUATIONS.items():
            if not self.plain["train"] and self.plain[key] and not self.has(stage):
                yield Fault(key=key, got=f"true, and {self._lacking(stage)}", expected="something to do")

    def _manual(self) -> Iterator[Fault]:
        """What Lightning refuses where the module steps by hand."""
        trainer = self.plain["trainer"]
        for name, without in (("gradient_clip_val", (None, 0)), ("accumulate_grad_batches", (1, None))):
            if trainer[name] not in without:
                yield Fault(
                    key=f"trainer.{name}",
                    got=f"{show(trainer[name])} with {self.kind.__name__}, which steps its optimizers by hand",
                    expected=f"{show(without[0])}: its training_step does that itself",
                )
