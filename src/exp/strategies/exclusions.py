"""What goes with a network in parts, judged by what the strategy says of itself; Lightning's own strategies, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from exp.config.targets import resolve
from exp.errors import Fault
from exp.spelling import among
from exp.strategies.strategy import Planned

# Of Lightning's callbacks: they copy the module to one device,
COPYING: tuple[type[Callback], ...] = (StochasticWeightAveraging, WeightAveraging)
# replace its weights, or change what the optimizer holds.
REPLACING = (*COPYING, ModelPruning, BaseFinetuning, LearningRateFinder, BatchSizeFinder)
# What these do to a number depends on that number's own history alone, so that it may be done to parts of a weight.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a network is cut.

    lies: where its parts are. terms, phases, compiles: why it takes no others, no phases and no compiled network.
    callbacks: of Lightning's, those that it does not take. averages: whether exp's average of the weights is right.
    cure: what to write instead, where something is.
    """

    lies: str
    terms: str
    phases: str
    compiles: str
    callbacks: tuple[type[Callback], ...]
    averages: bool
    cure: str | None


SHARDS = Cut(
    lies="which has parts of the weights in each rank",
    terms="terms of one forward and one backward",
    phases="gradients of parts are put together once a step",
    compiles="a compiled network was not seen to gather its parts in time",
    callbacks=REPLACING,
    averages=True,
    cure="Or write strategy=ddp",
)
STAGES = Cut(
    lies="which has the network's layers in several ranks",
    terms="terms of one forward and one backward, which a schedule orders",
    phases="a schedule makes one backward a step",
    compiles="stages are not compiled",
    callbacks=REPLACING,
    averages=False,
    cure=None,
)
DEVICES = Cut(
    lies="with layers split over devices",
    terms="terms of one forward pass: others call the network's layers themselves",
    phases="a phase calls parts of the network itself",
    compiles="the parts run one by one",
    callbacks=COPYING,
    averages=True,
    cure=None,
)


def exclusion_faults(planned: Planned) -> Iterator[Fault]:
    """Reject what needs the whole network in one place: terms, phases, compilation, callbacks, optimizers."""
    traits = planned.traits
    if traits & {"shards_parameters", "splits_tensors", "owns_step"}:
        yield from _optimizer_faults(planned.config["optimizer"], planned.config["strategy"]["name"])
        # What ranks of a cut layer send each other can be differentiated any number of times.
        twice = frozenset({"input_gradients", "forward_passes"})
        meets = twice if "splits_tensors" in traits and "shards_parameters" not in traits else frozenset()
        yield from _cut_faults(planned, SHARDS, meets=meets)
    elif "splits_layers" in traits:
        yield from _cut_faults(planned, STAGES, meets=frozenset())
    elif "splits_devices" in traits:
        yield from _cut_faults(planned, DEVICES, meets=frozenset({"retained_graph"}))


def callback_classes(config: Mapping[str, Any]) -> dict[str, type[Callback]]:
    """The class of each callback of a config that has been checked, by its name."""
    allow = tuple(config["security"]["allow"]) if config["callbacks"] else ()
    return {name: resolve(str(node["_target_"]), allow=allow) for name, node in config["callbacks"].items()}


def averages_weights(kind: type[Callback]) -> bool:
    """Whether a callback keeps an average of the weights: Lightning's, or one that says so by this attribute."""
    return issubclass(kind, WeightAveraging) or bool(getattr(kind, "averages_weights", False))


def _cut_faults(planned: Planned, cut: Cut, *, meets: frozenset[str]) -> Iterator[Fault]:
    """meets: what an objective may need of it beside one forward and one backward."""
    config = planned.config
    where = f"with strategy={config['strategy']['name']}, {cut.lies}"
    unmet = planned.needs - meets
    if unmet:
        expected = cut.terms + (f", or that need {', '.join(sorted(meets))}" if meets else "")
        got = f"terms that need {', '.join(sorted(unmet))}, {where}"
        yield Fault(key="objective", got=got, expected=expected, cure=cut.cure)
    if config.get("phases"):
        got = f"{among(config['phases'])} {where}"
        yield Fault(key="phases", got=got, expected=f"none: {cut.phases}", cure=cut.cure)
    if config["runtime"].get("compile"):
        got, expected = f"true {where}", f"false: {cut.compiles}"
        yield Fault(key="runtime.compile", got=got, expected=expected, cure=cut.cure)
    for entry, kind in callback_classes(config).items():
        is_own_average = averages_weights(kind) and not issubclass(kind, WeightAveraging)
        if not (is_own_average and not cut.averages) and not issubclass(kind, cut.callbacks):
            continue
        expected, cure = "callbacks that leave weights and optimizer where they are", cut.cure
        if is_own_average or issubclass(kind, COPYING):
            cure = "callbacks=[ema] averages parts, too" if cut.averages else None
            if not cut.averages:
                expected = "no average of the weights: rank 0 would keep that of its own layers alone"
        yield Fault(key=f"callbacks.{entry}", got=f"{kind.__name__} {where}", expected=expected, cure=cure)


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
