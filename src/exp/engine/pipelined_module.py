"""Training module for strategy=pipeline, in which one schedule runs the forward and the backward.

training_step    seeds the random generators and stores the batch; the returned 0 is not used
backward         runs all micro-batches through the schedule; the layers of this rank get gradients, scaled if the
                 precision has a loss scale
optimizer_step   after the last batch of an optimizer step: averages gradients over pipelines, then runs Lightning's
                 step: unscale, hooks, clipping, step

The module overrides only public hooks of LightningModule. Autocast is active in the forward of each stage and in the
loss. It is not active in the backward, because Lightning leaves autocast before it calls `backward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from exp.data.randomness import reseed
from exp.engine.forward import Values
from exp.engine.module import TrainingModule
from exp.engine.observer import StepResult
from exp.engine.predictions import NoOutput
from exp.nested import tensors_in
from exp.shared_types import STAGES, Batch, Stage
from exp.strategies.gradient_averaging import average_gradients
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.pipeline_stages import Stages, keep_samples, split_micro_batches

if TYPE_CHECKING:
    from exp.models.partition import Split


class MicroResult(NamedTuple):
    """Result of one micro-batch.

    Attributes:
        loss: Weighted loss, 0-d.
        parts: Weighted terms by name.
        seen: Values that the metrics need; None if there are no metrics.
    """

    loss: Tensor
    parts: Mapping[str, Tensor]
    seen: Values | None


class PipelinedModule(TrainingModule):
    """TrainingModule for strategy=pipeline, with the same arguments as TrainingModule."""

    _stages: Stages
    _split: Split

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._batch: Batch | None = None

    def pipeline_over(self, stages: Stages, *, split: Split, count: int) -> None:
        """Set the stages of the network.

        Args:
            stages: Pipeline stages of this rank.
            split: Split of the network into stages.
            count: Number of micro-batches into which this rank's part of a batch is split.
        """
        self.__dict__["_stages"], self.__dict__["_split"] = stages, split
        self._count = count
        for stage in STAGES:
            self.values_of(stage).source = stages

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Store the batch for `backward`, and return a 0 that is not used."""
        trainer = self._trainer
        # The seed uses the global rank, so that dropout masks differ between stages.
        reseed(seed=self.seed, rank=trainer.global_rank, epoch=trainer.current_epoch, batch=batch_idx)
        self._batch = self.divisors.of_batch(batch, batch_idx)
        return torch.zeros((), device=self.device)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run forward and backward on the batch that training_step stored."""
        batch, self._batch = self._batch, None
        assert batch is not None
        precision = self.precision
        count = 1 if batch.step is None else batch.step.micro_batches
        size = max(batch.size, 1)
        micro = split_micro_batches(batch.data, size=size, count=self._count)
        train_values = self._train_values

        def share_of_loss(output: object, place: int) -> tuple[Tensor, MicroResult | None]:
            piece = micro[place]
            if not piece.size:
                return zero_from(output), None
            values = self._values(piece.data, output, piece.size)
            with precision.train_step_context():
                loss, parts = self.objective(values)
            weight = batch.weight * piece.size / size
            seen = train_values.read(values) if train_values.measures and batch.size else None
            weighted = {name: part.detach() * weight for name, part in parts.items()}
            return precision.scale(loss * weight / count), MicroResult(loss.detach() * weight, weighted, seen)

        observer = self.observer
        with observer.around_forward(batch.data) if observer.watches_forward else nullcontext():
            results = self._stages.train([self._inputs(piece.data) for piece in micro], share_of_loss)
        self._record([result for result in results if result is not None])

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Tensor | None] | None = None,
    ) -> None:
        """Run Lightning's optimizer step, with gradients that are averaged over the pipelines."""
        strategy = self._trainer.strategy
        assert isinstance(strategy, ModelParallel)

        def closure() -> Tensor | None:
            result = None if optimizer_closure is None else optimizer_closure()
            average_gradients(self.network.parameters(), group=strategy.data_group)
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _record(self, results: list[MicroResult]) -> None:
        """Store the losses of a step, and update the metrics.

        Only one rank of a pipeline has the loss. The loss is multiplied by the number of ranks, because Recording later
        takes the mean over ranks.
        """
        ranks = len(set(self._stages.owner))
        # The dtype is fixed, because it must be equal on all ranks, and only one rank computes the loss.
        zero = torch.zeros((), device=self.device, dtype=torch.float64)
        loss = sum((one.loss for one in results), zero) * ranks
        parts = {name: sum((one.parts[name] for one in results), zero) * ranks for name in self.objective.terms}
        self.__dict__["last"] = StepResult(loss, parts)
        for one in results:
            if one.seen is not None:
                self._train_values.update_metrics(one.seen)

    def _evaluate(self, stage: Stage, batch: Batch, batch_idx: int) -> None:
        reseed(seed=self.seed, rank=self._trainer.global_rank, epoch=0, batch=batch_idx, stage=stage)
        size = max(batch.size, 1)
        output = self._stages.evaluate(self._inputs(batch.data))
        if output is None:
            return
        values = self._values(batch.data, output, size)
        _, parts = self.objective(values)
        self._add(stage, values, self.objective.means(values, parts, size=size) if batch.size else [])

    def predict_step(self, batch: Batch, batch_idx: int) -> object:
        """Return the network's output on ranks of the last stage, and NoOutput on other ranks."""
        reseed(seed=self.seed, rank=self._trainer.global_rank, epoch=0, batch=batch_idx, stage="test")
        output = self._stages.evaluate(self._inputs(batch.data))
        return NoOutput() if output is None else output

    def _inputs(self, data: object) -> dict[str, object]:
        """Return the network's inputs by name."""
        found: dict[str, object] = {}

        def bind(*arguments: object, **named: object) -> None:
            found.update(self._split.bind(arguments, named))

        self._run(bind, data)
        return self.precision.cast_inputs(found)

    def _values(self, data: object, output: object, size: int) -> Values:
        """Return the values of the forward for the first `size` samples, by name."""
        return self._run(lambda *_, **__: keep_samples(output, size), keep_samples(data, size))


def zero_from(output: object) -> Tensor:
    """Return a loss for a micro-batch without samples: a 0 that depends on each tensor of the output."""
    return sum((tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros(())) * 0.0


vars(PipelinedModule.training_step)["__signature__"] = inspect.signature(PipelinedModule.training_step)
