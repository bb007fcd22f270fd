"""The one writer of TensorBoard events: a Lightning logger that costs a few microseconds a step."""

from __future__ import annotations

import logging
import math
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, SummaryWriter

from exp.config.frozen import PRUNED_TAG
from exp.hooks.panels import Panel
from exp.loggers.run_logger import Description, RunLogger
from exp.tensorboard.event_file import EventFile
from exp.tensorboard.hparams import EVENTS, UNFINISHED, declared_above, end_summary, has_begun, start_summaries
from exp.tensorboard.summaries import Layout, summary_value, text_value

log = logging.getLogger(__name__)

_EVENTS_A_WRITE = 200
Values = Mapping[str, float | Panel | Summary.Value]


class TensorBoardLogger(RunLogger, LightningTensorBoardLogger):
    """Writes scalars, panels, texts and hyperparameters into `tensorboard/` of the run directory, on rank 0 alone.

    One event holds all values of a step. Events wait as plain values, and are encoded and written together: when 200
    wait, when a value comes `flush_seconds` after the last write, and in `save`, `finalize` and `end`. The file is
    made by the first write, and `finalize` may be followed by further values, as the test stage follows the fit.

    directory: the run directory; build.py gives it.
    flush_seconds: at most this long until a value can be seen, while values come.

    Raises RunError, from whichever call writes: the folder cannot be written, or the disk is full. What comes after
    that is dropped.
    """

    def __init__(self, *, directory: str | Path, flush_seconds: Annotated[float, Ge(0)] = 5.0) -> None:
        # As of Lightning's own: save_dir/name/version is where the events are.
        super().__init__(save_dir=str(directory), name="tensorboard", version="")
        self._writer: Experiment | None = None
        self.directory = Path(directory) / "tensorboard"
        self.flush_seconds = flush_seconds
        # Another process has begun this run, and has described it.
        self._is_continued = has_begun(self.directory)
        # What an earlier process wrote of steps before this one stays.
        self._begins = math.inf if self._is_continued else 0.0
        self._layout = Layout()
        self._file = EventFile(self.directory)
        self._waiting: list[tuple[float, int, Values]] = []
        self._last_write = time.time()
        # Whether the job of a search may be pruned.
        self._tells_pruned = False

    @property
    def log_dir(self) -> str:
        return str(self.directory)

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        """A SummaryWriter on the same event file, for what callbacks and modules add, such as figures."""
        if self._writer is None:
            self._writer = Experiment(self)
        return self._writer

    @rank_zero_only
    def add_event(self, event: Event) -> None:
        """Write an event of `experiment`."""
        if event.HasField("summary"):
            self._add(event.step, {value.tag: value for value in event.summary.value}, event.wall_time)
        else:
            self._write([event])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Scalars by tag. step: the optimizer steps done."""
        self._add(self._step_of(step), metrics)

    def _add(self, step: int, values: Values, wall_time: float | None = None) -> None:
        if step < self._begins:
            known = written_at(self.directory, step)
            values = {tag: value for tag, value in values.items() if tag not in known}
        now = time.time()
        # A copy: whoever gave them may go on with the mapping before it is written.
        self._waiting.append((wall_time or now, step, {**values}))
        if len(self._waiting) >= _EVENTS_A_WRITE or now - self._last_write >= self.flush_seconds:
            self.save()

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Histograms, images, texts and curves by tag, their tensors on the host. step: the optimizer steps done."""
        self._add(step, panels)

    @rank_zero_only
    def describe(self, description: Description) -> None:
        """Write the row of the HParams tab; once a run the texts."""
        self.log_hyperparams(dict(description.hyperparameters), metrics=description.metrics)
        if not self._is_continued:
            texts = [text_value(name, text) for name, text in description.texts.items()]
            self._write([Event(wall_time=time.time(), summary=Summary(value=texts))])

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: Iterable[str] | None = None, step: int | None = None
    ) -> None:
        """The run's row in the HParams tab. params: by dotted key; metrics: the tags that are its other columns."""
        plain = vars(params) if isinstance(params, Namespace) else params
        metrics = [] if metrics is None else list(metrics)
        # The run was started again: TensorBoard would believe the first end that it reads.
        for path in self.directory.glob(EVENTS + UNFINISHED):
            path.unlink(missing_ok=True)
        self._tells_pruned = self._tells_pruned or PRUNED_TAG in metrics
        summaries = start_summaries(plain, metrics, declared=declared_above(self.directory.parent))
        self._write(Event(wall_time=time.time(), summary=one) for one in summaries)

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int = 0) -> None:
        """A Markdown text in the Text tab."""
        self._write([Event(wall_time=time.time(), step=step, summary=Summary(value=[text_value(tag, text)]))])

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Void what earlier files hold from `step` on: a resumed run, `step` its first, draws these curves anew.

        Said twice, because the reader behind TensorBoard's pages takes a folder's first start for its beginning, and
        voids nothing (seen in tensorboard 2.21).
        """
        if not self._is_continued:
            return
        self._begins = step
        start = SessionLog(status=SessionLog.START)
        self._write([Event(wall_time=time.time(), step=step, session_log=start)] * 2)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits."""
        self._write(())
        if self._writer is not None:
            self._writer.flush_others()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what waits and close the file: Lightning calls this behind each stage. Safe to call twice."""
        if self._waiting:
            self.save()
        self._file.close()

    @rank_zero_only
    def end(self, status: str) -> None:
        """Say in the HParams tab how the run ended. status: completed, pruned, failed or interrupted.

        An end that a restart may yet undo stands in a file of its own, which the next start removes.
        """
        if self._writer is not None:
            self._writer.close()
        if self._tells_pruned and status in ("completed", "pruned"):
            self._add(self._step_of(None), {PRUNED_TAG: float(status == "pruned")})
        event = Event(wall_time=time.time(), summary=end_summary(status))
        self._write([event] if status == "completed" else [])
        self._file.close()
        if status != "completed" and not self._file.failed:
            end = EventFile(self.directory, suffix=UNFINISHED)
            end.write([event])
            end.close()

    def _write(self, events: Any) -> None:
        waiting, self._waiting = self._waiting, []
        self._last_write = time.time()
        written = [_event(*one) for one in waiting]
        if layout := self._layout.grown({tag for *_, values in waiting for tag in values}):
            written.append(Event(wall_time=time.time(), summary=layout))
        self._file.write([*written, *events])


class Experiment(SummaryWriter):
    """A SummaryWriter that writes into the event file of a logger.

    Private of torch (2.13), and tested: SummaryWriter asks `_get_file_writer` for the writer of its file.
    """

    # Of torch, with a type.
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
    """The event file of a logger, as a SummaryWriter writes to it."""

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
        """Do nothing: the logger closes its file when a stage ends."""


def written_at(directory: Path, step: int) -> set[str]:
    """The tags that have a point at this step: an earlier process of the run may have made its test already."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: set[str] = set()
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
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
