"""Fully sharded data parallel: every rank keeps a share of each weight, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from exp.errors import ConfigError, ErrorDetails
from exp.optim.optimizer import FUSED_IN_SHARDS
from exp.shared_types import Batch
from exp.strategies.batch_norm import Share, batch_norm_errors, join_statistics, part_statistics
from exp.strategies.footprint import Footprint, Load, Place, Transfer, gather, grouped, shards, whole
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of, move_all_but_network, network_of
from exp.strategies.units import (
    AUTO,
    checkpoint_activations,
    matched,
    scalar_errors,
    uniform,
    units,
)

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    shards_parameters = True

    def __init__(
        self,
        *,
        name: str = "fsdp",
        shard: Literal["auto"] | str | Sequence[str] = AUTO,
        min_parameters: Annotated[int, Ge(0)] = 0,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: Sequence[str] = (),
        cpu_offload: bool = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        no_sync: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(name=name)
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
        return Demand(rest="shard", group=any(options))

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Patterns that match nothing, offloading from a CPU, and what no sharded run can do."""
        errors = list(batch_norm_errors(planned, sync_batchnorm=self.sync_batchnorm))
        chosen = {}
        try:
            chosen = units(planned.network, self.shard, min_parameters=self.min_parameters, key="strategy.shard")
        except ConfigError as error:
            errors += error.errors
        try:
            matched(planned.network, self.activation_checkpointing, key="strategy.activation_checkpointing")
        except ConfigError as error:
            errors += error.errors
        errors += _tied_errors(planned.network, chosen)
        if planned.placement.world_size > 1 or self.demand.group:
            errors += scalar_errors(planned.network)
        unfused = [kind.__name__ for kind in planned.optimizers if kind.__name__ not in FUSED_IN_SHARDS]
        if planned.config["optimizer"].get("fused") is True and unfused:
            errors.append(
                ErrorDetails(
                    key="optimizer.fused",
                    got=f"true for {unfused[0]}, which torch cannot do on shards",
                    expected=f"null, or one of {', '.join(FUSED_IN_SHARDS)}",
                )
            )
        if self.cpu_offload and planned.placement.accelerator == "cpu":
            errors.append(
                ErrorDetails(
                    key="strategy.cpu_offload",
                    got="true on a run on CPU",
                    expected="false: the shards lie in the CPU's memory already",
                )
            )
        return errors

    def footprint(self, load: Load) -> Footprint:
        """Equal rows of each weight a rank, one unit gathered while it computes and the next one on its way."""
        ranks = load.placement.data_ranks
        chosen = units(load.network, self.shard, min_parameters=self.min_parameters, key="strategy.shard")
        gathered = unit_bytes(load, list(chosen), itemsize=self._itemsize(self.param_dtype))
        reduced = unit_bytes(load, list(chosen), itemsize=self._itemsize(self.reduce_dtype or self.param_dtype))
        largest = sorted(gathered.values())[-2:]
        buffers = {"gathered weights": sum(largest), "whole gradients": max(reduced.values())} if ranks > 1 else {}
        if self.no_sync and load.micro_batches > 1:
            buffers["whole gradients"] = sum(reduced.values())
        places = (
            Place(
                ranks=(rank,),
                held=shards(whole(load), load.sizes, ranks=ranks, rank=rank),
                buffers=buffers,
                offloaded=self.cpu_offload,
            )
            for rank in range(ranks)
        )
        notes = () if self.param_dtype is None else ("activations are counted without strategy.param_dtype",)
        return Footprint(places=grouped(places), transfers=self._transfers(load, gathered, reduced), notes=notes)

    def _transfers(self, load: Load, gathered: Mapping[str, int], reduced: Mapping[str, int]) -> list[Transfer]:
        ranks, times = load.placement.data_ranks, load.micro_batches
        if ranks == 1:
            return []
        everything, own = sum(gathered.values()), gathered[""]
        again = {None: everything - own, True: everything, False: 0}[self.reshard_after_forward]
        sums, calls = 1 if self.no_sync else times, len(gathered)
        forward, backward = gather(everything, ranks) * times, gather(again, ranks) * times
        return [
            Transfer(what="all-gather of weights, forward", sent=forward, over=ranks, messages=calls * times),
            Transfer(what="all-gather of weights, backward", sent=backward, over=ranks, messages=calls * times),
            Transfer(what="reduce-scatter of gradients", sent=gather(sum(reduced.values()), ranks) * sums, over=ranks),
        ]

    @staticmethod
    def _itemsize(dtype: Dtype | None) -> int | None:
        return None if dtype is None else DTYPES[dtype].itemsize

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """A FullyShardedStrategy with these options."""
        return FullyShardedStrategy(placement=placement, options=self)


class FullyShardedStrategy(ModelParallel):
    """Weights, gradients and optimizer state in shards over the ranks of the data, as DTensors.

    Relied on, and tested: fully_shard works by hooks around a module's call and sets the gathered parameters on the
    module that holds them, so that straight-line code that reads `_modules` tables meets both (seen in torch 2.13).
    """

    def __init__(self, *, placement: Placement, options: FSDP) -> None:
        super().__init__(placement=placement)
        self.options = options
        self._share = Share() if options.sync_batchnorm else None
        self._classes_before: dict[nn.Module, type[nn.Module]] = {}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        # In a second stage the network is placed, and the end of the first took them off.
        self._join_statistics()

    def teardown(self) -> None:
        super().teardown()
        part_statistics(self._classes_before)
        self._classes_before = {}

    def place_model(self) -> None:
        network, options = network_of(self), self.options
        recomputed = matched(network, options.activation_checkpointing, key="strategy.activation_checkpointing")
        checkpoint_activations(recomputed.values())
        self._join_statistics()
        shard = partial(
            fully_shard,
            mesh=self.data_mesh(),
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=DTYPES[options.param_dtype] if options.param_dtype else None,
                reduce_dtype=DTYPES[options.reduce_dtype] if options.reduce_dtype else None,
            ),
            offload_policy=CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        )
        chosen = units(network, options.shard, min_parameters=options.min_parameters, key="strategy.shard")
        # Innermost first, as fully_shard asks.
        for unit in reversed(uniform(network, chosen).values()):
            shard(unit)
        shard(network)

    def training_step(self, batch: Batch, *arguments: object, **named: object) -> STEP_OUTPUT:
        if self._share is not None:
            self._share.counts = batch.size > 0
        return super().training_step(batch, *arguments, **named)

    def model_to_device(self) -> None:
        if self.is_placed and not self.options.cpu_offload:
            super().model_to_device()
            return
        # fully_shard moves one unit after the other, and never the whole network; offloaded shards stay where they are.
        move_all_but_network(module_of(self), self.root_device)
        for module in network_of(self).modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it around the backward of accumulated batches, but for the last."""
        network = network_of(self)
        if not self.options.no_sync:
            yield
            return
        assert isinstance(network, FSDPModule)
        network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)

    def _join_statistics(self) -> None:
        if self._share is not None and not self._classes_before:
            network, kind = network_of(self), self.root_device.type
            self._classes_before = join_statistics(network, self._share, device_type=kind)


def unit_bytes(load: Load, chosen: Sequence[str], *, itemsize: int | None = None) -> dict[str, int]:
    """Bytes of the whole weights of each unit, by its name; the network's own is ''.

    itemsize: of a number where it is cast; None is as it is kept.
    """
    found = dict.fromkeys(["", *chosen], 0)
    for name, one in load.sizes.items():
        owner = max((unit for unit in chosen if name.startswith(f"{unit}.")), key=len, default="")
        found[owner] += one.count * (itemsize or one.itemsize)
    return found


def _tied_errors(network: nn.Module, chosen: Mapping[str, nn.Module]) -> list[ErrorDetails]:
    """A weight that two units share would be gathered by one and used by the other."""
    owners: dict[int, set[str]] = {}
    names: dict[int, list[str]] = {}
    for path, parameter in network.named_parameters(remove_duplicate=False):
        inside = [unit for unit in chosen if path.startswith(f"{unit}.")]
        owners.setdefault(id(parameter), set()).add(max(inside, key=len, default=""))
        names.setdefault(id(parameter), []).append(path)
    return [
        ErrorDetails(
            key="strategy.shard",
            got=f"{' and '.join(names[tied])} are one weight in different units",
            expected="a weight that is used twice in one unit",
            fix="Leave the modules that hold it out of strategy.shard",
        )
        for tied, units in owners.items()
        if len(units) > 1
    ]
