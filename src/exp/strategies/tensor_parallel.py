"""Tensor parallel: every rank has a part of each large layer, and all work on the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from exp.errors import ConfigError, Fault
from exp.strategies.placement import Demand
from exp.strategies.sharding_faults import sharding_faults
from exp.strategies.strategy import Planned, Strategy
from exp.strategies.tensor_plan import AUTO, Plan, division_faults, make_plan, tied_cuts

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy
    from torch import nn

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank

# What ranks send each other can be differentiated any number of times.
MEETS = frozenset({"input_gradients", "forward_passes"})


class TensorOptions:
    """How layers are cut, see exp.strategies.tensor_plan for the words.

    plan: `auto`, for models whose layers are called as those of gpt and transformer, or name patterns to words.
    divide: constants of containers that count what is cut, such as heads; `auto` those of a plan `auto`.
    sequence: with `auto`, between the layers that are cut each rank has a part of the sequence.
    vocabulary: with `auto`, embeddings and the head are cut over the vocabulary.
    verify: hold outputs and gradients of a random batch against the whole network's, before training.
    """

    def __init__(
        self,
        *,
        plan: str | Mapping[str, str | Sequence[str]],
        divide: str | Sequence[str],
        sequence: bool,
        vocabulary: bool,
        verify: bool,
    ) -> None:
        self.plan, self.divide = plan, divide
        self.sequence, self.vocabulary = sequence, vocabulary
        self.verify = verify

    def plan_of(self, network: nn.Module) -> Plan:
        """Raises: ConfigError."""
        return make_plan(network, self.plan, divide=self.divide, sequence=self.sequence, vocabulary=self.vocabulary)

    def faults(self, planned: Planned, *, ranks: int) -> list[Fault]:
        """What cannot be cut so."""
        faults = []
        if planned.precision == "fp8":
            expected = "another word: the layers of fp8 are not cut"
            faults.append(Fault(key="precision.word", got="fp8 with layers in parts", expected=expected))
        network = planned.network
        try:
            plan = self.plan_of(network)
        except ConfigError as error:
            return [*faults, *error.faults]
        return [*faults, *division_faults(network, plan, ranks=ranks), *tied_cuts(network, plan)]


class TensorParallel(Strategy):
    """All ranks of the run share each layer. The options are those of TensorOptions."""

    replicates = False
    splits_batch = False
    splits_tensors = True

    def __init__(
        self,
        *,
        name: str = "tensor_parallel",
        plan: str | Mapping[str, str | Sequence[str]] = AUTO,
        divide: str | Sequence[str] = AUTO,
        sequence: bool = False,
        vocabulary: bool = False,
        verify: bool = True,
    ) -> None:
        super().__init__(name=name)
        self.tensor = TensorOptions(plan=plan, divide=divide, sequence=sequence, vocabulary=vocabulary, verify=verify)

    @property
    def demand(self) -> Demand:
        """All ranks work on one batch together."""
        return Demand(model_ranks=None)

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """What cannot be cut so, and what no run in parts can do."""
        faults = sharding_faults(planned, name=self.name, meets=MEETS)
        return faults + self.tensor.faults(planned, ranks=planned.placement.model_ranks)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """A TensorParallelStrategy with these options."""
        from exp.strategies.tensor_ranks import TensorParallelStrategy

        return TensorParallelStrategy(placement=placement, tensor=self.tensor, name=self.name)
