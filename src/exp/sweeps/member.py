"""A member of a stack: one of several jobs that one process trains together.

Checkpoints of a member have the layout of exp.engine.checkpointing, so a single run can resume from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from exp.check.plan import Plan
from exp.config.frozen import read_overrides
from exp.config.settings import Settings, settings_of
from exp.construct import build_loggers, build_network, build_objective, build_optimization, build_starting_network
from exp.engine import checkpoint, checkpointing, recording, stopping
from exp.engine.datamodule import RunData
from exp.engine.forward import Values
from exp.engine.module import TrainingModule, clip
from exp.engine.non_finite import FIXES, NOT_FINITE, NOT_SAVED, broken_entries, finite_names, refuse_lost
from exp.engine.progress import Position
from exp.errors import ExpError, Interrupted, NonFiniteError, RunError, UserCodeError
from exp.files import hold_lock
from exp.hooks.memory_use import MIB, peak_of_run
from exp.launch.launcher import last_checkpoint
from exp.loggers.run_logger import Description, RunLogger, description_of, has_begun
from exp.nested import map_tensors
from exp.optim.phase import name_rates
from exp.precision.plugin import RunPrecision
from exp.run_report import Ongoing, Report, Status, best_of, explain, write_report
from exp.shared_types import EPOCH_LOSS, Batch, Stage, best_scalars
from exp.spelling import among
from exp.sweeps.jobs import Plain
from exp.sweeps.stacked_hooks import Numbers

# Strategy passed to functions that reduce values over ranks. A stack has only one rank.
HERE = SingleDeviceStrategy(device="cpu")
IO = checkpoint.AtomicCheckpointIO(is_synced=False)
LINE = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


@dataclass(kw_only=True)
class Progress:
    """The position in training that all members of a stack share.

    Attributes:
        epoch, batch, step, batches: Same as the fields of `exp.engine.progress.Position`.
        began: Start of the training in this process, from `time.monotonic`.
        ended: End of the training in this process, from `time.monotonic`. None while the training runs.
    """

    epoch: int
    batch: int
    step: int
    batches: int
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def position(self) -> Position:
        return Position(epoch=self.epoch, batch=self.batch, step=self.step, batches=self.batches)

    @property
    def seconds(self) -> float:
        """Wall time of the training in this process so far, in seconds."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began


class MemberLog:
    """The loggers and the train.log file of one member.

    Args:
        directory: Run directory.
        settings: Settings of the job.
        description: Description of the run for the loggers.

    Attributes:
        latest: Last logged value of each tag.
        stages: For each stage, the optimizer step of its last logged values.
        loggers: Loggers that opened without an error.
    """

    def __init__(self, directory: Path, settings: Settings, description: Description) -> None:
        self._directory, self._settings, self._description = directory, settings, description
        self.latest: dict[str, float] = {}
        self.stages: dict[str, int] = {}
        self.loggers: list[RunLogger] = []
        self._lines: list[str] = []

    def begin(self, step: int) -> None:
        """Open the loggers and log the description of the run.

        Args:
            step: First optimizer step that this process trains. Values of this and later steps are removed from the
                event file.
        """
        for name, logger in build_loggers(self._settings, self._directory).items():
            if isinstance(logger, RunLogger) and has_begun(logger, name=f"logger.{name}"):
                self.loggers.append(logger)
        for logger in self.loggers:
            logger.describe(self._description)
            logger.purge(step)

    def write(self, values: Numbers, step: int) -> None:
        """Log numbers by tag at an optimizer step."""
        self.latest.update(values)
        for logger in self.loggers:
            logger.log_metrics(values, step)

    def write_stage(self, stage: Stage, values: Numbers, step: int) -> None:
        self.stages[stage] = step
        self.write(values, step)

    def say(self, message: str, *, level: int = logging.INFO) -> None:
        """Add a line for train.log. The next checkpoint, or the end of the run, writes the line to the file."""
        self._lines.append(LINE.format(logging.LogRecord(__name__, level, __file__, 0, message, None, None)))

    def flush(self) -> None:
        """Write buffered values and lines, and close the files of the loggers.

        The files are closed because a stack has many members, and the number of open files is limited.
        """
        for logger in self.loggers:
            logger.finalize("")
        if self._lines:
            with (self._directory / "train.log").open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []


class MemberUpdates:
    """The optimizer of one member, with its schedule and its gradient clipping.

    Args:
        module: Training module of the member.
        settings: Settings of the job.
        total_steps: Number of optimizer steps of the whole run.
    """

    def __init__(self, module: TrainingModule, settings: Settings, *, total_steps: int) -> None:
        trainer, network = settings.trainer, module.network
        self.parameters = [one for one in network.parameters() if one.requires_grad]
        self.optimizer, self.schedule = module.optimization.make(
            network, total_steps=total_steps, total_epochs=trainer.max_epochs
        )
        self._interval, self._trainer = module.optimization.interval, trainer
        self._rates: list[float] | None = None

    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Clip gradients in place if the job clips them.

        Args:
            gradients: Gradient of each parameter.
        """
        value, algorithm = self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm
        if value:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            clip(self.parameters, value=value, algorithm=algorithm, strategy=HERE)

    def note_rates(self, values: Numbers, *, is_written: bool) -> None:
        """Add learning rates to `values` if the rates changed since the last call, or if this step is written.

        Args:
            values: Values of the step by tag. The learning rates are added in place.
            is_written: Whether the run writes the logged values at this step; see `exp.engine.recording.is_written`.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if is_written or rates != self._rates:
            self._rates = rates
            values.update(name_rates(self.optimizer, rates))

    def move_schedule(self, interval: str) -> None:
        if self.schedule is not None and self._interval == interval:
            self.schedule.step()

    def state(self) -> checkpoint.State:
        """Return the checkpoint entries of the optimizer and the schedule."""
        schedules = [] if self.schedule is None else [self.schedule.state_dict()]
        return {"optimizer_states": [self.optimizer.state_dict()], "lr_schedulers": schedules}

    def restore(self, state: checkpoint.State) -> None:
        self.optimizer.load_state_dict(state["optimizer_states"][0])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["lr_schedulers"][0])


class Member:
    """A job that is trained in a stack.

    Args:
        place: Index of the job in the list of jobs passed to `exp.sweeps.stack.train`.
        decided: Plan that all members of the stack share.
        plain: Config of the job as plain values, interpolations resolved.
        text: Text of the config.yaml of the job.
        directory: Run directory, with a frozen config. The job resumes if the directory has a checkpoint.
        precision: Precision of the stack.

    Attributes:
        position: Position at which the training of the job begins or resumes.
        log: Loggers and train.log of the job.
        metrics: Latest values by tag, among them the monitored value.
        best: Best validation so far, as in `Checkpointing`. None before the first validation with a finite value.
        error: Error that ended the job. None while the job runs.

    Raises:
        ExpError: A part of the job cannot be built, or its checkpoint cannot be read.
    """

    def __init__(
        self, place: int, decided: Plan, *, plain: Plain, text: str, directory: Path, precision: RunPrecision
    ) -> None:
        settings = settings_of(plain)
        self.place, self.settings, self.directory = place, settings, directory
        overrides = read_overrides(directory)
        self.ongoing = Ongoing(directory, settings, overrides=overrides, world_size=1)
        path = last_checkpoint(directory)
        self._resumed: checkpoint.State | None = None if path is None else checkpoint.read_checkpoint(path)
        saved = self._resumed or {checkpointing.POSITION: {"epoch": 0, "batch": 0, "step": 0, "batches": 0}}
        self.position = Position.of(saved[checkpointing.POSITION])
        self.module = TrainingModule(
            network=(build_starting_network if path is None else build_network)(settings, decided.spec),
            objective=build_objective(settings),
            optimization=build_optimization(settings),
            metrics=decided.metrics,
            metric_stages=settings.metric_stages,
            seed=settings.seed,
            inputs=tuple(decided.spec.inputs),
        )
        precision.represent(self.module)
        self._finite = finite_names(self.module)
        fitted = decided.data.fitted
        self._fitted = {RunData.__qualname__: dict(fitted)} if fitted else {}
        self.network: nn.Module = self.module.network
        self.log = MemberLog(directory, settings, description_of(plain, directory, overrides=overrides))
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.error: ExpError | None = None
        folder = directory / checkpoint.CHECKPOINTS
        self._last_path, self._best_path = folder / "last.ckpt", folder / "best.ckpt"
        self._text = text
        self._epoch_sum, self._epoch_size = 0.0, 0
        self._seconds_before = 0.0
        # Closing this ExitStack unlocks the run directory.
        self.hold = contextlib.ExitStack()
        # Copy of the best state in memory. The test stage loads the copy instead of best.ckpt.
        self._best_state: checkpoint.State | None = None
        self._best_is_written = False

    def join(self, progress: Progress, *, total_steps: int) -> None:
        """Build the optimizer and the schedule, and load the checkpoint if the job resumes.

        Call this method only after the network's tensors have been replaced by rows of the stacked tensors.
        """
        self._progress = progress
        self.updates = MemberUpdates(self.module, self.settings, total_steps=total_steps)
        if self._resumed is not None:
            self._restore(self._resumed)
            self._resumed = None

    def fail(self, error: ExpError | OSError) -> None:
        """Set the error that ends this member. The other members continue."""
        self.error = _as_known(explain(error, self.ongoing, parts=None) if isinstance(error, OSError) else error)

    def begin(self) -> None:
        """Lock the run directory, so that no other program resumes the run, and open the loggers."""
        self.hold.enter_context(hold_lock(self.directory / "config.yaml"))
        self.log.begin(self._progress.step + 1)

    def write_step(self, values: Numbers, losses: Sequence[float], *, index: int, size: int) -> None:
        """Log the values of one training step, and add the loss to the sums of the epoch.

        Args:
            values: Values of the hooks and the optimizer, by tag.
            losses: The loss. If the objective has several terms, the value of each term follows.
            index: Number of the optimizer step.
            size: Number of samples of the step.

        Raises:
            NonFiniteError: The loss is not finite.
        """
        loss, *parts = losses
        refuse_lost(loss, index, is_scaled=False)
        self._epoch_sum += loss * size
        self._epoch_size += size
        terms = zip(self.module.objective.terms, parts, strict=False)
        self.log.write({**values, "loss/train": loss, **{f"loss/train/{term}": part for term, part in terms}}, index)

    def evaluate(self, values: Values, *, stage: Stage, batch: Batch) -> None:
        """Add the values of one batch to the losses and the metrics of a stage."""
        objective, epoch_values = self.module.objective, self.module.values_of(stage)
        _, parts = objective(values, batch)
        epoch_values.add(objective.means(values, parts, size=batch.size))
        epoch_values.update_metrics(epoch_values.read(values))

    def _end_stage(self, stage: Stage, step: int) -> dict[str, float]:
        """Log and return the losses and metrics of a stage.

        Args:
            stage: The stage that was evaluated.
            step: Optimizer step of the evaluated weights.

        Raises:
            RunError: The evaluation gave no loss.
        """
        values = self.module.values_of(stage).finish(HERE)
        recording.require_loss(values, stage)
        self.log.write_stage(stage, values, step)
        return values

    def end_epoch(self, *, has_validated: bool) -> None:
        """Log the values of an epoch, and compare the monitored value with the best so far.

        The order of events equals that of `Recording` and `Checkpointing` in a single run. If the value is the best so
        far, the state is copied in memory. `save` writes the copy to best.ckpt later, and the test stage loads the
        copy.

        Args:
            has_validated: Whether the validation split was evaluated.
        """
        step, epoch, is_best = self._progress.step, self._progress.epoch - 1, False
        if has_validated:
            self.metrics.update(self._end_stage("val", step))
            is_best = self._compare(step, epoch)
        if self._epoch_size:
            mean = self._epoch_sum / self._epoch_size
            self.log.write_stage("train", {EPOCH_LOSS: mean}, step)
            self.metrics |= {EPOCH_LOSS: mean, "loss/train": mean}
        self._epoch_sum, self._epoch_size = 0.0, 0
        if self.best is not None and self.best["epoch"] == epoch:
            checkpointing.note_metrics(self.best, self.metrics, stage="train")
        shown = "  ".join(f"{tag} {value:.4g}" for tag, value in self.log.latest.items() if recording.is_shown(tag))
        self.log.say(f"epoch {epoch + 1}/{self.settings.trainer.max_epochs}  step {step}  {shown}")
        if is_best:
            self._best_state, self._best_is_written = map_tensors(self._state(), Tensor.clone), False

    def _compare(self, step: int, epoch: int) -> bool:
        """Return whether the monitored value is the best so far, and update `best`.

        Raises:
            RunError: The monitored tag has no value.
        """
        monitor, mode = self.settings.monitor, self.settings.mode
        if monitor is None:
            return False
        value = checkpointing.monitored_value(self.metrics, monitor)
        if not math.isfinite(value):
            self.log.say(f"{monitor} is {value} at step {step}: not the best", level=logging.WARNING)
            return False
        if not checkpointing.is_better(value, self.best, mode=mode):
            return False
        found = {"metric": monitor, "value": value, "step": step, "epoch": epoch}
        self.best = checkpointing.best_from(found, self._best_path)
        checkpointing.note_metrics(self.best, self.metrics, stage="val")
        for logger in self.log.loggers:
            logger.log_metrics(best_scalars(self.best), step)
        return True

    def load_best(self) -> None:
        """Load the best weights for the test stage. If the job has no best checkpoint, keep the last weights."""
        if self.best is not None:
            state = self._best_state or checkpoint.read_checkpoint(self._best_path)
            self.module.load_state_dict(state["state_dict"])

    def test(self) -> None:
        """Log the losses and metrics of the test stage."""
        values = self._end_stage("test", self._progress.step if self.best is None else self.best["step"])
        if self.best is not None:
            checkpointing.note_metrics(self.best, values, stage="test")

    def _state(self) -> checkpoint.State:
        """Return the contents of a checkpoint. The tensors are not copied, so later steps change their values.

        Raises:
            NonFiniteError: A number in the state is not finite.
        """
        step = self._progress.step
        found: checkpoint.State = {
            "epoch": self._progress.epoch,
            "global_step": step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": self.module.state_dict(),
            # The loops have no state, because Checkpointing computes the state of the fit loop on resume.
            "loops": {f"{name}_loop": {} for name in ("fit", "validate", "test", "predict")},
            "callbacks": {},
            **self.updates.state(),
            **self._fitted,
            recording.LATEST: dict(self.log.latest),
            recording.STATE: {
                "metrics": dict(self.metrics),
                "epoch_sum": self._epoch_sum,
                "epoch_size": self._epoch_size,
            },
            checkpointing.POSITION: dataclasses.asdict(self._progress.position),
            checkpointing.BEST: self.best and {key: self.best[key] for key in checkpointing.BEST_KEYS},
            checkpointing.CONFIG: self._text,
            stopping.STATE: self._seconds_before + self._progress.seconds,
        }
        if broken := broken_entries(found, self._finite):
            what = among(broken, count=6)
            raise NonFiniteError(f"{NOT_FINITE} {step}: {what}. {NOT_SAVED}. {FIXES}")
        return found

    def save(self) -> None:
        """Write the buffered log, best.ckpt if there is a new best state, and last.ckpt.

        best.ckpt is written before last.ckpt. If the process is killed between the two writes, the resumed training
        writes best.ckpt again.

        Raises:
            NonFiniteError: A number in the state is not finite.
            OSError: A file cannot be written.
        """
        self.log.flush()
        if self._best_state is not None and not self._best_is_written:
            IO.save_checkpoint(self._best_state, self._best_path)
            self._best_is_written = True
        step = self._progress.step
        if self.best is not None and self.best["step"] == step:
            checkpoint.copy_checkpoint(self._best_path, self._last_path, is_synced=False)
        else:
            IO.save_checkpoint(map_tensors(self._state(), Tensor.clone), self._last_path)

    def _restore(self, state: checkpoint.State) -> None:
        """Load a checkpoint of this job. Checkpoints of a stack and of a single run have the same layout."""
        self.module.load_state_dict(state["state_dict"])
        self.updates.restore(state)
        recorded, found = state[recording.STATE], state[checkpointing.BEST]
        self.metrics.update(recorded["metrics"])
        self.log.latest.update(state[recording.LATEST])
        self._epoch_sum, self._epoch_size = recorded["epoch_sum"], recorded["epoch_size"]
        self._seconds_before = state[stopping.STATE]
        if found is None or found["metric"] != self.settings.monitor:
            return
        known, step = checkpointing.best_from(found, self._best_path), state["global_step"]
        self.best = checkpointing.find_best(known, self._last_path, self._best_path, step=step)
        if self.best is None:
            line = f"the best.ckpt of step {found['step']} is missing. Only later checkpoints are compared"
            self.log.say(line, level=logging.WARNING)

    def end(self, status: Status, *, error: BaseException | None = None) -> Report | ExpError:
        """Write the report and close the loggers.

        Args:
            status: Status of the job.
            error: Error that ended the job, or None.

        Returns:
            The report or the error, as in a single run of the job.
        """
        if isinstance(error, Interrupted | UserCodeError) and self._last_path.is_file():
            error.command = self.ongoing.resume_command(str(self._last_path))
        if error is not None:
            self.log.say(f"the run {status}: {type(error).__name__}: {error}")
        report = self._report(status, error=error)
        try:
            self.log.flush()
            write_report(report, is_synced=False)
            for logger in self.log.loggers:
                logger.end(status)
        except (OSError, RunError) as second:
            error = second if error is None else error
        finally:
            self.hold.close()
        return report if error is None else _as_known(error)

    def _report(self, status: Status, *, error: BaseException | None) -> Report:
        steps, epochs = self._progress.step, self._progress.epoch
        seconds = self._seconds_before + self._progress.seconds
        return dataclasses.replace(
            self.ongoing.end_report(status, error=error),
            metrics={**self.log.latest, **best_scalars(self.best)},
            **best_of(self.best),
            stage_steps=dict(self.log.stages),
            ended_by=stopping.end_by_epochs(epochs) if status == "completed" else None,
            steps=steps,
            epochs=epochs,
            step_ms=1000.0 * seconds / steps if steps else None,
            peak_memory_mib=peak_of_run().so_far() / MIB,
        )


def _as_known(error: BaseException) -> ExpError:
    """Return an ExpError unchanged, and any other exception as a RunError with the same message."""
    return error if isinstance(error, ExpError) else RunError(f"{type(error).__name__}: {str(error).strip()}")
