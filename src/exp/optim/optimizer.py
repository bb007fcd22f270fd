"""Construction of the optimizer and the schedule for a network. The optimizer is fused if torch supports this."""

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
# The optimizers with fused kernels that support DTensors, which store sharded parameters.
FUSED_IN_SHARDS = ("Adam", "AdamW")


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The settings of an optimizer and its schedule.

    Args:
        optimizer_factory: The class of the optimizer with all its arguments except the parameters.
        groups: Parameter groups, as described in `parameter_groups`. Default: no groups.
        exempt_from_decay: Parameters without weight decay, as described in `parameter_groups`. Default: no parameters.
        schedule_factory: The class of the schedule with all its arguments except the optimizer. None (default): the
            learning rate is constant.
        interval: The unit in which the schedule steps: optimizer steps (`step`, the default) or epochs (`epoch`).
        monitor: The TensorBoard tag of the value that ReduceLROnPlateau uses. Default: None.
        begins_late: Whether some parameters are unfrozen in a later epoch, and get their first gradient in this epoch.
            Default: false.
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
        """Return the optimizer and the schedule for the parameters of a network.

        Args:
            network: The network. The parameters must be on their final device.
            total_steps: The number of optimizer steps of the whole run, including the steps before a resume. None if
                unknown.
            total_epochs: The number of epochs of the whole run, for a schedule that steps once per epoch. Default:
                None.
            parameters: Patterns of the parameters to include, as described in `parameter_groups`.
            shared: Whether other optimizers use the same groups, as described in `parameter_groups`.

        Returns:
            The optimizer, and the schedule. The schedule is None if the learning rate is constant.

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
        """Return the optimizer for the trained parameters of a network. The method `make` describes the arguments."""
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
            # In torch 2.13, other fused kernels do not support DTensors.
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
        """Return the reason why a fused kernel of torch 2.13 does not work. Return None if the kernel works.

        Args:
            network: The network.
            trained: The parameters of the optimizer.
            momenta: The option `momentum` of each parameter group. None for a group without this option.

        Returns:
            Two texts: the cause in this run, and the limitation of torch.
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
    """Return the ids of the parameters with sparse gradients. These are the weights of embeddings with sparse=True."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in network.modules() if isinstance(module, kinds) and module.sparse}


def has_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether torch has fused kernels for the devices and dtypes of all parameters."""
    return all(one.device.type in FUSED_DEVICES and torch.is_floating_point(one) for one in parameters)


def _wants_fused(factory: functools.partial[Optimizer]) -> bool:
    """Return whether an optimizer should use the fused kernel if torch has such a kernel.

    This is the case if the option `fused` is null and the options `foreach` and `differentiable` are not set.
    """
    if "fused" not in inspect.signature(factory.func).parameters:
        return False
    chosen = factory.keywords
    return chosen.get("fused") is None and not chosen.get("foreach") and not chosen.get("differentiable")


def _option_errors(
    factory: functools.partial[Optimizer], groups: Sequence[Mapping[str, object]], *, exempt: Sequence[str]
) -> Iterator[ErrorDetails]:
    """Yield an error for each option of a parameter group that the optimizer does not have.

    torch itself ignores unknown options of a group.
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
