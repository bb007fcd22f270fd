"""How a network is optimised, as one value: handed to the engine early, made into an optimizer when devices are set."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.optim.optimizer import build_optimizer
from exp.optim.schedules import Interval, build_schedule, changes_nothing


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Optimizer and schedule, not made yet.

    optimizer_factory: the optimizer's class with its options, all but the parameters.
    groups, exempt_from_decay: see exp.optim.groups.parameter_groups.
    schedule_factory: the schedule's class with its options, all but the optimizer; None for a fixed learning rate.
    interval: whether the schedule steps with every optimizer step or with every epoch.
    monitor: the tag that a schedule on plateau watches.
    """

    optimizer_factory: functools.partial[Optimizer]
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exempt_from_decay: Sequence[str] = ()
    schedule_factory: functools.partial[LRScheduler] | None = None
    interval: Interval = "step"
    monitor: str | None = None

    def make(
        self,
        network: nn.Module,
        *,
        total_steps: int | None,
        total_epochs: int | None = None,
        parameters: Sequence[str] | None = None,
        shared: bool = False,
    ) -> tuple[Optimizer, LRScheduler | None]:
        """The optimizer of the network's parameters where they lie now, and its schedule.

        total_steps: optimizer steps of the whole run, those before a resume included; None if it has no known end.
        total_epochs: likewise in epochs, for a schedule with interval epoch.
        parameters, shared: of an optimizer for a part of the network, see exp.optim.groups.parameter_groups.
        Returns: no schedule where it would leave the learning rate alone.
        Raises: ConfigError.
        """
        optimizer = build_optimizer(
            network,
            self.optimizer_factory,
            groups=self.groups,
            exempt_from_decay=self.exempt_from_decay,
            parameters=parameters,
            shared=shared,
        )
        if self.schedule_factory is None or changes_nothing(self.schedule_factory):
            return optimizer, None
        total = total_steps if self.interval == "step" else total_epochs
        return optimizer, build_schedule(optimizer, self.schedule_factory, interval=self.interval, total_steps=total)
