"""Training of several jobs of a sweep in one process, as a stack.

One vmap call computes the gradients of all members. Then each member makes an optimizer step with a separate optimizer.

    per member    run directory, network, optimizer, schedule, random streams, event file, checkpoints, report
    shared        the data, forward and backward, the time measurement

A member is one of these jobs. It computes the same numbers as a single run of the job. The events of a step have the
same order as in exp.engine.recording and exp.engine.checkpointing.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from exp.check.examination import examine as examine_config
from exp.check.first_samples import refuse_other_data
from exp.check.plan import Plan
from exp.check.resolution import resolve
from exp.config.compose import kept_overrides
from exp.config.freeze import clear, shared_origin, write_frozen
from exp.config.plain_tree import changes, with_changes
from exp.config.yaml_files import yaml_text
from exp.construct import build_network, build_run_precision
from exp.data.in_memory import EpochDependent, IndexedLoader
from exp.data.loader import GlobalBatches, ShareSampler
from exp.engine.forward import forward_by_name
from exp.engine.recording import is_written
from exp.engine.runtime import set_threads, threads_of
from exp.errors import ExpError, Interrupted, one_line
from exp.launch.launcher import last_checkpoint
from exp.nested import map_tensors
from exp.optim.direct_step import DirectSteps
from exp.precision.plugin import RunPrecision
from exp.run_report import Report, explain, forget_peak_memory
from exp.shared_types import Batch, Stage
from exp.signals import SignalFlag
from exp.sweeps.executor import Unstacked
from exp.sweeps.jobs import Job, Plain
from exp.sweeps.member import Member, Progress
from exp.sweeps.stacked_hooks import Numbers, StackedHooks
from exp.sweeps.stacked_network import StackedNetwork, Unstackable, examine
from exp.sweeps.stacking import obstacle

log = logging.getLogger(__name__)

Outcome = tuple[int, Report | ExpError]
# The shortest time between two saves of all members, in seconds.
SAVE_SECONDS = 30.0
# Largest number of members of a stack, because the weights of more members do not fit into the cache of the CPU.
MOST_MEMBERS = 64
# Largest number of parameters of a stacked network. At this size, 64 members with gradients, two optimizer averages and
# the best checkpoint take 1.3 GB in float32.
MOST_PARAMETERS = 2**20
# Operators with this many multiply-adds are slower in a stack on a CPU, and so are recurrent layers. Measured time of a
# stacked step divided by the time of the single steps: LeNet 0.8, MLP 1.0, ResNet 1.1, LSTM 2.6.
LARGE_OPERATOR = 2**26


def train(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Train jobs together, each in a separate run directory.

    Jobs that resume from different positions cannot share a step. The jobs of each position therefore form a separate
    stack, and the stacks are trained one after another.

    Args:
        jobs: Checked jobs of one group of `exp.sweeps.stacking.groups`. A job resumes from its last checkpoint if its
            run directory has a config.yaml.

    Yields:
        The index of a job that ended, and its report or error. The error is Unstacked if the stack as a whole failed.

    Raises:
        Unstackable: The jobs cannot be stacked. No run directory was created.
    """
    forget_peak_memory()
    examined = examine_config(resolve(jobs[0].new_config()))
    decided = examined.plan()
    _refuse(decided)
    network, batch = build_network(decided.settings, decided.spec), next(iter(decided.data.loader("train")))
    examine(network, batch, run=forward_by_name(network, tuple(decided.spec.inputs)), objective=decided.objective)
    if decided.settings.sweep.stack == "auto" and not is_faster(decided, network):
        raise Unstackable("model is not stacked with sweep.stack=auto: separate processes are faster")
    refuse_other_data(decided)
    precision, origin = build_run_precision(decided.settings, device_type="cpu"), shared_origin()
    by_position: dict[object, list[Member]] = {}
    for place, job in enumerate(jobs):
        try:
            plain = _resolve(job, jobs[0], decided)
            text = yaml_text(plain)
            directory = _directory(job, text, origin)
            member = Member(place, decided, plain=plain, text=text, directory=directory, precision=precision)
        except ExpError as error:
            yield place, error
        else:
            for note in examined.notes:
                member.log.say(note, level=logging.WARNING)
            by_position.setdefault(member.position, []).append(member)
    flag = SignalFlag()
    flag.install()
    try:
        for members in by_position.values():
            for start in range(0, len(members), MOST_MEMBERS):
                some = members[start : start + MOST_MEMBERS]
                yield from Stack(decided, some, precision=precision, flag=flag).run()
    finally:
        flag.restore()


def _refuse(decided: Plan) -> None:
    """Raise Unstackable if a key of the config, the objective or the data is not supported in a stack."""
    if reason := obstacle(decided.plain):
        raise Unstackable(reason)
    if decided.placement.accelerator != "cpu" or decided.placement.world_size != 1:
        raise Unstackable("launch.accelerator cannot be stacked: a stack runs in one process on a CPU")
    objective = decided.objective
    if objective.needs or any(True for _ in objective.parameters()):
        raise Unstackable("objective cannot be stacked: a loss term has parameters, or runs the network more than once")
    if weighed := objective.weighed:
        raise Unstackable(f"objective.{weighed[0]} cannot be stacked: it is divided by the weights of its targets")
    for stage in decided.data.stages:
        loader = decided.data.loader(stage)
        if not isinstance(loader, IndexedLoader) or type(loader.batches) is not GlobalBatches:
            raise Unstackable(f"data cannot be stacked: the {stage} split is not in memory")
        if loader.batches.draw is not None or decided.data.transforms_batches(stage):
            raise Unstackable(f"data cannot be stacked: the {stage} split has a sampler, or transforms of batches")


def is_faster(decided: Plan, network: nn.Module) -> bool:
    """Return whether a stack is expected to take less processor time than the same jobs in separate processes.

    The estimate uses the sizes of the network and its input. A stack saves the time between operators, which is short
    compared to the time of a large operator. Recurrent layers are slower in a stack.
    """
    has_slow_layers = any(isinstance(module, nn.RNNBase) for module in network.modules())
    is_small = sum(parameter.numel() for parameter in network.parameters()) <= MOST_PARAMETERS
    return is_small and decided.operator is not None and decided.operator < LARGE_OPERATOR and not has_slow_layers


def _directory(job: Job, text: str, origin: Mapping[str, object]) -> Path:
    """Return the run directory of a job after its config was frozen. Clear the directory of a job without a checkpoint.

    Args:
        job: The job.
        text: Text of config.yaml.
        origin: Result of `shared_origin`.
    """
    directory = cast(Path, job.directory)
    if last_checkpoint(directory) is None:
        if (directory / "config.yaml").is_file():
            clear(directory)
        overrides = kept_overrides(job.overrides)
        write_frozen(directory, text=text, overrides=overrides, origin=origin, is_synced=False)
    return directory


def _resolve(job: Job, other: Job, decided: Plan) -> Plain:
    """Return the resolved config of a job, derived from the plan of a similar job if possible.

    Args:
        job: The job.
        other: A similar job.
        decided: Plan of the similar job.
    """
    changed = changes(other.plain, job.plain)
    # The key `weights` may contain a run directory. Only `resolve` replaces it by the path of a checkpoint.
    if changed is None or any(path[0] == "weights" for path in changed):
        return resolve(job.new_config()).plain
    return with_changes(decided.plain, changed)


class Stack:
    """Jobs of a sweep, called members, that are trained together from the same epoch and batch.

    If a member fails, the tensors of the member stay in the stack, but its values are no longer logged.
    """

    def __init__(self, decided: Plan, members: Sequence[Member], *, precision: RunPrecision, flag: SignalFlag) -> None:
        self._decided, self._members, self._precision, self._flag = decided, members, precision, flag
        self._running = list(members)
        first, trainer = members[0], decided.settings.trainer
        self._start = start = first.position
        self._progress = Progress(epoch=start.epoch, batch=start.batch, step=start.step, batches=start.batches)
        assert trainer.max_epochs is not None  # `obstacle` refuses null
        self._epochs = trainer.max_epochs
        self._log_every: int = trainer.log_every_n_steps or 50
        self._loader = self._loader_of(decided.data.seed)
        total_steps = len(self._loader) * self._epochs
        self._run = forward_by_name(first.network, tuple(decided.spec.inputs))
        self._network = StackedNetwork(
            [member.network for member in members],
            seeds=[member.settings.seed for member in members],
            run=self._run,
            objective=first.module.objective,
            autocast=precision.forward_context,
        )
        for member in members:
            member.join(self._progress, total_steps=total_steps)
        updates = [member.updates for member in members]
        self._optimizers = DirectSteps([one.optimizer for one in updates], [one.parameters for one in updates])
        self._hooks = StackedHooks(
            decided.hooks,
            first.network,
            updates[0].optimizer,
            forward=self._forward,
            total_steps=total_steps,
        )
        # Steps that are not logged yet: number of the step, number of samples, losses `[T, M]` of T terms and M
        # members, and the values of each member by tag.
        self._waiting: list[tuple[int, int, Tensor, list[Numbers]]] = []
        self._seconds_waited = 0.0

    def run(self) -> Iterator[Outcome]:
        """Train to the end, then test.

        Yields:
            The index of a member that ended, and its report or error.
        """
        try:
            for _ in self._work():
                yield from self._end_failed()
            for member in self._running:
                yield member.place, member.end("completed")
        except Interrupted as interrupted:
            yield from self._save_interrupted(interrupted.signum)
        except Exception as error:
            if not isinstance(error, ExpError | OSError):
                log.exception("the stack failed")
            if len(self._running) > 1:
                # Any member may have caused the error. Each job runs again alone, so that only the job with the error
                # fails.
                for member in self._running:
                    member.hold.close()
                    yield member.place, Unstacked(f"the stack ended with {one_line(error)}")
                return
            for member in self._running:
                yield member.place, member.end("failed", error=explain(error, member.ongoing, parts=None))
        finally:
            for member in self._members:
                member.hold.close()
            self._hooks.detach()

    def _work(self) -> Iterator[None]:
        """Train and test. Yield None after each epoch and at the end, so that the caller handles failed members."""
        set_threads(threads_of(self._decided.settings.runtime.threads, operator=self._decided.operator))
        for member in self._members:
            member.begin()
            where = f"a stack of {len(self._members)} jobs, in process {os.getpid()}"
            member.log.say(f"trained in {where}; a stack logs no heat maps and no histograms")
        progress = self._progress
        progress.began = saved_at = time.monotonic()
        while self._running and progress.epoch < self._epochs:
            self._raise_signal()
            if time.monotonic() - saved_at >= SAVE_SECONDS:
                self._each(Member.save)
                saved_at = time.monotonic()
            self._train_epoch()
            yield
        progress.ended = time.monotonic()
        self._each(Member.save)
        if self._decided.settings.test and "test" in self._decided.data.stages:
            self._each(Member.load_best)
            self._evaluate("test")
            self._each(Member.test)
        yield

    def _raise_signal(self) -> None:
        if self._flag.received is not None:
            raise Interrupted(signum=self._flag.received, checkpoint=None)

    def _train_epoch(self) -> None:
        """Train the remaining batches of the epoch, validate, and update the best state."""
        progress = self._progress
        waited = time.perf_counter()
        for index, (batch, is_shared) in enumerate(self._batches(), progress.batch):
            self._seconds_waited += time.perf_counter() - waited
            self._raise_signal()
            self._do_batch(batch, is_shared, index)
            progress.batch = index + 1
            if progress.batch == len(self._loader):
                self._move_schedules("epoch")
            waited = time.perf_counter()
        self._flush()
        self._hooks.pause()
        has_validated = "val" in self._decided.data.stages
        if has_validated:
            self._evaluate("val")
        progress.epoch, progress.batch = progress.epoch + 1, 0
        self._each(functools.partial(Member.end_epoch, has_validated=has_validated))

    def _each(self, work: Callable[..., None], *entries: Sequence[Any]) -> None:
        """Call a function for each running member. If the call raises an error, only that member fails.

        Args:
            work: Function that is called with a member, and with the member's entry in each sequence.
            *entries: Sequences with an entry for each member.
        """
        for member, *own in zip(self._members, *entries, strict=True):
            if member.error is None:
                try:
                    work(member, *own)
                except (ExpError, OSError) as error:
                    member.fail(error)

    def _do_batch(self, batch: Batch, is_shared: bool, batch_idx: int) -> None:
        """Make one optimizer step of each member on one batch."""
        progress, hooks, members = self._progress, self._hooks, self._members
        index = progress.step + 1
        hooks.start_batch(
            batch if is_shared else batch._replace(data=map_tensors(batch.data, operator.itemgetter(0))),
            index=index,
            epoch=progress.epoch,
            batch_idx=batch_idx,
            seconds_waited=self._seconds_waited,
        )
        gradients, losses = self._network.gradients(batch, is_shared=is_shared, epoch=progress.epoch, index=batch_idx)
        progress.batches += 1
        rows = list(zip(*(gradients[name].unbind(0) for name in self._network.trained), strict=True))
        values = hooks.after_backward(gradients, members=len(members))
        is_flush = is_written(index, first=self._start.step, every=self._log_every)
        for member, own, found in zip(members, rows, values, strict=True):
            member.updates.note_rates(found, is_written=is_flush)
            member.updates.clip(own)
        self._optimizers(rows)
        shared = hooks.after_step()
        for found in values:
            found |= shared
        progress.step = index
        self._move_schedules("step")
        self._waiting.append((index, batch.global_size, losses, values))
        if is_flush:
            self._flush()

    def _move_schedules(self, interval: str) -> None:
        for member in self._members:
            member.updates.move_schedule(interval)

    def _forward(self, network: nn.Module, batch: Batch) -> None:
        """Run one forward and the objective on a network, as in a single run, for hooks that observe a forward."""
        with self._precision.forward_context():
            self._members[0].module.objective(self._run(network.train(), batch.data), batch)

    def _flush(self) -> None:
        """Log the values of all steps since the last call. A member with a non-finite loss fails."""
        steps, self._waiting = self._waiting, []
        for index, size, losses, values in steps:
            self._each(functools.partial(Member.write_step, index=index, size=size), values, losses.T.tolist())

    def _end_failed(self) -> Iterator[Outcome]:
        """Yield the index and the error of each member that failed since the last call."""
        failed = [member for member in self._running if member.error is not None]
        self._running = [member for member in self._running if member.error is None]
        for member in failed:
            yield member.place, member.end("failed", error=member.error)

    def _save_interrupted(self, signum: int) -> Iterator[Outcome]:
        """Save all members, and yield the index of each member with the error Interrupted."""
        self._flush()
        if self._progress.step:
            self._each(Member.save)
        yield from self._end_failed()
        for member in self._running:
            saved = last_checkpoint(member.directory)
            error = Interrupted(signum=signum, checkpoint=None if saved is None else str(saved))
            yield member.place, member.end("interrupted", error=error)

    def _loader_of(self, seed: int) -> IndexedLoader:
        """Return a training loader that shuffles the samples with a seed."""
        loader = self._decided.data.loader("train")
        assert isinstance(loader, IndexedLoader)
        assert isinstance(loader.batches, GlobalBatches)
        batches = replace(loader.batches, seed=seed)
        loader.batches, loader.sampler = batches, ShareSampler(batches=batches, rank=0, world_size=1)
        return loader

    def _batches(self) -> Iterator[tuple[Batch, bool]]:
        """Yield the remaining batches of the epoch.

        Yields:
            The batch, and True if all members share the data of the batch. Shared data has the shape `[B, ...]`.
            Separate data of M members has the shape `[M, B, ...]`.
        """
        seeds = [member.settings.seed for member in self._members]
        is_random = self._decided.data.shuffle or isinstance(self._loader.dataset, EpochDependent)
        distinct = list(dict.fromkeys(seeds)) if is_random else seeds[:1]
        loaders = [self._loader_of(seed) for seed in distinct]
        for loader in loaders:
            loader.set_position(self._progress.epoch, self._progress.batch)
        for found in zip(*loaders, strict=True):
            first, *others = (self._precision.convert_input(batch) for batch in found)
            if others:
                rows = torch.tensor([distinct.index(seed) for seed in seeds])
                yield first._replace(data=_stack_rows([first.data, *(batch.data for batch in others)], rows)), False
            else:
                yield first, True

    def _evaluate(self, stage: Stage) -> None:
        for batch in self._decided.data.loader(stage):
            batch = self._precision.convert_input(batch)
            each = self._network.evaluate(batch)
            with torch.no_grad(), self._precision.forward_context():
                self._each(functools.partial(Member.evaluate, stage=stage, batch=batch), each)


def _stack_rows(entries: Sequence[Any], index: Tensor) -> Any:
    """Stack the data of several batches along a new first axis, with one row for each member.

    Args:
        entries: Data of one batch for each seed. Members with equal seeds share the data.
        index: For each member, the index of its batch in `entries`, `[M]`.
    """
    first = entries[0]
    if isinstance(first, Mapping):
        return {name: torch.stack([one[name] for one in entries])[index] for name in first}
    return tuple(torch.stack(columns)[index] for columns in zip(*entries, strict=True))
