"""What a run cannot do with a network in parts, over ranks or over devices, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exp.errors import Fault
from exp.spelling import among

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

# Of Lightning's callbacks: they copy the module to one device,
COPYING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
# replace its weights, or change what the optimizer holds.
REPLACING = (
    *COPYING, "ModelPruning", "BackboneFinetuning", "LambdaFinetuning", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
OWN_AVERAGE = "exp.engine.ema."


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
    callbacks: tuple[str, ...]
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


def cut_faults(planned: Planned, cut: Cut, *, name: str, meets: frozenset[str] = frozenset()) -> list[Fault]:
    """Terms, phases, compiled networks and callbacks that need the whole network in one place.

    name: of the strategy, for the messages.
    meets: what an objective may need of it beside one forward and one backward.
    """
    config, faults = planned.config, []
    where = f"with strategy={name}, {cut.lies}"
    unmet = planned.needs - meets
    if unmet:
        expected = cut.terms + (f", or that need {', '.join(sorted(meets))}" if meets else "")
        got = f"terms that need {', '.join(sorted(unmet))}, {where}"
        faults.append(Fault(key="objective", got=got, expected=expected, cure=cut.cure))
    if config.get("phases"):
        got = f"{among(config['phases'])} {where}"
        faults.append(Fault(key="phases", got=got, expected=f"none: {cut.phases}", cure=cut.cure))
    if config["runtime"].get("compile"):
        got, expected = f"true {where}", f"false: {cut.compiles}"
        faults.append(Fault(key="runtime.compile", got=got, expected=expected, cure=cut.cure))
    return [*faults, *_callback_faults(planned, cut, where)]


def _callback_faults(planned: Planned, cut: Cut, where: str) -> Iterator[Fault]:
    for entry, callback in planned.config["callbacks"].items():
        target = str(callback["_target_"])
        kind = target.rpartition(".")[2]
        is_own = target.startswith(OWN_AVERAGE)
        if not (is_own and not cut.averages) and not (target.startswith("lightning.") and kind in cut.callbacks):
            continue
        expected, cure = "callbacks that leave weights and optimizer where they are", cut.cure
        if is_own or kind in COPYING:
            cure = "callbacks=[ema] averages parts, too" if cut.averages else None
            if not cut.averages:
                expected = "no average of the weights: rank 0 would keep that of its own layers alone"
        yield Fault(key=f"callbacks.{entry}", got=f"{kind} {where}", expected=expected, cure=cure)
