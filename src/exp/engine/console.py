"""Show the progress of a run by a bar or lines on the terminal, and write train.log."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

# Lightning's loggers, which print to the terminal.
CHATTY = ("lightning", "lightning.pytorch", "lightning.fabric")
ADVICE = (
    ".*(does not have many workers|smaller than the logging interval|speed up the dataloader worker"
    "|GPU available but not used)"
)
NOWHERE = Path(os.devnull)
LIGHTNING = frozenset({"lightning", "lightning_utilities", "lightning_fabric", "pytorch_lightning"})
# A person reads at most four numbers per second.
REFRESH_SECONDS = 0.25
# The shortest time between lines at the ends of epochs, and between lines in the middle of an epoch.
LINE_SECONDS, LONG_SECONDS = 5.0, 30.0
# The smallest number of columns of a bar.
BAR_WIDTH = 8


@contextmanager
def run_log(directory: Path | str, *, rank: Rank, not_written: list[dict[str, str]] | None = None) -> Iterator[Path]:
    """Write the log and the warnings of this process to train.log, or train.rank1.log ..., of the run directory.

    Warnings and errors of exp remain on the terminal of rank 0. All loggers are restored at the end.

    Args:
        directory: Run directory.
        rank: Rank of this process.
        not_written: List to which {what, error} is added for each failed output: the terminal, the log, a logger,
            a picture.
    """
    path = Path(directory) / ("train.log" if rank.is_first else f"train.rank{rank.global_rank}.log")
    root, own = logging.getLogger(), logging.getLogger("exp")
    screen = _ScreenHandler(logging.WARNING if rank.is_first else logging.CRITICAL)
    collector = NotWritten([] if not_written is None else not_written)
    chatty = [(logger, logger.handlers[:], logger.propagate) for logger in map(logging.getLogger, CHATTY)]
    level = own.level
    # A log that cannot be opened does not end the run.
    unopened: OSError | None = None
    try:
        opened = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        unopened, opened = error, NOWHERE.open("a", encoding="utf-8")
    with opened as text, warnings.catch_warnings(), survive_output_errors():
        file = logging.StreamHandler(cast(TextIO, SafeStream(text, path.name)))
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
            # exp's check gives this advice. Deprecations in Lightning's code do not concern the user.
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
    """Return whether to log a record: Lightning's information is known already, or advertising."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in LIGHTNING


class _Formatter(logging.Formatter):
    """A formatter that replaces secrets in messages and tracebacks by their names."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _ScreenHandler(logging.Handler):
    """Writes to the current sys.stderr, which a bar replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        # A traceback is for the file; the screen has the message.
        print(redact(record.getMessage()), file=sys.stderr)


def progress(enabled: bool, *, rank: Rank) -> list[Callback]:
    """Return the callbacks that show the progress of a run; none on ranks other than 0.

    Args:
        enabled: Value of trainer.enable_progress_bar. If false, the lines go to train.log only.
        rank: Rank of this process.
    """
    if not rank.is_first:
        return []
    return [Progress(Bar() if enabled and sys.stdout.isatty() else Lines(is_printing=enabled))]


@dataclass(frozen=True)
class View:
    """The numbers that a display shows.

    Attributes:
        title: Such as `epoch 3/30`, or the stage outside of training.
        step: Optimizer steps of the run.
        done: Batches of the epoch or of the stage that are done.
        total: Batches of the epoch or of the stage; None if unknown.
        rate: Optimizer steps per second; None if unknown.
        latest: Latest values by tag.
    """

    title: str
    step: int
    done: int
    total: int | None
    rate: float | None
    latest: Mapping[str, float]

    def values(self, room: float = math.inf) -> str:
        """Return the latest values and the speed. Leave out the last values if all need more than `room` columns."""
        speed = (
            []
            if self.rate is None
            else [f"{self.rate:,.0f} steps/s" if self.rate >= 10 else f"{self.rate:.3g} steps/s"]
        )
        values = [f"{tag} {value:.4g}" for tag, value in self.latest.items()]
        while values and len("  ".join([*values, *speed])) > room:
            values.pop()
        return "  ".join([*values, *speed])

    def text(self) -> str:
        return f"{self.title}  step {self.step}  {self.values()}"


class Lines:
    """A display that writes a line after each epoch and validation, but not several within a few seconds."""

    def __init__(self, *, is_printing: bool = True) -> None:
        self._is_printing = is_printing
        self._waiting: View | None = None
        self._written = 0.0

    def update(self, view: View) -> None:
        if time.monotonic() - self._written >= LONG_SECONDS:
            self.milestone(view)

    def milestone(self, view: View) -> None:
        """Show the view at the end of an epoch or of a validation."""
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
    """A display that draws a bar over the batches of an epoch or of an evaluation, and logs lines."""

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
        counts = f"{view.done}/?" if view.total is None else f"{view.total}/{view.total}"
        others = len(view.title) + BAR_WIDTH + len(counts) + 3  # three columns before the values, a space after each
        bar.update(
            bar.task_ids[0],
            description=view.title,
            completed=view.done,
            total=view.total,
            values=view.values(room=bar.console.width - others),
            refresh=True,
        )


def _new_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    bar = RichProgress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(min_width=BAR_WIDTH, max_width=24)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[values]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(highlight=False),
        # rich's thread would take turns with the training for the interpreter.
        auto_refresh=False,
    )
    bar.add_task("", total=None, values="")
    bar.start()
    return bar


class Progress(Callback):
    """A callback that shows the run on a display, at most four times a second.

    If the display fails, the run continues without it.
    """

    def __init__(self, display: Lines) -> None:
        super().__init__()
        self.display: Lines | None = display
        self._latest: Callable[[], dict[str, float]] = dict
        self._shown = 0.0
        self._rate: float | None = None
        # The step and the time of the last measurement, without the time of validations since then.
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
            self._show("update", self._view(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due(trainer)
        self._show("milestone", self._view(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show("close")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating_since = time.monotonic()
        if trainer.state.fn == "validate":
            self.on_train_start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int, *_: object
    ) -> None:
        if trainer.state.fn == "validate":
            self.on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured += time.monotonic() - self._validating_since
        if trainer.state.fn == "validate":
            self._show("close")
        # An epoch that ends with this validation shows a line later.
        elif trainer.state.fn == "fit" and not trainer.is_last_batch and not trainer.sanity_checking:
            self._show("milestone", self._view(trainer))

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
            self._show("update", self._view(trainer, evaluated=batch_idx + 1))

    on_predict_batch_end = on_test_batch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._show("close")

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether to refresh the display, and measure the speed if so."""
        now = time.monotonic()
        if now - self._shown < REFRESH_SECONDS:
            return False
        self._shown = now
        step = trainer.global_step
        # If no step has ended since, the last speed holds.
        if step > self._step and now > self._measured:
            self._rate = (step - self._step) / (now - self._measured)
            self._measured, self._step = now, step
        return True

    def _view(self, trainer: Trainer, *, evaluated: int | None = None) -> View:
        """Return the view to show. evaluated: batches done outside of training."""
        if evaluated is None:
            epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or -1
            # At the end of the last epoch, Lightning has counted one more.
            title = f"epoch {min(epoch, epochs)}/{epochs}" if epochs > 0 else f"epoch {epoch}"
            done, total = trainer.fit_loop.batch_idx + 1, trainer.num_training_batches
        elif trainer.testing:
            title, done, total = "test", evaluated, sum(trainer.num_test_batches)
        elif trainer.predicting:
            title, done, total = "predict", evaluated, sum(trainer.num_predict_batches)
        else:
            title, done, total = "val", evaluated, sum(trainer.num_val_batches)
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
