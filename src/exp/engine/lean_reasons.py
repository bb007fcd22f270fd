"""Why a run cannot do several steps in one call of the loop: what acts in it at every step and is not known here."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from exp.engine.data import RunData
from exp.engine.module import TrainingModule
from exp.engine.overhead import TRAINING_HOOKS, NoProfiler, overridden
from exp.precision.plugin import RunPrecision
from exp.precision.scaled import ScaledPrecision

WORD = "steps_per_execution"


def why_one_by_one(trainer: Trainer) -> str | None:
    """The reasons in one line; None where there are none."""
    return "; ".join(_reasons(trainer)) or None


def _reasons(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:
        if not is_own(callback):
            acting = [name for name in TRAINING_HOOKS if overridden(callback, Callback, name) is not None]
            if acting:
                yield f"the callback {type(callback).__name__} acts at every step, in {', '.join(acting)}"
        for name, hook in getattr(callback, "hooks", {}).items() if is_own(callback) else ():
            if WORD in hook.refuses:
                yield f"the hook {name}: {hook.refuses[WORD]}"
    module = trainer.lightning_module
    if not isinstance(module, TrainingModule):
        yield f"{type(module).__name__} is no module of exp"
    acting = [name for name in TRAINING_HOOKS if overridden(module, LightningModule, name) is not None]
    if acting:
        yield f"{type(module).__name__} acts at every step, in {', '.join(acting)}"
    strategy = trainer.strategy
    if not is_own(strategy) and type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        yield f"the strategy {type(strategy).__name__} is not exp's"
    elif strategy.handles_gradient_accumulation:
        yield f"the strategy {type(strategy).__name__} has a loop of its own"
    if type(trainer.precision_plugin) not in (RunPrecision, ScaledPrecision):
        yield f"the precision {type(trainer.precision_plugin).__name__} is not exp's"
    if type(trainer.profiler) is not NoProfiler:
        yield f"the profiler {type(trainer.profiler).__name__} looks into Lightning's loop"
    if not isinstance(trainer.datamodule, RunData):
        yield "the data is not exp's"
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        yield "the training step fetches its own batches"


def is_own(part: object) -> bool:
    """Whether exp itself wrote the class: a subclass by someone else may do anything."""
    return type(part).__module__.partition(".")[0] == "exp"
