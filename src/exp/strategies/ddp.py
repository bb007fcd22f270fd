"""Distributed data parallel: a copy of the network in every rank, gradients averaged while backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from exp.errors import Fault
from exp.strategies.batch_norm_faults import batch_norm_faults
from exp.strategies.layer_split import inner_split, split_faults
from exp.strategies.placement import CPU_RANKS, DEFAULT_DEMAND, Demand
from exp.strategies.strategy import Planned, Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """How `communication_hook: powersgd` compresses; torch's PowerSGDState, under names of exp.

    rank: of the two matrices that stand for one; more is closer and costs more.
    start_step: optimizer steps with whole gradients before the first compressed one.
    min_compression_rate: a matrix that would not shrink by this factor is sent whole.
    error_feedback: what was lost in one step is added to the next one's gradients.
    warm_start: a step begins with the matrices of the last.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Steps without communication.

    every_n_steps: optimizer steps between two averagings of the weights; None is no local SGD.
    start_step: optimizer steps of ordinary ddp before the first local one.
    within_node: the gradients are still averaged among the ranks of each node, at every step.
    average_optimizer_state: momenta are averaged with the weights, so that a run resumes exactly.
    """

    every_n_steps: int | None = None
    start_step: int = 0
    within_node: bool = False
    average_optimizer_state: bool = True


class DDP(Strategy):
    """The options are those of torch.nn.parallel.DistributedDataParallel, under its names, and some around it.

    find_unused_parameters: search the graph for parameters without a gradient at every step.
    gradient_as_bucket_view: gradients are views of the buckets that are sent, and take their memory once.
    static_graph: every step uses the same parameters in the same order.
    broadcast_buffers: rank 0's buffers go to all ranks before each forward.
    bucket_cap_mb: size of a bucket in MiB; None is torch's default.
    sync_batchnorm: batch normalisation over the global batch, not over each rank's share.
    communication_hook: how gradients are sent: None as they are, fp16, bf16, powersgd.
    powersgd: the options of that hook. local_sgd: steps without communication.
    inner: `layer_split` lays the network of each rank over several devices; None has it on one.
    devices_per_rank, layers: of that split, see exp.strategies.layer_split; None is one device for each of `layers`,
        or two.
    """

    def __init__(
        self,
        *,
        name: str = "ddp",
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        communication_hook: Literal["fp16", "bf16", "powersgd"] | None = None,
        powersgd: PowerSGD | None = None,
        local_sgd: LocalSGD | None = None,
        inner: Literal["layer_split"] | None = None,
        devices_per_rank: int | None = None,
        layers: Sequence[Sequence[str]] | None = None,
    ) -> None:
        super().__init__(name=name)
        self.inner = inner_split(inner, devices_per_rank=devices_per_rank, layers=layers)
        self.splits_devices = self.inner is not None
        self.options = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.sync_batchnorm = sync_batchnorm
        self.communication_hook = communication_hook
        self.powersgd = powersgd or PowerSGD()
        self.local_sgd = local_sgd or LocalSGD()

    @property
    def demand(self) -> Demand:
        """One device a rank, or those of its layers; a machine without a GPU tries two ranks."""
        if self.inner is None:
            return DEFAULT_DEMAND
        return Demand(devices=self.inner.devices, cpu_devices=CPU_RANKS * self.inner.devices)

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """Options that contradict each other, the network or the machine."""
        faults = [*self._contradictions(planned), *batch_norm_faults(planned, sync_batchnorm=self.sync_batchnorm)]
        if self.inner is not None:
            faults += split_faults(planned, count=self.inner.devices, layers=self.inner.layers)
        return faults

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Lightning's DDPStrategy with these options."""
        from exp.strategies.lightning_ddp import ExpDDPStrategy

        options = dict(self.options)
        if self.local_sgd.every_n_steps is not None:
            # They are averaged with the weights, and sent at no other time.
            options["broadcast_buffers"] = False
        split: dict[str, Any] = {}
        kind = ExpDDPStrategy
        if self.inner is not None:
            from exp.strategies.lightning_layer_split import LayerSplitStrategy, SplitDDPStrategy

            split = {"devices": placement.devices(rank.local_rank), "layers": self.inner.layers}
            if placement.world_size == 1:
                return LayerSplitStrategy(**split)
            kind = SplitDDPStrategy
        return kind(
            **split,
            backend=placement.backend,
            ranks_per_node=placement.ranks_per_node,
            sync_batchnorm=self.sync_batchnorm,
            communication_hook=self.communication_hook,
            powersgd=self.powersgd,
            local_sgd=self.local_sgd,
            **options,
        )

    def _contradictions(self, planned: Planned) -> Iterator[Fault]:
        is_local = self.local_sgd.every_n_steps is not None
        if self.options["static_graph"] and self.options["find_unused_parameters"]:
            yield Fault(
                key="strategy.static_graph",
                got="true with find_unused_parameters",
                expected="one of the two: a static graph finds unused parameters once",
                cure="Write strategy.find_unused_parameters=false",
            )
        if is_local and self.communication_hook is not None:
            yield Fault(
                key="strategy.communication_hook",
                got=f"{self.communication_hook} with local_sgd",
                expected="null: local steps send no gradients",
            )
        if is_local and planned.precision in ("fp16", "fp16_true"):
            yield Fault(
                key="strategy.local_sgd",
                got=f"local steps with precision={planned.precision}",
                expected="bf16 or fp32: each rank would have a loss scale of its own",
                cure="Write precision=bf16",
            )
        if is_local and self.sync_batchnorm:
            yield Fault(
                key="strategy.sync_batchnorm",
                got="true with local_sgd",
                expected="false: it makes ranks talk at every layer of every step",
            )
        if is_local:
            yield from _averaging_faults(planned)
        if self.inner is not None and (is_local or self.communication_hook is not None):
            key = "local_sgd" if is_local else "communication_hook"
            got, expected = f"{key} with inner=layer_split", "neither: torch has them for networks on one device"
            yield Fault(key=f"strategy.{key}", got=got, expected=expected)
        yield from self._powersgd_faults(planned)

    def _powersgd_faults(self, planned: Planned) -> Iterator[Fault]:
        if self.communication_hook != "powersgd":
            return
        import torch

        if planned.placement.accelerator == "cpu" and torch.cuda.is_available():
            yield Fault(
                key="strategy.communication_hook",
                got="powersgd on cpu ranks of a machine with a GPU",
                expected="bf16, fp16 or null: torch's hook waits for the GPU",
            )


def _averaging_faults(planned: Planned) -> Iterator[Fault]:
    for entry, callback in planned.config["callbacks"].items():
        target = str(callback["_target_"])
        # exp's own and Lightning's.
        if target.startswith("exp.engine.ema.") or target.endswith("WeightAveraging"):
            yield Fault(
                key=f"callbacks.{entry}",
                got=f"{target} with local_sgd",
                expected="no average of the weights: between two meetings each rank would average weights of its own, "
                "and a checkpoint would hold rank 0's",
                cure="Write strategy.local_sgd.every_n_steps=null, or leave the callback out",
            )
