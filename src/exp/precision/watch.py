"""A loss scale that falls for good: said once, from numbers that are on the host anyway."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

# The scale of the first step comes down from 65536 to 1 in 16 skips; more in a row is no search for a scale.
SKIPS_IN_A_ROW = 20
CURE = (
    "a gradient is infinite or not a number whatever the scale. Look with precision.report=true for the layer and keep "
    "it in fp32 (precision.keep), or train in bf16"
)


class ScaleWatch:
    """Looks at scale and skipped steps whenever they are written, and warns once."""

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None
        self._row = 0
        self._skips = 0.0
        self._has_warned = False

    def see(self, *, step: int, loss_scale: float, skipped_steps: float) -> None:
        """step: of the run, counted from 1. skipped_steps: of all optimizers, of which phases have several a step."""
        if self._seen is not None:
            steps, skips = step - self._seen[0], skipped_steps - self._seen[1]
            is_row = skips >= steps > 0
            self._row, self._skips = (self._row + steps, self._skips + skips) if is_row else (0, 0.0)
        self._seen = step, skipped_steps
        if self._has_warned:
            return
        if loss_scale < 1.0:
            self._has_warned = True
            log.warning("step %d: the loss scale has fallen to %g: %s", step, loss_scale, CURE)
        elif self._row >= SKIPS_IN_A_ROW:
            self._has_warned = True
            log.warning(
                "step %d: in the last %d steps optimizers skipped %d updates, the loss scale is %g: %s",
                step, self._row, self._skips, loss_scale, CURE,
            )  # fmt: skip
