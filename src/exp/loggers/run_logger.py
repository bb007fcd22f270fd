"""Base class of exp's loggers, and tools that create loggers, ignore their errors and describe the run to them."""

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
        hyperparameters: Values by dotted key that may differ between runs, such as the learning rate.
        metrics: Tags of scalars by which runs are compared, such as `loss/val`.
        config: The whole config as nested dicts and lists, with interpolations resolved.
        texts: Markdown texts by name: `config`, `command` and, in a git repository, `git`.
        tags: Value of the config key `tags`.
    """

    hyperparameters: Mapping[str, object]
    metrics: Sequence[str]
    config: Mapping[str, object]
    texts: Mapping[str, str]
    tags: Sequence[str]


def description_of(plain: Mapping[str, Any], directory: Path, *, overrides: Sequence[str]) -> Description:
    """Return the description of a run.

    Args:
        plain: The whole config as nested dicts and lists, with interpolations resolved.
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
    """Base class of exp's loggers: a Lightning logger that also logs panels and a description of the run.

    A panel is a histogram, a heat map, an image, a text or a curve that a hook returns. The description has the config,
    the command and the revision of the code.

    The methods have an effect only on rank 0.
    """

    @abstractmethod
    def describe(self, description: Description) -> None:
        """Log the description of the run.

        The method is called once before the first step, in a new run and in each resume of the run.
        """

    @abstractmethod
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        """Log panels: histograms, images, texts and curves. Classes of panels that are not supported are skipped.

        Args:
            panels: Panels by tag, with tensors on the CPU.
            step: Number of completed optimizer steps.
        """

    @abstractmethod
    def purge(self, step: int) -> None:
        """Remove logged values from step `step` onward, because training starts at this step and logs them again."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Log the end of the run.

        Args:
            status: Status of the run: completed, pruned, failed or interrupted.
        """

    # Last optimizer step that was logged.
    _latest = 0

    def _step_of(self, step: int | None) -> int:
        """Return the given step and record it as the last logged step. For None, return the last logged step."""
        self._latest = self._latest if step is None else step
        return self._latest


# Methods of loggers that the engine and Lightning call.
CALLED = (
    *("describe", "log_metrics", "log_panels", "log_hyperparams", "log_graph", "log_image", "after_save_checkpoint"),
    *("add_event", "purge", "save", "finalize", "end"),
)


def make_logger(make: Callable[[], Logger], *, name: str) -> Logger | None:
    """Return a logger that cannot end the run by an error. If the logger cannot be created, warn and return None.

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
        # Other exceptions mean that the logger's service is not reachable.
        is_of_values = isinstance(cause, REFUSALS) and not isinstance(cause, OSError | RuntimeError)
        if cause is None or is_of_values or isinstance(cause, ExpError | MisconfigurationException | SystemExit):
            raise
        warn_not_written(name, cause)
    except Exception as error:
        warn_not_written(name, error)
    return None


def has_begun(logger: Logger, *, name: str) -> bool:
    """Return whether a logger can open its files or connect to its service. If not, log a warning.

    The function reads the attribute `experiment`, as Lightning does at the start of a run.

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
    """Return the logger with changed methods, so that the run continues if the logger fails.

    The first error is logged as a warning. From then on, all methods do nothing, because each further call of an
    unreachable service would take minutes.

    Args:
        logger: The logger, which is changed in place.
        name: Config key, such as `logger.tensorboard`.
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
    """JSON file in which a logger stores values for a resumed run, such as the id of the run at a service.

    Args:
        path: Path of the file.

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


# Maximum length of the logged diff, because TensorBoard's Text tab freezes on a longer diff. provenance.json contains
# the whole diff.
MAX_DIFF_CHARACTERS = 100_000


def texts(directory: Path, *, overrides: Sequence[str]) -> dict[str, str]:
    """Return Markdown texts about a run: `config`, `command` and, in a git repository, `git`.

    Args:
        directory: Run directory, from which config.yaml and provenance.json are read.
        overrides: Overrides of the command line.

    Returns:
        Texts by name.
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
    """Return a Markdown code block with a text. The fence is longer than all fences within the text.

    Args:
        text: Content of the code block.
        language: Language for syntax highlighting, such as "yaml". Default: none.
    """
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence_marks = "`" * max(3, longest + 1)
    return f"{fence_marks}{language}\n{text}\n{fence_marks}"
