"""The result of a training step, and the observer that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from exp.engine.forward import Values
from exp.shared_types import Stage


class StepResult(NamedTuple):
    """The result of a training step.

    loss: the objective of this rank's share, weighted so that the mean over ranks is the mean over samples; 0-d,
        detached. None before a window of phases has run.
    parts: its terms by name, weighted alike.
    """

    loss: Tensor | None
    parts: Mapping[str, Tensor]


class Turn(NamedTuple):
    """One of several passes over a window's micro-batches.

    phase: its name; None in a run without phases, and between two windows.
    places: what its randomness is derived from; see exp.data.randomness.reseed.
    is_recorded: whether it is the phase's last in the step, which is the one that is recorded.
    """

    phase: str | None = None
    places: tuple[int, ...] = ()
    is_recorded: bool = True


NO_RESULT = StepResult(None, {})
WHOLE_STEP = Turn()


class StepObserver:
    """An observer of training and evaluation. This one does nothing; the engine's calls hooks.

    watches_forward: whether it has a context to enter around the forward of the micro-batch under way.
    """

    watches_forward = False

    def around_forward(self, data: object) -> AbstractContextManager[None]:
        """Return a context around a micro-batch's forward and objective. Asked for where `watches_forward`."""
        return nullcontext()

    def after_forward(self, values: Values) -> None:
        """See what they gave. values: by name, as `forward_by_name` gives them."""

    def after_backward(self) -> None:
        """See the backward of one micro-batch of a phase done."""

    def after_clipping(self) -> None:
        """See the gradients as the optimizer takes them."""

    def after_phase(self) -> None:
        """See that the optimizer of a phase has stepped."""

    def begin_turn(self, turn: Turn) -> None:
        """Begin another pass over the window's micro-batches, or, by WHOLE_STEP, end the last one."""

    def evaluated(self, stage: Stage, values: Values) -> None:
        """See a batch of an evaluation, of which this rank has a share."""


UNOBSERVED = StepObserver()
