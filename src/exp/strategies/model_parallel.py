"""Base of Lightning strategies whose ranks hold parts of one network: fsdp, tensor_parallel, hybrid, pipeline.

setup                  once, in fit or test: every rank has the whole network with the same numbers
  place_model          shards or cuts it in place, in a subclass
  setup_optimizers     of the parts; before place_model if a rank keeps only some of the parameters
checkpoints            whole, see whole_state.py
norms, total_norm      of whole gradients, over all ranks
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from exp.errors import RunError
from exp.strategies.gradient_averaging import broadcast_buffers
from exp.strategies.placement import Placement
from exp.strategies.strategy import module_of, precision_of
from exp.strategies.whole_state import Whole, WholeState, local_part

# Prefix of the network's names in the module's state dict.
NETWORK = "network."


class ModelParallel(WholeState):
    """Base of strategies that place parts of a network.

    A subclass implements `place_model`, and also `gather`, `part` and `copies_in_model` if its parts are no DTensors.
    If `holds_every_name` is False, the optimizers are made of the whole network and then keep the parameters of this
    rank, so that their groups and a checkpoint's indices are those of one process.

    Attributes:
        is_placed: Whether the network is in parts.
        is_last_backward: Whether an optimizer step follows this backward, instead of another accumulated batch.
        data_group: Ranks with the same part of the model, one for each share of the batch.
        model_group: Ranks with the parts of one model, which share one part of a batch.
    """

    data_group: dist.ProcessGroup

    def __init__(self, *, placement: Placement) -> None:
        super().__init__(placement=placement)
        self._is_grouped = False
        self.is_placed = False
        self.is_last_backward = True
        self._parameter_names: list[str] = []

    @abstractmethod
    def place_model(self) -> None:
        """Shard or cut the network in place. Called once, on every rank, with the same numbers everywhere."""

    def copies(self, name: str, part: Tensor) -> int:
        """Return the number of ranks that hold this part of a tensor: it counts once in a norm over all ranks."""
        in_model = self.copies_in_model(name)
        if not isinstance(part, DTensor):
            return in_model * self.placement.data_ranks
        # The mesh has the data ranks, and the ranks of one model each have one.
        sizes = [part.device_mesh.size(dim) for dim, place in enumerate(part.placements) if place.is_replicate()]
        return in_model * math.prod(sizes)

    def copies_in_model(self, name: str) -> int:
        """Return the number of ranks of one model that hold the same part of a tensor. Default: 1."""
        return 1

    # --- placing ---

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if not self._is_grouped:
            self._make_groups()
            self._is_grouped = True

    def _make_groups(self) -> None:
        # torch needs every rank to make every group, in the same order.
        self.model_group = dist.new_subgroups_by_enumeration(self.placement.models())[0]
        self.data_group = dist.new_subgroups_by_enumeration(self.placement.peers())[0]
        if self.placement.backend == "nccl" and not self.holds_every_name:
            # Of all ranks: a smaller group would make the other ranks split NCCL's communicator (torch 2.13).
            self.host_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))

    def data_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that share the batch, for FSDP2."""
        return DeviceMesh.from_group(self.data_group, self.root_device.type, mesh_dim_names=("data",))

    def setup(self, trainer: Trainer) -> None:
        """Place the model, instead of wrapping it and sending the numbers of rank 0 like DDPStrategy."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_first = self.whole is None
        if is_first:
            self.model = self.precision_plugin.convert_module(self.model)
            self._remember_whole()
        self.model_to_device()
        if fitting and not self.holds_every_name:
            if not is_first:
                raise RunError("the network was cut into parts before; expected fit before any other stage")
            self.setup_optimizers(trainer)
        if is_first:
            before = dict(module_of(self).named_parameters())
            self.place_model()
            self.is_placed = True
            self._keep_what_is_left(before)
            self._share_metrics()
        # Attached again: after the hooks of place_model, and in a second stage, since the first one removed them.
        precision_of(self).attach(module_of(self))
        if fitting and self.holds_every_name:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # All parts skip a step that one part must skip.
        assert dist.group.WORLD is not None
        precision_of(self).agree_over(dist.group.WORLD)

    def _remember_whole(self) -> None:
        module = module_of(self)
        self._parameter_names = [name for name, _ in module.named_parameters()]
        self.whole = {
            name: Whole(shape=value.shape, dtype=value.dtype)
            for name, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def _keep_what_is_left(self, before: Mapping[str, nn.Parameter]) -> None:
        if self.holds_every_name:
            return
        left = {id(before[name]): parameter for name, parameter in module_of(self).named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [left[id(old)] for old in group["params"] if id(old) in left]

    def _share_metrics(self) -> None:
        """Let metrics count over the data ranks: the ranks of one model see the same samples."""
        for module in module_of(self).modules():
            if isinstance(module, Metric):
                module.process_group = self.data_group

    # --- accumulated batches ---

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Mark the backward of accumulated batches. Lightning enters it for all except the last batch."""
        self.is_last_backward = False
        try:
            yield
        finally:
            self.is_last_backward = True

    # --- evaluation and checkpoints ---

    def on_validation_start(self) -> None:
        self._agree_on_buffers()

    def on_test_start(self) -> None:
        self._agree_on_buffers()

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        self._agree_on_buffers()
        return super().lightning_module_state_dict()

    def _agree_on_buffers(self) -> None:
        """Give all ranks the running statistics of the first share, for evaluation and checkpoints."""
        broadcast_buffers(module_of(self), group=self.data_group, are_saved_only=True)

    # --- norms ---

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the 2-norm of each whole tensor that any rank has, 0-d. Every rank must call it.

        Args:
            tensors: This rank's parts, such as gradients, by the names of the network's parameters.
        """
        squares = {name: self._share_of_square(f"{NETWORK}{name}", tensor)[None] for name, tensor in tensors.items()}
        return {name: total[0].sqrt() for name, total in self._reduce(squares, dist.ReduceOp.SUM, width=1).items()}

    def sums(self, found: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implement Parts: a part that several ranks hold counts once."""
        once = {name: one.double() / self.copies(f"{NETWORK}{name}", tensors[name]) for name, one in found.items()}
        # Thirds do not add up to an integer.
        return {name: total.round() for name, total in self._reduce(once, dist.ReduceOp.SUM).items()}

    def maxima(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implement Parts."""
        return self._reduce(found, dist.ReduceOp.MAX)

    def _reduce(
        self, found: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType, *, width: int | None = None
    ) -> dict[str, Tensor]:
        """Return `[K]` for each name that any rank has. width: K, the same for all names. None: unknown."""
        places = {name.removeprefix(NETWORK): place for place, name in enumerate(self._parameter_names)}
        is_held = [float(name in found) for name in places]
        if width is None or not self.holds_every_name:
            # A rank may have none of the parameters, and then does not know K.
            sent = [*is_held, float(max((len(one) for one in found.values()), default=0))]
            there = torch.tensor(sent, dtype=torch.float64, device=self.root_device)
            dist.all_reduce(there, op=dist.ReduceOp.MAX)
            *is_held, most = there.tolist()
            width = int(most)
        smallest = 0.0 if op == dist.ReduceOp.SUM else -math.inf
        values = torch.full((len(places), width), smallest, dtype=torch.float64, device=self.root_device)
        for name, one in found.items():
            values[places[name]] = one.to(device=self.root_device, dtype=torch.float64)
        dist.all_reduce(values, op=op)
        return {name: values[place] for name, place in places.items() if is_held[place]}

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm of the gradients of all parameters together, 0-d, float64. Every rank must call it."""
        names = self._names()
        total = torch.zeros((), dtype=torch.float64, device=self.root_device)
        for parameter in parameters:
            if parameter.grad is not None:
                total += self._share_of_square(names[id(parameter)], parameter.grad)
        dist.all_reduce(total)
        return total.sqrt()

    def _share_of_square(self, name: str, part: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(local_part(part), dtype=torch.float64)
        return norm.square() / self.copies(name, part)


def gather_ranks(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `[R, ...]` from the tensors `[...]` of R ranks, in their order. Every rank of the group must call it.

    Args:
        group: None: all ranks. A single process returns `[1, ...]`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return tensor[None]
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return torch.stack(found)


def gather_data(tensor: Tensor, *, strategy: LightningStrategy) -> Tensor:
    """Return the tensors of the ranks that share the data: one for the ranks of each model."""
    return gather_ranks(tensor, group=strategy.data_group if isinstance(strategy, ModelParallel) else None)
