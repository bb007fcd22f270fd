"""What a run cannot do while parts of its weights lie in several ranks, said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exp.errors import Fault
from exp.strategies.cut_faults import SHARDS, cut_faults

if TYPE_CHECKING:
    from torch import nn

    from exp.strategies.strategy import Planned

# What these do to a number depends on that number's own history alone, so that it may be done to parts of a weight.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop",
)  # fmt: skip


def sharding_faults(planned: Planned, *, name: str, meets: frozenset[str] = frozenset()) -> list[Fault]:
    """An optimizer that looks at whole weights, and kinds of steps that were not seen to be right on parts.

    name: of the strategy, for the messages.
    meets: what an objective may need of it beside one forward and one backward.
    """
    return [
        *_optimizer_faults(planned.config["optimizer"], name),
        *cut_faults(planned, SHARDS, name=name, meets=meets),
    ]


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
