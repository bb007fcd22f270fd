"""Base class of exp's loggers, with descriptions of runs and notes for a resume."""

from __future__ import annotations

import functools
import json
import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import Logger

from exp.config.frozen import chosen_values, compared_tags
from exp.errors import REFUSALS, ConfigError, ExpError, Interrupted, MissingExtraError
from exp.files import write_atomic
from exp.hooks.panels import Panel
from exp.output import warn_not_written


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a run, logged before its first step.

    Attributes:
        hyperparameters: Values by dotted key in which the run may differ from other runs.
        metrics: Tags by which runs are compared, such as `loss/val`.
        config: The whole config as plain, resolved values.
        texts: Markdown texts by name: the config, the command, the revision.
        tags: Tags that the user set in the config.
    """

    hyperparameters: Mapping[str, object]
    metrics: Sequence[str]
    config: Mapping[str, object]
    texts: Mapping[str, str]
    tags: Sequence[str]


def description_of(plain: Mapping[str, Any], directory: Path, *, overrides: Sequence[str]) -> Description:
    """Return the description of a run.

    Args:
        plain: The whole config as plain, resolved values.
        directory: Run directory.
        overrides: Overrides of the command line.
    """
    return Description(
        hyperparameters=chosen_values(plain, overrides),
        metrics=compared_tags(plain),
        config=plain,
        texts=texts(directory, overrides=overrides),
        tags=[str(tag) for tag in plain["tags"]],
    )


class RunLogger(Logger):
    """Logger that receives panels and a description in addition to numbers. Its methods act only on rank 0."""

    @abstractmethod
    def describe(self, description: Description) -> None:
        """Log the description. Called once in each process of the run, before the first step."""

    @abstractmethod
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Log histograms, images, texts and curves by tag, with tensors on the CPU. Skip unsupported classes."""

    @abstractmethod
    def purge(self, step: int) -> None:
        """Remove the values from step `step` onward. Training starts at this step and logs them again."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Log the end of the run.

        Args:
            status: completed, pruned, failed or interrupted.
        """

    # Last optimizer step that was logged.
    _latest = 0

    def _step_of(self, step: int | None) -> int:
        """Return the step; for None, the last logged step."""
        self._latest = self._latest if step is None else step
        return self._latest


# Methods of loggers that the engine and Lightning call.
CALLED = (
    *("describe", "log_metrics", "log_panels", "log_hyperparams", "log_graph", "log_image", "after_save_checkpoint"),
    *("add_event", "purge", "save", "finalize", "end"),
)


def make_logger(make: Callable[[], Logger], *, name: str) -> Logger | None:
    """Return a logger whose errors do not end the run. If it cannot be created, log a warning and return None.

    Args:
        make: Function that creates the logger.
        name: Config key, such as `logger.tensorboard`.

    Raises:
        ConfigError: A parameter is invalid.
        MissingExtraError: The logger's package is not installed.
    """
    try:
        return isolate_errors(make(), name=name)
    except (Interrupted, MissingExtraError):
        raise
    except ConfigError as error:
        cause = error.__cause__
        # Other exceptions come from a service that is not reachable.
        is_of_values = isinstance(cause, REFUSALS) and not isinstance(cause, OSError | RuntimeError)
        if cause is None or is_of_values or isinstance(cause, ExpError | MisconfigurationException | SystemExit):
            raise
        warn_not_written(name, cause)
    except Exception as error:
        warn_not_written(name, error)
    return None


def has_begun(logger: Logger, *, name: str) -> bool:
    """Return whether a logger can open its store, as Lightning does when a run begins. If not, log a warning.

    Args:
        logger: The logger.
        name: Config key, such as `logger.tensorboard`.
    """
    try:
        getattr(logger, "experiment", None)
    except Interrupted:
        raise
    except Exception as error:
        warn_not_written(name, error)
        return False
    return True


def isolate_errors(logger: Logger, *, name: str) -> Logger:
    """Make a run continue if this logger fails. A warning is logged once, and the logger is not called again.

    An unreachable service would take minutes at every write, and a full disk stays full.
    """
    has_failed = False

    def guard(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(*arguments: object, **named: object) -> object:
            nonlocal has_failed
            if has_failed:
                return None
            try:
                return method(*arguments, **named)
            except Interrupted:
                raise  # a signal arrived while the logger wrote
            except Exception as error:
                has_failed = True
                warn_not_written(name, error)
                return None

        return call

    for method in CALLED:
        if hasattr(logger, method):
            setattr(logger, method, guard(getattr(logger, method)))
    return logger


class Notes:
    """Small JSON file with the id of the run in a logger's store, and the last written step.

    Raises:
        OSError: The file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if path.is_file():
            self.values = json.loads(path.read_text(encoding="utf-8"))

    def keep(self, **values: object) -> None:
        self.values.update(values)
        write_atomic(self.path, json.dumps(self.values) + "\n")


# The Text tab freezes on a longer diff. provenance.json contains the whole diff.
MAX_DIFF_CHARACTERS = 100_000


def texts(directory: Path, *, overrides: Sequence[str]) -> dict[str, str]:
    """Return the texts `config` and `command`, read from files of the run directory.

    In a repository, add the text `git`.
    """
    provenance = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))
    command = shlex.join(["python", "-m", "exp.train", *overrides])
    versions = "\n".join(f"| {name} | {version} |" for name, version in provenance["versions"].items())
    table = f"| package | version |\n|---|---|\n{versions}"
    found = {
        "config": fence((directory / "config.yaml").read_text(encoding="utf-8"), language="yaml"),
        "command": f"{fence(command)}\n\nin `{provenance['working_directory']}`\n\n{table}",
    }
    if git := provenance["git"]:
        diff = git["diff"]
        if len(diff) > MAX_DIFF_CHARACTERS:
            diff = diff[:MAX_DIFF_CHARACTERS] + "\n... cut here; provenance.json has the whole diff\n"
        shown = fence(diff, language="diff") if diff else "No changes since then."
        found["git"] = f"Revision `{git['revision']}`\n\n{shown}"
    return found


def fence(text: str, *, language: str = "") -> str:
    """Return a Markdown code block. Its fence is longer than the fences within the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence_marks = "`" * max(3, longest + 1)
    return f"{fence_marks}{language}\n{text}\n{fence_marks}"
