"""What a logger of exp's own does beside Lightning's interface: it knows the run, shows panels, outlives a resume."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from exp.hooks.values import Panel


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of a run before its first step.

    hyperparameters: by dotted key: those that tell it from its neighbours.
    metrics: the tags by which runs are compared, `loss/val`.
    config: every value, by dotted key.
    texts: Markdown by name: the config, the command, the revision.
    tags: the user's words for it.
    network: builds the network anew on the meta device, with inputs that fit it.
    """

    hyperparameters: Mapping[str, Any]
    metrics: Sequence[str]
    config: Mapping[str, Any]
    texts: Mapping[str, str]
    tags: Sequence[str]
    network: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


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
        """The run is over: completed, failed or interrupted."""
