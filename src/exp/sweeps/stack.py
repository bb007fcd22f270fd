"""Train several jobs of a sweep in one process: one vmap for all gradients, then one update per member.

    per member    run directory, network, optimizer, schedule, random streams, event file, checkpoints, report
    shared        the data, the forward and the backward, the clock

A member computes what a single run of the job computes. The order of events in a step is the order of
exp.engine.recording and exp.engine.checkpointing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from exp.check.examination import examine as examine_config
from exp.check.first_samples import refuse_other_data
from exp.check.plan import Plan
from exp.check.resolution import resolve
from exp.config.freeze import COMPOSITION, clear, freeze, read_overrides, shared_origin, take_directory
from exp.config.plain_tree import are_referred, changes, with_changes
from exp.config.yaml_files import yaml_text
from exp.construct import (
    build_network,
    build_optimization,
    build_run_precision,
    build_starting_network,
)
from exp.data.in_memory import EpochDependent, IndexedLoader
from exp.data.loader import GlobalBatches, ShareSampler
from exp.engine.buffer import EpochValues
from exp.engine.checkpoint import AtomicCheckpointIO, State, read_checkpoint
from exp.engine.checkpointing import POSITION, note_metrics
from exp.engine.datamodule import RunData
from exp.engine.forward import forward_by_name
from exp.engine.module import TrainingModule
from exp.engine.non_finite import kinds_by_design, refuse_lost
from exp.engine.progress import Position, fit_loop_state
from exp.engine.recording import is_written, require_loss
from exp.engine.runtime import set_threads, threads_of
from exp.errors import ExpError, Interrupted, NonFiniteError, RunError, one_line
from exp.hooks.saved_tensors import kept_by
from exp.launch.launcher import last_checkpoint
from exp.nested import mapped, tensors_in
from exp.objectives.objective import Objective
from exp.optim.direct_step import DirectSteps
from exp.optim.phase import rate_names
from exp.run_report import Ongoing, Report, explain
from exp.shared_types import EPOCH_LOSS, Batch, Stage
from exp.signals import SignalFlag
from exp.sweeps.executor import Unstacked
from exp.sweeps.member import HERE, Member, Shared
from exp.sweeps.stacked_evaluation import StackedEvaluation
from exp.sweeps.stacked_hooks import StackedHooks
from exp.sweeps.stacked_network import Losses, StackedNetwork, Unstackable, examine
from exp.sweeps.stacking import STACK, is_member, obstacle

log = logging.getLogger(__name__)

Outcome = tuple[int, Report | ExpError]
# The shortest time between two saves of all members, in seconds and in multiples of the time that a save takes.
SAVE_SECONDS, SAVE_SHARE = 30.0, 20.0
# The weights of more members do not fit into a cache.
MOST_MEMBERS = 64
# The share of free memory that all stacks take, and the size of a member in multiples of its weights.
MEMORY_SHARE, WEIGHTS_PER_MEMBER = 0.5, 8
# Recurrent layers, and operators of so many multiply-adds, are slower in a stack on a CPU.
# Time of a stacked step divided by the time of the single steps: LeNet 0.8, MLP 1.0, ResNet 1.1, LSTM 2.6.
SLOW_IN_A_STACK = (nn.RNNBase,)
LARGE_OPERATOR = 2**26


def train(configs: Sequence[DictConfig], *, at_once: int = 1) -> Iterator[Outcome]:
    """Train jobs together, each in its own run directory. Members at different positions are trained one after another.

    Args:
        configs: Composed and checked configs that `exp.sweeps.stacking.groups` put into one group. A job whose
            directory has a config.yaml resumes from its last checkpoint.
        at_once: Number of stacks that share the memory of this machine.

    Yields:
        The index of a member that ended, and its report or the error of a single run. The error is Unstacked if it
        concerns all members.

    Raises:
        Unstackable: The jobs cannot be stacked. No directory was made.
    """
    with torch.random.fork_rng(devices=[]):
        yield from _train(configs, at_once=at_once)


def _train(configs: Sequence[DictConfig], *, at_once: int) -> Iterator[Outcome]:
    examined = examine_config(resolve(configs[0]))
    decided = examined.plan()
    was_decided = any(is_member(Path(config[COMPOSITION].directory)) for config in configs)
    _refuse(decided, was_decided=was_decided)
    refuse_other_data(decided)
    members, ended = _made(configs, decided)
    yield from ended
    by_position: dict[Position | None, list[Member]] = {}
    states: dict[int, State] = {}
    for member in members:
        position = None
        if (path := last_checkpoint(member.directory)) is not None:
            states[member.place] = read_checkpoint(path)
            position = Position(**states[member.place][POSITION])
        by_position.setdefault(position, []).append(member)
    flag = SignalFlag()
    flag.install()
    try:
        most = most_members(decided, stacks=at_once)
        for position, members in by_position.items():
            # In parts that fit the memory.
            for first in range(0, len(members), most):
                together = members[first : first + most]
                stack = Stack(decided, together, flag=flag, notes=examined.notes)
                if position is not None:
                    for member in together:
                        member.restore(states[member.place])
                yield from stack.run(position or Position(epoch=0, batch=0, step=0, batches=0))
    finally:
        flag.restore()


def _refuse(decided: Plan, *, was_decided: bool) -> None:
    """Raise Unstackable if a key of the config, or an object made from it, is not supported in a stack.

    was_decided: whether an earlier sweep began to train the jobs in a stack.
    """
    reason = obstacle(decided.plain)
    if reason is not None:
        raise Unstackable(reason)
    if decided.placement.accelerator != "cpu" or decided.placement.world_size != 1:
        raise Unstackable("launch.accelerator cannot be stacked: jobs are stacked on a CPU alone, in one process")
    if decided.objective.needs:
        raise Unstackable(f"objective cannot be stacked: its terms need {', '.join(sorted(decided.objective.needs))}")
    if any(True for _ in decided.objective.parameters()):
        raise Unstackable("objective cannot be stacked: it has parameters")
    for stage in decided.data.stages:
        loader = decided.data.loader(stage)
        if not isinstance(loader, IndexedLoader) or type(loader.batches) is not GlobalBatches:
            raise Unstackable(f"data cannot be stacked: the {stage} part is not taken by index from memory")
        if loader.batches.draw is not None or decided.data.transforms_batches(stage):
            raise Unstackable(f"data cannot be stacked: the {stage} part is drawn or transformed for one run")
    network = build_network(decided.plain, decided.spec)
    run = forward_by_name(network, tuple(decided.spec.inputs))
    examine(network, next(iter(decided.data.loader("train"))), run=run, objective=decided.objective)
    is_auto = decided.plain["sweep"]["stack"] == "auto" and not was_decided
    if is_auto and not is_faster(decided, network):
        raise Unstackable("model is not stacked by sweep.stack=auto: its jobs are faster side by side")


def is_faster(decided: Plan, network: nn.Module) -> bool:
    """Return whether jobs like this one take less processor time in a stack than side by side.

    A stack saves the time between operators, of which large ones have little, and recurrent layers run slower in it.
    """
    if decided.plain["runtime"]["compile"]:
        return True  # which takes many times what a job does, and is done once for all of them
    has_slow_layers = any(isinstance(module, SLOW_IN_A_STACK) for module in network.modules())
    return decided.operator is not None and decided.operator < LARGE_OPERATOR and not has_slow_layers


def most_members(decided: Plan, *, stacks: int = 1, free: int | None = None) -> int:
    """Return how many members of a stack fit into memory; at least one.

    Args:
        decided: Plan of one member.
        stacks: Number of stacks that share the memory.
        free: Free memory in bytes. None asks the system.
    """
    free = psutil.virtual_memory().available if free is None else free
    network, batch = build_network(decided.plain, decided.spec), next(iter(decided.data.loader("train")))
    run = forward_by_name(network.train(), tuple(decided.spec.inputs))
    weights = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    data = sum(tensor.nbytes for tensor in tensors_in(batch.data))
    kept = kept_by(lambda: decided.objective(run(network, batch.data), batch), network=network, data=batch.data)
    # Weights, gradients and two averages of them, the best checkpoint; activations and their gradients.
    member = WEIGHTS_PER_MEMBER * weights + 2 * kept.size + data
    return max(1, min(MOST_MEMBERS, int(MEMORY_SHARE * free / stacks / member)))


def _made(configs: Sequence[DictConfig], decided: Plan) -> tuple[list[Member], list[Outcome]]:
    """Return a member per config, with its directory and its network, and the errors of the other configs."""
    origin = {**shared_origin(), STACK: True}
    members: list[Member] = []
    ended: list[Outcome] = []
    values = _Values(configs[0], decided)
    for place, config in enumerate(configs):
        try:
            plain = values.of(config)
            text = values.text(plain)
            directory = Path(config[COMPOSITION].directory)
            goes_on = last_checkpoint(directory) is not None
            if not goes_on:
                if (directory / "config.yaml").is_file():  # killed before its first checkpoint
                    clear(directory)
                    take_directory(config, directory)
                directory = freeze(config, text=text, origin=origin, is_synced=False)
            overrides = read_overrides(directory)
            ongoing = Ongoing(directory, plain, overrides=overrides, world_size=1)
            network = (build_network if goes_on else build_starting_network)(plain, decided.spec)
        except ExpError as error:
            ended.append((place, error))
            continue
        members.append(
            Member(
                place,
                plain=plain,
                text=text,
                directory=directory,
                overrides=overrides,
                ongoing=ongoing,
                network=network,
            )
        )
    return members, ended


class _Values:
    """Resolves and formats configs that differ in few values, and computes the shared parts once.

    Args:
        first: One of the configs.
        decided: Its plan.
    """

    def __init__(self, first: DictConfig, decided: Plan) -> None:
        self._known: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(_raw(first), decided.plain)]
        self._texts: dict[tuple[str, str], str] = {}

    def of(self, config: DictConfig) -> Mapping[str, Any]:
        """Return the values that `resolve` gives for a config."""
        raw = _raw(config)
        for other, plain in self._known:
            changed = changes(other, raw)
            # `resolve` looks up the run whose weights are named.
            if changed is None or are_referred(changed, raw) or any(path[0] == "weights" for path in changed):
                continue
            return with_changes(plain, changed)
        plain = resolve(config).plain
        self._known.append((raw, plain))
        return plain

    def text(self, plain: Mapping[str, Any]) -> str:
        """Return the YAML text of the values."""
        return "".join(self._part(name, value) for name, value in plain.items())

    def _part(self, name: str, value: Any) -> str:
        key = name, json.dumps(value, default=repr)
        if key not in self._texts:
            self._texts[key] = yaml_text({name: value})
        return self._texts[key]


def _raw(config: DictConfig) -> dict[str, Any]:
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    del raw[COMPOSITION]
    return raw


@dataclass
class _Step:
    """A step that is not written yet: losses `[T, M]`, and the values of each member by tag."""

    index: int
    size: int
    losses: Tensor
    values: list[dict[str, Any]]


class Stack:
    """Members at one position of their runs, which are trained together."""

    def __init__(
        self, decided: Plan, members: Sequence[Member], *, flag: SignalFlag, notes: Sequence[str] = ()
    ) -> None:
        self._decided, self._members, self._flag, self._notes = decided, list(members), flag, notes
        plain = decided.plain
        trainer = plain["trainer"]
        self._epochs: int = trainer["max_epochs"]
        self._max_steps: int = trainer["max_steps"] if trainer["max_steps"] not in (None, -1) else 0
        self._log_every: int = trainer["log_every_n_steps"] or 50
        self._precision = build_run_precision(plain, device_type="cpu")
        self._loader = self._loader_of(decided.data.seed)
        steps = len(self._loader) * self._epochs
        self._total_steps = min(steps, self._max_steps) if self._max_steps else steps
        self._is_shuffled = decided.data.shuffle
        self._module = self._represented()
        self._objective: Objective = self._module.objective
        self._run = forward_by_name(members[0].network, tuple(decided.spec.inputs))
        self._network = StackedNetwork(
            members, run=self._run, autocast=self._precision.forward_context, compiled=_compiled(plain)
        )
        self._learn()
        self._hooks = StackedHooks(
            decided.hooks,
            members,
            run=self._run,
            autocast=self._precision.forward_context,
            total_steps=self._total_steps,
        )
        fitted = decided.data.fitted
        self._shared = Shared(
            io=AtomicCheckpointIO(is_synced=False),
            fitted={RunData.__qualname__: dict(fitted)} if fitted else {},
            by_design=kinds_by_design(self._module),
        )
        self._bare = Trainer(
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=1,
            max_epochs=self._epochs,
        )
        self._waiting: list[_Step] = []
        self._step = self._first = self._batches_done = 0
        self._failed: dict[int, ExpError] = {}
        self._saved_at, self._save_seconds = time.monotonic(), 0.0

    def _represented(self) -> TrainingModule:
        """Return the training module of the first member. Convert all networks to the dtypes of the precision."""
        plain = self._decided.plain
        first, *others = self._members
        module = TrainingModule(
            network=first.network,
            objective=first.objective,
            optimization=build_optimization(plain),
            metrics=self._decided.metrics,
            metric_stages=plain["metric_stages"],
            seed=plain["seed"],
            inputs=tuple(self._decided.spec.inputs),
        )
        self._precision.represent(module)
        for member in others:
            self._precision.represent(member.network)
            self._precision.represent(member.objective)
        return module

    def _learn(self) -> None:
        """Make the optimizer and the schedule of each member. The tensors of its network are rows of the stack."""
        for member in self._members:
            optimization = build_optimization(member.plain)
            member.learn(*optimization.make(member.network, total_steps=self._total_steps, total_epochs=self._epochs))
            member.interval, member.plateau = optimization.interval, optimization.monitor
            if self._objective.weighed:
                member.train_values = EpochValues(stage="train", terms=self._objective.terms, measures=[])
        self._optimizers = DirectSteps(
            [member.optimizer for member in self._members], [member.parameters for member in self._members]
        )

    # --- the run ---

    def run(self, position: Position) -> Iterator[Outcome]:
        """Train from a position to the end, then test. Yield members when they end."""
        plain = self._decided.plain
        try:
            self._begin(position)
            yield from self._fit(position)
            if self._members and plain["test"]:
                self._test()
            for member in self._members:
                yield member.place, member.end("completed")
        except _Stopped as stopped:
            yield from self._interrupted(stopped.position)
        except Exception as error:
            if not isinstance(error, ExpError | OSError):
                log.exception("the stack failed")
            if len(self._members) > 1:
                # The error may belong to any member. Each job runs alone, so that only the failing job fails.
                for member in self._members:
                    member.release()
                    yield member.place, Unstacked(f"together they ended with {one_line(error)}")
                return
            for member in self._members:
                told = explain(error, member.ongoing, parts=None)
                yield member.place, member.end("failed", error=told)
        finally:
            for member in self._members:
                member.release()
            self._hooks.detach()

    def _begin(self, position: Position) -> None:
        decided, plain = self._decided, self._decided.plain
        set_threads(threads_of(plain["runtime"]["threads"], operator=decided.operator))
        self._step = self._first = position.step
        self._batches_done = position.batches
        for member in self._members:
            member.hold()
            member.open_loggers()
            for note in self._notes:
                member.say(note, level=logging.WARNING)
            member.say(f"trained in a stack of {len(self._members)} jobs, in process {os.getpid()}")
            member.begin()

    def _fit(self, position: Position) -> Iterator[Outcome]:
        if position.epoch >= self._epochs or (self._max_steps and position.step >= self._max_steps):
            for member in self._members:
                member.say(f"nothing is left to train: {member.step} steps are done", level=logging.WARNING)
                member.pause()
            return
        for epoch in range(position.epoch, self._epochs):
            if not self._members:
                return
            start = position.batch if epoch == position.epoch else 0
            if not (position.validation_due and epoch == position.epoch and position.epoch_complete):
                yield from self._train_epoch(epoch, start)
            if not self._members:
                return
            yield from self._end_epoch(epoch)
            if not self._members:
                return
            if self._is_over(epoch):
                break
            place = Position(epoch=epoch + 1, batch=0, step=self._step, batches=self._batches_done)
            self._hold_best(place)
            if self._flag.received is not None:
                raise _Stopped(place)
            self._save_sometimes(place)
        yield from self._end_fit()

    def _is_over(self, epoch: int) -> bool:
        return epoch + 1 == self._epochs or (self._max_steps > 0 and self._step >= self._max_steps)

    def _train_epoch(self, epoch: int, start: int) -> Iterator[Outcome]:
        self._epoch, self._batch = epoch, start
        for member in self._members:
            member.epochs = epoch
        batches = len(self._loader)
        waited = time.perf_counter()
        for index, (batch, is_shared) in enumerate(self._batches(epoch, start), start):
            self._hooks.seconds_waited += time.perf_counter() - waited
            if self._flag.received is not None:
                self._flush()
                yield from self._drop_failed()
                raise _Stopped(self._position(index))
            is_last = index + 1 == batches
            self._do_batch(batch, is_shared, epoch, index)
            self._batch = index + 1
            if is_last:
                self._move_schedules("epoch")
            if self._failed:
                yield from self._drop_failed()
                if not self._members:
                    return
            if self._max_steps and self._step >= self._max_steps:
                break
            waited = time.perf_counter()
        self._flush()
        yield from self._drop_failed()

    def _position(self, index: int) -> Position:
        return Position(epoch=self._epoch, batch=index, step=self._step, batches=self._batches_done)

    def _end_epoch(self, epoch: int) -> Iterator[Outcome]:
        trainer = self._decided.plain["trainer"]
        self._hooks.pause()
        validated = (epoch + 1) % trainer["check_val_every_n_epoch"] == 0 and "val" in self._decided.data.stages
        if validated:
            found = self._evaluate("val")
            for member, values in zip(self._members, found, strict=True):
                self._given(member, "val", values)
                if not member.watches_training:
                    self._try(member, member.compare)
        for member in self._members:
            self._end_train_epoch(member)
        is_complete = self._batch == len(self._loader)
        for member in self._members:
            member.epochs = epoch + 1
            if is_complete:
                self._move_on_plateau(member, epoch)
            member.say_epoch(epoch + 1, self._epochs)
        yield from self._drop_failed()

    def _given(self, member: Member, stage: Stage, values: dict[str, float]) -> None:
        try:
            require_loss(values, stage)
        except RunError as error:
            self._failed[member.place] = error
            return
        member.write_stage(stage, values, member.step)
        member.metrics.update(values)

    def _end_train_epoch(self, member: Member) -> None:
        metrics: dict[str, float] = {}
        if member.train_values is not None:
            found = member.train_values.finish(HERE)
            if "loss/train" in found:
                metrics[EPOCH_LOSS] = found["loss/train"]
        elif member.epoch_has_loss:
            metrics[EPOCH_LOSS] = member.epoch_sum / member.epoch_size
        member.epoch_sum, member.epoch_size, member.epoch_has_loss = 0.0, 0, False
        member.write_stage("train", metrics, member.step)
        if EPOCH_LOSS in metrics:
            metrics = {**metrics, "loss/train": metrics[EPOCH_LOSS]}
        member.metrics.update(metrics)
        if member.watches_training:
            self._try(member, member.compare)
        if member.best is not None and member.best["epoch"] == member.epochs:
            note_metrics(member.best, member.metrics, stage="train")

    def _end_fit(self) -> Iterator[Outcome]:
        """Save the last state of each member, and its best."""
        complete = self._batch == len(self._loader)
        place = Position(
            epoch=self._epoch + complete,
            batch=0 if complete else self._batch,
            step=self._step,
            batches=self._batches_done,
        )
        self._hold_best(place)
        for member in self._members:
            member.pause()
        self._save(place)
        yield from self._drop_failed()

    # --- a step ---

    def _do_batch(self, batch: Batch, is_shared: bool, epoch: int, index: int) -> None:
        """One step of each member's optimizer."""
        one = batch if is_shared else batch._replace(data=mapped(batch.data, lambda tensor: tensor[0]))
        self._hooks.start_batch(one, index=self._step + 1, epoch=epoch, batch_idx=index)
        gradients, losses = self._network.gradients(batch, is_shared=is_shared, epoch=epoch, index=index)
        self._batches_done += 1
        self._add_train_values(losses, batch)
        found = [losses.total, *losses.parts.values()] if len(losses.parts) > 1 else [losses.total]
        self._update(gradients, torch.stack(found), size=batch.global_size)

    def _update(self, gradients: Mapping[str, Tensor], losses: Tensor, *, size: int) -> None:
        names, members, hooks = self._network.trained, self._members, self._hooks
        rows = list(zip(*(gradients[name].unbind(0) for name in names), strict=True))
        hooks.after_backward()
        clipped = [place for place, member in enumerate(members) if member.clip_value]
        for place in range(len(members)) if hooks.need_gradients() else clipped:
            for parameter, gradient in zip(members[place].parameters, rows[place], strict=True):
                parameter.grad = gradient
        index = self._step + 1
        values = hooks.before_update(gradients)
        is_flush = is_written(index, first=self._first, every=self._log_every)
        for member, found in zip(members, values, strict=True):
            if is_flush or member.schedule is not None or member.rates is None:
                self._note_rates(member, found, is_flush=is_flush)
        for place in clipped:
            member = members[place]
            _clip(member.parameters, member.clip_value, member.plain["trainer"]["gradient_clip_algorithm"])
        hooks.after_clipping(values)
        self._optimizers(rows)
        for member in members:
            member.step = index
        hooks.after_step(values)
        self._step = index
        self._move_schedules("step")
        self._waiting.append(_Step(index, size, losses, values))
        if is_flush:
            self._flush()

    def _note_rates(self, member: Member, found: dict[str, Any], *, is_flush: bool) -> None:
        rates = [group["lr"] for group in member.optimizer.param_groups]
        if is_flush or rates != member.rates:
            member.rates = rates
            names = rate_names(member.optimizer, phase=None)
            found.update({f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)})

    def _move_schedules(self, interval: str) -> None:
        for member in self._members:
            schedule = member.schedule
            if schedule is not None and member.interval == interval and not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()

    def _move_on_plateau(self, member: Member, epoch: int) -> None:
        schedule, every = member.schedule, 1
        if not isinstance(schedule, ReduceLROnPlateau):
            return
        if "val" in (member.plateau or "").split("/"):
            every = self._decided.plain["trainer"]["check_val_every_n_epoch"] or 1
        if (epoch + 1) % every == 0:
            schedule.step(torch.tensor(member.metrics[str(member.plateau)], dtype=torch.float64))

    def _add_train_values(self, losses: Losses, batch: Batch) -> None:
        """Add the divisors of weighed terms to the sums of the epoch, as TrainingModule does."""
        for place, member in enumerate(self._members):
            if member.train_values is None:
                return
            means = []
            for name, part in losses.parts.items():
                divisor = losses.divisors[name] if name in self._objective.weighed else None
                if isinstance(divisor, Tensor):
                    divisor = divisor[place] if divisor.dim() else divisor
                means.append((part[place], batch.global_size if divisor is None else divisor))
            member.train_values.add(means)

    # --- what is written ---

    def _flush(self) -> None:
        """Write the waiting steps. A member fails if its loss is not finite."""
        steps, self._waiting = self._waiting, []
        terms = list(self._objective.terms)
        for step in steps:
            for place, (member, losses) in enumerate(zip(self._members, step.losses.T.tolist(), strict=True)):
                if member.place in self._failed:
                    continue
                try:
                    refuse_lost(losses[0], step.index, is_scaled=False, saved=member.saved)
                except NonFiniteError as error:
                    self._failed[member.place] = error
                    continue
                member.epoch_sum += losses[0] * step.size
                member.epoch_size += step.size
                member.epoch_has_loss = True
                values = step.values[place]
                values["loss/train"] = losses[0]
                values |= {f"loss/train/{term}": part for term, part in zip(terms, losses[1:], strict=False)}
                member.write_step(values, step.index)

    def _try(self, member: Member, work: Any) -> None:
        """Run a function. If it raises, the member has failed."""
        try:
            work()
        except ExpError as error:
            self._failed[member.place] = error
        except OSError as error:
            told = explain(error, member.ongoing, parts=None)
            self._failed[member.place] = told if isinstance(told, ExpError) else RunError(str(told))

    def _drop_failed(self) -> Iterator[Outcome]:
        """Remove failed members from the stack."""
        failed, self._failed = self._failed, {}
        if not failed:
            return
        leaving = [member for member in self._members if member.place in failed]
        self._keep([number for number, member in enumerate(self._members) if member.place not in failed])
        for member in leaving:
            yield member.place, member.end("failed", error=failed[member.place])

    def _keep(self, stay: Sequence[int]) -> None:
        """Keep these members, given by their places in the stack, and drop the others."""
        self._members = [self._members[place] for place in stay]
        if stay:
            self._network.keep(stay)
            self._hooks.keep(stay)
            self._optimizers.keep(stay)

    def _loops(self, place: Position) -> dict[str, Any]:
        """Return the states of Lightning's loops at a position, for a checkpoint."""
        trainer = self._bare
        loops = {"validate_loop": trainer.validate_loop, "test_loop": trainer.test_loop}
        # The loader has no state except the position.
        fit_loop = {**fit_loop_state(trainer, place), "state_dict": {"combined_loader": [{}]}}
        found: dict[str, Any] = {"fit_loop": fit_loop}
        found |= {name: loop.state_dict() for name, loop in loops.items()}
        return {**found, "predict_loop": trainer.predict_loop.state_dict()}

    def _hold_best(self, place: Position) -> None:
        loops = self._loops(place)
        for member in self._members:
            self._try(member, functools.partial(member.hold_best, place, loops, self._shared))

    def _save_sometimes(self, place: Position) -> None:
        """Save all members if the last save is long enough ago."""
        now = time.monotonic()
        if now - self._saved_at < max(SAVE_SECONDS, SAVE_SHARE * self._save_seconds):
            return
        self._save(place)
        self._saved_at, self._save_seconds = time.monotonic(), time.monotonic() - now

    def _save(self, place: Position) -> None:
        loops = self._loops(place)
        for member in self._members:
            self._try(member, functools.partial(member.save, place, loops, self._shared))

    def _interrupted(self, place: Position) -> Iterator[Outcome]:
        """Save each member at this position, and end the stack."""
        signum = self._flag.received
        assert signum is not None
        if place.step:
            self._save(place)
        yield from self._drop_failed()
        for member in self._members:
            saved = last_checkpoint(member.directory)
            error = Interrupted(signum=signum, checkpoint=None if saved is None else str(saved))
            yield member.place, member.end("interrupted", error=error)

    # --- data ---

    def _loader_of(self, seed: int) -> IndexedLoader:
        """Return the loader of training with the order of a seed."""
        loader = self._decided.data.loader("train")
        assert isinstance(loader, IndexedLoader)
        assert isinstance(loader.batches, GlobalBatches)
        batches = replace(loader.batches, seed=seed)
        loader.batches, loader.sampler = batches, ShareSampler(batches=batches, rank=0, world_size=1)
        return loader

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the batches of an epoch from batch `start`, and whether all members share the data.

        Shared data is `[B, ...]`, other data is `[M, B, ...]`.
        """
        distinct = list(dict.fromkeys(member.seed for member in self._members))
        is_random = self._is_shuffled or isinstance(self._loader.dataset, EpochDependent)
        if len(distinct) == 1 or not is_random:
            loader = self._loader_of(distinct[0])
            loader.set_position(epoch, start)
            for batch in loader:
                yield self._precision.convert_input(batch), True
            return
        loaders = [self._loader_of(seed) for seed in distinct]
        for loader in loaders:
            loader.set_position(epoch, start)
        for found in zip(*loaders, strict=True):
            rows = {seed: place for place, seed in enumerate(distinct)}
            index = torch.tensor([rows[member.seed] for member in self._members])
            each = [self._precision.convert_input(batch) for batch in found]
            yield each[0]._replace(data=_stacked([batch.data for batch in each], index)), False

    # --- evaluation ---

    def _evaluate(self, stage: Stage) -> list[dict[str, float]]:
        objectives = [member.objective for member in self._members]
        measures = self._module.values_of(stage).measures
        evaluation = StackedEvaluation(stage=stage, objectives=objectives, measures=measures)
        for batch in self._decided.data.loader(stage):
            batch = self._precision.convert_input(batch)
            values = self._network.evaluate(batch)
            with torch.no_grad(), self._precision.forward_context():
                evaluation.add(values, batch)
        return evaluation.finish()

    def _test(self) -> None:
        """Evaluate the best weights of each member on the test split."""
        if "test" not in self._decided.data.stages:
            for member in self._members:
                member.say("the data has no test part: the test stage is left out", level=logging.WARNING)
            return
        with torch.no_grad():
            for member in self._members:
                self._take_best(member)
        found = self._evaluate("test")
        for member, values in zip(self._members, found, strict=True):
            step = member.step
            if member.best is not None:
                step = member.best["step"]
                note_metrics(member.best, values, stage="test")
            member.write_stage("test", values, step)

    def _take_best(self, member: Member) -> None:
        weights = member.best_weights()
        if weights is None:
            if member.plain["checkpoint"]["save_best"] and member.monitor is not None:
                line = f"{member.monitor} was never measured, so no best.ckpt: the last weights are tested"
                member.say(line, level=logging.WARNING)
            return
        member.network.load_state_dict(weights)


class _Stopped(Exception):
    """A signal came. position: where the members resume."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position


def _clip(parameters: Sequence[nn.Parameter], value: float, algorithm: str | None) -> None:
    """Clip gradients as exp.engine.module.clip does on one device."""
    if algorithm == "value":
        nn.utils.clip_grad_value_(parameters, value)
    else:
        nn.utils.clip_grad_norm_(parameters, value)


def _stacked(entries: Sequence[Any], index: Tensor) -> Any:
    """Stack the data of several batches, and return the row `index[m]` for each member m."""
    first = entries[0]
    if isinstance(first, Mapping):
        return {name: torch.stack([one[name] for one in entries])[index] for name in first}
    return tuple(torch.stack(columns)[index] for columns in zip(*entries, strict=True))


def _compiled(plain: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return a function that compiles forward, objective and backward of all members; None without runtime.compile."""
    if not plain["runtime"]["compile"]:
        return None
    from exp.engine.compilation import compiled_function

    return functools.partial(compiled_function, backend=plain["runtime"]["compile_backend"])
