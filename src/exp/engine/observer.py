"""The result of a training step, and the observers of steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from exp.engine.forward import Values
from exp.shared_types import Stage


class StepResult(NamedTuple):
    """The result of a training step.

    Attributes:
        loss: Objective of this rank's share, weighted so that the mean over ranks is the mean over samples; 0-d,
            detached. None before a window of phases has run.
        parts: Terms of the objective by name, weighted alike.
    """

    loss: Tensor | None
    parts: Mapping[str, Tensor]


class Turn(NamedTuple):
    """A pass over the micro-batches of a window.

    Attributes:
        phase: Name of the phase; None without phases, and between two windows.
        places: Derives the randomness of the pass; see exp.data.randomness.reseed.
        is_recorded: Whether the pass is the last one of its phase in the step, which is recorded.
    """

    phase: str | None = None
    places: tuple[int, ...] = ()
    is_recorded: bool = True


NO_RESULT = StepResult(None, {})
WHOLE_STEP = Turn()


class StepObserver:
    """An observer of training and evaluation. This class does nothing; StepHooks calls hooks.

    Attributes:
        watches_forward: Whether `around_forward` returns a context to enter in the current micro-batch.
    """

    watches_forward = False

    def around_forward(self, data: object) -> AbstractContextManager[None]:
        """Return a context around the forward and the objective of a micro-batch."""
        return nullcontext()

    def after_forward(self, values: Values) -> None:
        """Called after the forward and the objective. values: by name, as from `forward_by_name`."""

    def after_backward(self) -> None:
        """Called after the backward of a micro-batch of a phase."""

    def after_clipping(self) -> None:
        """Called with the gradients that the optimizer takes."""

    def after_phase(self) -> None:
        """Called after the optimizer step of a phase."""

    def begin_turn(self, turn: Turn) -> None:
        """Called when a pass over the micro-batches begins; WHOLE_STEP ends the last one."""

    def evaluated(self, stage: Stage, values: Values) -> None:
        """Called for each batch of an evaluation of which this rank has a share."""


UNOBSERVED = StepObserver()
