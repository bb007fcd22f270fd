"""The report of a run: report.json for programs, report.md for users, and a printed table."""

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

# Folder of the pictures of report.md.
PICTURES = "pictures"
# Part of torch 2.13's message about a worker process of a DataLoader that died.
LOST_WORKER = re.compile(r"DataLoader worker \(pid")
# Exceptions that reading a damaged report.json may raise.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
# The status `pruned` means that a search ended the job early.
Record = Mapping[str, Any]
Status = Literal["completed", "failed", "interrupted", "pruned"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a run. The fields are the keys of report.json, which is a stable interface.

    Attributes:
        status: "completed", "failed", "interrupted", or "pruned" if a search ended the job early.
        directory: Run directory.
        metrics: Last value of each tag, such as {"accuracy/val": 0.98}. For a resumed run, this includes values that
            were logged before the resume.
        best: Dict with the keys `metric`, `value`, `step` and `checkpoint` of the best checkpoint. None: no best
            checkpoint.
        best_metrics: Losses and metrics by tag, measured with the weights of the best checkpoint. `loss/train` is the
            mean over the epoch of the checkpoint. Empty if there is no best checkpoint.
        stage_steps: For each stage, the optimizer step at which the stage last measured values, such as {"train": 40}.
        ended_by: Reason why the training ended, such as `trainer.max_epochs=30`, or EarlyStopping with its arguments.
            None: the training did not end normally.
        steps: Optimizer steps of the whole run, including the steps before a resume.
        epochs: Epochs of the whole run.
        wall_seconds: Duration of the run in seconds, without imports and the check.
        step_ms: Wall time of training and validation in ms, divided by the optimizer steps. None: no steps.
        peak_memory_mib: Peak memory of rank 0 in MiB. On a GPU, it is the memory of the device, otherwise the resident
            memory of the process. None: not measured.
        world_size: Number of ranks.
        precision: Value of `precision.word`, such as "bf16".
        strategy: Name of the strategy, such as "ddp".
        monitor: Tag of the monitored metric. None: no metric is monitored.
        command: Shell command that started the run.
        tags: Value of the config key `tags`. Users search runs by these tags.
        versions: Versions of Python and of packages, by name.
        parent: For a fork, a dict with the keys `run`, `step`, `checkpoint` and `changed` about the parent run. None:
            the run is not a fork.
        error: Dict with the keys `type` and `message` of the error that ended the run. For an exception in the user's
            code, `type` is the name of the exception's class. None: no error.
        not_written: Dict with the keys `what` and `error` for each output that could not be written, such as a log.
    """

    status: Status
    directory: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Record | None = None
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
    parent: Record | None = None
    error: Mapping[str, str] | None = None
    not_written: Sequence[Mapping[str, str]] = ()

    @property
    def monitored(self) -> float:
        """Value of the monitored metric that a sweeper compares between jobs.

        It is the value of the best checkpoint, or the last value if there is no best checkpoint. Without any value of
        the metric, it is NaN.
        """
        if self.best is not None:
            return float(self.best["value"])
        tag = None if self.monitor is None else compared_tag(self.monitor)
        return float(self.metrics[tag]) if tag is not None and tag in self.metrics else math.nan


class Ongoing:
    """Facts about a run that has started, from which its report is created when the run ends.

    Args:
        directory: Run directory.
        settings: Settings of the run.
        overrides: Overrides of the run.
        world_size: Number of ranks.
    """

    def __init__(self, directory: Path, settings: Settings, *, overrides: Sequence[str], world_size: int) -> None:
        self._started = time.monotonic()
        self.directory = directory
        # Entries for the report's `not_written`. A log handler of the run adds them.
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

    def end_report(
        self,
        status: Status,
        *,
        parts: Parts | None = None,
        error: BaseException | None = None,
        before: Report | None = None,
    ) -> Report:
        """Return the report at the end of the run.

        Args:
            status: Status of the run.
            parts: Objects of the run. None: the run ended before they were built, or they are in other processes.
            error: Error that ended the run. None: no error.
            before: Report that rank 0 already wrote for this run. The result is this report with another status and
                error. None: the report is created from `parts`.
        """
        # For an error in the user's code, the report has the type of the user's exception.
        kind = error.kind if isinstance(error, UserCodeError) else type(error).__name__
        entry = None if error is None else {"type": kind, "message": str(error)}
        if before is not None:
            return dataclasses.replace(before, status=status, error=entry)
        return Report(
            status=status,
            wall_seconds=time.monotonic() - self._started,
            error=entry,
            not_written=self.not_written,
            **self._facts,
            **({} if parts is None else _progress(parts)),
        )

    def resume_command(self, checkpoint: str) -> str:
        """Return the command that resumes this run from a checkpoint."""
        others = [text for text in self._overrides if text.lstrip("+").partition("=")[0] != "resume"]
        return train_command(others, key="resume", path=checkpoint)


def train_command(overrides: Sequence[str], *, key: str, path: str) -> str:
    """Return a shell command that calls exp.train with some overrides and the additional override `key=path`.

    The path is quoted for Hydra and for the shell. Within the working directory, it is written as a relative path.

    Args:
        overrides: Overrides of the command.
        key: Key of the additional override, such as `resume`.
        path: Path of a file or folder.
    """
    shown = os.path.relpath(path)
    shown = os.path.abspath(path) if shown.startswith("..") else shown
    # A path with other characters is quoted, because these characters have a meaning in Hydra's grammar.
    plain = re.fullmatch(r"[\w./+@%:-]+", shown, re.ASCII)
    escaped = shown.replace("'", "\\'")
    return _command([*overrides, f"{key}={shown}" if plain else f"{key}='{escaped}'"])


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "exp.train", *overrides])


def _progress(parts: Parts) -> dict[str, Any]:
    """Return the fields of a report that are measured during training, such as metrics and steps."""
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


def best_of(best: Record | None) -> dict[str, Any]:
    """Return the fields `best` and `best_metrics` of a report.

    Args:
        best: Record of the best checkpoint. None: there is no best checkpoint, and the result is empty.
    """
    if best is None:
        return {}
    return {
        "best": {key: best[key] for key in ("metric", "value", "step", "checkpoint")},
        "best_metrics": dict(best["metrics"]),
    }


def _peak_memory_mib() -> float:
    # Imported late, because this module imports torch, which reading reports does not need.
    from exp.hooks.memory_use import MIB, peak_of_run

    return peak_of_run().so_far() / MIB


def forget_peak_memory() -> None:
    """Reset the measured peak memory of this process, so that a report does not contain the peak of an earlier run."""
    # Imported late, because this module imports torch, which reading and writing reports does not need.
    from exp.hooks.memory_use import HOST, peak_of_run

    for peak in {HOST, peak_of_run()}:
        peak.forget()


def write_report(report: Report, *, is_synced: bool = True) -> None:
    """Write report.json and report.md to the run directory. Each file is written atomically.

    Args:
        report: Report to write.
        is_synced: Sync the files to disk before returning. Default: true.

    Raises:
        RunError: The run directory cannot be written.
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
    """Return the report of a run directory.

    Raises:
        RunError: report.json is missing or damaged.
    """
    path = Path(directory) / "report.json"
    if not path.is_file():
        raise RunError(f"{path} does not exist: the run is not over, or was killed before it wrote its report")
    try:
        return parse_report(path.read_text(encoding="utf-8"))
    except (OSError, *DAMAGE) as error:
        raise RunError(f"{path} is damaged: {one_line(error)}") from error


def parse_report(text: str) -> Report:
    """Return the report that the text of a report.json contains.

    Raises:
        Exception: The text is damaged. The type of the exception is one of DAMAGE.
    """
    plain = json.loads(text)
    plain["metrics"] = {tag: float(value) for tag, value in plain["metrics"].items()}
    # Reports of earlier versions lack these two keys.
    plain["best_metrics"] = {tag: float(value) for tag, value in plain.get("best_metrics", {}).items()}
    plain["tags"] = tuple(plain["tags"])
    plain["not_written"] = tuple(plain.get("not_written", ()))
    report = Report(**plain)
    if report.status not in get_args(Status):
        raise ValueError(f"no status of a run, {report.status!r}")
    return report


def find_report(directory: Path | str) -> Report | None:
    """Return the report of a run directory; None if report.json is missing or damaged."""
    try:
        return read_report(directory)
    except RunError:
        return None


def write_end(report: Report, loggers: Sequence[Logger]) -> None:
    """Write the report and its pictures, and log the end of the run to the loggers.

    Args:
        report: Report of the run.
        loggers: Loggers of the run.

    Raises:
        RunError: The run directory cannot be written.
    """
    from exp.loggers.run_logger import RunLogger

    write_report(report)
    before = len(report.not_written)
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.end(report.status)
    is_drawn = report.status != "interrupted" and draw_pictures(report)
    if is_drawn or len(report.not_written) > before:
        write_report(report)


def write_bad_end(
    ongoing: Ongoing, error: BaseException, *, parts: Parts | None = None, has_ranks: bool = False
) -> None:
    """Write the report of a failed or interrupted run, and set the attribute `command` of the error.

    The attribute is the command that resumes the run.

    Args:
        ongoing: Facts about the run.
        error: Error that ended the run.
        parts: Objects of the run. None: the run ended before they were built, or they are in other processes.
        has_ranks: The ranks ran in other processes. If rank 0 has written a report, only its status and error are
            replaced.

    Raises:
        RunError: `has_ranks` is true, and the run directory cannot be written.
    """
    saved = last_checkpoint(ongoing.directory)
    if isinstance(error, Interrupted) and error.checkpoint is not None:
        error.command = ongoing.resume_command(error.checkpoint)
    elif isinstance(error, RankError | UserCodeError) and saved is not None:
        error.command = ongoing.resume_command(str(saved))
    status: Status = "interrupted" if isinstance(error, Interrupted) else "failed"
    if has_ranks:
        write_report(ongoing.end_report(status, error=error, before=find_report(ongoing.directory)))
        return
    report = ongoing.end_report(status, parts=parts, error=error)
    # This line is for train.log only. The caller prints the error on the terminal.
    log.info("the run %s", report.status, exc_info=error)
    try:
        write_end(report, () if parts is None else parts.trainer.loggers)
    except RunError as second:
        # Only logged, because the caller raises the first error. On a full disk, both errors have the same cause.
        log.error("%s", second)


def explain(error: BaseException, ongoing: Ongoing, *, parts: Parts | None) -> BaseException:
    """Return an error with a clear message for an exception that ended a run.

    Four kinds of exception are replaced: interruptions by Ctrl-C, exceptions in the user's code, errors of the
    operating system, and out-of-memory errors. Other exceptions are returned unchanged.

    Args:
        error: Exception that ended the run.
        ongoing: Facts about the run.
        parts: Objects of the run. None: the run ended before they were built.
    """
    from exp.hooks.memory_use import explain_out_of_memory, is_out_of_memory

    explained: ExpError
    is_exit = isinstance(error, SystemExit)
    if isinstance(error, KeyboardInterrupt) or (is_exit and isinstance(error.__context__, KeyboardInterrupt)):
        error = Interrupted(signum=signal.SIGINT, checkpoint=None)
    if isinstance(error, Interrupted):
        return _with_checkpoint(error, ongoing.directory)
    if isinstance(error, ExpError):
        return error
    if is_exit:
        explained = UserCodeError.of(error, what="the run")
    elif is_out_of_memory(error):
        explained = RunError(explain_out_of_memory(error, is_built=parts is not None))
    elif LOST_WORKER.search(message_of(error)):
        explained = RunError(
            f"{error} The worker is a process that loads data. Either the system killed the process because the memory "
            "was full, or an error in the code of the data ended it. Write data.num_workers=0 to see such an error"
        )
    elif isinstance(error, OSError) and _is_below(error.filename, ongoing.directory):
        explained = RunError(_write_message(ongoing, error))
    elif (place := _place(error, parts)) is not None:
        explained = UserCodeError.of(error, what=place)
    elif isinstance(error, OSError):
        explained = RunError(_write_message(ongoing, error))
    else:
        return error
    # The cause is set before the error is raised, because train.log prints it earlier.
    explained.__cause__ = error
    return explained


def _with_checkpoint(error: Interrupted, directory: Path) -> Interrupted:
    """Return an Interrupted with a checkpoint. If `error` has no checkpoint, the run's last checkpoint is used.

    `error` has no checkpoint if the signal arrived after the last step. If the run saved no checkpoint, `error` is
    returned unchanged.

    Args:
        error: Interruption of the run.
        directory: Run directory.
    """
    saved = last_checkpoint(directory) if error.checkpoint is None else None
    return error if saved is None else Interrupted(signum=error.signum, checkpoint=str(saved), detail=error.detail)


def _is_below(filename: object, directory: Path) -> bool:
    """Return whether the file name of an error is a path within the run directory."""
    return isinstance(filename, str) and Path(filename).absolute().is_relative_to(directory)


def _place(error: BaseException, parts: Parts | None) -> str | None:
    """Return a description of the object in which an exception was raised, such as a callback or a layer.

    The object belongs to the user's code or to a package other than exp and torch.

    Args:
        error: Exception with its traceback.
        parts: Objects of the run. None: the run ended before they were built.

    Returns:
        Text such as `callback MyCallback, in on_train_start,`. None if the object is unknown.
    """
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
    return "your code" if is_own else None


def _write_message(ongoing: Ongoing, error: OSError) -> str:
    """Return the message for a file that cannot be written. The message contains the command that resumes the run."""
    what = f"{error.filename or ongoing.directory}: {error.strerror or error}. The run ends here"
    fix = "free disk space" if error.errno in NO_SPACE else "make the directory writable"
    saved = last_checkpoint(ongoing.directory)
    if saved is None:
        return f"{what}, before anything was saved. {fix.capitalize()}, or set another directory with hydra.run.dir"
    command = ongoing.resume_command(str(saved))
    return f"{what}; the saved checkpoints are intact. {fix.capitalize()}, and then resume with\n  {command}"


def draw_pictures(report: Report) -> bool:
    """Draw the losses, metrics and gradients of a run, and write the pictures to the run directory.

    If the pictures cannot be drawn, a warning is logged.

    Returns:
        True if at least one picture was written.
    """
    # Imported late, because reading reports does not need the modules that draw.
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
    """Return a report as Markdown text: results, overrides, pictures, other facts and the last value of each tag."""
    directory = Path(report.directory)
    facts = _facts(report)
    lines = [f"# {report.status}: {facts.pop('best', directory.name)}"]
    if report.error:
        lines += ["", f"**{report.error['type']}**", "", "```", report.error["message"], "```"]
    if rows := _results(report):
        lines += ["", *markdown_table(("weights", "metric", *STAGES), rows, left=2)]
    changed = report.command.partition("exp.train")[2].strip()
    lines += ["", f"Changed from the defaults: `{changed}`" if changed else "All settings are defaults."]
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
    """Print a report on standard output: a table of metrics, then facts such as steps and run directory."""
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
        # soft_wrap keeps a path on one line, so that it can be copied.
        console.print(f"{name:<{len('dashboard')}}  {fact}", soft_wrap=True, markup=False)


def _results(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of the table of results. Rows of the best weights come before rows of the last weights.

    The value in the row of the training loss is the mean over an epoch.

    Returns:
        Rows of texts. The cells are: name of the weights, name of the metric, and the metric's value in each stage. A
        missing value is "".
    """
    last = dict(report.metrics)
    last.pop("loss/train", None)
    if EPOCH_LOSS in last:
        last["loss/train"] = last.pop(EPOCH_LOSS)
    # Values measured at an earlier step are left out: the test uses the best weights, and the last validation may have
    # run before the last step.
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
    """Return the facts that are shown below the table of results, as texts by name. Empty facts are left out."""
    shown, best = os.path.relpath(report.directory), report.best
    speed = "" if report.step_ms is None else f", {report.step_ms:.2f} ms per step"
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


def _parent(parent: Record) -> str:
    changed = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in parent["changed"].items())
    return f"{os.path.relpath(parent['run'])}@{parent['step']}" + (f" with {changed}" if changed else "")


def _dashboard_root(shown: str) -> str:
    """Return the folder to pass to exp.dashboard.

    The folder is the first part of the run directory's relative path, so that the dashboard also shows earlier runs.
    If the run directory is outside of the working directory, the folder is the run directory.

    Args:
        shown: Run directory, relative to the working directory.
    """
    first = shown.partition(os.sep)[0]
    return shown if first in ("..", "", ".") else first


def _finite(value: object) -> object:
    """Return nested dicts with NaN and infinity replaced by texts, because JSON does not support these numbers."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
