"""Learning rate schedules, each a function of the steps done, so that a resumed run is exact."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from exp.errors import REFUSALS, ConfigError, ErrorDetails, config_error, constructor_error

Unit = Literal["step", "epoch"]
Steps = Annotated[int, "a number of steps", Ge(0)]
Length = Annotated[int, "a number of steps", Ge(1)]


class Constant(LambdaLR):
    """The learning rate as it is, after a linear warm-up.

    warmup_steps: over which it rises; step n of them (from 0) has (n + 1) / (warmup_steps + 1) of the rate.
    """

    def __init__(self, optimizer: Optimizer, *, warmup_steps: Steps = 0) -> None:
        # A function, not an object: LambdaLR would put an object's values into the checkpoint, and a resumed run
        # could then not be made longer.
        super().__init__(optimizer, lambda done: _warmup_factor(done, warmup_steps))


class Cosine(LambdaLR):
    """Linear warm-up, then half a cosine from the learning rate down to end_factor times it.

    With w warm-up steps of T in all, after n steps: (n + 1) / (w + 1) for n < w, else
    e + (1 - e) (1 + cos(pi (n - w) / (T - w))) / 2 (Loshchilov and Hutter, SGDR, eq. 5, one period), and e beyond T.

    total_steps: T; null is the length of the run.
    warmup_steps: w; or as a share of total_steps, warmup_fraction.
    end_factor: e, the share of the learning rate that is left at the end.
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
        total = _known(total_steps)
        warmup = _warmup_steps(total, warmup_steps, warmup_fraction)
        super().__init__(optimizer, lambda done: _cosine_factor(done, total, warmup, end_factor))


class OneCycle(OneCycleLR):
    """torch's OneCycleLR with each group's own learning rate as its peak.

    total_steps: null is the length of the run. The other parameters are torch's.
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
            total_steps=_known(total_steps),
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
    factory: Callable[..., LRScheduler],
    *,
    interval: Unit,
    total_steps: int | None,
    key: str = "scheduler",
    is_part: bool = False,
) -> LRScheduler:
    """The schedule of an optimizer.

    factory: a functools.partial of the schedule's class; where it is made of schedules, with partials of these.
    interval: what one of its steps is: an optimizer step or an epoch.
    total_steps: of the whole run, in that unit; stands in where the schedule takes total_steps and the config leaves
        it null. None where the run has no known end.
    key: of the schedule in the config. is_part: whether another schedule steps it, so that its length is not the run's.
    Raises: ConfigError where the length is needed and not known, or the schedule refuses its values.
    """
    options: dict[str, Any] = {}
    if (detail := contradiction(factory, key=key)) is not None:
        raise ConfigError([detail])
    if needs_total(factory):
        if total_steps is None:
            raise ConfigError([_unknown_length(interval, key=key, is_part=is_part)])
        options["total_steps"] = total_steps
    make = functools.partial(factory, optimizer, **options)
    if "schedulers" in _given(factory):
        parts = [
            build_schedule(
                optimizer, part, interval=interval, total_steps=None, key=f"{key}.schedulers.{index}", is_part=True
            )
            for index, part in enumerate(_given(factory)["schedulers"])
        ]
        # Of the two of torch one takes its parts first.
        make = functools.partial(factory, optimizer=optimizer, schedulers=parts, **options)
    try:
        with warnings.catch_warnings():
            # torch's sequence of schedules steps a part while it is made, and warns of that.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            return make()
    except REFUSALS as error:
        got = f"{_function(factory).__name__} refused its values ({error})"
        known = inspect.signature(_function(factory)).parameters
        tried = None if "schedulers" in _given(factory) else make
        raise ConfigError([constructor_error(error, key=key, known=known, got=got, make=tried)]) from error


# Where torch's optimizers and schedules hold rates, the schedules that another one runs, and what each step changes.
RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
RATES_OF_SCHEDULES = ("base_lrs", "max_lrs", "_last_lr")
NESTED = "_schedulers"
PROGRESS = ("last_epoch", "_step_count", NESTED, *RATES_OF_SCHEDULES)


@dataclass(frozen=True)
class ScheduleState:
    """What a schedule and the groups of its optimizer hold, without the parameters."""

    state: dict[str, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, schedule: LRScheduler) -> ScheduleState:
        groups = [{key: one for key, one in group.items() if key != "params"} for group in _groups(schedule)]
        return cls(copy.deepcopy(schedule.state_dict()), copy.deepcopy(groups))

    def put_into(self, schedule: LRScheduler) -> None:
        schedule.load_state_dict(copy.deepcopy(self.state))
        for group, own in zip(_groups(schedule), self.groups, strict=True):
            group.update(copy.deepcopy(own))


def take_length(schedule: LRScheduler, fresh: ScheduleState) -> bool:
    """Have a restored schedule go on as one of the present length does; torch restores the old length and rate.

    fresh: what the schedule held before its state was restored, from which its steps are done again.
    Returns: whether the length is another one. One that does not show in the state or the rates is the same.
    Raises: ConfigError if something else than the schedule set the rates, which the steps would lose.
    """
    saved = ScheduleState.of(schedule)
    if not _may_be_other(schedule, fresh.state, saved.state):
        return False
    # A checkpoint of an earlier version may have lowered rates: runtime.non_finite=rewind.
    factor = float(saved.groups[0]["initial_lr"] / fresh.groups[0]["initial_lr"])
    groups = [
        {key: one * factor if key in RATES_OF_GROUPS else one for key, one in own.items()} for own in fresh.groups
    ]
    ScheduleState(lowered(fresh.state, factor), groups).put_into(schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(_steps_done(saved.state)):
            schedule.step()
    moved = ScheduleState.of(schedule)
    constant = [key for key, one in fresh.state.items() if key not in PROGRESS and moved.state[key] == one]
    is_other = any(saved.state.get(key) != fresh.state[key] for key in constant)
    if not is_other and _are_close(moved.state["_last_lr"], saved.state["_last_lr"]):
        saved.put_into(schedule)
        return False
    rates = [float(group["lr"]) for group in saved.groups]
    if not _are_close(rates, saved.state["_last_lr"]):
        given = float(saved.state["_last_lr"][0])
        raise config_error(
            "trainer.max_epochs",
            got=f"another length, and a learning rate of {rates[0]:g} where the schedule had set {given:g}",
            expected="the length before: a schedule of another length knows nothing of what else set the rate",
            fix="Or give the schedule a length of its own",
        )
    for group, own, start in zip(_groups(schedule), saved.groups, groups, strict=True):
        # What the schedule leaves alone stays as it was saved.
        group.update(
            {key: one for key, one in own.items() if key not in RATES_OF_GROUPS and group.get(key) == start.get(key)}
        )
    return True


def lowered(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a schedule's state with lower rates, those of schedules in it included."""
    changed: dict[str, Any] = {
        key: [rate * factor for rate in state[key]] for key in RATES_OF_SCHEDULES if key in state
    }
    if NESTED in state:
        changed[NESTED] = [lowered(one, factor) for one in state[NESTED]]
    return {**state, **changed}


def _may_be_other(schedule: LRScheduler, fresh: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a schedule may have another length than the one whose state it was given; the answer costs no step."""
    if isinstance(schedule, LambdaLR):  # whose length is in functions
        rates = [
            base * own(schedule.last_epoch) for base, own in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        return not _are_close(rates, saved["_last_lr"])
    parts = zip(vars(schedule).get(NESTED, ()), fresh.get(NESTED, ()), saved.get(NESTED, ()), strict=True)
    is_other = any(saved.get(key) != one for key, one in fresh.items() if key not in PROGRESS)
    return is_other or any(_may_be_other(*part) for part in parts)


def _steps_done(state: Mapping[str, Any]) -> int:
    return int(state["last_epoch"]) if "last_epoch" in state else _steps_done(state[NESTED][0])


def _are_close(rates: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(rates, others, strict=True))


def _groups(schedule: LRScheduler) -> list[dict[str, Any]]:
    return schedule.optimizer.param_groups


# In which torch's OneCycleLR may be told its length, too.
EPOCHS = ("epochs", "steps_per_epoch")


def needs_total(factory: Callable[..., LRScheduler]) -> bool:
    """Whether the schedule takes total_steps and the config leaves its length open."""
    given = _given(factory)
    takes = "total_steps" in inspect.signature(_function(factory)).parameters
    return takes and all(given.get(name) is None for name in ("total_steps", *EPOCHS))


def contradiction(factory: Callable[..., LRScheduler], *, key: str = "scheduler") -> ErrorDetails | None:
    """A length that is said twice, of which torch would take one in silence; or by half."""
    given = _given(factory)
    said = [name for name in EPOCHS if given.get(name) is not None]
    if not said:
        return None
    place, got = f"{key}.{said[0]}", str(given[said[0]])
    if given.get("total_steps") is not None:
        got = f"{got}, beside total_steps {given['total_steps']}"
        return ErrorDetails(key=place, got=got, expected="one of the two: torch would take total_steps")
    if len(said) < len(EPOCHS):
        other = next(name for name in EPOCHS if name not in said)
        fix = f"Or leave {said[0]} out: the schedule is as long as the run"
        return ErrorDetails(
            key=place, got=f"{got} without {other}", expected="both, whose product is the length", fix=fix
        )
    return None


def _given(factory: Callable[..., LRScheduler]) -> Mapping[str, Any]:
    return factory.keywords if isinstance(factory, functools.partial) else {}


def changes_nothing(factory: Callable[..., LRScheduler]) -> bool:
    """Whether the schedule leaves the learning rate alone, so that no step has to pay for it."""
    if _function(factory) is not Constant:
        return False
    return not _given(factory).get("warmup_steps")


def _function(factory: Callable[..., LRScheduler]) -> Callable[..., LRScheduler]:
    return factory.func if isinstance(factory, functools.partial) else factory


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
                f"warmup_fraction is {warmup_fraction} beside warmup_steps {warmup_steps}; expected one of the two"
            )
        warmup_steps = round(warmup_fraction * total_steps)
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps is {warmup_steps}; expected fewer than the {total_steps} steps of the run")
    return warmup_steps


def _known(total_steps: int | None) -> int:
    if not total_steps:
        raise ValueError(f"total_steps is {total_steps}; expected a number of steps, 1 or more")
    return total_steps


def _unknown_length(interval: Unit, *, key: str, is_part: bool) -> ErrorDetails:
    if is_part:
        got = "null in a part of another schedule, which is not as long as the run"
        return ErrorDetails(key=f"{key}.total_steps", got=got, expected=f"a number of {interval}s")
    limit = "trainer.max_epochs" if interval == "epoch" else "trainer.max_epochs or trainer.max_steps"
    return ErrorDetails(
        key=f"{key}.total_steps",
        got="null, and the length of the run is not known",
        expected=f"a number of {interval}s",
        fix=f"Or set {limit}",
    )
