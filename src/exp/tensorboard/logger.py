"""Lightning logger that writes TensorBoard events, and takes a few microseconds per step."""

from __future__ import annotations

import logging
import math
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from google.protobuf.message import DecodeError
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, SummaryWriter

from exp.config.frozen import PRUNED_TAG
from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, RunLogger
from exp.tensorboard.event_file import EVENTS, EventFile, read_records
from exp.tensorboard.hparams import UNFINISHED, declared_above, end_summary, has_begun, start_summaries
from exp.tensorboard.summaries import Layout, summary_value, text_value

log = logging.getLogger(__name__)

_EVENTS_A_WRITE = 200
Values = Mapping[str, float | Panel | Summary.Value]


class TensorBoardLogger(RunLogger, LightningTensorBoardLogger):
    """Logger that writes scalars, panels, texts and hyperparameters to `tensorboard/` in the run directory.

    It writes only on rank 0. An event contains all values of a step. Events are buffered as plain values, and are
    encoded and written together. A write occurs when 200 events are buffered, when a value arrives `flush_seconds`
    after the last write, and in `save`, `finalize` and `end`. The first write creates the file. Values may follow
    `finalize`, because the test stage follows fit. If the folder cannot be written, or the disk is full, calls that
    write raise OSError.

    Args:
        directory: Run directory; set by build.py.
        flush_seconds: Maximum seconds until a value is visible. Default: 5.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        # Lightning's logger writes events to save_dir/name/version.
        super().__init__(save_dir=str(directory), name="tensorboard", version="")
        self._writer: Experiment | None = None
        self.directory = Path(directory) / "tensorboard"
        self.flush_seconds = flush_seconds
        # True if another process has started and described this run.
        self._is_continued = has_begun(self.directory)
        # Values that an earlier process wrote for steps before this step are kept.
        self._begins = math.inf if self._is_continued else 0.0
        self._layout = Layout()
        self._file = EventFile(self.directory)
        self._waiting: list[tuple[float, int, Values]] = []
        self._last_write = time.time()
        # True if a search may prune this job.
        self._may_be_pruned = False

    @property
    def log_dir(self) -> str:
        return str(self.directory)

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        """SummaryWriter on the same event file. Callbacks and modules use it to add figures."""
        if self._writer is None:
            self._writer = Experiment(self)
        return self._writer

    @rank_zero_only
    def add_event(self, event: Event) -> None:
        """Write an event of the SummaryWriter `experiment`."""
        if event.HasField("summary"):
            self._add(event.step, {value.tag: value for value in event.summary.value}, event.wall_time)
        else:
            self._write([event])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add scalars by tag.

        Args:
            metrics: Numbers by tag.
            step: Number of completed optimizer steps. None uses the last step. Default: None.
        """
        self._add(self._step_of(step), metrics)

    def _add(self, step: int, values: Values, wall_time: float | None = None) -> None:
        if step < self._begins:
            known = written_at(self.directory, step)
            values = {tag: value for tag, value in values.items() if tag not in known}
        now = time.time()
        # Copied, because the caller may change the mapping before it is written.
        self._waiting.append((wall_time or now, step, {**values}))
        if len(self._waiting) >= _EVENTS_A_WRITE or now - self._last_write >= self.flush_seconds:
            self.save()

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Add histograms, images, texts and curves by tag.

        Args:
            panels: Panels by tag, with tensors on the CPU.
            step: Number of completed optimizer steps.
        """
        self._add(step, panels)

    @rank_zero_only
    def describe(self, description: Description) -> None:
        """Write the run's row of the HParams tab. In the first process of the run, also write the texts."""
        self.log_hyperparams(dict(description.hyperparameters), metrics=description.metrics)
        if not self._is_continued:
            texts = [text_value(name, text) for name, text in description.texts.items()]
            self._write([Event(wall_time=time.time(), summary=Summary(value=texts))])

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, object] | Namespace, metrics: Iterable[str] | None = None, step: int | None = None
    ) -> None:
        """Write the run's row of the HParams tab.

        Args:
            params: Values by dotted key.
            metrics: Tags of scalars, shown as additional columns. Default: None.
            step: Not used.
        """
        plain = vars(params) if isinstance(params, Namespace) else params
        metrics = [] if metrics is None else list(metrics)
        # The run was restarted. The old end is removed, because TensorBoard would use the first end that it reads.
        for path in self.directory.glob(EVENTS + UNFINISHED):
            path.unlink(missing_ok=True)
        self._may_be_pruned = self._may_be_pruned or PRUNED_TAG in metrics
        summaries = start_summaries(plain, metrics, declared=declared_above(self.directory.parent))
        self._write(Event(wall_time=time.time(), summary=one) for one in summaries)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Mark earlier values from step `step` onward as invalid, because a resumed run starts at this step.

        The start is written twice, because TensorBoard's reader ignores the first one in a folder (2.21).
        """
        if not self._is_continued:
            return
        self._begins = step
        start = SessionLog(status=SessionLog.START)
        self._write([Event(wall_time=time.time(), step=step, session_log=start)] * 2)

    @rank_zero_only
    def save(self) -> None:
        """Write the buffered events."""
        self._write(())
        if self._writer is not None:
            self._writer.flush_others()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the buffered events and close the file.

        Lightning calls this method after each stage. It may be called twice.
        """
        if self._waiting:
            self.save()
        self._file.close()

    @rank_zero_only
    def end(self, status: str) -> None:
        """Write the end of the run to the HParams tab.

        An end that a restart may undo is written to a separate file, which the next start removes.

        Args:
            status: completed, pruned, failed or interrupted.
        """
        if self._writer is not None:
            self._writer.close()
        if self._may_be_pruned and status in ("completed", "pruned"):
            self._add(self._step_of(None), {PRUNED_TAG: float(status == "pruned")})
        event = Event(wall_time=time.time(), summary=end_summary(status))
        self._write([event] if status == "completed" else [])
        self._file.close()
        if status != "completed":
            end = EventFile(self.directory, suffix=UNFINISHED)
            end.write([event])
            end.close()

    def _write(self, events: Iterable[Event]) -> None:
        waiting, self._waiting = self._waiting, []
        self._last_write = time.time()
        written = [_event(*one) for one in waiting]
        if layout := self._layout.extend({tag for *_, values in waiting for tag in values}):
            written.append(Event(wall_time=time.time(), summary=layout))
        self._file.write([*written, *events])


class Experiment(SummaryWriter):
    """SummaryWriter that writes to the event file of a TensorBoardLogger.

    Private property of torch (2.13), tested: SummaryWriter calls `_get_file_writer` to get the writer of its file.
    """

    # Attributes of torch's class, which does not declare their types.
    file_writer: Any
    all_writers: Any

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger = logger
        super().__init__(log_dir=logger.log_dir)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            self.file_writer = FileOfLogger(self._logger)
            self.all_writers = {self._logger.log_dir: self.file_writer}
        return self.file_writer

    def flush_others(self) -> None:
        """Flush the files that `add_scalars` opens, one for each curve."""
        for writer in (self.all_writers or {}).values():
            if writer is not self.file_writer:
                writer.flush()


class FileOfLogger(FileWriter):
    """FileWriter that passes the events of a SummaryWriter to a TensorBoardLogger."""

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger = logger

    def get_logdir(self) -> str:
        return self._logger.log_dir

    def add_event(self, event: Event, step: float | None = None, walltime: float | None = None) -> None:
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        self._logger.add_event(event)

    def flush(self) -> None:
        self._logger.save()

    def close(self) -> None:
        """Do nothing, because the logger closes its file when a stage ends."""


def written_at(directory: Path, step: int) -> set[str]:
    """Return the tags that have a value at a step. An earlier process of the run may already have logged the test."""
    found: set[str] = set()
    for path in sorted(directory.glob(EVENTS)):
        with path.open("rb") as file, suppress(EOFError, DecodeError):
            for event in map(Event.FromString, read_records(file)):
                if event.HasField("session_log") and event.step <= step:
                    found.clear()
                elif event.step == step:
                    found.update(value.tag for value in event.summary.value)
    return found


def _event(wall_time: float, step: int, values: Values) -> Event:
    event = Event(wall_time=wall_time, step=step)
    add = event.summary.value.add
    for tag, value in values.items():
        if isinstance(value, Panel):
            event.summary.value.append(summary_value(tag, value))
        elif isinstance(value, Summary.Value):
            event.summary.value.append(value)
        else:
            add(tag=tag, simple_value=value)
    return event
