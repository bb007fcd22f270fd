"""What a run cannot do while parts of its weights lie in several ranks, said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exp.errors import Fault
from exp.spelling import among

if TYPE_CHECKING:
    from torch import nn

    from exp.strategies.strategy import Planned

# What these do to a number depends on that number's own history alone, so that it may be done to parts of a weight.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop",
)  # fmt: skip
# Of Lightning's callbacks: they copy the module, replace its weights, or change what the optimizer holds.
REPLACING = (
    "StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning", "BackboneFinetuning",
    "LambdaFinetuning", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip


def sharding_faults(planned: Planned, *, name: str, meets: frozenset[str] = frozenset()) -> list[Fault]:
    """An optimizer that looks at whole weights, and kinds of steps that were not seen to be right on parts.

    name: of the strategy, for the messages.
    meets: what an objective may need of it beside one forward and one backward.
    """
    faults = [*_optimizer_faults(planned.config["optimizer"], name), *_group_faults(planned.config, name)]
    faults += _callback_faults(planned.config["callbacks"], name)
    unmet = planned.needs - meets
    if unmet:
        got = f"terms that need {', '.join(sorted(unmet))}, with strategy={name}"
        expected = "terms of one forward and one backward" + (
            f", or that need {', '.join(sorted(meets))}" if meets else ""
        )
        faults.append(Fault(key="objective", got=got, expected=expected, cure="Or write strategy=ddp"))
    return faults


def _optimizer_faults(optimizer: Mapping[str, Any], name: str) -> list[Fault]:
    package, _, kind = str(optimizer["_target_"]).rpartition(".")
    if package.startswith("torch.optim") and kind in ELEMENTWISE:
        return []
    reason = {
        "LBFGS": "it searches along all weights together",
        "Adafactor": "it keeps sums over whole rows and columns",
        "Muon": "it makes whole matrices orthogonal",
        "SparseAdam": "it takes sparse gradients",
    }.get(kind, "nothing says that it treats each number of a weight by itself")
    return [
        Fault(
            key="optimizer._target_",
            got=f"{kind} with strategy={name}: {reason}, and each rank has a part",
            expected=f"one of {', '.join(ELEMENTWISE)} of torch.optim",
            cure="Or write strategy=ddp",
        )
    ]


def _group_faults(config: Mapping[str, Any], name: str) -> list[Fault]:
    """Steps of several backwards, and compiled ones."""
    faults = []
    if config.get("phases"):
        got = f"{among(config['phases'])} with strategy={name}"
        expected = "none: gradients of parts are put together once a step"
        faults.append(Fault(key="phases", got=got, expected=expected, cure="Or write strategy=ddp"))
    if config["runtime"].get("compile"):
        got = f"true with strategy={name}"
        expected = "false: a compiled network was not seen to gather its parts in time"
        faults.append(Fault(key="runtime.compile", got=got, expected=expected, cure="Or write strategy=ddp"))
    return faults


def _callback_faults(callbacks: Mapping[str, Any], name: str) -> list[Fault]:
    faults = []
    for callback, node in callbacks.items():
        package, _, kind = str(node["_target_"]).rpartition(".")
        if package.startswith("lightning.") and kind in REPLACING:
            got = f"{kind} with strategy={name}, which has parts of the weights in each rank"
            cure = "callbacks=[ema] averages parts, too" if "Averaging" in kind else "Or write strategy=ddp"
            expected = "callbacks that leave weights and optimizer where they are"
            faults.append(Fault(key=f"callbacks.{callback}", got=got, expected=expected, cure=cure))
    return faults


def tied_faults(network: nn.Module, chosen: Mapping[str, nn.Module]) -> list[Fault]:
    """A weight that two units share would be gathered by one and used by the other."""
    owners: dict[int, set[str]] = {}
    names: dict[int, list[str]] = {}
    for path, parameter in network.named_parameters(remove_duplicate=False):
        inside = [unit for unit in chosen if path.startswith(f"{unit}.")]
        owners.setdefault(id(parameter), set()).add(max(inside, key=len, default=""))
        names.setdefault(id(parameter), []).append(path)
    return [
        Fault(
            key="strategy.shard",
            got=f"{' and '.join(names[tied])} are one weight in different units",
            expected="a weight that is used twice in one unit",
            cure="Leave the modules that hold it out of strategy.shard",
        )
        for tied, units in owners.items()
        if len(units) > 1
    ]
