"""Training module of a run with phases: several backward passes and several optimizers in one step.

for each micro-batch of a step (trainer.accumulate_grad_batches)          Lightning's loop
    training_step                         stores the micro-batch; backward and zero_grad do nothing
at the last micro-batch: optimizer_step
    for each phase that is due, repeats times
        for each micro-batch: reseed, forward and terms of the phase, scaled backward into its parameters
        gradients averaged over ranks, unscaled; hooks; clipping; the optimizer of the phase
    update of the loss scale
    simultaneous phases: one forward, all backwards, then the optimizers
schedules, on_train_batch_end             Lightning's loop

All phases together count as one step of the Trainer. The x axis, max_steps, checkpoints, positions and schedules count
these steps. The module overrides only public hooks of LightningModule. Manual optimization is not used. With it,
Lightning 2.6.6 rejects accumulate_grad_batches and counts each optimizer step as a step of the run.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from exp.data.randomness import reseed
from exp.engine.forward import Values, detach_output, forward_by_name
from exp.engine.module import TrainingModule, clip, schedule_config
from exp.engine.observer import NO_RESULT, WHOLE_STEP, StepResult, Turn
from exp.models.containers import with_forward
from exp.objectives.objective import Mean
from exp.optim.parameter_groups import trained_parameters
from exp.optim.phase import Phase, PhaseOptimizers, PhaseSchedule, turns_of
from exp.shared_types import STAGES, Batch
from exp.strategies.gradient_averaging import average_gradients, broadcast_buffers
from exp.strategies.strategy import WrapsModule


class PhasedModule(TrainingModule):
    """TrainingModule that runs several phases per step, each with its terms, parameters and optimizer.

    The loss of a step is the sum of the losses of the phases that ran in the step. If a phase is repeated, only the
    loss of its last repeat is added.

    Args:
        phases: Phases in the order in which they run.
        parts: Arguments of TrainingModule. The argument `optimization` is not used.
    """

    averages_gradients = True

    def __init__(self, *, phases: Sequence[Phase], **parts: Any) -> None:
        super().__init__(**parts)
        self.phases = tuple(phases)
        self._turns = turns_of(self.phases)
        # A plain dict instead of a ModuleDict, because the objective has already registered the terms as submodules.
        self._objectives = {phase.name: self.objective.only(phase.terms) for phase in self.phases}
        counts = [len(self._objectives[phase.name].terms) for phase in self.phases]
        # For each phase, the index of its first term in EpochValues.summed.
        ends = itertools.accumulate(counts, initial=0)
        self._places = {phase.name: end for phase, end in zip(self.phases, ends, strict=False)}
        for stage in STAGES:
            values = self.values_of(stage)
            values.summed = [term for one in self._objectives.values() for term in one.terms.items()]
            values.clear_losses()
        self._window: list[tuple[Batch, int]] = []
        self._trained: dict[str, list[nn.Parameter]] = {}
        self._all_trained: list[nn.Parameter] = []
        self._ran: set[str] = set()
        self._metrics_wait = False
        # A plain dict of views of the network, so that the state dict contains the network only once.
        views = {phase.forward: self.network for phase in self.phases}
        views |= {name: with_forward(self.network, name) for name in views if name is not None}
        self._forwards = {name: (view, forward_by_name(view, self.inputs)) for name, view in views.items()}

    def runs(self) -> list[tuple[nn.Module, frozenset[str]]]:
        needs: dict[str | None, frozenset[str]] = {}
        for phase in self.phases:
            needs[phase.forward] = needs.get(phase.forward, frozenset()) | self._objectives[phase.name].needs
        return [(self._forwards[name][0], words) for name, words in needs.items()]

    # --- called by Lightning's loop ---

    def on_train_start(self) -> None:
        self._window = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Store a micro-batch for the phases, and return a 0 that is not used.

        The phases run after the last micro-batch of a step.
        """
        self._window.append((batch, batch_idx))
        self.__dict__["last"] = NO_RESULT
        return torch.zeros((), device=self.device)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Do nothing, because the phases run their backward in optimizer_step."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Do nothing, because each phase begins with zero_grad."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: object, optimizer_closure: Callable[[], object] | None = None
    ) -> None:
        """Run all phases over the micro-batches of the step."""
        if optimizer_closure is not None:
            optimizer_closure()
        window, self._window = self.divisors.of_step(self._window), []
        together = self.trainer.optimizers[0]
        assert isinstance(together, PhaseOptimizers)
        self._run_phases(window, together)

    def configure_optimizers(self) -> Any:
        """Return one PhaseOptimizers object with the optimizers of all phases, and the schedules of the phases."""
        optimizers, schedules = {}, {}
        steps, epochs = self.lengths()
        for phase in self.phases:
            made = phase.make(self.network, total_steps=steps, total_epochs=epochs)
            optimizers[phase.name], schedules[phase.name] = made
            self._trained[phase.name] = trained_parameters(self.network, phase.parameters)
        self._all_trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        together = PhaseOptimizers(optimizers)
        configs = []
        for phase in self.phases:
            schedule = schedules[phase.name]
            if schedule is not None:
                config = schedule_config(schedule, phase.optimization, self.trainer)
                config["scheduler"] = PhaseSchedule(phase=phase.name, schedule=schedule, optimizer=together)
                configs.append(config)
        return [together], configs

    def lr_scheduler_step(self, scheduler: object, metric: Any) -> None:
        """Step the schedule of a phase, unless the phase's optimizer skipped its last step."""
        assert isinstance(scheduler, PhaseSchedule)
        name, schedule = scheduler.phase, scheduler.schedule
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(metric)
            return
        interval = next(phase.optimization.interval for phase in self.phases if phase.name == name)
        ran = interval == "step" and name in self._ran
        if not (ran and self.precision.has_skipped(scheduler.optimizer.optimizers[name])):
            schedule.step()

    # --- an optimizer step ---

    def _run_phases(self, window: Sequence[tuple[Batch, int]], together: PhaseOptimizers) -> None:
        step = self.trainer.global_step + 1
        # Buffers are broadcast unless exp's DDP strategy disables the broadcast.
        strategy = self.trainer.strategy
        if not isinstance(strategy, WrapsModule) or strategy.broadcasts_buffers:
            broadcast_buffers(self)
        precision = self.precision
        losses: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        self._ran = set()
        self._metrics_wait = bool(self._train_values.measures)
        for index, group in self._turns:
            first = group[0]
            if not first.due(step):
                continue
            self._ran |= {phase.name for phase in group}
            for repeat in range(first.repeats):
                if repeat:
                    # The loss scale is updated, because the loss scaler allows only one step per optimizer between two
                    # updates.
                    precision.update()
                places = (index, repeat) if index + repeat else ()
                turns = [Turn(phase.name, places, repeat == first.repeats - 1) for phase in group]
                self.observer.begin_turn(turns[0])
                together.zero_grad()
                results = self._backward_phases(group, window, turns=turns)
                for phase, turn, result in zip(group, turns, results, strict=True):
                    self.observer.begin_turn(turn)
                    self.__dict__["last"] = result
                    self._step_phase(phase, together.optimizers[phase.name])
                self._metrics_wait = self._metrics_wait and first.forward is not None
            for phase, (loss, found) in zip(group, results, strict=True):
                assert loss is not None
                losses[phase.name] = loss
                parts |= found
        precision.update()
        self.observer.begin_turn(WHOLE_STEP)
        ordered = {name: parts[name] for name in self.objective.terms if name in parts}
        self.__dict__["last"] = StepResult(torch.stack(list(losses.values())).sum(), ordered)

    def _backward_phases(
        self, group: Sequence[Phase], window: Sequence[tuple[Batch, int]], *, turns: Sequence[Turn]
    ) -> list[StepResult]:
        """Compute the gradients of one phase, or of simultaneous phases, over all micro-batches of a step.

        Returns:
            The loss and the terms of each phase.
        """
        sums: list[tuple[Tensor, dict[str, Tensor]]] = []
        with self._freeze_others([one for phase in group for one in self._trained[phase.name]]):
            for batch, batch_idx in window:
                values, shares = self.compute_phases(group, batch, batch_idx, turns[0].places)
                # Metrics use the first phase of a step that runs the network's default forward.
                if self._metrics_wait and group[0].forward is None and batch.size:
                    self._train_values.update_metrics(self._train_values.read(values))
                if self._is_weighed and turns[0].is_recorded:
                    for phase in group:
                        means = self._objectives[phase.name].own_means(batch)
                        self._train_values.add(means, first=self._places[phase.name])
                count = len(window)
                if count != 1:
                    shares = [
                        (loss / count, {name: part / count for name, part in parts.items()}) for loss, parts in shares
                    ]
                self._backward(group, [loss for loss, _ in shares], turns)
                own = [(loss.detach(), dict(parts)) for loss, parts in shares]
                sums = [_add_results(*pair) for pair in zip(sums, own, strict=True)] if sums else own
            for phase in group:
                average_gradients(self._trained[phase.name])
        return [StepResult(loss, parts) for loss, parts in sums]

    def _backward(self, group: Sequence[Phase], losses: Sequence[Tensor], turns: Sequence[Turn]) -> None:
        """Run the backward of each phase's loss, which adds gradients only to the parameters of the phase."""
        scale = self.precision.scale
        if len(group) == 1:
            scale(losses[0]).backward()
            self.observer.after_backward()
            return
        for place, (phase, loss, turn) in enumerate(zip(group, losses, turns, strict=True)):
            self.observer.begin_turn(turn)
            scale(loss).backward(inputs=self._trained[phase.name], retain_graph=place < len(group) - 1)
            self.observer.after_backward()
        self.observer.begin_turn(turns[0])

    def compute_phases(
        self, group: Sequence[Phase], batch: Batch, batch_idx: int, turn: tuple[int, ...]
    ) -> tuple[Values, list[tuple[Tensor, Mapping[str, Tensor]]]]:
        """Run one forward over a micro-batch for one phase, or for simultaneous phases.

        Args:
            group: One phase, or simultaneous phases.
            batch: Micro-batch on this rank.
            batch_idx: Number of the micro-batch in the epoch.
            turn: Numbers that select the random stream of the pass.

        Returns:
            The values of the forward by name, and the loss and the terms of each phase.
        """
        reseed(seed=self.seed, rank=self.rank, epoch=self.trainer.current_epoch, batch=batch_idx, turn=turn)
        with ExitStack() as stack:
            if self.observer.watches_forward:
                stack.enter_context(self.observer.around_forward(batch.data))
            stack.enter_context(self.trainer.precision_plugin.train_step_context())
            values, loss, parts = self._forward_phase(group[0], batch)
            shares: list[tuple[Tensor, Mapping[str, Tensor]]] = [(loss, parts)]
            shares += [self._forward_phase(phase, batch, values)[1:] for phase in group[1:]]
        self.observer.after_forward(values)
        if batch.weight != 1.0:
            shares = [
                (loss * batch.weight, {name: part * batch.weight for name, part in parts.items()})
                for loss, parts in shares
            ]
        return values, shares

    def _forward_phase(
        self, phase: Phase, batch: Batch, values: Values | None = None
    ) -> tuple[Values, Tensor, Mapping[str, Tensor]]:
        """Return the values of the forward by name, the loss, and the terms of a phase.

        Args:
            phase: The phase.
            batch: Micro-batch on this rank.
            values: Values of a forward that has already run. None: the forward runs now. Default: None.
        """
        objective = self._objectives[phase.name]
        network, run = self._forwards[phase.forward]
        runner = self.run_network if phase.forward is None else network
        network.training = self.network.training  # a view has a separate copy of this attribute
        if objective.needs:
            return self._forward_with_passes(batch, objective, network=network, run=run, runner=runner)
        values = run(runner, batch.data) if values is None else values
        loss, parts = objective(values, batch)
        return values, loss, parts

    def _means(self, batch: Batch) -> tuple[Values, Sequence[Mean]]:
        """Return the values of an evaluation batch, and the means of the terms of all phases.

        The loss is the weighted sum of the means.
        """
        known: dict[str | None, Values] = {}
        means: list[Mean] = []
        for phase in self.phases:
            found, _, parts = self._forward_phase(phase, batch, known.get(phase.forward))
            known.setdefault(phase.forward, found)
            means += self._objectives[phase.name].means(found, parts, size=batch.size)
        # Metrics use the output of the default forward.
        values = known[None] if None in known else self._run(self.run_network, batch.data)
        return {**values, "output": detach_output(values["output"])}, means

    def _step_phase(self, phase: Phase, optimizer: Optimizer) -> None:
        """Run the optimizer step of a phase, after unscaling the gradients, calling hooks and clipping."""
        trainer, precision = self._trainer, self.precision
        precision.unscale(optimizer)
        for callback in trainer.callbacks:
            callback.on_before_optimizer_step(trainer, self, optimizer)
        self.on_before_optimizer_step(optimizer)
        clip(
            self._trained[phase.name],
            value=phase.gradient_clip_val,
            algorithm=phase.gradient_clip_algorithm,
            strategy=trainer.strategy,
        )
        self.observer.after_clipping()
        precision.step(optimizer)
        self.observer.after_phase()

    @contextmanager
    def _freeze_others(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Freeze all parameters except the given ones, so that the backward computes gradients only for these."""
        chosen = {id(parameter) for parameter in parameters}
        others = [parameter for parameter in self._all_trained if id(parameter) not in chosen]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)


def _add_results(
    one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of two losses, and the sums of the terms of both losses by name."""
    return one[0] + other[0], {name: one[1][name] + part for name, part in other[1].items()}


# The last lines of module.py give the reason.
vars(PhasedModule.training_step)["__signature__"] = inspect.signature(PhasedModule.training_step)
