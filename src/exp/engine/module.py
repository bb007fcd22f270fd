"""LightningModule of a run, with its network, objective, metrics and optimizer.

The module uses the private names `_current_fx_name` and `_trainer` of Lightning (2.6.6). docs/engine.md lists their
tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric, MetricCollection

from exp.data.randomness import reseed
from exp.engine.buffer import EpochValues
from exp.engine.checkpoint import State
from exp.engine.datamodule import RunTrainer
from exp.engine.forward import (
    Forward,
    Runner,
    Values,
    detach_output,
    enable_needs,
    forward_by_name,
    make_passes,
    named_values,
)
from exp.engine.non_finite import finite_names, require_finite
from exp.engine.observer import NO_RESULT, UNOBSERVED, StepObserver, StepResult
from exp.engine.progress import Limits, total_epochs, total_steps
from exp.engine.runtime import run_uncompiled
from exp.errors import UserCodeError
from exp.nested import move_tensors
from exp.objectives.measures import Measure, as_measure, as_scored
from exp.objectives.objective import Mean, Objective
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.precision.plugin import RunPrecision
from exp.shared_types import INPUT, STAGES, Batch, Stage, StepWeights
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.whole_state import local_part


class StepDivisors:
    """Calculator of the divisors of the losses in an optimizer step, from all micro-batches of the step.

    A divisor is the number of samples, or the sum of the weights of the targets.
    """

    def __init__(self, module: TrainingModule) -> None:
        self._module = module
        self._is_weighed = bool(module.objective.weighed)
        self.clear()

    @property
    def _trainer(self) -> RunTrainer:
        return cast(RunTrainer, self._module.trainer)

    def clear(self) -> None:
        """Delete the divisors of the current step."""
        # Key of the current step: its epoch and the number of accumulated batches. Then the range of its micro-batches
        # in the epoch, and their divisors.
        self._key, self._numbers = (-1, 0), range(0)
        self._weights: StepWeights | None = None

    def of_batch(self, batch: Batch, batch_idx: int) -> Batch:
        """Return a micro-batch with the divisors of its optimizer step.

        Every rank must call this method at the first micro-batch of a step.
        """
        trainer = self._trainer
        count = trainer.accumulate_grad_batches
        key = trainer.current_epoch, count
        if count == 1:
            return batch
        if self._weights is None or key != self._key or batch_idx not in self._numbers:
            stop = int(min(batch_idx - batch_idx % count + count, trainer.num_training_batches))
            found = trainer.datamodule.ahead.micro_batches(batch_idx, stop, with_data=self._is_weighed)
            self._weights = self._divide(found)
            self._key, self._numbers = key, range(batch_idx, batch_idx + self._weights.micro_batches)
        return batch.with_step(self._weights)

    def of_step(self, window: Sequence[tuple[Batch, int]]) -> Sequence[tuple[Batch, int]]:
        """Return all micro-batches of a step with the divisors of the step. Every rank must call this method.

        Args:
            window: Micro-batches with their numbers in the epoch.
        """
        if len(window) == 1:
            return window
        weights = self._divide([batch for batch, _ in window])
        return [(batch.with_step(weights), batch_idx) for batch, batch_idx in window]

    def _divide(self, batches: Sequence[Batch]) -> StepWeights:
        module, objective = self._module, self._module.objective
        names = [objective.terms[name].names.values() for name in objective.weighed]
        read = {name for some in names for name in some} if all(names) else None

        def by_name(data: object) -> Values:
            values = {one: value for one, value in named_values(data).items() if read is None or one in read}
            converted: Values = self._trainer.precision_plugin.convert_input(values)
            return move_tensors(converted, module.device)

        return objective.step_weights(batches, by_name, device=module.device)


class TrainingModule(LightningModule):
    """LightningModule of exp, with a network, an objective, metrics and an optimizer.

    A training step sets the random generators, runs the forward and computes the objective. A step does not wait for
    the device and does not log. One exception: with a loss scale and interval=step, the schedule waits for the device,
    because it has to read whether the optimizer skipped the step.

    Args:
        network: The network.
        objective: Loss terms. The loss is their weighted sum.
        optimization: Factory of the optimizer and its schedule.
        metrics: Metrics by name. The tag of a metric is `<name>/<stage>`. A metric that names no values compares
            `output` and `target`. Each stage has separate copies of the metrics. Default: no metrics.
        metric_stages: Stages in which the metrics are computed. Default: val and test.
        seed: Seed of the run. Random layers such as dropout depend on (seed, rank, epoch, batch). Default: 0.
        rank: Index of the part of each global batch that this process uses. Default: 0.
        limits: Limits of the run, for schedules that depend on the length of the run. Default: no limits.
        inputs: Names of the data's inputs. Default: input.

    Attributes:
        averages_gradients: True if the module averages gradients over ranks. DDP then does not average gradients.
        run_network: Callable that a step calls with the inputs: the network, or a replacement that a strategy sets.
        last: Result of the last training step.
        observer: Observer of training and evaluation; Recording sets it.
        divisors: Divisors of the losses over accumulated micro-batches.
    """

    averages_gradients = False
    phases: Sequence[Phase] = ()
    run_network: Runner
    # Lightning's property `trainer` checks for None at each access, which takes time in every step.
    _trainer: RunTrainer

    def __init__(
        self,
        *,
        network: nn.Module,
        objective: Objective,
        optimization: Optimization,
        metrics: Mapping[str, Measure | Metric | MetricCollection] | None = None,
        metric_stages: Sequence[Stage] = ("val", "test"),
        seed: int = 0,
        rank: int = 0,
        limits: Limits | None = None,
        inputs: Sequence[str] = INPUT,
    ) -> None:
        super().__init__()
        self.network, self.inputs = network, tuple(inputs)
        self.objective = objective
        self.optimization = optimization
        self.seed, self.rank = seed, rank
        self.limits = limits or Limits()
        self.last = NO_RESULT
        # True if sums and metrics of the epoch count the next forward. Recording sets it to False after the first
        # forward of a step, because LBFGS runs several forwards on a batch.
        self.is_counting = True
        self.observer: StepObserver = UNOBSERVED
        measures = [as_scored(as_measure(name, metric), objective) for name, metric in (metrics or {}).items()]
        self.epoch_values = nn.ModuleDict(
            {
                f"{stage}_values": EpochValues(
                    stage=stage,
                    terms=objective.terms,
                    measures=[measure.clone() for measure in measures] if stage in metric_stages else [],
                )
                for stage in STAGES
            }
        )
        self._train_values = self.values_of("train")
        self._finite: frozenset[str] = frozenset()
        # Not a submodule, so that the state dict contains the network only once.
        self.__dict__["run_network"] = network
        self._run = forward_by_name(network, self.inputs)
        self._needs = objective.needs
        self._is_weighed = bool(objective.weighed)
        self.divisors = StepDivisors(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this attribute forty times per step, and each time nn.Module.__setattr__ would search the
        # parameters.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def values_of(self, stage: Stage) -> EpochValues:
        """Return the loss sums and metrics of the current epoch of a stage."""
        values = self.epoch_values[f"{stage}_values"]
        assert isinstance(values, EpochValues)
        return values

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of this rank's samples, 0-d.

        Lightning divides the loss by the number of accumulated batches.
        """
        count = self._trainer.accumulate_grad_batches
        if count != 1:
            batch = self.divisors.of_batch(batch, batch_idx)
        values, loss, parts = self.compute(batch, batch_idx)
        if self._is_weighed and self.is_counting:
            self._train_values.add(self.objective.own_means(batch))
        # Set through __dict__, because nn.Module.__setattr__ takes as long as a small operator.
        self.__dict__["last"] = StepResult(loss.detach(), parts)
        if self._train_values.measures and batch.size and self.is_counting:
            self._train_values.update_metrics(self._train_values.read(values))
        # Lightning divides the loss by the configured number of micro-batches, but the last step of an epoch may have
        # fewer.
        own = count if batch.step is None else batch.step.micro_batches
        return loss if own == count else loss * (count / own)

    def compute(self, batch: Batch, batch_idx: int) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Run the forward and the objective on a micro-batch, without changing the sums of the epoch.

        Returns:
            Values of the forward by name, the loss, and the terms of the loss by name.
        """
        reseed(seed=self.seed, rank=self.rank, epoch=self._trainer.current_epoch, batch=batch_idx)
        observer = self.observer
        if observer.watches_forward:
            with observer.around_forward(batch.data):
                values, loss, parts = self._forward(batch)
        else:
            values, loss, parts = self._forward(batch)
        observer.after_forward(values)
        weight = batch.weight
        if weight != 1.0:
            loss = loss * weight
            parts = {name: part * weight for name, part in parts.items()}
        return values, loss, parts

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> object:
        """Return the network's output for this rank's part of a batch."""
        reseed(seed=self.seed, rank=self.rank, epoch=0, batch=batch_idx, stage="test")
        return self._run(self.run_network, batch.data)["output"]

    def configure_optimizers(self) -> Any:
        """Return the optimizer and, if configured, its schedule, in the format that Lightning expects."""
        steps, epochs = self.lengths()
        optimizer, schedule = self.optimization.make(self.network, total_steps=steps, total_epochs=epochs)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": schedule_config(schedule, self.optimization, self.trainer)}

    def metric_names(self, stage: Stage) -> Sequence[str]:
        return [measure.name for measure in self.values_of(stage).measures]

    @property
    def seconds_waited(self) -> float:
        """Total seconds for which training has waited for batches in this process."""
        return self._trainer.datamodule.seconds_waited

    def lengths(self) -> tuple[int | None, int | None]:
        """Return the number of optimizer steps and of epochs of the whole run. An unlimited number is None."""
        trainer = self._trainer
        return total_steps(trainer, self.limits, trainer.datamodule.batches("train")), total_epochs(trainer)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip unscaled gradients, jointly over all ranks that split the model."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strategy = self.trainer.strategy
        clip(parameters, value=gradient_clip_val, algorithm=gradient_clip_algorithm, strategy=strategy)
        self.observer.after_clipping()

    def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any | None) -> None:
        """Step a schedule, unless the optimizer skipped its step because of the loss scale."""
        if metric is not None:
            scheduler.step(metric)
            return
        precision = self.trainer.precision_plugin
        # The interval is checked first, because `has_skipped` waits for the device.
        counts_steps = self.optimization.interval == "step"
        if not (counts_steps and isinstance(precision, RunPrecision) and precision.has_skipped(scheduler.optimizer)):
            scheduler.step()

    def setup(self, stage: str) -> None:
        self.divisors.clear()
        if stage == "fit":
            self._finite = finite_names(self)

    def on_save_checkpoint(self, checkpoint: State) -> None:
        # Lightning calls this method after on_save_checkpoint of all callbacks.
        self.require_finite(checkpoint)
        checkpoint.update(self._train_values.state(self.trainer.strategy, with_losses=self._is_weighed))

    def restore_epoch(self, state: State) -> None:
        """Restore the sums and metrics of the training epoch from a checkpoint."""
        device, ranks = self._trainer.strategy.root_device, self._trainer.datamodule.world_size
        self._train_values.restore(state, device=device, rank=self.rank, ranks=ranks)

    @property
    def precision(self) -> RunPrecision:
        """Precision plugin of the run."""
        plugin = self._trainer.precision_plugin
        assert isinstance(plugin, RunPrecision)
        return plugin

    def require_finite(self, state: State) -> None:
        """Raise NonFiniteError if a checkpoint or a state dict contains unexpected non-finite numbers.

        Every rank must call this method.
        """
        require_finite(state, self._finite, self._trainer)

    def on_load_checkpoint(self, checkpoint: State) -> None:
        if self.trainer.state.fn == "fit":
            self.restore_epoch(checkpoint)

    def loss_with(self, run_network: Runner, data: object) -> Tensor:
        """Return the loss of a batch, 0-d and not weighted, with the output of the callable `run_network`.

        A compiled network runs uncompiled, because this method is called only once.
        """
        with run_uncompiled(self.network):
            loss: Tensor = self.objective(self._run(run_network, data))[0]
        return loss

    def runs(self) -> list[tuple[nn.Module, frozenset[str]]]:
        """Return the modules that a step calls, each with the needs of the terms that use the module's output."""
        return [(self.network, self.objective.needs)]

    def forward(self, *inputs: object, **named: object) -> object:
        """Return the network's output."""
        return self.network(*inputs, **named)

    def _evaluate(self, stage: Stage, batch: Batch, batch_idx: int) -> None:
        # Epoch 0 is used in each evaluation, so that random layers draw the same numbers every time.
        reseed(seed=self.seed, rank=self.rank, epoch=0, batch=batch_idx, stage=stage)
        # Compute means over the samples of this rank only. The sums over all ranks are computed after the last batch.
        try:
            values, means = self._means(Batch(batch.data, batch.size, global_size=max(batch.size, 1), world_size=1))
            self._add(stage, values, means if batch.size else [])
        except StopIteration as error:
            # Lightning would treat the StopIteration as the end of the data.
            raise UserCodeError.of(error, what=f"batch {batch_idx} of {stage}") from error
        if batch.size and not self._trainer.sanity_checking:
            self.observer.evaluated(stage, values)

    def _add(self, stage: Stage, values: Values, means: Sequence[Mean]) -> None:
        """Add a batch to the loss sums and metrics of a stage. If the batch is empty and has no means, add nothing."""
        epoch_values = self.values_of(stage)
        seen = epoch_values.read(values) if epoch_values.measures else None
        if means:
            epoch_values.add(means)
            if seen is not None:
                epoch_values.update_metrics(seen)

    def _means(self, batch: Batch) -> tuple[Values, Sequence[Mean]]:
        """Return the values of an evaluation batch by name, and the mean of each term with its divisor."""
        values, _, parts = self._forward(batch)
        return values, self.objective.means(values, parts, size=batch.size)

    def _forward(self, batch: Batch) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Run a forward. Return the values by name, the loss, and the terms of the loss by name."""
        if self._needs:
            return self._forward_with_passes(
                batch, self.objective, network=self.network, run=self._run, runner=self.run_network
            )
        values = self._run(self.run_network, batch.data)
        loss, parts = self.objective(values, batch)
        return values, loss, parts

    def _forward_with_passes(
        self, batch: Batch, objective: Objective, *, network: nn.Module, run: Forward, runner: Runner
    ) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Run the forwards of an objective that needs several. Return the same values as `_forward`.

        Args:
            batch: The batch.
            objective: Objective of the step, or of one phase.
            network: The network.
            run: Function that runs one forward; see Passes.
            runner: Callable used instead of the network; see Passes.
        """
        precision = self._trainer.precision_plugin
        scale = precision.loss_scale if isinstance(precision, RunPrecision) and precision.is_scaled else None
        with enable_needs(objective.needs, network):
            passes = make_passes(
                objective.needs,
                network=network,
                run=run,
                data=batch.data,
                inputs=self.inputs,
                runner=runner,
                loss_scale=scale,
            )
            values = passes.run()
            loss, parts = objective(values, batch, passes)
        if not self.training:
            values = {**values, "output": detach_output(values["output"])}
        return values, loss, parts


def schedule_config(schedule: object, optimization: Optimization, trainer: Trainer) -> dict[str, object]:
    """Return a schedule and its frequency in the format that Lightning expects."""
    config: dict[str, object] = {"scheduler": schedule, "interval": optimization.interval, "name": None}
    if isinstance(schedule, ReduceLROnPlateau):
        config |= {"monitor": optimization.monitor, "reduce_on_plateau": True}
        # The tag is a validation value, such as `accuracy/val` or `loss/val/<term>`. In epochs without a validation,
        # Lightning would use the last value again.
        if "val" in (optimization.monitor or "").split("/"):
            config["frequency"] = trainer.check_val_every_n_epoch or 1
    return config


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter], *, value: float | None, algorithm: str | None, strategy: Strategy
) -> Tensor | None:
    """Clip gradients in place. If ranks split the model, every rank must call this function.

    Args:
        parameters: Parameters with gradients.
        value: Largest allowed 2-norm over all gradients, or largest absolute value of each number. None or 0 disables
            clipping.
        algorithm: `norm` or `value`. None means `norm`.
        strategy: Strategy of the run.

    Returns:
        The 2-norm before clipping, 0-d; None if no norm was computed.
    """
    if not value:
        return None
    parameters = list(parameters)
    if not isinstance(strategy, ModelParallel):
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value)
    # Gradients are clipped one by one, because torch's kernels for lists reject DTensors together with plain tensors.
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if algorithm == "value":
        for part in parts:
            part.clamp_(min=-value, max=value)
        return None
    norm = strategy.total_norm(parameters)
    # The following code has the same rule as torch.nn.utils.clip_grad_norm_.
    factor = torch.clamp(value / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor.to(device=part.device, dtype=part.dtype))
    return norm


# Lightning inspects the signature in each step. The module `inspect` reads this attribute instead of computing it.
vars(TrainingModule.training_step)["__signature__"] = inspect.signature(TrainingModule.training_step)
