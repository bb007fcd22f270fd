"""Find what a user's LightningModule cannot do in a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from exp.check.own_training import LOADERS, STEPS, OwnTraining
from exp.errors import ErrorDetails
from exp.shared_types import Stage
from exp.spelling import among, show

# The evaluations by the key that asks for them.
EVALUATIONS: Mapping[str, Stage] = {"validate": "val", "test": "test"}


def module_errors(own: OwnTraining) -> Iterator[ErrorDetails]:
    """Yield what Lightning's Trainer would refuse later, or do otherwise than the config says."""
    settings, kind, data_kind = own.settings, own.kind, own.data_kind
    trains = "a LightningModule that trains", "Or train=false"
    if settings.has_own_loaders and data_kind is None:
        expected = "exp.data.data.Data, around a Dataset of yours, or a LightningDataModule"
        yield ErrorDetails(key="data._target_", got=f"{settings.data['_target_']} with a module", expected=expected)
    if settings.train:
        for method in ("training_step", "configure_optimizers"):
            if not is_overridden(method, kind, LightningModule):
                yield ErrorDetails(
                    key="module", got=f"{kind.__name__} without {method}", expected=trains[0], fix=trains[1]
                )
        if data_kind is not None and not is_overridden(LOADERS["train"], data_kind, LightningDataModule):
            got = f"{data_kind.__name__} without train_dataloader"
            yield ErrorDetails(key="data", got=got, expected="loaders to train on", fix="Or write train=false")
    for key, stage in EVALUATIONS.items():
        if not settings.train and getattr(settings, key) and not own.has(stage):
            yield ErrorDetails(key=key, got=f"true, and {_lacking(own, stage)}", expected="something to do")
    loaders = [name for name in LOADERS.values() if is_overridden(name, kind, LightningModule)]
    if loaders:
        got = f"{kind.__name__} with {among(loaders)}, which the loaders of data would replace"
        expected, fix = "loaders of a LightningDataModule, named by data", "Move them there: data._target_=mine.LitData"
        yield ErrorDetails(key="module", got=got, expected=expected, fix=fix)
    if "dataloader_iter" in inspect.signature(kind.training_step).parameters:
        expected = "training_step(self, batch, batch_idx): a run that fetches batches itself has no position to resume"
        yield ErrorDetails(key="module", got="a training_step that takes dataloader_iter", expected=expected)
    if not own.network.automatic_optimization:
        for name, off in (("gradient_clip_val", (None, 0)), ("accumulate_grad_batches", (1, None))):
            value = getattr(settings.trainer, name)
            if value not in off:
                got = f"{show(value)} with {kind.__name__}, which steps its optimizers by hand"
                expected = f"{show(off[0])}: its training_step does that itself"
                yield ErrorDetails(key=f"trainer.{name}", got=got, expected=expected)


def module_notes(own: OwnTraining) -> Iterator[str]:
    """Yield what is left out without an error."""
    settings, name = own.settings, f"{own.kind.__module__}.{own.kind.__qualname__}"
    yield (
        f"module {name} brings its own network, losses, metrics and optimizers: the model, objective, metrics, "
        "optimizer and scheduler of exp's defaults do not apply"
    )
    if settings.train and not own.has("val"):
        yield f"nothing is validated: {_lacking(own, 'val')}"
    if settings.test and not own.has("test"):
        yield f"the test stage is left out: {_lacking(own, 'test')}"
    if settings.train and settings.monitor is None and settings.checkpoint.save_best:
        yield "no best.ckpt is kept, for monitor is null: name a tag that the module logs, monitor=val/acc mode=max"


def _lacking(own: OwnTraining, stage: Stage) -> str:
    if not is_overridden(STEPS[stage], own.kind, LightningModule):
        return f"{own.kind.__name__} has no {STEPS[stage]}"
    return f"{own.class_of('data').__name__} has no {LOADERS[stage]}"
