"""Result of a training step, and base class of objects that observe training steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from exp.engine.forward import Values
from exp.shared_types import Stage


class StepResult(NamedTuple):
    """Result of a training step.

    Attributes:
        loss: Loss of this rank's samples, 0-d and detached. The weight of the loss makes the mean over ranks equal to
            the mean over samples. With phases, None before the phases of the step have run.
        parts: Terms of the objective by name, with the same weight as the loss.
    """

    loss: Tensor | None
    parts: Mapping[str, Tensor]


class Turn(NamedTuple):
    """A single pass of a phase over the micro-batches of an optimizer step.

    Attributes:
        phase: Name of the phase. None in a run without phases, and between two optimizer steps. Default: None.
        places: Numbers that select the random stream of the pass; see exp.data.randomness.reseed. Default: ().
        is_recorded: Whether the values of this pass are recorded. If a phase is repeated, only its last pass in a step
            is recorded. Default: True.
    """

    phase: str | None = None
    places: tuple[int, ...] = ()
    is_recorded: bool = True


NO_RESULT = StepResult(None, {})
WHOLE_STEP = Turn()


class StepObserver:
    """Observer of training and evaluation, with methods that do nothing. StepHooks overrides them to call the hooks.

    Attributes:
        watches_forward: True if the forward of the current micro-batch must run inside `around_forward`.
    """

    watches_forward = False

    def around_forward(self, data: object) -> AbstractContextManager[None]:
        """Return a context that observes the forward and the objective of a micro-batch."""
        return nullcontext()

    def after_forward(self, values: Values) -> None:
        """Observe the values after the forward and the objective of a micro-batch.

        Args:
            values: Values by name, as `forward_by_name` returns them.
        """

    def after_backward(self) -> None:
        """Observe the end of the backward of a micro-batch."""

    def after_clipping(self) -> None:
        """Observe the gradients after clipping, before the optimizer step."""

    def after_phase(self) -> None:
        """Observe the end of the optimizer step of a phase."""

    def begin_turn(self, turn: Turn) -> None:
        """Observe the start of a pass over the micro-batches, and the end of the last pass of a step.

        Args:
            turn: The pass that starts. WHOLE_STEP if the last pass of the step has ended.
        """

    def evaluated(self, stage: Stage, values: Values) -> None:
        """Observe the values of an evaluation batch that has samples on this rank."""


UNOBSERVED = StepObserver()
