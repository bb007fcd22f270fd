"""Display of a run's progress: a bar or lines on the terminal, and lines in train.log."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer

from exp.engine.datamodule import RunTrainer
from exp.engine.recording import StepRecording
from exp.errors import Interrupted
from exp.output import NotWritten, SafeStream, survive_output_errors, warn_not_written
from exp.redaction import redact
from exp.strategies.rank import Rank

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

log = logging.getLogger(__name__)

# Loggers of Lightning that print to the terminal.
CHATTY = ("lightning", "lightning.pytorch", "lightning.fabric")
ADVICE = (
    ".*(does not have many workers|smaller than the logging interval|speed up the dataloader worker"
    "|GPU available but not used)"
)
NOWHERE = Path(os.devnull)
LIGHTNING = frozenset({"lightning", "lightning_utilities", "lightning_fabric", "pytorch_lightning"})
# Shortest time in seconds between two refreshes, because a person reads at most four numbers per second.
REFRESH_SECONDS = 0.25
# Shortest time in seconds between two lines. LINE_SECONDS: at the end of an epoch. LONG_SECONDS: within an epoch.
LINE_SECONDS, LONG_SECONDS = 5.0, 30.0
# Width of the bar in columns.
BAR_WIDTH = 12


@contextmanager
def run_log(directory: Path | str, *, rank: Rank, not_written: list[dict[str, str]] | None = None) -> Iterator[Path]:
    """Write the log messages and warnings of this process to its log file in the run directory.

    Rank 0 writes train.log, rank 1 train.rank1.log. Warnings and errors of exp also appear on the terminal of rank 0.
    The previous state of all loggers is restored when the context ends.

    Args:
        directory: Run directory.
        rank: Rank of this process.
        not_written: List to which a dict with the keys `what` and `error` is appended for each output that fails.
            Outputs are the terminal, the log, the loggers and the pictures.
    """
    path = Path(directory) / ("train.log" if rank.is_first else f"train.rank{rank.global_rank}.log")
    root, own = logging.getLogger(), logging.getLogger("exp")
    screen = _ScreenHandler(logging.WARNING if rank.is_first else logging.CRITICAL)
    collector = NotWritten([] if not_written is None else not_written)
    chatty = [(logger, logger.handlers[:], logger.propagate) for logger in map(logging.getLogger, CHATTY)]
    level = own.level
    # If the log cannot be opened, the run continues without it.
    unopened: OSError | None = None
    try:
        opened = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        unopened, opened = error, NOWHERE.open("a", encoding="utf-8")
    with closing(SafeStream(opened, path.name)) as text, warnings.catch_warnings(), survive_output_errors():
        file = logging.StreamHandler(cast(TextIO, text))
        file.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        file.addFilter(is_of_the_run)
        try:
            root.addHandler(file)
            own.addHandler(screen)
            own.addHandler(collector)
            own.setLevel(logging.INFO)
            for logger, _, _ in chatty:
                logger.handlers, logger.propagate = [], True
            logging.captureWarnings(True)
            # Lightning's advice is hidden, because the checks of exp give the same advice. Deprecation warnings about
            # Lightning's code are hidden, because users cannot change this code.
            warnings.filterwarnings("ignore", message=ADVICE, category=PossibleUserWarning)
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category, module="lightning")
            if unopened is not None:
                warn_not_written(path.name, unopened)
            yield path
        finally:
            logging.captureWarnings(False)
            for logger, handlers, propagate in chatty:
                logger.handlers, logger.propagate = handlers, propagate
            own.setLevel(level)
            own.removeHandler(screen)
            own.removeHandler(collector)
            root.removeHandler(file)


def is_of_the_run(record: logging.LogRecord) -> bool:
    """Return whether a record is logged. Records of Lightning below the level WARNING are not logged."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in LIGHTNING


class _Formatter(logging.Formatter):
    """Log formatter that replaces each secret in messages and tracebacks by the name of the secret."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _ScreenHandler(logging.Handler):
    """Log handler that writes to the current sys.stderr.

    A progress bar replaces sys.stderr so that lines appear above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        # The terminal shows only the message. The log file also contains tracebacks.
        print(redact(record.getMessage()), file=sys.stderr)


def progress(enabled: bool, *, rank: Rank) -> list[Callback]:
    """Return the callbacks that show the progress of a run. On ranks other than 0 the list is empty.

    Args:
        enabled: Value of trainer.enable_progress_bar. If false, progress is written only to train.log.
        rank: Rank of this process.
    """
    if not rank.is_first:
        return []
    return [Progress(Bar() if enabled and sys.stdout.isatty() else Lines(is_printing=enabled))]


@dataclass(frozen=True)
class View:
    """The data that a progress display shows.

    Attributes:
        title: Title such as `epoch 3/30`. Outside of training, the name of the stage.
        step: Optimizer steps of the run so far.
        done: Completed batches of the epoch or of the stage.
        total: Number of batches of the epoch or of the stage; None if unknown.
        rate: Optimizer steps per second; None if unknown.
        latest: Latest values by tag.
    """

    title: str
    step: int
    done: int
    total: int | None
    rate: float | None
    latest: Mapping[str, float]

    def values(self) -> str:
        """Return the latest values and the speed as text."""
        values = [f"{tag} {value:.4g}" for tag, value in self.latest.items()]
        if self.rate is not None:
            values.append(f"{self.rate:,.0f} steps/s" if self.rate >= 10 else f"{self.rate:.3g} steps/s")
        return "  ".join(values)

    def text(self) -> str:
        return f"{self.title}  step {self.step}  {self.values()}"


class Lines:
    """Progress display that writes a line after each epoch and validation. Lines are at least LINE_SECONDS apart."""

    def __init__(self, *, is_printing: bool = True) -> None:
        self._is_printing = is_printing
        self._waiting: View | None = None
        self._written = 0.0

    def update(self, view: View) -> None:
        if time.monotonic() - self._written >= LONG_SECONDS:
            self.milestone(view)

    def milestone(self, view: View) -> None:
        """Write a line at the end of an epoch or a validation, unless the last line was written recently."""
        self._waiting = view
        if time.monotonic() - self._written >= LINE_SECONDS:
            self._write(view)

    def close(self) -> None:
        if self._waiting is not None:
            self._write(self._waiting)

    def _write(self, view: View) -> None:
        self._waiting, self._written = None, time.monotonic()
        log.info(view.text())
        if self._is_printing:
            print(view.text(), flush=True)


class Bar(Lines):
    """Progress display that draws a bar over the batches of an epoch, and writes lines to the log."""

    def __init__(self) -> None:
        super().__init__(is_printing=False)
        self._bar: RichProgress | None = None
        self._latest: View | None = None
        self._drawn = 0.0

    def update(self, view: View) -> None:
        self._draw(view)
        super().update(view)

    def milestone(self, view: View) -> None:
        self._latest = view
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._draw(view)
        super().milestone(view)

    def close(self) -> None:
        if self._latest is not None:
            self._draw(self._latest)
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._latest = None
        super().close()

    def _draw(self, view: View) -> None:
        bar = self._bar = self._bar or _new_bar()
        self._drawn = time.monotonic()
        bar.update(
            bar.task_ids[0],
            description=view.title,
            completed=view.done,
            total=view.total,
            values=view.values(),
            refresh=True,
        )


def _new_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    bar = RichProgress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=BAR_WIDTH),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[values]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="crop")),
        console=Console(highlight=False),
        expand=True,
        # No refresh thread, because it would compete with training for the interpreter.
        auto_refresh=False,
    )
    bar.add_task("", total=None, values="")
    bar.start()
    return bar


class Progress(Callback):
    """Callback that shows the progress of a run on a display, at most four times per second.

    If the display raises an error, the run continues without the display.
    """

    def __init__(self, display: Lines) -> None:
        super().__init__()
        self.display: Lines | None = display
        self._latest: Callable[[], dict[str, float]] = dict
        self._shown = 0.0
        self._rate: float | None = None
        # Step and time of the last speed measurement. The duration of later validations is added to the time.
        self._step, self._measured = 0, 0.0
        self._validating_since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = cast(RunTrainer, trainer).callbacks
        recordings = [callback for callback in callbacks if isinstance(callback, StepRecording)]
        self._latest = recordings[0].progress_values if recordings else dict
        self._shown = self._measured = time.monotonic()
        self._rate, self._step = None, trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self._is_due(trainer):
            self._show("update", self._view_epoch(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due(trainer)
        self._show("milestone", self._view_epoch(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show("close")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating_since = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured += time.monotonic() - self._validating_since
        # If the epoch ends with this validation, on_train_epoch_end shows the line.
        if trainer.state.fn == "fit" and not trainer.is_last_batch and not trainer.sanity_checking:
            self._show("milestone", self._view_epoch(trainer))

    on_test_start = on_predict_start = on_train_start
    on_test_end = on_predict_end = on_train_end

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due(trainer):
            total = sum(trainer.num_test_batches if trainer.testing else trainer.num_predict_batches)
            title = "test" if trainer.testing else "predict"
            self._show("update", self._view(trainer, title, batch_idx + 1, total))

    on_predict_batch_end = on_test_batch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._show("close")

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether the display has to be refreshed. If it has to be, measure the speed, too."""
        now = time.monotonic()
        if now - self._shown < REFRESH_SECONDS:
            return False
        self._shown = now
        step = trainer.global_step
        # If no step has ended since the last measurement, the last speed stays valid.
        if step > self._step and now > self._measured:
            self._rate = (step - self._step) / (now - self._measured)
            self._measured, self._step = now, step
        return True

    def _view_epoch(self, trainer: Trainer) -> View:
        epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or -1
        # At the end of the last epoch, Lightning's current_epoch is already one larger.
        title = f"epoch {min(epoch, epochs)}/{epochs}" if epochs > 0 else f"epoch {epoch}"
        return self._view(trainer, title, trainer.fit_loop.batch_idx + 1, trainer.num_training_batches)

    def _view(self, trainer: Trainer, title: str, done: int, total: float) -> View:
        known = None if total == math.inf else int(total)
        return View(title, trainer.global_step, done, known, self._rate, self._latest())

    def _show(self, action: Literal["update", "milestone", "close"], *view: View) -> None:
        if self.display is None:
            return
        try:
            getattr(self.display, action)(*view)
        except Interrupted:
            raise  # a signal arrived while the display was drawn
        except Exception as error:
            self.display = None
            warn_not_written("the progress display", error)
