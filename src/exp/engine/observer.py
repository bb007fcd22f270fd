"""What a training step gives, and who may look on while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from exp.engine.forward import Values
from exp.types import Stage


class StepResult(NamedTuple):
    """What a training step computed.

    loss: the objective of this rank's share, weighted so that the mean over ranks is the mean over samples; 0-d,
        detached. None before a window of phases has run.
    parts: its terms by name, weighted alike.
    """

    loss: Tensor | None
    parts: Mapping[str, Tensor]


class Turn(NamedTuple):
    """Which of several passes over a window's micro-batches is under way.

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
    """Looks on while a module trains and is evaluated. This one sees nothing; the engine's calls hooks.

    watches_forward: whether it has a context to enter around the forward of the micro-batch under way.
    """

    watches_forward = False

    def around_forward(self, data: object) -> AbstractContextManager[None]:
        """Around the forward and the objective of one micro-batch. Asked for where `watches_forward`."""
        return nullcontext()

    def after_forward(self, values: Values) -> None:
        """Behind them. values: by name, as `forward_by_name` gives them."""

    def after_backward(self) -> None:
        """The backward of one micro-batch of a phase is done."""

    def after_clipping(self) -> None:
        """The gradients are as the optimizer takes them."""

    def after_phase(self) -> None:
        """The optimizer of a phase has stepped."""

    def begin_turn(self, turn: Turn) -> None:
        """Another pass over the window's micro-batches begins, or, by WHOLE_STEP, the last one has ended."""

    def evaluated(self, stage: Stage, values: Values) -> None:
        """A batch of an evaluation, of which this rank has a share."""


UNOBSERVED = StepObserver()
