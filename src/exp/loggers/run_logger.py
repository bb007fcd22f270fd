"""What every logger of exp's own has: what it is told of a run, what it cannot show, and notes for a resume."""

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
    """What is known of a run before its first step.

    hyperparameters: by dotted key: those that tell it from its neighbours.
    metrics: the tags by which runs are compared, `loss/val`.
    config: every value, by dotted key.
    texts: Markdown by name: the config, the command, the revision.
    tags: the user's words for it.
    """

    hyperparameters: Mapping[str, Any]
    metrics: Sequence[str]
    config: Mapping[str, Any]
    texts: Mapping[str, str]
    tags: Sequence[str]


def description_of(plain: Mapping[str, Any], directory: Path, *, overrides: Sequence[str]) -> Description:
    """Return what is known of a run from the values of its config, its overrides and its directory."""
    return Description(
        hyperparameters=chosen_values(plain, overrides),
        metrics=compared_tags(plain),
        config=plain,
        texts=texts(directory, overrides=overrides),
        tags=[str(tag) for tag in plain["tags"]],
    )


class RunLogger(Logger):
    """A logger that the engine tells more than numbers. On other ranks than 0 its calls do nothing."""

    @abstractmethod
    def describe(self, description: Description) -> None:
        """Called once, before the first step; once more in a process that goes on with the run."""

    @abstractmethod
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Histograms, images, texts and curves by tag, their tensors on the host. What cannot be shown is said once."""

    @abstractmethod
    def purge(self, step: int) -> None:
        """Called at each start of the training, `step` its first: what was logged from there on is logged anew."""

    @abstractmethod
    def end(self, status: str) -> None:
        """The run is over: completed, pruned, failed or interrupted."""

    # The optimizer step that was logged last.
    _latest = 0

    def _step_of(self, step: int | None) -> int:
        """Return the step to log at: without one, that of the last point."""
        self._latest = self._latest if step is None else step
        return self._latest


# What the engine and Lightning ask of a logger.
ASKED = (
    *("describe", "log_metrics", "log_panels", "log_hyperparams", "log_graph", "log_image", "after_save_checkpoint"),
    *("add_event", "purge", "save", "finalize", "end"),
)


def make_logger(make: Callable[[], Logger], *, name: str) -> Logger | None:
    """Make a logger that a run outlives; None where it cannot be made, which is told.

    name: as in the config, `logger.tensorboard`.
    Raises: ConfigError where a parameter is wrong; MissingExtraError.
    """
    try:
        return outlive(make(), name=name)
    except (Interrupted, MissingExtraError):
        raise
    except ConfigError as error:
        cause = error.__cause__
        # What a store says that does not answer, and not of the values that it was given.
        is_of_values = isinstance(cause, REFUSALS) and not isinstance(cause, OSError | RuntimeError)
        if cause is None or is_of_values or isinstance(cause, ExpError | MisconfigurationException | SystemExit):
            raise
        warn_not_written(name, cause)
    except Exception as error:
        warn_not_written(name, error)
    return None


def has_begun(logger: Logger, *, name: str) -> bool:
    """Whether a logger has its store open, as Lightning asks of each when a run begins; where it fails, that is told.

    name: as in the config.
    """
    try:
        getattr(logger, "experiment", None)
    except Interrupted:
        raise
    except Exception as error:
        warn_not_written(name, error)
        return False
    return True


def outlive(logger: Logger, *, name: str) -> Logger:
    """Let a run go on where this logger fails: that is told once, and nothing is asked of it any more.

    A store that does not answer would cost minutes at every write, and a full disk stays full.
    """
    has_failed = False

    def outlived(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
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

    for method in ASKED:
        if hasattr(logger, method):
            setattr(logger, method, outlived(getattr(logger, method)))
    return logger


class Notes:
    """A small JSON file of plain values: whose run this is in the store, and how far it was written.

    Raises RunError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if path.is_file():
            try:
                self.values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(
                    f"{path} cannot be read: {error}; without it the logger begins a new run there"
                ) from error

    def keep(self, **values: Any) -> None:
        self.values.update(values)
        try:
            write_atomic(self.path, json.dumps(self.values) + "\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error


log = logging.getLogger(__name__)


class LeftOut:
    """Picks the panels that a logger can show, and says which kinds it cannot, each once.

    name: the logger's, as in the config. kinds: those that it can show.
    """

    def __init__(self, *, name: str, kinds: tuple[type[Panel], ...]) -> None:
        self._name = name
        self._kinds = kinds
        self._said: set[type[Panel]] = set()

    def shown(self, panels: Mapping[str, Panel]) -> dict[str, Panel]:
        shown = {}
        for tag, panel in panels.items():
            if isinstance(panel, self._kinds):
                shown[tag] = panel
            elif type(panel) not in self._said:
                self._said.add(type(panel))
                kind = type(panel).__name__
                log.info("logger %s cannot show a %s: %s and its like are left out", self._name, kind, tag)
        return shown


# A page that shows a longer one stands still; provenance.json has the whole.
MAX_DIFF_CHARACTERS = 100_000


def texts(directory: Path, *, overrides: Sequence[str]) -> dict[str, str]:
    """By name, from what `freeze` wrote: `config`, `command` and, of a run inside a repository, `git`."""
    provenance = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))
    command = shlex.join(["python", "-m", "exp.train", *overrides])
    versions = "\n".join(f"| {name} | {version} |" for name, version in provenance["versions"].items())
    table = f"| package | version |\n|---|---|\n{versions}"
    found = {
        "config": fenced((directory / "config.yaml").read_text(encoding="utf-8"), language="yaml"),
        "command": f"{fenced(command)}\n\nin `{provenance['working_directory']}`\n\n{table}",
    }
    if git := provenance["git"]:
        diff = git["diff"]
        if len(diff) > MAX_DIFF_CHARACTERS:
            diff = diff[:MAX_DIFF_CHARACTERS] + "\n... cut here; provenance.json has the whole diff\n"
        shown = fenced(diff, language="diff") if diff else "Nothing was changed since."
        found["git"] = f"Revision `{git['revision']}`\n\n{shown}"
    return found


def fenced(text: str, *, language: str = "") -> str:
    """A Markdown block of code, its fence longer than any in the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
