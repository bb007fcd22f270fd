"""What a training step and whoever looks at it tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from exp.types import Stage


class LastBatch:
    """What a training step leaves for Recording, and what hooks want in it.

    loss: the objective of this rank's share, weighted so that the mean over ranks is the mean over samples; 0-d,
        detached. parts: its terms, weighted alike.
    seen, passed, after_clipping, evaluated: what hooks ask to be called with: the values of a forward; a boundary of
        the step; nothing, when gradients are clipped; the values of a batch of an evaluation. None: nobody asks.
    around: makes such a context for one forward, of a micro-batch's data; None: nobody asks.
    phase, is_recorded, turn: of a module with phases: the phase under way, whether this run of it, its last in the
        step, is the one that is recorded, and the turn by which its randomness is derived.
    """

    # Not attributes of the module: setting one of those costs as much as a small operator.
    __slots__ = (
        "after_clipping", "around", "evaluated", "is_recorded", "loss", "parts", "passed", "phase",
        "seen", "turn",
    )  # fmt: skip

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.parts: Mapping[str, Tensor] = {}
        self.around: Callable[[Any], AbstractContextManager[Any]] | None = None
        self.phase: str | None = None
        self.is_recorded = True
        self.turn: tuple[int, ...] = ()
        self.seen: Callable[[Mapping[str, Any]], None] | None = None
        self.passed: Callable[[str], None] | None = None
        self.after_clipping: Callable[[], None] | None = None
        self.evaluated: Callable[[Stage, Mapping[str, Any]], None] | None = None
