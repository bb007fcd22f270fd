"""The message with which nan_guard ends a run, from the findings of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exp.hooks.step_trace import Trace


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The finding of one rank.

    Args:
        loss: The first loss that is not finite; 0.0 if all are finite.
        trace: The step, run again on this rank alone. None if it could not be run.
        path: File with the step's batches, or None.
        problems: Reasons why a file or a trace is missing, in sentences.
    """

    loss: float
    trace: Trace | None
    path: str | None
    problems: Sequence[str]

    @property
    def is_bad(self) -> bool:
        return not math.isfinite(self.loss) or (self.trace is not None and self.trace.is_bad)


def message(index: int, phase: str | None, findings: Sequence[Finding]) -> str:
    """Return the message of all ranks, in their order, on an optimizer step. It names the first bad rank."""
    count = len(findings)
    rank = next((n for n, one in enumerate(findings) if one.is_bad), 0)
    one = findings[rank]
    what = f"the loss is {one.loss:g}" if not math.isfinite(one.loss) else "a gradient is not finite"
    of_phase = "" if phase is None else f" in phase {phase}"
    on_rank = f" on rank {rank} of {count}" if count > 1 else ""
    lines = [
        f"step {index}: {what}{of_phase}{on_rank}; the run ends before the optimizer's step, with the weights as they "
        "were before it."
    ]
    if one.trace is not None and one.trace.where:
        lines.append(one.trace.where)
    elif any(other.trace is not None and not other.trace.is_bad for other in findings):
        ranks = "on each rank alone: it is their mean that is not" if count > 1 else "uncompiled and alone"
        lines.append(f"Run again, the step is finite {ranks}.")
    lines += one.problems
    if one.path is not None:
        others = " (each rank has its own)" if count > 1 else ""
        lines.append(f"Its batches are in {one.path}{others}.")
    return "\n".join(lines)
