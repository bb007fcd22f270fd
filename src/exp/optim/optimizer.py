"""Build a network's optimizer, fused where torch has that, and its schedule.

Private name of torch (seen in 2.13): torch.utils._foreach_utils._get_fused_kernels_supported_devices.
"""

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
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from exp.errors import ConfigError, Fault, refusal
from exp.optim.parameter_groups import Groups, parameter_groups
from exp.optim.schedules import Unit, build_schedule, changes_nothing

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
    is_right = _is_right_in_half(taken, factory)
    is_even = not (begins_late and _keeps_momentum(factory, split))
    # No fused kernel takes sparse gradients (seen in torch 2.13).
    is_dense = not sparse_parameters(network) & {id(parameter) for parameter in taken}
    if _wants_fused(factory):
        has_kernel = has_fused(taken) and _has_fused_in_shards(taken, factory)
        options["fused"] = (has_kernel and is_right and is_even and is_dense) or None
    elif options.get("fused") and not is_right:
        expected = "null or false: torch's fused SGD on CPU makes wrong steps there"
        raise ConfigError(
            [Fault(key="optimizer.fused", got="true for parameters in half precision", expected=expected)]
        )
    elif options.get("fused") and not is_dense:
        expected = "null or false: no fused kernel takes sparse gradients"
        raise ConfigError(
            [Fault(key="optimizer.fused", got="true with a layer that has sparse=true", expected=expected)]
        )
    elif options.get("fused") and not is_even:
        expected = "null or false: torch's fused SGD takes momenta that begin in one step"
        raise ConfigError([Fault(key="optimizer.fused", got="true with freeze.unfreeze", expected=expected)])
    make = functools.partial(factory.func, split, *factory.args, **options)
    try:
        return make()
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{_name(factory)} refused its values ({error})"
        raise ConfigError([refusal(error, key="optimizer", known=factory.keywords, got=got, make=make)]) from error


def sparse_parameters(network: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse: those of embeddings with sparse=True."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in network.modules() if isinstance(module, kinds) and module.sparse}


def has_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch can update all of these in one kernel. Seen in torch 2.13: cpu, cuda, mps, xpu and others."""
    devices = _get_fused_kernels_supported_devices()
    return all(parameter.device.type in devices and torch.is_floating_point(parameter) for parameter in parameters)


def _has_fused_in_shards(parameters: Sequence[nn.Parameter], factory: functools.partial[Optimizer]) -> bool:
    return _name(factory) in FUSED_IN_SHARDS or not any(isinstance(parameter, DTensor) for parameter in parameters)


def _is_right_in_half(parameters: Sequence[nn.Parameter], factory: functools.partial[Optimizer]) -> bool:
    """torch 2.13's fused SGD on CPU is wrong by the size of the step itself in bfloat16 and float16."""
    half = (torch.float16, torch.bfloat16)
    return _name(factory) != "SGD" or not any(p.device.type == "cpu" and p.dtype in half for p in parameters)


def _keeps_momentum(factory: functools.partial[Optimizer], split: Sequence[Mapping[str, object]]) -> bool:
    """Of SGD, whose fused kernel wants the momenta of all parameters of a group, or of none (seen in torch 2.13)."""
    momenta = [factory.keywords.get("momentum"), *(group.get("momentum") for group in split)]
    return _name(factory) == "SGD" and any(momenta)


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
    faults = [
        Fault(
            key=f"optimizer.groups.{group['name']}.{option}",
            got=f"an option that {_name(factory)} does not have",
            expected=f"one of {', '.join(known)}",
        )
        for group in split
        for option in group
        if option not in ("params", "name", "weight_decay", *known)
    ]
    if decay and "weight_decay" not in known:
        faults.append(
            Fault(
                key="optimizer.exempt_from_decay",
                got=f"{_name(factory)} has no weight_decay",
                expected="an optimizer that decays weights, or an empty list",
            )
        )
    if faults:
        raise ConfigError(faults)


def _name(factory: functools.partial[Optimizer]) -> str:
    return factory.func.__name__
