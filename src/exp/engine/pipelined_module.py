"""The training module of a pipeline, whose schedule makes forward and backward in one.

training_step    reseed; keeps the batch; a 0 that nothing reads
backward         all micro-batches through the schedule; gradients of the rank's own layers, true or scaled
optimizer_step   at a window's end: gradients averaged over pipelines, then Lightning's: unscale, hooks, clipping, step

Only public hooks of LightningModule are overridden. Autocast is around each stage's forward and the loss, and around no
backward, because Lightning has left it when it calls `backward`.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exp.data.randomness import reseed
from exp.engine.forward import Values
from exp.engine.module import TrainingModule
from exp.engine.observer import StepResult
from exp.engine.predictions import Nothing
from exp.nested import tensors_in
from exp.precision.plugin import RunPrecision
from exp.shared_types import STAGES, Batch, Stage
from exp.strategies.gradient_averaging import average_gradients
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.pipeline_stages import Stages, keep_samples, split_micro_batches

if TYPE_CHECKING:
    from exp.models.partition import Split


class PipelinedModule(TrainingModule):
    """A TrainingModule for strategy=pipeline. Its parameters are TrainingModule's."""

    _stages: Stages
    _split: Split

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._batch: Batch | None = None

    def pipeline_over(self, stages: Stages, *, split: Split, count: int) -> None:
        """Take the stages of a network that the strategy has cut.

        stages: of this rank. split: the network's. count: micro-batches of a share.
        """
        self.__dict__["_stages"], self.__dict__["_split"] = stages, split
        self._count = count
        for stage in STAGES:
            self.values_of(stage).source = stages

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Keep the batch for `backward`. Returns a 0 that nothing reads."""
        trainer = self._trainer
        # Dropout of two stages must not be alike: each rank has a stream of its own.
        reseed(seed=self.seed, rank=trainer.global_rank, epoch=trainer.current_epoch, batch=batch_idx)
        self._batch = self.in_step(batch, batch_idx)
        return torch.zeros((), device=self.device)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run forward and backward of the batch that training_step kept."""
        batch, self._batch = self._batch, None
        assert batch is not None
        precision = self._trainer.precision_plugin
        assert isinstance(precision, RunPrecision)
        count = 1 if batch.step is None else batch.step.micro_batches
        size = max(batch.size, 1)
        micro = split_micro_batches(batch.data, size=size, count=self._count)
        train_values = self._train_values

        def share_of_loss(output: Any, place: int) -> tuple[Tensor, Any]:
            piece = micro[place]
            if not piece.size:
                return nothing_of(output), None
            values = self._values(piece.data, output, piece.size)
            with precision.train_step_context():
                loss, parts = self.objective(values)
            weight = batch.weight * piece.size / size
            seen = train_values.read(values) if train_values.measures and batch.size else None
            weighted = {name: part.detach() * weight for name, part in parts.items()}
            return precision.scale(loss * weight / count), (loss.detach() * weight, weighted, seen)

        observer = self.observer
        with observer.around_forward(batch.data) if observer.watches_forward else nullcontext():
            notes = self._stages.train([self._inputs(piece.data) for piece in micro], share_of_loss)
        self._remember([note for note in notes if note is not None])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step as Lightning does, with the gradients averaged over the pipelines behind the backward."""

        strategy = self._trainer.strategy
        assert isinstance(strategy, ModelParallel)

        def closure() -> Any:
            result = optimizer_closure()
            average_gradients(self.network.parameters(), group=strategy.data_group)
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _remember(self, notes: list[Any]) -> None:
        """Leave the losses as those of all ranks, of which Recording takes means, on the rank that has them."""
        ranks = len(set(self._stages.owner))
        # One dtype on all ranks, of which only one knows the loss's own.
        zero = torch.zeros((), device=self.device, dtype=torch.float64)
        loss = sum((loss for loss, _, _ in notes), zero) * ranks
        parts = {name: sum((parts[name] for _, parts, _ in notes), zero) * ranks for name in self.objective.terms}
        self.__dict__["last"] = StepResult(loss, parts)
        for _, _, seen in notes:
            if seen is not None:
                self._train_values.update_metrics(seen)

    def _evaluate(self, stage: Stage, batch: Batch, batch_idx: int) -> None:
        reseed(seed=self.seed, rank=self._trainer.global_rank, epoch=0, batch=batch_idx, stage=stage)
        size = max(batch.size, 1)
        output = self._stages.evaluate(self._inputs(batch.data))
        if output is None:
            return
        values = self._values(batch.data, output, size)
        _, parts = self.objective(values)
        self._add(stage, values, self.objective.means(values, parts, size=size) if batch.size else [])

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return what the network gives, in the last stage; Nothing in the others."""
        reseed(seed=self.seed, rank=self._trainer.global_rank, epoch=0, batch=batch_idx, stage="test")
        output = self._stages.evaluate(self._inputs(batch.data))
        return Nothing() if output is None else output

    def _inputs(self, data: object) -> dict[str, Any]:
        """Return the network's inputs by name, of a batch's data."""
        found: dict[str, Any] = {}

        def bind(*arguments: object, **named: object) -> None:
            found.update(self._split.bind(arguments, named))

        self._run(bind, data)
        precision = self._trainer.precision_plugin
        assert isinstance(precision, RunPrecision)
        inputs: dict[str, Any] = precision.cast_inputs(found)
        return inputs

    def _values(self, data: object, output: object, size: int) -> Values:
        """Return the values by name, of the first `size` samples."""
        return self._run(lambda *_, **__: keep_samples(output, size), keep_samples(data, size))


def nothing_of(output: object) -> Tensor:
    """Return a 0 that depends on every tensor of an output, so that its micro-batch has a backward, too."""
    return sum((tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros(())) * 0.0


vars(PipelinedModule.training_step)["__signature__"] = inspect.signature(PipelinedModule.training_step)
