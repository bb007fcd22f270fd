"""Fully sharded data parallel: each rank stores a shard of each weight, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from exp.errors import ConfigError, ErrorDetails, not_supported_with
from exp.optim.optimizer import FUSED_IN_SHARDS
from exp.strategies.batch_norm import StatisticsOverRanks, batch_norm_errors
from exp.strategies.footprint import (
    Footprint,
    Load,
    Place,
    Transfer,
    gather_bytes,
    merge_equal_places,
    shard_parameters,
)
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import (
    Blueprint,
    Strategy,
    module_of,
    move_all_but_network,
    network_of,
    shared_names,
)
from exp.strategies.units import (
    AUTO,
    checkpoint_activations,
    choose_units,
    match_modules,
    scalar_errors,
    split_by_dtype,
    unit_of,
)

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD, CHECKPOINTING = "strategy.shard", "strategy.activation_checkpointing"


class FSDP(Strategy):
    """Strategy that uses torch.distributed.fsdp.fully_shard (FSDP2). A step computes the same result as with DDP.

    A unit is a module. Before the module runs, the shards of all its parameters are gathered together.

    Args:
        name: Name of the strategy. Default: fsdp.
        shard: Units of the network: `auto`, or patterns of names or types (see exp.strategies.units). The rest of the
            network is one additional unit. Default: auto.
        reshard_after_forward: Whether gathered weights are freed after the forward and gathered again for the backward.
            None keeps only the weights of the additional unit, because the backward needs them first. Default: None.
        activation_checkpointing: Patterns of modules. The backward recomputes their activations. Default: ().
        cpu_offload: Whether shards, gradients and the optimizer step are on the CPU in a run on GPUs. Default: False.
        param_dtype: Dtype of gathered weights. None uses the dtype of the shards. Default: None.
        reduce_dtype: Dtype in which gradients are summed. None uses param_dtype. Default: None.
        sync_batchnorm: Whether BatchNorm statistics are computed over the global batch instead of the rank's samples.
            Default: False.
    """

    shards_parameters = True

    def __init__(
        self,
        *,
        name: str = "fsdp",
        shard: Literal["auto"] | str | Sequence[str] = AUTO,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: Sequence[str] = (),
        cpu_offload: bool = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(name=name)
        self.shard = shard
        self.reshard_after_forward = reshard_after_forward
        self.activation_checkpointing = tuple(activation_checkpointing)
        self.cpu_offload = cpu_offload
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.sync_batchnorm = sync_batchnorm

    @property
    def demand(self) -> Demand:
        """Devices to use: all devices, over which the network is sharded.

        A single rank gets a process group only if an option has an effect on one rank.
        """
        options = (self.activation_checkpointing, self.cpu_offload, self.param_dtype, self.reduce_dtype)
        return Demand(rest="shard", group=any(options))

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return errors for patterns without a match, offloading in a CPU run, and networks that cannot be sharded."""
        errors = list(batch_norm_errors(planned, sync_batchnorm=self.sync_batchnorm))
        units: Mapping[str, nn.Module] = {}
        try:
            units = choose_units(planned.network, self.shard, key=SHARD)
        except ConfigError as error:
            errors += error.errors
        try:
            match_modules(planned.network, self.activation_checkpointing, key=CHECKPOINTING)
        except ConfigError as error:
            errors += error.errors
        errors += _tied_errors(planned.network, units)
        if planned.placement.world_size > 1 or self.demand.group:
            errors += scalar_errors(planned.network)
        unfused = [kind.__name__ for kind in planned.optimizers if kind.__name__ not in FUSED_IN_SHARDS]
        if planned.settings.optimizer.get("fused") is True and unfused:
            expected = f"null, or {' or '.join(FUSED_IN_SHARDS)}: torch has no fused {unfused[0]} for sharded weights"
            errors.append(not_supported_with("optimizer.fused", True, f"strategy={self.name}", expected))
        if self.cpu_offload and planned.placement.accelerator == "cpu":
            expected = "false: the shards of a CPU run are already in its memory"
            errors.append(not_supported_with("strategy.cpu_offload", True, "launch.accelerator=cpu", expected))
        return errors

    def footprint(self, load: Load) -> Footprint:
        """Return the memory of each rank: its shard of the parameters, and buffers for gathered weights.

        A unit is a group of layers whose weights are gathered together. The buffers have the size of two units, because
        the next unit is gathered while the current unit runs.
        """
        ranks = load.placement.data_ranks
        units = choose_units(load.network, self.shard, key=SHARD)
        gathered = unit_bytes(load, list(units), self.param_dtype)
        reduced = unit_bytes(load, list(units), self.reduce_dtype or self.param_dtype)
        largest = sorted(gathered.values())[-2:]
        buffers = {"gathered weights": sum(largest), "whole gradients": max(reduced.values())} if ranks > 1 else {}
        places = (
            Place(
                ranks=(rank,),
                held=shard_parameters(load.whole_parameters(), load.sizes, ranks=ranks, rank=rank),
                buffers=buffers,
                offloaded=self.cpu_offload,
            )
            for rank in range(ranks)
        )
        transfers = self._transfers(load, gathered, reduced) if ranks > 1 else []
        notes = () if self.param_dtype is None else ("activations are counted without strategy.param_dtype",)
        return Footprint(places=merge_equal_places(places), transfers=transfers, notes=notes)

    def _transfers(self, load: Load, gathered: Mapping[str, int], reduced: Mapping[str, int]) -> list[Transfer]:
        ranks, times, calls = load.placement.data_ranks, load.micro_batches, len(gathered)
        everything = sum(gathered.values())
        again = {None: everything - gathered[""], True: everything, False: 0}[self.reshard_after_forward]
        sizes = {
            "all-gather of weights, forward": (everything, calls * times),
            "all-gather of weights, backward": (again, calls * times),
            "reduce-scatter of gradients": (sum(reduced.values()), 1),
        }
        return [
            Transfer(what=what, sent=gather_bytes(size, ranks) * times, over=ranks, messages=messages)
            for what, (size, messages) in sizes.items()
        ]

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's strategy for FSDP, with these options."""
        return FullyShardedStrategy(placement=placement, options=self)


class FullyShardedStrategy(StatisticsOverRanks, ModelParallel):
    """Strategy that stores weights, gradients and optimizer state as DTensors. All ranks have shards of them.

    Tested properties of torch 2.13: fully_shard adds hooks to a module's call. The hooks assign gathered parameters to
    the module that owns them. A forward program also runs these hooks and reads the gathered parameters.
    """

    def __init__(self, *, placement: Placement, options: FSDP) -> None:
        super().__init__(placement=placement)
        self.options = options
        self.sync_batchnorm = options.sync_batchnorm

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        # If a test follows the training, the network is already sharded, but the end of the training has restored the
        # classes.
        self.join_statistics(network_of(self))

    def place_model(self) -> None:
        network, options = network_of(self), self.options
        recomputed = match_modules(network, options.activation_checkpointing, key=CHECKPOINTING)
        checkpoint_activations(recomputed.values())
        self.join_statistics(network)
        mesh = self.data_mesh()
        dtypes = MixedPrecisionPolicy(
            param_dtype=DTYPES[options.param_dtype] if options.param_dtype else None,
            reduce_dtype=DTYPES[options.reduce_dtype] if options.reduce_dtype else None,
        )
        offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
        units = split_by_dtype(network, choose_units(network, options.shard, key=SHARD))
        # fully_shard must be applied to inner units before outer units.
        for unit in [*reversed(units.values()), network]:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=dtypes,
                offload_policy=offload,
            )

    def model_to_device(self) -> None:
        if self.is_placed and not self.options.cpu_offload:
            super().model_to_device()
            return
        # The network is not moved, because it may be too large for the device. fully_shard later moves one unit at a
        # time. Offloaded shards stay on the CPU.
        move_all_but_network(module_of(self), self.root_device)
        for module in network_of(self).modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))


def unit_bytes(load: Load, units: Sequence[str], dtype: Dtype | None) -> dict[str, int]:
    """Return the bytes of the unsharded weights of each unit, by name. The rest of the network is the unit ''.

    Args:
        load: Properties of the run.
        units: Names of the units.
        dtype: Dtype to which the weights are cast. None uses the dtype of each weight.
    """
    found = dict.fromkeys(["", *units], 0)
    for name, one in load.sizes.items():
        found[unit_of(name, units)] += one.count * (one.itemsize if dtype is None else DTYPES[dtype].itemsize)
    return found


def _tied_errors(network: nn.Module, units: Mapping[str, nn.Module]) -> list[ErrorDetails]:
    """Return an error for each weight that belongs to two units.

    Such a weight is not supported, because one unit would gather it while the other unit uses it.
    """
    expected = "one sharded module that contains all layers with this weight"
    fix = "Remove the modules with this weight from strategy.shard"
    return [
        not_supported_with(SHARD, "two sharded modules", f"one weight, called {' and '.join(names)}", expected, fix)
        for names in shared_names(network)
        if len({unit_of(name, units) for name in names}) > 1
    ]
