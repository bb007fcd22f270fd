"""Base class of exp's loggers: the description of a run, panels that a logger cannot show, and notes for a resume."""

from __future__ import annotations

import functools
import json
import logging
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
from exp.errors import REFUSALS, ConfigError, ExpError, Interrupted, MissingExtraError, RunError
from exp.files import write_atomic
from exp.hooks.panels import Panel
from exp.output import warn_not_written


@dataclass(frozen=True, kw_only=True)
class Description:
    """A run before its first step.

    Attributes:
        hyperparameters: Values by dotted key in which it may differ from other runs.
        metrics: Tags by which runs are compared, such as `loss/val`.
        config: The whole config, plain and resolved.
        texts: Markdown texts by name: the config, the command, the revision.
        tags: The user's tags.
    """

    hyperparameters: Mapping[str, object]
    metrics: Sequence[str]
    config: Mapping[str, object]
    texts: Mapping[str, str]
    tags: Sequence[str]


def description_of(plain: Mapping[str, Any], directory: Path, *, overrides: Sequence[str]) -> Description:
    """Return the description of a run from its config, overrides and directory."""
    return Description(
        hyperparameters=chosen_values(plain, overrides),
        metrics=compared_tags(plain),
        config=plain,
        texts=texts(directory, overrides=overrides),
        tags=[str(tag) for tag in plain["tags"]],
    )


class RunLogger(Logger):
    """A logger that gets panels and a description in addition to numbers. Its calls do nothing except on rank 0."""

    @abstractmethod
    def describe(self, description: Description) -> None:
        """Log the description, once before the first step of each process of the run."""

    @abstractmethod
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Log histograms, images, texts and curves by tag, with tensors on the CPU. Report unsupported kinds once."""

    @abstractmethod
    def purge(self, step: int) -> None:
        """Remove values from `step` on, the first step of the training: they are logged again."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Log the end of the run. status: completed, pruned, failed or interrupted."""

    # Last optimizer step that was logged.
    _latest = 0

    def _step_of(self, step: int | None) -> int:
        """Return the step, or the last logged step for None."""
        self._latest = self._latest if step is None else step
        return self._latest


# Methods of loggers that the engine and Lightning call.
CALLED = (
    *("describe", "log_metrics", "log_panels", "log_hyperparams", "log_graph", "log_image", "after_save_checkpoint"),
    *("add_event", "purge", "save", "finalize", "end"),
)


def make_logger(make: Callable[[], Logger], *, name: str) -> Logger | None:
    """Return a logger whose errors do not end the run, or None, after a warning, if it cannot be created.

    Args:
        name: Config key, such as `logger.tensorboard`.

    Raises:
        ConfigError: A parameter is invalid.
        MissingExtraError: Its package is not installed.
    """
    try:
        return isolate_errors(make(), name=name)
    except (Interrupted, MissingExtraError):
        raise
    except ConfigError as error:
        cause = error.__cause__
        # Other exceptions come from a store that does not answer.
        is_of_values = isinstance(cause, REFUSALS) and not isinstance(cause, OSError | RuntimeError)
        if cause is None or is_of_values or isinstance(cause, ExpError | MisconfigurationException | SystemExit):
            raise
        warn_not_written(name, cause)
    except Exception as error:
        warn_not_written(name, error)
    return None


def has_begun(logger: Logger, *, name: str) -> bool:
    """Return whether a logger can open its store, as Lightning does when a run begins. Warn if it cannot.

    Args:
        name: Config key.
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
    """Let a run continue if this logger fails: warn once, and do not call it again.

    A store that does not answer would take minutes at every write, and a full disk stays full.
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
                raise  # a signal came while it wrote
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
    """A small JSON file with the run's id in a store, and the last step that was written.

    Raises:
        RunError: The file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if path.is_file():
            try:
                self.values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(
                    f"{path} cannot be read: {error}; without it the logger starts a new run there"
                ) from error

    def keep(self, **values: object) -> None:
        self.values.update(values)
        try:
            write_atomic(self.path, json.dumps(self.values) + "\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error


log = logging.getLogger(__name__)


class LeftOut:
    """Selects the panels that a logger can show, and logs each other kind once.

    Args:
        name: Name of the logger in the config.
        kinds: Kinds that it can show.
    """

    def __init__(self, *, name: str, kinds: tuple[type[Panel], ...]) -> None:
        self._name = name
        self._kinds = kinds
        self._said: set[type[Panel]] = set()

    def select(self, panels: Mapping[str, Panel]) -> dict[str, Panel]:
        shown = {}
        for tag, panel in panels.items():
            if isinstance(panel, self._kinds):
                shown[tag] = panel
            elif type(panel) not in self._said:
                self._said.add(type(panel))
                kind = type(panel).__name__
                log.info("logger %s cannot show a %s: %s and similar panels are left out", self._name, kind, tag)
        return shown


# A page with a longer diff freezes. provenance.json has the whole diff.
MAX_DIFF_CHARACTERS = 100_000


def texts(directory: Path, *, overrides: Sequence[str]) -> dict[str, str]:
    """Return the texts `config`, `command` and, in a repository, `git` from the files of the run directory."""
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
    """Return a Markdown block of code, with a fence longer than those in the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence_marks = "`" * max(3, longest + 1)
    return f"{fence_marks}{language}\n{text}\n{fence_marks}"
