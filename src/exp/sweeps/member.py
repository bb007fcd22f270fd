"""One job of a stack, as everybody outside sees it: its run directory with all that a run alone leaves there.

Its checkpoints have the layout of exp.engine.checkpointing, so that an ordinary run goes on from them. A stack writes
them at its end, when it is interrupted, and at the ends of epochs as seldom as its caller says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.construct import build_objective, construct
from exp.engine.buffer import EpochValues, on_host_values
from exp.engine.checkpoint import (
    CHECKPOINTS,
    AtomicCheckpointIO,
    State,
    copy_checkpoint,
    lay_out_optimizer_states,
    on_host,
    read_checkpoint,
)
from exp.engine.checkpointing import (
    BEST,
    BEST_KEYS,
    CONFIG,
    KEPT,
    POSITION,
    is_better,
    monitored_value,
    note_metrics,
    restored_best,
)
from exp.engine.module import TRAIN_LOSSES
from exp.engine.non_finite import CURES, Kinds, broken_entries
from exp.engine.progress import Position
from exp.engine.recording import LATEST, STATE, is_shown
from exp.engine.stopping import STATE as SECONDS
from exp.engine.stopping import end_by_epochs, end_by_steps
from exp.errors import ExpError, Interrupted, NonFiniteError, RunError, UserCodeError
from exp.files import holding
from exp.hooks.panels import Panel
from exp.loggers.heat_maps import HeatMaps
from exp.loggers.run_logger import RunLogger, description_of, has_begun, made
from exp.objectives.objective import Objective
from exp.run_report import Ongoing, Report, Status, best_of, write_report
from exp.shared_types import EPOCH_LOSS, Stage, best_scalars
from exp.spelling import among

# Of values that lie on this process's one device.
HERE = SingleDeviceStrategy(device="cpu")
LINE = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What is the same for all members of a stack.

    io: writes checkpoints. fitted: what the training part of the data says, by the data's name.
    by_design: of `kinds_by_design`.
    """

    io: AtomicCheckpointIO
    fitted: Mapping[str, Any]
    by_design: Mapping[str, Kinds]


class Member:
    """A job of a stack.

    Attributes:
        place: Index of its config among the configs of the stack.
        network: Its network, whose tensors are rows of the stack.
        latest: Last value of each tag, as in `Recording`.
        metrics: Values that callbacks compare, as in `Recording`.
        best: As in `Checkpointing`.
    """

    def __init__(
        self,
        place: int,
        *,
        plain: Mapping[str, Any],
        text: str,
        directory: Path,
        overrides: Sequence[str],
        ongoing: Ongoing,
        network: nn.Module,
    ) -> None:
        self.place, self.plain, self.text, self.overrides = place, plain, text, overrides
        self.directory, self.ongoing, self.network = directory, ongoing, network
        self.objective: Objective = build_objective(plain)
        self.seed: int = plain["seed"]
        self.optimizer: Optimizer
        self.schedule: LRScheduler | None = None
        self.interval: str = "step"
        self.plateau: str | None = None
        self.parameters: list[nn.Parameter] = []
        self.clip_value: float = plain["trainer"]["gradient_clip_val"] or 0.0
        self.latest: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.epoch_sum, self.epoch_size, self.epoch_has_loss = 0.0, 0, False
        self.train_values: EpochValues | None = None
        self.rates: list[float] | None = None
        self.step = self.epochs = 0
        self.seconds_before = 0.0
        self._started: float | None = None
        self._loggers: list[RunLogger] = []
        # Pictures of many members would take longer than their training.
        self._heat_maps = HeatMaps(directory, is_drawn=False)
        self._lines: list[str] = []
        self._is_better = False
        self._hold = contextlib.ExitStack()
        # The state of the best, until its file is written.
        self._best_state: State | None = None
        self._stages: dict[str, int] = {}
        self.saved = "no checkpoint was saved before it"

    # --- what learns ---

    def learn(self, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.parameters = [one for one in self.network.parameters() if one.requires_grad]

    @property
    def monitor(self) -> str | None:
        monitor: str | None = self.plain["monitor"]
        return monitor

    @property
    def watches_training(self) -> bool:
        return self.monitor is not None and (self.monitor.endswith("/train") or self.monitor == EPOCH_LOSS)

    @property
    def last_path(self) -> Path:
        return self.directory / CHECKPOINTS / "last.ckpt"

    @property
    def best_path(self) -> Path:
        return self.directory / CHECKPOINTS / "best.ckpt"

    @property
    def seconds(self) -> float:
        """Wall time of training so far, before a resume included: of the whole stack."""
        return self.seconds_before + (0.0 if self._started is None else time.monotonic() - self._started)

    def begin(self) -> None:
        """Training begins."""
        self._started = time.monotonic()
        for logger in self._loggers:
            logger.purge(self.step + 1)
        self._heat_maps.begin(self.step + 1)

    def pause(self) -> None:
        """Training ends; the clock stands still."""
        self.seconds_before, self._started = self.seconds, None

    def hold(self) -> None:
        """Let other programs know that it is going on, until its end: none goes on from its checkpoints by itself."""
        self._hold.enter_context(holding(self.directory / "config.yaml"))

    def release(self) -> None:
        """Let other programs go on with it."""
        self._hold.close()

    # --- what is written ---

    def open_loggers(self) -> None:
        """Make its loggers, and tell them of the run; the graph of a stack is not drawn."""
        offers = {"directory": str(self.directory), "save_dir": str(self.directory)}
        for name, node in self.plain["logger"].items():
            key = f"logger.{name}"
            logger = made(partial(construct, node, key=key, allow=self.plain["security"]["allow"], **offers), name=key)
            if isinstance(logger, RunLogger) and has_begun(logger, name=key):
                self._loggers.append(logger)
        description = description_of(self.plain, self.directory, overrides=self.overrides, trace=_no_trace)
        for logger in self._loggers:
            logger.describe(description)

    def write(self, values: Mapping[str, float], index: int, panels: Mapping[str, Panel] | None = None) -> None:
        """Write what optimizer step `index` gave, by tag."""
        self.latest.update(values)
        shown = {tag: panel.drawn() for tag, panel in panels.items()} if panels else {}
        shown = self._heat_maps.shown(shown, index)
        for logger in self._loggers:
            logger.log_metrics(dict(values), index)
            if shown:
                logger.log_panels(shown, index)

    def write_step(self, values: Mapping[str, Any], index: int) -> None:
        """Write the values of a step, which may be floats, tensors and panels."""
        numbers, panels = on_host_values(values)
        self.write(numbers, index, panels)

    def write_stage(self, stage: Stage, values: Mapping[str, float], index: int) -> None:
        """Write what a stage gave, once an optimizer step."""
        if values and self._stages.get(stage) != index:
            self._stages[stage] = index
            self.write(values, index)

    def flush(self) -> None:
        """Let loggers write what they hold back, and close their files: a stack has many."""
        self._heat_maps.save()
        for logger in self._loggers:
            logger.finalize("")

    def say(self, message: str, *, level: int = logging.INFO) -> None:
        """Add a line to its train.log, which is written with the next checkpoint or at the end."""
        self._lines.append(LINE.format(logging.LogRecord(__name__, level, __file__, 0, message, None, None)))

    def say_epoch(self, epoch: int, epochs: int) -> None:
        shown = "  ".join(f"{tag} {value:.4g}" for tag, value in self.latest.items() if is_shown(tag))
        self.say(f"epoch {epoch}/{epochs}  step {self.step}  {shown}")

    def write_log(self) -> None:
        if self._lines:
            with (self.directory / "train.log").open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []

    # --- the best ---

    def compare(self) -> None:
        """Note whether the latest monitored value is the best.

        Raises:
            RunError: Nothing gives the monitored tag.
        """
        if not self.plain["checkpoint"]["save_best"] or self.monitor is None:
            return
        value = monitored_value(self.metrics, self.monitor)
        if not math.isfinite(value):
            self.say(f"{self.monitor} is {value} at step {self.step}: not the best", level=logging.WARNING)
            return
        if is_better(value, self.best, mode=self.plain["mode"]):
            place = {"step": self.step, "epoch": self.epochs}
            self.best = restored_best({"metric": self.monitor, "value": value, **place}, self.best_path)
            if self._stages.get("val") == self.step:
                note_metrics(self.best, self.metrics, stage="val")
            for logger in self._loggers:
                logger.log_metrics(best_scalars(self.best), self.step)
            self._is_better = True

    def hold_best(self, position: Position, loops: State, shared: Shared) -> None:
        """Keep the state of a best that has just been found, at the clean point behind it, until it is written."""
        if self._is_better:
            self._is_better = False
            self._best_state = on_host(self.state(position, loops, shared))

    def best_weights(self) -> Mapping[str, Tensor] | None:
        """What the test stage evaluates, by the network's names; None where there is no best."""
        if self.best is None:
            return None
        state = self._best_state
        if state is None:
            state = read_checkpoint(self.best_path)
        return {name.removeprefix("network."): tensor for name, tensor in state["state_dict"].items()}

    # --- checkpoints ---

    def state(self, position: Position, loops: State, shared: Shared) -> State:
        """What a checkpoint holds at a clean point, its tensors those that are trained on."""
        values, train_values = self.network.state_dict(), self.train_values
        found: State = {
            "epoch": self.epochs,
            "global_step": self.step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": type(values)((f"network.{name}", tensor) for name, tensor in values.items()),
            "loops": loops,
            "callbacks": {},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [] if self.schedule is None else [self.schedule.state_dict()],
            **shared.fitted,
            LATEST: dict(self.latest),
            STATE: {"metrics": dict(self.metrics), "epoch_sum": self.epoch_sum, "epoch_size": self.epoch_size},
            POSITION: dataclasses.asdict(position),
            BEST: self.best and {key: self.best[key] for key in BEST_KEYS},
            KEPT: [],
            CONFIG: self.text,
            SECONDS: self.seconds,
        }
        if train_values is not None:
            found[TRAIN_LOSSES] = train_values.totals(HERE)
        self._require_finite(found, shared)
        return found

    def _require_finite(self, state: State, shared: Shared) -> None:
        found = broken_entries(state, shared.by_design)
        if found:
            raise NonFiniteError(
                f"not finite after step {self.step}: {among(found, count=6)}. Nothing of it is saved; "
                f"{self.saved}. {CURES}"
            )

    def save(self, position: Position, loops: State, shared: Shared) -> None:
        """Write last.ckpt and, where a better one came, best.ckpt; then what loggers and the log hold back.

        Raises: NonFiniteError; RunError where they cannot be written.
        """
        self.flush()
        self.write_log()
        state = on_host(self.state(position, loops, shared))
        saves_last = self.plain["checkpoint"]["save_last"]
        is_one = self._best_state is not None and self.best is not None and self.best["step"] == self.step
        if saves_last:
            shared.io.save_checkpoint(state, self.last_path)
        if is_one and saves_last:
            copy_checkpoint(self.last_path, self.best_path)
        elif self._best_state is not None:
            shared.io.save_checkpoint(self._best_state, self.best_path)
        self.saved = f"checkpoints/last.ckpt is of step {position.step}, and good"

    def restore(self, state: State) -> Position:
        """Go on from a checkpoint of its own, of a stack or of a run alone."""
        lay_out_optimizer_states(state, self.network)
        own = {name.removeprefix("network."): tensor for name, tensor in state["state_dict"].items()}
        self.network.load_state_dict(own)
        self.optimizer.load_state_dict(state["optimizer_states"][0])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["lr_schedulers"][0])
        self.step, self.epochs = state["global_step"], state["epoch"]
        recorded = state[STATE]
        self.metrics.update(recorded["metrics"])
        self.latest.update(state[LATEST])
        self.epoch_sum, self.epoch_size = recorded["epoch_sum"], recorded["epoch_size"]
        self.epoch_has_loss = bool(self.epoch_size)
        self.seconds_before = state[SECONDS]
        if self.train_values is not None and TRAIN_LOSSES in state:
            self.train_values.restore_losses(state[TRAIN_LOSSES])
        found, path = state[BEST], self.best_path
        if found is not None and found["metric"] == self.monitor:
            if path.is_file() and (read_checkpoint(path)[BEST] or {}).get("step") == found["step"]:
                self.best = restored_best(found, path)
            elif found["step"] == self.step:
                # A kill has kept the last from being copied.
                copy_checkpoint(self.last_path, path)
                self.best = restored_best(found, path)
            else:
                line = f"the best.ckpt of step {found['step']} is not there: the best is sought anew from here"
                self.say(line, level=logging.WARNING)
        return Position(**state[POSITION])

    # --- the end ---

    def end(self, status: Status, *, error: BaseException | None = None) -> Report | ExpError:
        """Write the report, tell the loggers, and give what a run alone would have returned or raised."""
        if error is not None:
            self._say_how(error)
            self.say(f"the run {status}: {type(error).__name__}: {error}")
        report = self.report(status, error=error)
        try:
            self.flush()
            self.write_log()
            write_report(report, is_synced=False)
            for logger in self._loggers:
                logger.end(status)
        except (OSError, RunError) as second:
            told = second if isinstance(second, RunError) else RunError(f"{self.directory}: {second}")
            return told if error is None else _as_known(error)
        finally:
            self.release()
        return report if error is None else _as_known(error)

    def report(self, status: Status, *, error: BaseException | None = None) -> Report:
        from exp.hooks.memory_peaks import peak_of_run

        ended = self.ongoing.ended(status, error=error)
        return dataclasses.replace(
            ended,
            metrics={**self.latest, **best_scalars(self.best)},
            **best_of(self.best),
            stage_steps=dict(self._stages),
            ended_by=self._ended_by() if status == "completed" else None,
            steps=self.step,
            epochs=self.epochs,
            step_ms=1000.0 * self.seconds / self.step if self.step else None,
            peak_memory_mib=peak_of_run().so_far() / 2**20,
        )

    def _ended_by(self) -> str:
        limits = self.plain["trainer"]
        return end_by_epochs(self.epochs) if self.epochs == limits["max_epochs"] else end_by_steps(limits["max_steps"])

    def _say_how(self, error: BaseException) -> None:
        if isinstance(error, Interrupted | UserCodeError) and self.last_path.is_file():
            error.command = self.ongoing.resume_command(str(self.last_path))


def _no_trace() -> tuple[None, Sequence[str]]:
    return None, ("the graph is not drawn of a stack",)


def _as_known(error: BaseException) -> ExpError:
    return error if isinstance(error, ExpError) else RunError(f"{type(error).__name__}: {str(error).strip()}")
