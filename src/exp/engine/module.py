"""The LightningModule of a run: network, objective, metrics and optimizer.

Private of Lightning (2.6.6), and tested: `_current_fx_name`, `_on_before_batch_transfer`,
`_apply_batch_transfer_handler` and `_trainer`; docs/engine.md lists them with their tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric, MetricCollection

from exp.data.randomness import reseed
from exp.engine.buffer import EpochValues
from exp.engine.checkpoint import State, lay_out_optimizer_states
from exp.engine.compilation import uncompiled
from exp.engine.datamodule import RunTrainer
from exp.engine.forward import Forward, Runner, Values, detached, forward_by_name, make_passes, named_values, needing
from exp.engine.non_finite import FIXES, Kinds, kinds_by_design, require_finite
from exp.engine.observer import NO_RESULT, UNOBSERVED, StepObserver, StepResult
from exp.engine.progress import Limits, total_epochs, total_steps
from exp.errors import UserCodeError
from exp.hooks.step import Window
from exp.nested import move_tensors
from exp.objectives.measures import Measure, as_measure, as_scored
from exp.objectives.objective import Mean, Objective
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.precision.plugin import RunPrecision
from exp.shared_types import INPUT, STAGES, Batch, Stage, StepWeights
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.whole_state import local_part

TRAIN_METRICS = "exp_train_metrics"
TRAIN_LOSSES = "exp_train_losses"


@dataclass(frozen=True, slots=True)
class _Micro:
    """The micro-batches of a step: from number `start` of an epoch to before `stop`, of an accumulation of `count`."""

    epoch: int
    start: int
    stop: int
    count: int
    weights: StepWeights


class TrainingModule(LightningModule):
    """A module whose training step is: reseed, forward, objective. Nothing in it waits for the device or logs.

    Behind it, under a loss scale, a schedule with interval=step does wait, to learn whether the optimizer skipped.

    metrics: by name, as in the tag `<name>/<stage>`; a bare one compares output and target. Each stage works on copies
        of its own.
    metric_stages: the stages whose metrics are computed.
    phases: none; see engine/phased_module.py.
    averages_gradients: whether its steps average their gradients over ranks themselves, so that ddp must not.
    run_network: an attribute, what a step calls with the inputs; a strategy may put another in the network's place.
    last: an attribute, what the training step that was last computed.
    saved: an attribute, which checkpoint is good, in words.
    observer: an attribute, who looks on; Recording puts the hooks there.
    seed: of the run; dropout and the like are a function of (seed, rank, epoch, batch).
    rank: which share of each global batch this process works on.
    limits: for schedules that need the length of the run.
    inputs: the names of the data's inputs.
    """

    averages_gradients = False
    phases: Sequence[Phase] = ()
    fixes = FIXES
    run_network: Runner
    # Without Lightning's None before a Trainer is there: its property, which looks for that, costs at every step.
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
        # Recording clears it after the first evaluation of a step, because LBFGS evaluates a batch several times.
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
        self._by_design: Mapping[str, Kinds] = {}
        self.saved = "no checkpoint was saved before it"
        # Not a submodule: what calls the network may hold it in another wrapping, and the state dict has it once.
        self.__dict__["run_network"] = network
        self._run = forward_by_name(network, self.inputs)
        self._needs = objective.needs
        self._is_weighed = bool(objective.weighed)
        self._micro: _Micro | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook under way forty times a step; nn.Module would look for parameters in it.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _on_before_batch_transfer(self, batch: Batch, dataloader_idx: int = 0) -> Batch:
        # Lightning looks eight times a step for who overrides its three transfer hooks. Relied on, and tested: its
        # strategies call these two methods for every batch, and nothing else moves one (seen in 2.6.6).
        return batch

    def _apply_batch_transfer_handler(
        self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Batch:
        return self._trainer.datamodule.transfer_batch_to_device(batch, device or self.device, dataloader_idx)

    def values_of(self, stage: Stage) -> EpochValues:
        """Return the sums and metrics of one stage's epoch."""
        values = self.epoch_values[f"{stage}_values"]
        assert isinstance(values, EpochValues)
        return values

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the objective of this rank's share of a batch, 0-d, as Lightning divides it by the accumulation."""
        count = self._trainer.accumulate_grad_batches
        batch = self.in_step(batch, batch_idx)
        values, loss, parts = self._share(batch, batch_idx)
        if self._is_weighed and self.is_counting:
            self._train_values.add(self.objective.own_means(batch))
        # Past nn.Module, whose setting of an attribute costs as much as a small operator.
        self.__dict__["last"] = StepResult(loss.detach(), parts)
        if self._train_values.measures and batch.size and self.is_counting:
            self._train_values.update_metrics(self._train_values.read(values))
        # Of a short last step Lightning divides by too much.
        own = count if batch.step is None else batch.step.micro_batches
        return loss if own == count else loss * (count / own)

    def in_step(self, batch: Batch, batch_idx: int) -> Batch:
        """Return a micro-batch with the divisors of its step. Every rank must call it at the first one of a step."""
        trainer, micro = self._trainer, self._micro
        count = trainer.accumulate_grad_batches
        if count == 1:
            return batch
        epoch = trainer.current_epoch
        if micro is None or (micro.epoch, micro.count) != (epoch, count) or not micro.start <= batch_idx < micro.stop:
            stop = int(min(batch_idx - batch_idx % count + count, trainer.num_training_batches))
            found = trainer.datamodule.ahead.micro_batches(batch_idx, stop, with_data=self._is_weighed)
            weights = self._step_weights(found)
            micro = _Micro(epoch, batch_idx, batch_idx + weights.micro_batches, count, weights)
            self.__dict__["_micro"] = micro
        return batch.with_step(micro.weights)

    def in_window(self, window: Sequence[tuple[Batch, int]]) -> Sequence[tuple[Batch, int]]:
        """Return all micro-batches of a step with its divisors. Every rank must call it."""
        if len(window) == 1:
            return window
        weights = self._step_weights([batch for batch, _ in window])
        return [(batch.with_step(weights), batch_idx) for batch, batch_idx in window]

    def _step_weights(self, batches: Sequence[Batch]) -> StepWeights:
        names = [self.objective.terms[name].names.values() for name in self.objective.weighed]
        read = {name for some in names for name in some} if all(names) else None

        def named(data: Any) -> Values:
            values = {one: value for one, value in named_values(data).items() if read is None or one in read}
            converted: Values = self._trainer.precision_plugin.convert_input(values)
            return move_tensors(converted, self.device)

        return self.objective.step_weights(batches, named, device=self.device)

    def _share(self, batch: Batch, batch_idx: int) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Compute the values by name, the objective and its terms; nothing is counted."""
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

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return what the network gives for this rank's share of a batch, and no loss of it."""
        reseed(seed=self.seed, rank=self.rank, epoch=0, batch=batch_idx, stage="test")
        return self._run(self.run_network, batch.data)["output"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer and, where there is one, its schedule, in Lightning's form."""
        steps, epochs = self.lengths()
        optimizer, schedule = self.optimization.make(self.network, total_steps=steps, total_epochs=epochs)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule_config(schedule, self.optimization)}

    def metric_names(self, stage: Stage) -> Sequence[str]:
        """Return the names of the metrics of one stage."""
        return [measure.name for measure in self.values_of(stage).measures]

    @property
    def seconds_waited(self) -> float:
        """For how long training has waited for its batches, in this process."""
        return self._trainer.datamodule.seconds_waited

    def lengths(self) -> tuple[int | None, int | None]:
        """Return optimizer steps and epochs of the whole run, for schedules; None where they are not limited."""
        trainer = self._trainer
        return total_steps(trainer, self.limits, trainer.datamodule.batches("train")), total_epochs(trainer)

    def schedule_config(self, schedule: LRScheduler, optimization: Optimization) -> dict[str, Any]:
        """Say when a schedule steps, in Lightning's form."""
        config: dict[str, Any] = {"scheduler": schedule, "interval": optimization.interval, "name": None}
        if isinstance(schedule, ReduceLROnPlateau):
            config["monitor"] = optimization.monitor
            config["reduce_on_plateau"] = True
            # `accuracy/val`, and `loss/val/<term>`.
            if "val" in (optimization.monitor or "").split("/"):
                # Else Lightning steps it with the value of the last validation again.
                config["frequency"] = self.trainer.check_val_every_n_epoch or 1
        return config

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip true gradients, of all ranks that hold parts of the model."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip(
            parameters,
            value=gradient_clip_val,
            algorithm=gradient_clip_algorithm,
            strategy=self.trainer.strategy,
        )
        self.observer.after_clipping()

    def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any | None) -> None:
        """Step a schedule, unless the loss scale had the optimizer skip its step: it counts updates of the weights."""
        if metric is not None:
            scheduler.step(metric)
            return
        precision = self.trainer.precision_plugin
        # The interval first: to ask whether a step was skipped waits for the device.
        counts_steps = self.optimization.interval == "step"
        if not (counts_steps and isinstance(precision, RunPrecision) and precision.skipped(scheduler.optimizer)):
            scheduler.step()

    def setup(self, stage: str) -> None:
        self._micro = None
        if stage == "fit":
            self._by_design = kinds_by_design(self)

    def on_save_checkpoint(self, checkpoint: State) -> None:
        # Behind those of all callbacks, whoever saves.
        self.require_finite(checkpoint)
        checkpoint.update(self.epoch_state())

    def epoch_state(self) -> State:
        """Return what training has summed in the epoch under way, over all ranks. Every rank must call it."""
        state: State = {}
        if self._train_values.measures:
            state[TRAIN_METRICS] = self._train_values.metric_states()
        if self._is_weighed:
            state[TRAIN_LOSSES] = self._train_values.totals(self.trainer.strategy)
        return state

    def restore_epoch(self, state: State) -> None:
        """Go on from `epoch_state`. The ranks of one share of the data take what it summed, the others start empty."""
        if TRAIN_METRICS in state:
            ranks = self._trainer.datamodule.world_size
            self._train_values.restore_metrics(state[TRAIN_METRICS], rank=self.rank, ranks=ranks)
        if TRAIN_LOSSES in state and self.rank == 0:
            self._train_values.restore_losses(state[TRAIN_LOSSES].to(self.trainer.strategy.root_device))

    def require_finite(self, state: State) -> None:
        """Check what a checkpoint holds, or a state dict alone. Every rank must call it.

        Raises: NonFiniteError.
        """
        require_finite(state, self._by_design, self._trainer, saved=self.saved)

    def on_load_checkpoint(self, checkpoint: State) -> None:
        lay_out_optimizer_states(checkpoint, self.network)
        if self.trainer.state.fn == "fit":
            self.restore_epoch(checkpoint)

    def loss_with(self, run_network: Runner, data: object) -> Tensor:
        """Compute the objective of a batch's data, 0-d and not weighted, with something else in the network's place.

        A compiled network that it calls runs uncompiled: it is called once in this way, and not as in a step.
        """
        with uncompiled(self.network):
            loss: Tensor = self.objective(self._run(run_network, data))[0]
        return loss

    def scaled_loss(self, window: Window, place: int) -> Tensor:
        """Compute again what the backward of the micro-batch at this place began with, 0-d, with its graph."""
        trainer = self._trainer
        with trainer.precision_plugin.train_step_context():
            loss = self._share(*self.in_window(window.batches)[place])[1]
        loss = loss / len(window.batches)
        precision = trainer.precision_plugin
        return precision.scale(loss) if isinstance(precision, RunPrecision) else loss

    def trained_in(self, window: Window) -> dict[str, nn.Parameter]:
        """Return the parameters that the step behind a window changes, by name."""
        return {name: one for name, one in self.network.named_parameters() if one.requires_grad}

    def runs(self) -> list[tuple[nn.Module, frozenset[str]]]:
        """Return what its steps run, and what the terms that look at it need: the network; of phases, each forward."""
        return [(self.network, self.objective.needs)]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the network."""
        return self.network(*inputs, **named)

    def _evaluate(self, stage: Stage, batch: Batch, batch_idx: int) -> None:
        # Always epoch 0: what is random in an evaluation is the same each time.
        reseed(seed=self.seed, rank=self.rank, epoch=0, batch=batch_idx, stage=stage)
        # Each rank's means of its own samples: what they weigh over ranks is known behind the last batch.
        try:
            values, means = self._means(Batch(batch.data, batch.size, global_size=max(batch.size, 1), world_size=1))
            self._add(stage, values, means if batch.size else [])
        except StopIteration as error:
            # Lightning would take it for the end of the data.
            raise UserCodeError.of(error, what=f"batch {batch_idx} of {stage}") from error
        if batch.size and not self._trainer.sanity_checking:
            self.observer.evaluated(stage, values)

    def _add(self, stage: Stage, values: Values, means: Sequence[Mean]) -> None:
        """Add a batch to a stage's epoch; one without means, which is a stand-in, leaves no trace."""
        epoch_values = self.values_of(stage)
        seen = epoch_values.read(values) if epoch_values.measures else None
        if means:
            epoch_values.add(means)
            if seen is not None:
                epoch_values.update_metrics(seen)

    def _means(self, batch: Batch) -> tuple[Values, Sequence[Mean]]:
        """Evaluate: compute the values by name, and the mean of each term."""
        values, _, parts = self._forward(batch)
        return values, self.objective.means(values, parts, size=batch.size)

    def _forward(self, batch: Batch) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Compute the values by name, the objective, and its terms."""
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
        """Do so for an objective that needs more than the values of one pass. run, runner: as Passes takes them."""
        precision = self._trainer.precision_plugin
        scale = precision.loss_scale if isinstance(precision, RunPrecision) and precision.is_scaled else None
        with needing(objective.needs, network):
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
            values = {**values, "output": detached(values["output"])}
        return values, loss, parts


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter], *, value: float | None, algorithm: str | None, strategy: Strategy
) -> Tensor | None:
    """Clip the gradients of parameters in place. Where parts lie in several ranks, every one of those must call it.

    value: the largest 2-norm of all gradients together, or the largest absolute value of each number; None or 0 clips
        nothing.
    algorithm: norm or value; None is norm.
    Returns: the 2-norm before clipping, 0-d; None where no norm was needed.
    """
    if not value:
        return None
    parameters = list(parameters)
    if not isinstance(strategy, ModelParallel):
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value)
    # One by one: torch's kernels for many refuse lists that mix DTensors and others.
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if algorithm == "value":
        for part in parts:
            part.clamp_(min=-value, max=value)
        return None
    norm = strategy.total_norm(parameters)
    # As torch.nn.utils.clip_grad_norm_ has it.
    factor = torch.clamp(value / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor.to(device=part.device, dtype=part.dtype))
    return norm


# Lightning reads the signature at every step; this is where inspect looks first.
vars(TrainingModule.training_step)["__signature__"] = inspect.signature(TrainingModule.training_step)
