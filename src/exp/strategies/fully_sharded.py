"""Lightning's side of strategy=fsdp: fully_shard on the units of the network, then on the network itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from exp.strategies.batch_norm import Share, join_statistics, part_statistics
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.placement import Placement
from exp.strategies.recomputing import recompute
from exp.strategies.units import matched, uniform, units

if TYPE_CHECKING:
    from exp.strategies.fsdp import FSDP

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        network, options = self.lightning_module.network, self.options
        recompute(matched(network, options.activation_checkpointing, key="strategy.activation_checkpointing").values())
        self._join_statistics()
        settings = {
            "mesh": self._mesh(),
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=options.param_dtype and DTYPES[options.param_dtype],
                reduce_dtype=options.reduce_dtype and DTYPES[options.reduce_dtype],
            ),
            "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        }
        chosen = units(network, options.shard, min_parameters=options.min_parameters, key="strategy.shard")
        # Innermost first, as fully_shard asks.
        for unit in reversed(uniform(network, chosen).values()):
            fully_shard(unit, **settings)
        fully_shard(network, **settings)

    def training_step(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        if self._share is not None:
            self._share.counts = batch.size > 0
        return super().training_step(batch, *arguments, **named)

    def model_to_device(self) -> None:
        if self.is_placed and not self.options.cpu_offload:
            super().model_to_device()
            return
        # fully_shard moves one unit after the other, and never the whole network; offloaded shards stay where they are.
        for name, part in self.lightning_module.named_children():
            if name != "network":
                part.to(self.root_device)
        for module in self.lightning_module.network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it around the backward of accumulated batches, but for the last."""
        network = self.lightning_module.network
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
            network, kind = self.lightning_module.network, self.root_device.type
            self._classes_before = join_statistics(network, self._share, device_type=kind)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.root_device.type, (self.placement.world_size,), mesh_dim_names=("data",))
