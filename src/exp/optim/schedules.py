"""Learning rate schedules.

The learning rate is a function of the number of steps, so that a resumed run has exactly the same rates.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from exp.errors import REFUSALS, ConfigError, config_error, constructor_error

Unit = Literal["step", "epoch"]
Steps = Annotated[int, "a number of steps", Ge(0)]
Length = Annotated[int, "a number of steps", Ge(1)]
# The state dict of a schedule, or a parameter group of an optimizer.
State = dict[str, Any]


class Constant(LambdaLR):
    """A constant learning rate after a linear warm-up.

    Args:
        optimizer: The optimizer.
        warmup_steps: The number of warm-up steps, w. Default: 0. In warm-up step n, the factor of the learning rate is
            (n + 1) / (w + 1). The first step has n = 0.
    """

    def __init__(self, optimizer: Optimizer, *, warmup_steps: Steps = 0) -> None:
        # Pass a function instead of a callable object. LambdaLR saves the attributes of an object in a checkpoint, so a
        # resumed run could not have another length.
        super().__init__(optimizer, lambda done: _warmup_factor(done, warmup_steps))


class Cosine(LambdaLR):
    """Cosine decay of the learning rate after a linear warm-up.

    The learning rate decreases along half a cosine to end_factor times its maximum. For w warm-up steps and T steps in
    total, the factor of the learning rate after n steps is

        (n + 1) / (w + 1)                                     for n < w
        e + (1 - e) (1 + cos(pi (n - w) / (T - w))) / 2       for w <= n < T
        e                                                     for n >= T

    where e is end_factor. This is equation 5 of Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm
    Restarts", for a single period.

    Args:
        optimizer: The optimizer.
        total_steps: The total number of steps, T. If null (default) in the config, exp sets the length of the run.
        warmup_steps: The number of warm-up steps, w. Default: 0.
        warmup_fraction: The number of warm-up steps as a fraction of total_steps, from 0 to 1. Default: None. Must not
            be set together with warmup_steps.
        end_factor: The factor at the end, e, from 0 to 1. Default: 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: Length | None = None,
        warmup_steps: Steps = 0,
        warmup_fraction: Annotated[float, "a share of the run", Interval(ge=0, lt=1)] | None = None,
        end_factor: Annotated[float, Interval(ge=0, le=1)] = 0.0,
    ) -> None:
        total = _require_length(total_steps)
        warmup = _warmup_steps(total, warmup_steps, warmup_fraction)
        super().__init__(optimizer, lambda done: _cosine_factor(done, total, warmup, end_factor))


class OneCycle(OneCycleLR):
    """torch's OneCycleLR, in which the maximum rate of a parameter group is the learning rate of the group.

    torch's documentation of OneCycleLR describes the parameters. If total_steps is null in the config, exp sets the
    length of the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: Length | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:
        super().__init__(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=_require_length(total_steps),
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
        )


def build_schedule(
    optimizer: Optimizer,
    factory: functools.partial[LRScheduler],
    *,
    interval: Unit,
    total_steps: int | None,
    key: str = "scheduler",
    is_part: bool = False,
) -> LRScheduler:
    """Return the schedule of an optimizer.

    Args:
        optimizer: The optimizer.
        factory: The class of the schedule with its arguments, as a functools.partial. If the argument `schedulers` is
            set, its elements are also partial objects.
        interval: The unit in which the schedule steps: `step` for optimizer steps, or `epoch`.
        total_steps: The length of the run in this unit, for a schedule with total_steps=null. None if unknown.
        key: The config key of the schedule. Default: scheduler.
        is_part: Whether the schedule is a part of another schedule, and may be shorter than the run. Default: false.

    Raises:
        ConfigError: The schedule needs a length that is unknown, or the schedule rejects its arguments.
    """
    given = factory.keywords
    if given.get("total_steps") is not None and given.get("epochs") is not None:
        got = f"{given['epochs']}, and total_steps is {given['total_steps']}"
        raise config_error(f"{key}.epochs", got=got, expected="only one of the two, because torch would ignore epochs")
    options: dict[str, int] = {}
    if needs_total(factory):
        if total_steps is None:
            raise _unknown_length(interval, key=f"{key}.total_steps", is_part=is_part)
        options["total_steps"] = total_steps
    make = functools.partial(factory, optimizer, **options)
    if "schedulers" in given:
        parts = [
            build_schedule(
                optimizer, part, interval=interval, total_steps=None, key=f"{key}.schedulers.{index}", is_part=True
            )
            for index, part in enumerate(given["schedulers"])
        ]
        # Pass the arguments by name, because SequentialLR and ChainedScheduler have different orders of arguments.
        make = functools.partial(factory, optimizer=optimizer, schedulers=parts, **options)
    try:
        with warnings.catch_warnings():
            # The constructor of SequentialLR steps the parts of the schedule, so torch warns.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            return make()
    except REFUSALS as error:
        got = f"{factory.func.__name__} refused its values ({error})"
        known = inspect.signature(factory.func).parameters
        tried = None if "schedulers" in given else make
        raise ConfigError([constructor_error(error, key=key, known=known, got=got, make=tried)]) from error


# Attributes of torch's schedules that store the length of the schedule.
LENGTHS = ("total_steps", "T_max", "total_iters")


def lengths_of(schedule: LRScheduler) -> State:
    """Return the attributes in LENGTHS that the state of a schedule contains, with their values."""
    state = schedule.state_dict()
    return {name: state[name] for name in LENGTHS if name in state}


def take_length(schedule: LRScheduler, lengths: State) -> bool:
    """Adapt the learning rates of a restored schedule to the current length of the run.

    torch restores the rates for the length before the resume. The rates can be adapted for a LambdaLR, such as Cosine.

    Args:
        schedule: The schedule with its restored state.
        lengths: The result of `lengths_of` before the state was restored.

    Returns:
        True if the rates have changed.

    Raises:
        ConfigError: The length of the run has changed, but the rates cannot be adapted. This is the case if the
            schedule stores the length, or if other code has set the rates.
    """
    name, before = type(schedule).__name__, schedule.get_last_lr()
    if isinstance(schedule, LambdaLR):
        pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        rates, groups = [base * factor(schedule.last_epoch) for base, factor in pairs], schedule.optimizer.param_groups
        if _are_close(rates, before):
            return False
        if _are_close([group["lr"] for group in groups], before):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            schedule.load_state_dict({**schedule.state_dict(), "_last_lr": rates})
            return True
        reason = f"other code than {name} has set the learning rate"
    elif lengths_of(schedule) == lengths:
        return False
    else:
        reason = f"{name} stores its length in its state"
    raise config_error(
        "trainer.max_epochs",
        got="the run has another length than before the resume",
        expected=f"the same length, because {reason}",
        fix="A longer run needs a schedule that is a function of the steps, such as scheduler=cosine",
    )


def _are_close(rates: Sequence[float | Tensor], others: Sequence[float | Tensor]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(rates, others, strict=True))


def needs_total(factory: functools.partial[LRScheduler]) -> bool:
    """Return whether exp must set total_steps of a schedule, because the config does not set a length."""
    given = factory.keywords
    takes = "total_steps" in inspect.signature(factory.func).parameters
    # In torch's OneCycleLR, epochs and steps_per_epoch may set the length instead of total_steps.
    return takes and all(given.get(name) is None for name in ("total_steps", "epochs", "steps_per_epoch"))


def changes_nothing(factory: functools.partial[LRScheduler]) -> bool:
    """Return whether a schedule never changes the learning rate. Such a schedule is not needed."""
    return factory.func is Constant and not factory.keywords.get("warmup_steps")


def _warmup_factor(done: int, warmup_steps: int) -> float:
    return (done + 1) / (warmup_steps + 1) if done < warmup_steps else 1.0


def _cosine_factor(done: int, total_steps: int, warmup_steps: int, end_factor: float) -> float:
    if done < warmup_steps:
        return _warmup_factor(done, warmup_steps)
    if done >= total_steps:
        return end_factor
    progress = (done - warmup_steps) / (total_steps - warmup_steps)
    return end_factor + (1.0 - end_factor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _warmup_steps(total_steps: int, warmup_steps: int, warmup_fraction: float | None) -> int:
    if warmup_fraction is not None:
        if warmup_steps:
            raise ValueError(
                f"warmup_fraction is {warmup_fraction}, and warmup_steps is {warmup_steps}; expected one of the two"
            )
        warmup_steps = round(warmup_fraction * total_steps)
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps is {warmup_steps}; expected fewer than the {total_steps} steps of the run")
    return warmup_steps


def _require_length(total_steps: int | None) -> int:
    if not total_steps:
        raise ValueError(f"total_steps is {total_steps}; expected a number of steps, 1 or more")
    return total_steps


def _unknown_length(interval: Unit, *, key: str, is_part: bool) -> ConfigError:
    got, fix = "null, in a part of another schedule, which may be shorter than the run", None
    if not is_part:
        limit = "trainer.max_epochs" if interval == "epoch" else "trainer.max_epochs or trainer.max_steps"
        got, fix = "null, and the length of the run is not known", f"Or set {limit}"
    return config_error(key, got=got, expected=f"a number of {interval}s", fix=fix)
