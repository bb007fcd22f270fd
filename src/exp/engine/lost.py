"""A loss that is not a number ends the run."""

from __future__ import annotations

import math

from exp.errors import RunError


def refuse_lost(loss: float, index: int, *, is_scaled: bool) -> None:
    """Raises: RunError where the loss of a step is not a number, or infinite and no loss scale will fall for it."""
    if not math.isnan(loss) and (math.isfinite(loss) or is_scaled):
        return
    name = "not a number" if math.isnan(loss) else "infinite"
    raise RunError(
        f"the loss is {name} ({loss}) at step {index}; expected a finite number. The checkpoints are from before it. "
        "Lower optimizer.lr or set trainer.gradient_clip_val; or add '+hooks=nan_guard', which stops before such a "
        "step, names the layer and keeps the step"
    )
