"""Lightning's side of strategy=tensor_parallel: layers cut by a plan, held against the whole before training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from exp.strategies.averaging import average_gradients
from exp.strategies.model_parallel import NETWORK, ModelParallel
from exp.strategies.placement import Placement
from exp.strategies.tensor_functions import join, own
from exp.strategies.tensor_layers import Cut
from exp.strategies.tensor_placing import carry_out
from exp.strategies.units import AUTO, uniform, units
from exp.strategies.verification import Trial, require_same, stand_in, try_out

if TYPE_CHECKING:
    from exp.strategies.tensor_parallel import TensorOptions

log = logging.getLogger(__name__)


class TensorParallelStrategy(ModelParallel):
    """Neighbouring ranks share each layer; where there are several such groups, gradients are averaged over them.

    name: of the config's strategy, for messages.
    """

    averages: bool = True

    def __init__(self, *, placement: Placement, tensor: TensorOptions, name: str) -> None:
        super().__init__(placement=placement)
        self.tensor, self.name = tensor, name
        self._cuts: dict[str, Cut] = {}
        self._is_averaging = True

    def place_model(self) -> None:
        network = self.lightning_module.network
        whole = self._trial(network) if self.tensor.verify else None
        assert self.model_group is not None
        cuts = carry_out(self.tensor.plan_of(network), network, self.model_group)
        self._cuts = {f"{NETWORK}{name}": cut for name, cut in cuts.items()}
        network.to(self.root_device)
        if whole is not None:
            self._require_same(network, whole)
        self.share_parts(network)

    def share_parts(self, network: nn.Module) -> None:
        """What the groups do with their parts: each has them all, and gradients are averaged."""

    def model_to_device(self) -> None:
        if self.is_placed:
            super().model_to_device()
            return
        # A device need not have room for the whole network.
        for name, part in self.lightning_module.named_children():
            if f"{name}." != NETWORK:
                part.to(self.root_device)

    # --- parts ---

    def gather(self, name: str, part: Tensor) -> Tensor:
        part = super().gather(name, part)
        if name not in self._cuts:
            return part
        cut = self._cuts[name]
        return join(part, self.model_group, dim=cut.dim, size=cut.size)

    def part(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        if name in self._cuts:
            whole = own(whole, self.model_group, dim=self._cuts[name].dim)
        return super().part(name, whole, like)

    def copies_in_model(self, name: str) -> int:
        return 1 if name in self._cuts else self.placement.model_ranks

    # --- several groups ---

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.averages and self._is_averaging and self.placement.data_ranks > 1:
            average_gradients(self.lightning_module.network.parameters(), group=self.data_group)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it around the backward of accumulated batches, but for the last, which averages the sums."""
        self._is_averaging = False
        try:
            yield
        finally:
            self._is_averaging = True

    # --- the same as the whole network ---

    def _trial(self, network: nn.Module) -> Trial | None:
        spec = self.lightning_module.trainer.datamodule.data.spec
        device = next(network.parameters()).device
        try:
            return try_out(network, stand_in(spec, network, device=device))
        except (TypeError, KeyError, IndexError) as error:
            log.warning(
                "strategy=%s is not held against the whole network, which does not take a batch of %s %s alone (%s)",
                self.name, spec.input_dtype, list(spec.input_shape), error,
            )  # fmt: skip
            return None

    def _require_same(self, network: nn.Module, whole: Trial) -> None:
        spec = self.lightning_module.trainer.datamodule.data.spec

        def part(name: str, gradient: Tensor) -> Tensor:
            return self.part(f"{NETWORK}{name}", gradient.to(self.root_device), gradient)

        def here(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.to(self.root_device) for tensor in tensors]

        whole = replace(whole, training=here(whole.training), evaluation=here(whole.evaluation))
        placed = try_out(network, stand_in(spec, network, device=self.root_device))
        with torch.no_grad():
            require_same(whole, placed, part=part, strategy=self.name)


class ShardedTensorStrategy(TensorParallelStrategy):
    """The parts of each layer in shards over the groups, which FSDP2 gathers unit by unit."""

    averages = False

    def share_parts(self, network: nn.Module) -> None:
        mesh = DeviceMesh.from_group(self.data_group, self.root_device.type, mesh_dim_names=("data",))
        chosen = uniform(network, units(network, AUTO, min_parameters=0, key="strategy.shard"))
        for unit in [*reversed(chosen.values()), network]:
            fully_shard(unit, mesh=mesh)
