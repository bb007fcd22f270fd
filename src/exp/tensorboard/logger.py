"""Lightning logger that writes TensorBoard events. Logging takes a few microseconds per step."""

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

    The logger writes only on rank 0. An event contains all values of a step. Events are buffered, and later encoded and
    written together. The buffer is written in these cases:

    - 200 events are buffered.
    - A value is logged `flush_seconds` after the last write.
    - `save`, `finalize` or `end` is called.

    The first write creates the file. Values may be logged after `finalize`, because the test stage runs after fit. If
    the folder cannot be written, methods that write raise OSError.

    Args:
        directory: Run directory. exp sets it.
        flush_seconds: Seconds after a write until a new value causes the next write. Default: 5.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        # Lightning's logger writes events to save_dir/name/version.
        super().__init__(save_dir=str(directory), name="tensorboard", version="")
        self._writer: Experiment | None = None
        self.directory = Path(directory) / "tensorboard"
        self.flush_seconds = flush_seconds
        # True if an earlier process of this run has already written the description.
        self._is_continued = has_begun(self.directory)
        # First step of this process. Values that an earlier process wrote for previous steps are kept.
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
        """SummaryWriter that writes to the logger's event file. Callbacks and modules may add figures with it."""
        if self._writer is None:
            self._writer = Experiment(self)
        return self._writer

    @rank_zero_only
    def add_event(self, event: Event) -> None:
        """Write an event that was logged through the SummaryWriter `experiment`."""
        if event.HasField("summary"):
            self._add(event.step, {value.tag: value for value in event.summary.value}, event.wall_time)
        else:
            self._write([event])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log scalars.

        Args:
            metrics: Scalars by tag.
            step: Number of completed optimizer steps. Default: None, the step of the previous call.
        """
        self._add(self._step_of(step), metrics)

    def _add(self, step: int, values: Values, wall_time: float | None = None) -> None:
        if step < self._begins:
            known = written_at(self.directory, step)
            values = {tag: value for tag, value in values.items() if tag not in known}
        now = time.time()
        # Copied, because the caller may change the mapping before the buffer is written.
        self._waiting.append((wall_time or now, step, {**values}))
        if len(self._waiting) >= _EVENTS_A_WRITE or now - self._last_write >= self.flush_seconds:
            self.save()

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Log panels: histograms, images, texts and curves.

        Args:
            panels: Panels by tag, with tensors on the CPU.
            step: Number of completed optimizer steps.
        """
        self._add(step, panels)

    @rank_zero_only
    def describe(self, description: Description) -> None:
        """Write the run's row of the HParams tab, and the texts of the description.

        A resumed run does not write the texts again.
        """
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
        # The end of an earlier process is removed, because TensorBoard would use the first end that it reads.
        for path in self.directory.glob(EVENTS + UNFINISHED):
            path.unlink(missing_ok=True)
        self._may_be_pruned = self._may_be_pruned or PRUNED_TAG in metrics
        summaries = start_summaries(plain, metrics, declared=declared_above(self.directory.parent))
        self._write(Event(wall_time=time.time(), summary=one) for one in summaries)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Discard the values of an earlier process from step `step` onward, because a resumed run starts at this step.

        An event marks these values as invalid for TensorBoard. The event is written twice, because TensorBoard 2.21
        ignores the first such event in a folder.
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

        Lightning calls this method after each stage. The method may be called several times.
        """
        if self._waiting:
            self.save()
        self._file.close()

    @rank_zero_only
    def end(self, status: str) -> None:
        """Write the end of the run to the HParams tab.

        If the run is not completed, a restart may continue it. The end is then written to a separate file, which the
        restart removes.

        Args:
            status: Status of the run: completed, pruned, failed or interrupted.
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

    SummaryWriter of torch 2.13 calls its private method `_get_file_writer` to get the writer of its file. This class
    overrides the method. A test checks that torch still calls the method.
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
        """Flush the additional files that SummaryWriter.add_scalars opens, one for each curve."""
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
    """Return the tags that already have a value at a step in the event files of a directory.

    For example, an earlier process of the run may have logged the test metrics at this step.

    Args:
        directory: Directory of the event files.
        step: Number of completed optimizer steps.
    """
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
