"""What came of a run: report.json for programs, report.md for people, and the table at the end on the screen."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shlex
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

from exp.config.frozen import read_parent, versions
from exp.config.settings import Settings
from exp.errors import ExpError, Interrupted, RankError, RunError, UserCodeError, message_of, one_line, user_frames
from exp.files import write_atomic
from exp.launch.launcher import last_checkpoint
from exp.output import NO_SPACE, markdown_table, warn_not_written
from exp.shared_types import EPOCH_LOSS, STAGES, best_scalars, compared_tag, split_tag

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from exp.build import Parts

log = logging.getLogger(__name__)

# The folder of a run with the pictures of its report.md.
PICTURES = "pictures"
# What torch says of a worker of its DataLoader that was killed, or left (seen in 2.13).
LOST_WORKER = re.compile(r"DataLoader worker \(pid")
# Where Lightning tears down in answer to any exception; private to it, and tested (2.6.6).
LIGHTNING_CATCHES_IN = "_call_and_handle_interrupt"
# What a report.json that is torn, or was written by somebody else, makes of its reading.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
# Pruned: ended early by the search that it is a job of, and well.
Status = Literal["completed", "failed", "interrupted", "pruned"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run's result. The fields are the keys of report.json, a public contract.

    metrics: tag to last value, such as {"accuracy/val": 0.98}. A resumed run has those of earlier processes, too.
    best: {metric, value, step, checkpoint} of the best checkpoint; None if none was written.
    best_metrics: the losses and metrics by tag of the weights in the best checkpoint. `loss/train` is the mean of its
        epoch. Empty if there is no best checkpoint.
    stage_steps: by stage, the optimizer step of the weights that its last values are of, such as {"train": 40}.
    ended_by: what ended the training, such as `trainer.max_epochs=30`, or an EarlyStopping with its settings. None if
        the run did not train to an end.
    steps: optimizer steps of the whole run, those before a resume included.
    wall_seconds: of the run itself, without the imports and the check before it.
    step_ms: wall time of training over optimizer steps, validation included; None where no step was taken.
    peak_memory_mib: of device memory on a GPU, else of this rank's resident set.
    tags: the config's, by which runs are found again.
    parent: of a run of exp.fork {run, step, checkpoint, changed}, as in provenance.json; else None.
    error: None, or {type, message}; the type is that of the exception that the user's own code raised, where it did.
    not_written: {what, error} of what the run went on without: the screen, the log, a logger, a picture.
    """

    status: Status
    directory: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    stage_steps: Mapping[str, int] = field(default_factory=dict)
    ended_by: str | None = None
    steps: int = 0
    epochs: int = 0
    wall_seconds: float = 0.0
    step_ms: float | None = None
    peak_memory_mib: float | None = None
    world_size: int = 1
    precision: str = "fp32"
    strategy: str = "auto"
    monitor: str | None = "loss/val"
    command: str = ""
    tags: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None
    not_written: Sequence[Mapping[str, str]] = ()

    @property
    def monitored(self) -> float:
        """The value that goes back to a sweeper: the best of the monitored metric, nan where there is none."""
        if self.best is not None:
            return float(self.best["value"])
        tag = None if self.monitor is None else compared_tag(self.monitor)
        return float(self.metrics[tag]) if tag is not None and tag in self.metrics else math.nan


class Ongoing:
    """A run under way: knows how it started, and makes the report of its end.

    directory: the run directory. settings: Of the run.
    """

    def __init__(self, directory: Path, settings: Settings, *, overrides: Sequence[str], world_size: int) -> None:
        self._started = time.monotonic()
        self.directory = directory
        # The run's log fills it.
        self.not_written: list[dict[str, str]] = []
        self._overrides = list(overrides)
        self._facts = {
            "directory": str(directory),
            "precision": settings.precision.word,
            "strategy": settings.strategy["name"],
            "monitor": settings.monitor,
            "world_size": world_size,
            "command": _command(overrides),
            "tags": tuple(settings.tags),
            "versions": versions(),
            "parent": read_parent(directory),
        }

    def ended(
        self,
        status: Status,
        *,
        parts: Parts | None = None,
        error: BaseException | None = None,
        before: Report | None = None,
    ) -> Report:
        """The report of an end.

        parts: what build.py made; None where the run ended before, or in other processes.
        before: what rank 0 had to report of the same run, if it could: its figures hold, its reason may not.
        """
        # Of the user's own code it is their exception that programs look for.
        kind = error.kind if isinstance(error, UserCodeError) else type(error).__name__
        told = None if error is None else {"type": kind, "message": str(error)}
        if before is not None:
            return dataclasses.replace(before, status=status, error=told)
        return Report(
            status=status,
            wall_seconds=time.monotonic() - self._started,
            error=told,
            not_written=self.not_written,
            **self._facts,
            **({} if parts is None else _progress(parts)),
        )

    def resume_command(self, checkpoint: str) -> str:
        """What goes on with this run from a checkpoint: its own command, with `resume`."""
        others = [text for text in self._overrides if text.lstrip("+").partition("=")[0] != "resume"]
        return train_command(others, key="resume", path=checkpoint)


def train_command(overrides: Sequence[str], *, key: str, path: str) -> str:
    """The command of a run with a path as the value of a key behind its overrides, quoted for Hydra and for a shell.

    The path is told from the working directory, where it lies below that.
    """
    shown = os.path.relpath(path)
    shown = os.path.abspath(path) if shown.startswith("..") else shown
    # Hydra reads other signs as its own grammar; inside quotes a quote is escaped.
    plain = re.fullmatch(r"[\w./+@%:-]+", shown, re.ASCII)
    escaped = shown.replace("'", "\\'")
    return _command([*overrides, f"{key}={shown}" if plain else f"{key}='{escaped}'"])


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "exp.train", *overrides])


def _progress(parts: Parts) -> dict[str, Any]:
    """How far a run came, read from the callbacks that kept count."""
    trainer = parts.trainer
    steps = trainer.global_step
    return {
        "metrics": {**parts.recording.latest, **best_scalars(parts.checkpointing.best)},
        **best_of(parts.checkpointing.best),
        "stage_steps": dict(parts.recording.stage_steps),
        "ended_by": parts.stopping.ended_by,
        "steps": steps,
        "epochs": trainer.current_epoch,
        "step_ms": 1000.0 * parts.stopping.seconds / steps if steps else None,
        "peak_memory_mib": _peak_memory_mib(),
    }


def best_of(best: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a report that describe the best checkpoint."""
    if best is None:
        return {}
    return {
        "best": {key: best[key] for key in ("metric", "value", "step", "checkpoint")},
        "best_metrics": dict(best["metrics"]),
    }


def _peak_memory_mib() -> float:
    # Here, because who only reads reports needs no torch.
    from exp.hooks.memory_peaks import MIB, peak_of_run

    return peak_of_run().so_far() / MIB


def forget_peak_memory() -> None:
    """Reset the peaks of memory of this process, so that the next report has no peak of an earlier run."""
    # The import loads torch, and a process that only reads or writes reports needs no torch.
    from exp.hooks.memory_peaks import HOST, peak_of_run

    for peak in {HOST, peak_of_run()}:
        peak.forget()


def write_report(report: Report, *, is_synced: bool = True) -> None:
    """Writes report.json and report.md into the run directory, each whole or not at all.

    is_synced: whether they are on the disk when this returns.
    Raises: RunError where the directory cannot be written.
    """
    directory = Path(report.directory)
    plain = dataclasses.asdict(report)
    try:
        text = json.dumps(_finite(plain), indent=2, sort_keys=True) + "\n"
        write_atomic(directory / "report.json", text, is_synced=is_synced)
        write_atomic(directory / "report.md", as_markdown(report), is_synced=is_synced)
    except OSError as error:
        place = error.filename or directory
        raise RunError(f"the report cannot be written to {place}: {error.strerror or error}") from error


def read_report(directory: Path | str) -> Report:
    """The report of a run directory.

    Raises: RunError where it holds none, or one that is damaged.
    """
    path = Path(directory) / "report.json"
    if not path.is_file():
        raise RunError(f"{path} is not there: the run has not ended, or was killed before it could write its report")
    try:
        return parsed_report(path.read_text(encoding="utf-8"))
    except (OSError, *DAMAGE) as error:
        raise RunError(f"{path} is not as a run wrote it: {one_line(error)}") from error


def parsed_report(text: str) -> Report:
    """The report that a report.json holds.

    Raises: one of DAMAGE where it is not as a run wrote it.
    """
    plain = json.loads(text)
    plain["metrics"] = {tag: float(value) for tag, value in plain["metrics"].items()}
    # Older reports have no metrics of the best checkpoint.
    plain["best_metrics"] = {tag: float(value) for tag, value in plain.get("best_metrics", {}).items()}
    plain["tags"] = tuple(plain["tags"])
    plain["not_written"] = tuple(plain.get("not_written", ()))  # which an older one has not
    report = Report(**plain)
    if report.status not in get_args(Status):
        raise ValueError(f"no status of a run, {report.status!r}")
    numbers = [report.wall_seconds, report.monitored, *([] if report.best is None else [report.best["step"]])]
    words = [] if report.error is None else [report.error["message"]]
    if not all(isinstance(one, int | float) for one in numbers) or not all(isinstance(one, str) for one in words):
        raise ValueError("a text in the place of a number, or the other way round")
    return report


def find_report(directory: Path | str) -> Report | None:
    """The report of a run directory; None where there is none yet, and where it is damaged."""
    try:
        return read_report(directory)
    except RunError:
        return None


def write_end(report: Report, loggers: Sequence[Logger]) -> None:
    """Write the report, and tell every logger how the run ended.

    Raises: RunError where the directory cannot be written.
    """
    from exp.loggers.run_logger import RunLogger

    write_report(report)
    told = len(report.not_written)
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.end(report.status)
    is_drawn = report.status != "interrupted" and draw_pictures(report)
    if is_drawn or len(report.not_written) > told:
        write_report(report)


def write_bad_end(
    ongoing: Ongoing, error: BaseException, *, parts: Parts | None = None, has_ranks: bool = False
) -> None:
    """Write the report of a run that failed or was interrupted, and say in the error how it goes on.

    parts: what build.py made; None where the run ended before, or in other processes.
    has_ranks: whether ranks of it had processes of their own, whose figures hold, and whose reason may not.
    Raises: RunError, for a run with ranks, where the directory cannot be written.
    """
    saved = last_checkpoint(ongoing.directory)
    if isinstance(error, Interrupted) and error.checkpoint is not None:
        error.command = ongoing.resume_command(error.checkpoint)
    elif isinstance(error, RankError | UserCodeError) and saved is not None:
        error.command = ongoing.resume_command(str(saved))
    status: Status = "interrupted" if isinstance(error, Interrupted) else "failed"
    if has_ranks:
        write_report(ongoing.ended(status, error=error, before=find_report(ongoing.directory)))
        return
    report = ongoing.ended(status, parts=parts, error=error)
    # To train.log alone: whoever called says it on the screen.
    log.info("the run %s", report.status, exc_info=error)
    try:
        write_end(report, () if parts is None else parts.trainer.loggers)
    except RunError as second:
        # The first error is the one to tell; where the disk is full, this one follows from it.
        log.error("%s", second)


def explain(error: BaseException, ongoing: Ongoing, *, parts: Parts | None) -> BaseException:
    """The error that is told in the place of one that says nothing to a user: of the user's own code, of the system's,
    and of no memory.

    parts: what build.py made; None where the run ended before.
    """
    from exp.hooks.out_of_memory import explained, is_out_of_memory

    told: ExpError
    error = _what_ended(error)
    is_exit = isinstance(error, SystemExit)
    if isinstance(error, KeyboardInterrupt) or (is_exit and isinstance(error.__context__, KeyboardInterrupt)):
        error = Interrupted(signum=signal.SIGINT, checkpoint=None)
    if isinstance(error, Interrupted):
        return _with_checkpoint(error, ongoing.directory)
    if isinstance(error, ExpError):
        return error
    if is_exit:
        told = UserCodeError.of(error, what="the run")
    elif is_out_of_memory(error):
        told = RunError(explained(error, is_built=parts is not None))
    elif LOST_WORKER.search(message_of(error)):
        told = RunError(
            f"{error} It was to read the data. The system kills one so when the memory is used up; else its code ended "
            "its process. With data.num_workers=0 its own error is told, and where"
        )
    elif isinstance(error, OSError) and _is_below(error.filename, ongoing.directory):
        told = RunError(_unwritable(ongoing, error))
    elif (place := _place(error, parts)) is not None:
        told = UserCodeError.of(error, what=place)
    elif isinstance(error, OSError):
        told = RunError(_unwritable(ongoing, error))
    else:
        return error
    # Before it is raised, for the log tells where it came from.
    told.__cause__ = error
    return told


def _with_checkpoint(error: Interrupted, directory: Path) -> Interrupted:
    """The interruption with what there is to go on from, for a signal may come behind the last step, too."""
    saved = last_checkpoint(directory) if error.checkpoint is None else None
    return error if saved is None else Interrupted(signum=error.signum, checkpoint=str(saved), detail=error.detail)


def _what_ended(error: BaseException) -> BaseException:
    """The error that ended the run, and not what Lightning or a callback raised in answer to it, as in on_exception."""
    caught = _catching_frames(error)
    first, context = error, error.__context__
    while context is not None:
        if caught & _catching_frames(context):
            first = context
        context = context.__context__
    return first


def _catching_frames(error: BaseException) -> set[FrameType]:
    """The calls of the function in which Lightning catches what ends a trainer's work, that an error came through."""
    return {
        frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == LIGHTNING_CATCHES_IN
    }


def _is_below(filename: object, directory: Path) -> bool:
    """Return whether a file that an error names is in the run directory."""
    return isinstance(filename, str) and Path(filename).absolute().is_relative_to(directory)


def _place(error: BaseException, parts: Parts | None) -> str | None:
    """Which part of the user's own, or of a package, raised an error; None where it was neither."""
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torchmetrics import Metric

    from exp.hooks.hook import Hook

    kinds: dict[type, str] = {Callback: "callback", Logger: "logger", Metric: "metric", Hook: "hook"}
    kinds |= {Optimizer: "optimizer", LRScheduler: "schedule"}
    layers = {} if parts is None else {id(module): name for name, module in parts.network.named_modules()}
    is_own = bool(user_frames(error))
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        holder = frame.f_locals.get("self")
        method, kind = frame.f_code.co_name, type(holder)
        word = next((word for base, word in kinds.items() if isinstance(holder, base)), None)
        if word is not None and kind.__module__.partition(".")[0] not in ("exp", "torch"):
            return f"{word} {holder.name if isinstance(holder, Hook) else kind.__name__}, in {method},"
        if is_own and id(holder) in layers:
            name = layers[id(holder)]
            return f"{f'layer {name} ({kind.__name__})' if name else f'the network, {kind.__name__},'} in {method}"
    return "code of your own" if is_own else None


def _unwritable(ongoing: Ongoing, error: OSError) -> str:
    """Return the message for a file of the run that cannot be written, with the command that resumes the run."""
    what = f"{error.filename or ongoing.directory}: {error.strerror or error}. The run ends here"
    fix = "make room" if error.errno in NO_SPACE else "make the directory writable"
    saved = last_checkpoint(ongoing.directory)
    if saved is None:
        return f"{what}, before anything was saved; {fix}, or choose another place with hydra.run.dir"
    command = ongoing.resume_command(str(saved))
    return f"{what}; the saved checkpoints are good. {fix.capitalize()}, and resume with\n  {command}"


def draw_pictures(report: Report) -> bool:
    """Draw the loss, the metrics and the gradients of a run's event file and table into its directory.

    What cannot be drawn is told, and is no reason for a run to fail; nor is a signal that comes now: the run is over.
    Returns: whether there is one.
    """
    # Here, because who only reads reports needs neither.
    from exp.report_pictures import draw_report_pictures

    directory = Path(report.directory)
    try:
        found = draw_report_pictures(directory, tags=report.metrics)
        for name, picture in found.items():
            (directory / PICTURES).mkdir(exist_ok=True)
            write_atomic(directory / PICTURES / f"{name}.png", picture, is_synced=False)
    except Exception as error:
        warn_not_written(f"{PICTURES}/", error)
        return False
    return bool(found)


def as_markdown(report: Report) -> str:
    """The report as a page: the result, what was changed, pictures, the facts, every last value."""
    directory = Path(report.directory)
    facts = _facts(report)
    lines = [f"# {report.status}: {facts.pop('best', directory.name)}"]
    if report.error:
        lines += ["", f"**{report.error['type']}**", "", "```", report.error["message"], "```"]
    if rows := _results(report):
        lines += ["", *markdown_table(("weights", "metric", *STAGES), rows, left=2)]
    changed = report.command.partition("exp.train")[2].strip()
    lines += ["", f"Changed from the defaults: `{changed}`" if changed else "Nothing was changed from the defaults."]
    for name in ("loss", "metrics", "gradients"):
        if (directory / PICTURES / f"{name}.png").is_file():
            lines += ["", f"![{name}]({PICTURES}/{name}.png)"]
    lines += ["", *(f"- {name}: {value}" for name, value in facts.items())]
    if report.not_written:
        lines += ["", "Not written:", "", *(f"- {entry['what']}: {entry['error']}" for entry in report.not_written)]
    if report.metrics:
        last = [(tag, f"{value:.6g}") for tag, value in sorted(report.metrics.items())]
        lines += ["", *markdown_table(("tag", "last value"), last, left=1)]
    return "\n".join(lines) + "\n"


def print_report(report: Report) -> None:
    """Print the table of results and how to look further."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False)
    columns = [Column("weights"), Column("metric"), *(Column(stage, justify="right") for stage in STAGES)]
    table = Table(*columns, title=f"{report.status} in {report.wall_seconds:.1f} s", title_justify="left")
    shown = ""
    for weights, *cells in _results(report):
        table.add_row("" if weights == shown else weights, *cells)
        shown = weights
    console.print(table)
    for name, fact in _facts(report).items():
        # soft_wrap: a path that is broken over two lines cannot be copied.
        console.print(f"{name:<{len('dashboard')}}  {fact}", soft_wrap=True, markup=False)


def _results(report: Report) -> list[tuple[str, ...]]:
    """Return weights, metric, and the value of each stage: of the best weights first, then of the last ones.

    The value of `loss/train` is the mean of an epoch.
    """
    last = dict(report.metrics)
    last.pop("loss/train", None)
    if EPOCH_LOSS in last:
        last["loss/train"] = last.pop(EPOCH_LOSS)
    # The test stage evaluates the best weights, and the last validation may be of an earlier step.
    steps = report.stage_steps
    if report.steps and steps:
        last = {tag: value for tag, value in last.items() if steps.get(split_tag(tag)[1]) == report.steps}
    word = f"last, step {report.steps}" if report.steps else "as loaded"
    if not report.steps or report.best is None or not report.best_metrics:
        groups = {word: last}
    elif report.best["step"] == report.steps:
        groups = {f"best and {word}": {**last, **report.best_metrics}}
    else:
        groups = {f"best, step {report.best['step']}": dict(report.best_metrics), word: last}
    rows = []
    for weights, metrics in groups.items():
        cells = {split_tag(tag): f"{value:.4f}" for tag, value in metrics.items()}
        names = sorted({name for name, stage in cells if stage})
        rows += [(weights, name, *(cells.get((name, stage), "") for stage in STAGES)) for name in names]
    return rows


def _facts(report: Report) -> dict[str, str]:
    """Return the other results in words by name."""
    shown, best = os.path.relpath(report.directory), report.best
    speed = "" if report.step_ms is None else f", {report.step_ms:.2f} ms a step"
    ranks = f", {report.world_size} ranks" if report.world_size > 1 else ""
    memory = "" if report.peak_memory_mib is None else f", {report.peak_memory_mib:.0f} MiB at the peak"
    facts = {
        "best": best and f"{best['metric']} {best['value']:.4f} at step {best['step']}",
        "ended by": None if "max_epochs" in (report.ended_by or "") else report.ended_by,
        "steps": f"{report.steps} in {report.epochs} epochs{speed}{memory}",
        "tags": ", ".join(map(str, report.tags)),
        "parent": report.parent and _parent(report.parent),
        "placed": f"precision {report.precision}, strategy {report.strategy}{ranks}",
        "results": shown,
        "dashboard": f"python -m exp.dashboard {_dashboard_root(shown)}",
    }
    return {name: str(fact) for name, fact in facts.items() if fact}


def _parent(parent: Mapping[str, Any]) -> str:
    changed = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in parent["changed"].items())
    return f"{os.path.relpath(parent['run'])}@{parent['step']}" + (f" with {changed}" if changed else "")


def _dashboard_root(shown: str) -> str:
    """Return `outputs` for a run below it, so that earlier runs are shown with it; else the directory of the run."""
    first = shown.partition(os.sep)[0]
    return shown if first in ("..", "", ".") else first


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, so that any reader can parse the file."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
