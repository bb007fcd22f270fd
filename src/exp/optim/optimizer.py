"""Construction of a network's optimizer and its schedule. The optimizer is fused if torch supports it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.errors import (
    ConfigError,
    ErrorDetails,
    config_error,
    constructor_error,
    not_supported_with,
    raise_errors,
    unknown_key,
)
from exp.optim.parameter_groups import Groups, parameter_groups
from exp.optim.schedules import Unit, build_schedule, changes_nothing

# The devices on which torch 2.13 has fused optimizers.
FUSED_DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
# The optimizers with fused kernels that support DTensors.
FUSED_IN_SHARDS = ("Adam", "AdamW")


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The settings of an optimizer and its schedule.

    Args:
        optimizer_factory: The optimizer's class with its options, except the parameters.
        groups: See parameter_groups.
        exempt_from_decay: See parameter_groups.
        schedule_factory: The schedule's class with its options, except the optimizer; None for a constant learning
            rate.
        interval: The unit in which the schedule steps: an optimizer step or an epoch.
        monitor: The tag of the metric that ReduceLROnPlateau uses.
        begins_late: Whether a parameter is unfrozen in a later epoch, and gets its first gradient in that epoch.
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
        """Return the optimizer and the schedule of a network's parameters.

        The parameters must be on their final device.

        Args:
            network: The network.
            total_steps: The number of optimizer steps of the whole run, including those before a resume; None if
                unknown.
            total_epochs: The number of epochs of the whole run, for a schedule that steps once per epoch.
            parameters: See parameter_groups.
            shared: See parameter_groups.

        Returns:
            The optimizer, and the schedule. The schedule is None if it would never change the learning rate.

        Raises:
            ConfigError: The groups do not match the network, or the optimizer or schedule rejects its options.
        """
        optimizer = self.make_optimizer(network, parameters=parameters, shared=shared)
        if self.schedule_factory is None or changes_nothing(self.schedule_factory):
            return optimizer, None
        total = total_steps if self.interval == "step" else total_epochs
        return optimizer, build_schedule(optimizer, self.schedule_factory, interval=self.interval, total_steps=total)

    def make_optimizer(
        self, network: nn.Module, *, parameters: Sequence[str] | None = None, shared: bool = False
    ) -> Optimizer:
        """Return the optimizer of a network's trained parameters; see `make` for the arguments."""
        exempt, factory = self.exempt_from_decay, self.optimizer_factory
        groups = parameter_groups(
            network, groups=self.groups, exempt_from_decay=exempt, parameters=parameters, shared=shared
        )
        name = factory.func.__name__
        raise_errors(_option_errors(factory, groups, exempt=exempt))
        options = dict(factory.keywords)
        trained = [parameter for group in groups for parameter in group["params"]]
        obstacle = self._obstacle(network, trained, [group.get("momentum") for group in groups])
        if _wants_fused(factory):
            # torch 2.13 has no sharding strategy for the other kernels.
            in_shards = name in FUSED_IN_SHARDS or not any(isinstance(one, DTensor) for one in trained)
            options["fused"] = (has_fused(trained) and in_shards and obstacle is None) or None
        elif options.get("fused") and obstacle is not None:
            got, reason = obstacle
            raise config_error("optimizer.fused", got=f"true {got}", expected=f"null or false: {reason}")
        make = functools.partial(factory.func, groups, *factory.args, **options)
        try:
            return make()
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{name} refused its values ({error})"
            raise ConfigError(
                [constructor_error(error, key="optimizer", known=factory.keywords, got=got, make=make)]
            ) from error

    def _obstacle(
        self, network: nn.Module, trained: Sequence[nn.Parameter], momenta: Sequence[object]
    ) -> tuple[str, str] | None:
        """Return the reason why the fused kernel of torch 2.13 would fail; None if it works.

        Returns:
            The cause in this run, and the limitation of torch.
        """
        half, factory = (torch.float16, torch.bfloat16), self.optimizer_factory
        is_sgd = factory.func.__name__ == "SGD"
        if is_sgd and any(one.device.type == "cpu" and one.dtype in half for one in trained):
            return "for parameters in half precision", "torch's fused SGD on a CPU computes wrong steps for them"
        if sparse_parameters(network) & {id(parameter) for parameter in trained}:
            return "with a layer that has sparse=true", "fused optimizers do not support sparse gradients"
        if is_sgd and self.begins_late and any([factory.keywords.get("momentum"), *momenta]):
            return "with freeze.unfreeze", "torch's fused SGD needs the momenta of all parameters from the same step on"
        return None


def sparse_parameters(network: nn.Module) -> set[int]:
    """Return the ids of the parameters with sparse gradients, which embeddings with sparse=True have."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in network.modules() if isinstance(module, kinds) and module.sparse}


def has_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether torch has a fused kernel for all of these parameters, by device and dtype."""
    return all(
        parameter.device.type in FUSED_DEVICES and torch.is_floating_point(parameter) for parameter in parameters
    )


def _wants_fused(factory: functools.partial[Optimizer]) -> bool:
    """Return whether to use the fused kernel if torch has it.

    This is the case if `fused` is null, and neither foreach nor differentiable is set.
    """
    if "fused" not in inspect.signature(factory.func).parameters:
        return False
    chosen = factory.keywords
    return chosen.get("fused") is None and not chosen.get("foreach") and not chosen.get("differentiable")


def _option_errors(
    factory: functools.partial[Optimizer], groups: Sequence[Mapping[str, object]], *, exempt: Sequence[str]
) -> Iterator[ErrorDetails]:
    """Yield an error for each option of a group that the optimizer does not have.

    Without this check, torch would ignore unknown options of a group.
    """
    known = list(inspect.signature(factory.func).parameters)[1:]
    name = factory.func.__name__
    for group in groups:
        for option in group:
            if option not in ("params", "name", "weight_decay", *known):
                yield unknown_key(f"optimizer.groups.{group['name']}.{option}", known, holder=name)
    if exempt and "weight_decay" not in known:
        key, expected = "optimizer.exempt_from_decay", f"an empty list: {name} has no weight_decay"
        yield not_supported_with(key, list(exempt), name, expected)
