"""Step each schedule through its run, without a step of training: it may neither fail nor leave a rate below 0."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from exp.errors import REFUSALS, ConfigError, Fault, guilty_parameter
from exp.optim.optimizer import Optimization
from exp.optim.schedules import build_schedule, changes_nothing, needs_total
from exp.spelling import show

# Steps that are looked at: of a longer run the first.
MOST = 2_000
EXPECTED = "a value with which the schedule lasts through the run and no rate is below 0"


def rate_faults(
    optimization: Optimization, optimizer: Optimizer, *, key: str, steps: Callable[[], int | None], epochs: int | None
) -> Iterator[Fault]:
    """The fault of a schedule that would fail in the run, or train upwards, at the parameter that makes it so.

    optimizer: as it was made; its rates are changed. steps, epochs: of the run; None where it has no known end. For the
        steps the data are asked, and only where the schedule counts steps and is not told how many there are.
    """
    factory = optimization.schedule_factory
    if factory is None or changes_nothing(factory):
        return
    length = MOST if needs_total(factory) else steps() if optimization.interval == "step" else epochs
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    def stepped(**values: Any) -> str | None:
        for group, first in zip(optimizer.param_groups, groups, strict=True):
            group.update({**first, "lr": first.get("initial_lr", first["lr"])})
            group.pop("initial_lr", None)
        changed = functools.partial(factory, **values)
        try:
            made = build_schedule(optimizer, changed, interval=optimization.interval, total_steps=length or MOST)
        except ConfigError as error:
            return str(error.faults[0])
        return _trouble(made, optimizer, length=length)

    trouble = stepped()
    if trouble is None:
        return
    guilty = guilty_parameter(stepped, factory, accepts=lambda told: told is None)
    place = key if guilty is None else f"{key}.{guilty}"
    value = factory.func.__name__ if guilty is None else show(factory.keywords[guilty])
    yield Fault(key=place, got=f"{value}, with which {trouble}", expected=EXPECTED)


def _trouble(schedule: LRScheduler, optimizer: Optimizer, *, length: int | None) -> str | None:
    """What goes wrong in a run of so many steps; where that is not known, in the first few."""
    if isinstance(schedule, OneCycleLR) and length is not None and schedule.total_steps < length:
        return f"it ends after {schedule.total_steps} steps, and the run has {length}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule that steps before its optimizer
        for step in range(1, min(MOST, length or 3)):
            try:
                schedule.step(1.0) if isinstance(schedule, ReduceLROnPlateau) else schedule.step()
            except REFUSALS as error:
                return f"step {step} ends with {type(error).__name__}: {error}"
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            wrong = [rate for rate in rates if not math.isfinite(rate) or rate < 0]
            if wrong:
                return f"the learning rate is {wrong[0]:g} at step {step}"
    return None
