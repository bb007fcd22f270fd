"""Fully sharded data parallel: every rank keeps a share of each weight, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from exp.errors import ConfigError, Fault
from exp.strategies.batch_norm_faults import batch_norm_faults
from exp.strategies.placement import Demand
from exp.strategies.sharding_faults import ELEMENTWISE, sharding_faults, tied_faults
from exp.strategies.strategy import Planned, Strategy
from exp.strategies.units import AUTO, matched, units

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank

Dtype = Literal["fp32", "bf16", "fp16"]


class FSDP(Strategy):
    """torch.distributed.fsdp.fully_shard (FSDP2). A step computes what ddp's does.

    shard: which modules are gathered by themselves while they compute, `auto`, or patterns of names or types: see
        exp.strategies.units. The rest of the network is one more unit.
    min_parameters: smaller modules are left to what they are in.
    reshard_after_forward: whether gathered weights are freed after the forward, and gathered again for the backward;
        None frees all but the network's own unit, which the backward needs first.
    activation_checkpointing: patterns of modules whose activations are computed again in the backward, not kept.
    cpu_offload: shards, gradients and the optimizer's step stay on the CPU of a run on GPUs.
    param_dtype: of gathered weights; None is that of the shards, which autocast casts where it does.
    reduce_dtype: in which gradients are added up; None is param_dtype.
    no_sync: where batches are accumulated, gradients are kept whole until the last one: fewer messages, more memory.
    sync_batchnorm: batch normalisation over the global batch, not over each rank's share.
    """

    replicates = False
    shards_parameters = True

    def __init__(
        self,
        *,
        name: str = "fsdp",
        shard: Literal["auto"] | str | Sequence[str] = AUTO,
        min_parameters: int = 0,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: Sequence[str] = (),
        cpu_offload: bool = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        no_sync: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(name=name)
        if min_parameters < 0:
            raise ConfigError([Fault(key="min_parameters", got=str(min_parameters), expected="0 or more")])
        self.shard, self.min_parameters = shard, min_parameters
        self.reshard_after_forward = reshard_after_forward
        self.activation_checkpointing = tuple(activation_checkpointing)
        self.cpu_offload = cpu_offload
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.no_sync = no_sync
        self.sync_batchnorm = sync_batchnorm

    @property
    def demand(self) -> Demand:
        """One rank alone has a process group where an option means something to it, too."""
        options = (self.activation_checkpointing, self.cpu_offload, self.param_dtype, self.reduce_dtype)
        return Demand(group=any(options))

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """Patterns that match nothing, offloading from a CPU, and what no sharded run can do."""
        faults = sharding_faults(planned, name=self.name)
        faults += batch_norm_faults(planned, sync_batchnorm=self.sync_batchnorm)
        chosen = {}
        try:
            chosen = units(planned.network, self.shard, min_parameters=self.min_parameters, key="strategy.shard")
        except ConfigError as error:
            faults += error.faults
        try:
            matched(planned.network, self.activation_checkpointing, key="strategy.activation_checkpointing")
        except ConfigError as error:
            faults += error.faults
        faults += tied_faults(planned.network, chosen)
        from exp.optim.optimizer import FUSED_IN_SHARDS

        optimizer = planned.config["optimizer"]
        kind = optimizer["_target_"].rpartition(".")[2]
        if optimizer.get("fused") is True and kind in ELEMENTWISE and kind not in FUSED_IN_SHARDS:
            faults.append(
                Fault(
                    key="optimizer.fused",
                    got=f"true for {kind}, which torch cannot do on shards",
                    expected=f"null, or one of {', '.join(FUSED_IN_SHARDS)}",
                )
            )
        if self.cpu_offload and planned.placement.accelerator == "cpu":
            faults.append(
                Fault(
                    key="strategy.cpu_offload",
                    got="true on a run on CPU",
                    expected="false: the shards lie in the CPU's memory already",
                )
            )
        return faults

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """A FullyShardedStrategy with these options."""
        from exp.strategies.fully_sharded import FullyShardedStrategy

        return FullyShardedStrategy(placement=placement, options=self)
