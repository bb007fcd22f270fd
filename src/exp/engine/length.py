"""How long a run is: its limits, and what they come to in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer

from exp.errors import ConfigError, Fault
from exp.types import SPAN


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that exp keeps itself, because Lightning's own end a resumed run too early.

    max_steps: optimizer steps of the whole run, those before a resume included; None is no limit.
    max_seconds: wall time of training, likewise.
    """

    max_steps: int | None = None
    max_seconds: float | None = None


def take_limits(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], Limits]:
    """Divides the config's trainer node into the arguments of Lightning's Trainer and the limits that are ours.

    With a limit by steps or time and none by epochs, epochs are not limited.

    Raises: ConfigError for a max_time that cannot be read.
    """
    arguments = dict(trainer)
    max_steps, max_time = arguments.pop("max_steps", -1), arguments.pop("max_time", None)
    limits = Limits(
        max_steps=None if max_steps is None or max_steps < 0 else max_steps,
        max_seconds=None if max_time is None else seconds_of(max_time),
    )
    if arguments.get("max_epochs") is None and (limits.max_steps is not None or limits.max_seconds is not None):
        arguments["max_epochs"] = -1
    return arguments, limits


def seconds_of(max_time: float | str | Mapping[str, float] | timedelta) -> float:
    """Seconds of a max_time: a number of them, a time such as 1h30m, or one of Lightning's spellings, which are
    DD:HH:MM:SS and a mapping of days, hours, ...

    Raises: ConfigError.
    """
    try:
        if isinstance(max_time, int | float) and not isinstance(max_time, bool):
            max_time = timedelta(seconds=max_time)
        elif isinstance(max_time, str) and max_time and (found := SPAN.fullmatch(max_time.strip())):
            days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
            max_time = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(max_time, str):
            days, hours, minutes, seconds = (int(part) for part in max_time.strip().split(":"))
            max_time = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(max_time, Mapping):
            max_time = timedelta(**max_time)
        seconds = max_time.total_seconds()
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError([_unreadable(max_time)]) from error
    if seconds < 0:
        raise ConfigError([_unreadable(max_time)])
    return seconds


def _unreadable(max_time: Any) -> Fault:
    return Fault(
        key="trainer.max_time",
        got=repr(max_time),
        expected="seconds, a time such as 1h30m, DD:HH:MM:SS, or a mapping of days, hours, minutes and seconds",
    )


def total_epochs(trainer: Trainer) -> int | None:
    """Epochs of the whole run; None where they are not limited."""
    return None if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs


def epoch_batches(trainer: Trainer, batches: int | None) -> int | None:
    """Global batches of an epoch that the run takes; None where it is not known.

    batches: that the training data has in an epoch; None where it is not known.
    """
    limit = trainer.limit_train_batches
    if batches is not None:
        # Lightning's rule: a whole number counts batches, a fraction is one of the data's.
        return min(limit, batches) if isinstance(limit, int) else int(limit * batches)
    return limit if isinstance(limit, int) else None


def refuse_late_validation(trainer: Trainer, batches: int | None) -> None:
    """Lightning raises a ValueError for a validation that an epoch is too short for.

    batches: as epoch_batches takes it.
    Raises: ConfigError.
    """
    interval, taken = trainer.val_check_interval, epoch_batches(trainer, batches)
    if trainer.check_val_every_n_epoch is None or not isinstance(interval, int) or taken is None or interval <= taken:
        return
    fault = Fault(
        key="trainer.val_check_interval",
        got=f"{interval}, more than the {taken} batches of an epoch",
        expected=f"at most {taken}",
        cure="Add trainer.check_val_every_n_epoch=null to count the batches over all epochs",
    )
    raise ConfigError([fault])


def total_steps(trainer: Trainer, limits: Limits, batches: int | None) -> int | None:
    """Optimizer steps of the whole run; None where it has no known end.

    batches: global batches that the training data has in an epoch; None where it is not known.
    """
    batches = epoch_batches(trainer, batches)
    epochs = total_epochs(trainer)
    known = [steps for steps in (limits.max_steps, trainer.max_steps) if steps is not None and steps >= 0]
    if batches is not None and epochs is not None:
        known.append(math.ceil(batches / trainer.accumulate_grad_batches) * epochs)
    return min(known) if known else None
