"""Build a network's optimizer, fused where torch has that, and its schedule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.errors import ConfigError, ErrorDetails, config_error, constructor_error, raise_errors
from exp.optim.parameter_groups import Groups, parameter_groups
from exp.optim.schedules import Unit, build_schedule, changes_nothing

# Devices whose optimizers torch 2.13 has as one kernel.
FUSED_DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
# Of DTensors: torch 2.13 has no sharding strategy for the other kernels.
FUSED_IN_SHARDS = ("Adam", "AdamW")


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Optimizer and schedule, not made yet.

    optimizer_factory: the optimizer's class with its options, all but the parameters.
    groups, exempt_from_decay: see parameter_groups.
    schedule_factory: the schedule's class with its options, all but the optimizer; None for a fixed learning rate.
    interval: whether the schedule steps with every optimizer step or with every epoch.
    monitor: the tag that a schedule on plateau watches.
    begins_late: whether some parameters have their first gradient in a later epoch than others.
    """

    optimizer_factory: functools.partial[Optimizer]
    groups: Groups = field(default_factory=dict)
    exempt_from_decay: Sequence[str] = ()
    schedule_factory: functools.partial[LRScheduler] | None = None
    interval: Unit = "step"
    monitor: str | None = None
    begins_late: bool = False

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
        parameters, shared: of an optimizer for a part of the network, see parameter_groups.
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
            begins_late=self.begins_late,
        )
        if self.schedule_factory is None or changes_nothing(self.schedule_factory):
            return optimizer, None
        total = total_steps if self.interval == "step" else total_epochs
        return optimizer, build_schedule(optimizer, self.schedule_factory, interval=self.interval, total_steps=total)


def build_optimizer(
    network: nn.Module,
    factory: functools.partial[Optimizer],
    *,
    groups: Groups,
    exempt_from_decay: Sequence[str],
    parameters: Sequence[str] | None = None,
    shared: bool = False,
    begins_late: bool = False,
) -> Optimizer:
    """The optimizer of a network's trained parameters.

    factory: the optimizer's class with its options, all but the parameters.
    groups, exempt_from_decay, parameters, shared: see parameter_groups. begins_late: see Optimization.
    Raises: ConfigError where the groups do not fit the network or the optimizer refuses its options.
    """
    split = parameter_groups(
        network, groups=groups, exempt_from_decay=exempt_from_decay, parameters=parameters, shared=shared
    )
    _check_options(factory, split, decay=bool(exempt_from_decay))
    options = dict(factory.keywords)
    taken = [parameter for group in split for parameter in group["params"]]
    obstacles = _obstacles(network, taken, factory, split, begins_late=begins_late)
    if _wants_fused(factory):
        options["fused"] = (has_fused(taken) and _has_fused_in_shards(taken, factory) and not obstacles) or None
    elif options.get("fused") and obstacles:
        got, reason = obstacles[0]
        raise config_error("optimizer.fused", got=f"true {got}", expected=f"null or false: {reason}")
    make = functools.partial(factory.func, split, *factory.args, **options)
    try:
        return make()
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{_name(factory)} refused its values ({error})"
        raise ConfigError(
            [constructor_error(error, key="optimizer", known=factory.keywords, got=got, make=make)]
        ) from error


def _obstacles(
    network: nn.Module,
    taken: Sequence[nn.Parameter],
    factory: functools.partial[Optimizer],
    split: Sequence[Mapping[str, object]],
    *,
    begins_late: bool,
) -> list[tuple[str, str]]:
    """Return why the fused kernel would make wrong steps or none: what there is, and what torch 2.13 lacks."""
    half, is_sgd = (torch.float16, torch.bfloat16), _name(factory) == "SGD"
    momenta = [factory.keywords.get("momentum"), *(group.get("momentum") for group in split)]
    found = []
    if is_sgd and any(one.device.type == "cpu" and one.dtype in half for one in taken):
        found.append(("for parameters in half precision", "torch's fused SGD on CPU makes wrong steps there"))
    if sparse_parameters(network) & {id(parameter) for parameter in taken}:
        found.append(("with a layer that has sparse=true", "no fused kernel takes sparse gradients"))
    if is_sgd and begins_late and any(momenta):
        found.append(("with freeze.unfreeze", "torch's fused SGD takes momenta that begin in one step"))
    return found


def sparse_parameters(network: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse: those of embeddings with sparse=True."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in network.modules() if isinstance(module, kinds) and module.sparse}


def has_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch can update all of these in one kernel. Seen in torch 2.13: cpu, cuda, mps, xpu and others."""
    return all(
        parameter.device.type in FUSED_DEVICES and torch.is_floating_point(parameter) for parameter in parameters
    )


def _has_fused_in_shards(parameters: Sequence[nn.Parameter], factory: functools.partial[Optimizer]) -> bool:
    return _name(factory) in FUSED_IN_SHARDS or not any(isinstance(parameter, DTensor) for parameter in parameters)


def _wants_fused(factory: functools.partial[Optimizer]) -> bool:
    """`fused: null` stands for "where torch has it"; an explicit foreach or differentiable excludes it."""
    if "fused" not in inspect.signature(factory.func).parameters:
        return False
    chosen = factory.keywords
    return chosen.get("fused") is None and not chosen.get("foreach") and not chosen.get("differentiable")


def _check_options(
    factory: functools.partial[Optimizer], split: Sequence[Mapping[str, object]], *, decay: bool
) -> None:
    """torch accepts any key in a group and ignores the unknown in silence."""
    known = list(inspect.signature(factory.func).parameters)[1:]
    errors = [
        ErrorDetails(
            key=f"optimizer.groups.{group['name']}.{option}",
            got=f"an option that {_name(factory)} does not have",
            expected=f"one of {', '.join(known)}",
        )
        for group in split
        for option in group
        if option not in ("params", "name", "weight_decay", *known)
    ]
    if decay and "weight_decay" not in known:
        errors.append(
            ErrorDetails(
                key="optimizer.exempt_from_decay",
                got=f"{_name(factory)} has no weight_decay",
                expected="an optimizer that decays weights, or an empty list",
            )
        )
    raise_errors(errors)


def _name(factory: functools.partial[Optimizer]) -> str:
    return factory.func.__name__
