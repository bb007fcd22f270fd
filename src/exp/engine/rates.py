"""Learning rates as they are logged: a rate that stands still is one point a write, not one a step."""

from __future__ import annotations

from torch.optim import Optimizer

from exp.optim.phase import rate_names


class Rates:
    """Remembers what each optimizer's learning rates were last."""

    def __init__(self) -> None:
        self._last: dict[str | None, list[float]] = {}

    def of(self, optimizer: Optimizer, *, phase: str | None, is_written: bool) -> dict[str, float]:
        """The rates by tag, where they have changed or the step is one that is written; else nothing.

        phase: whose optimizer it is; None where there is one alone.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        if rates == self._last.get(phase) and not is_written:
            return {}
        self._last[phase] = rates
        names = rate_names(optimizer, phase=phase)
        return {f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
