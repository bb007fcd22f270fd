"""Base class of Lightning strategies that split one network over ranks: fsdp, tensor_parallel, hybrid, pipeline.

setup                  once, in training or test: every rank has the whole network with the same values
  place_model          shards or splits the network in place; implemented by a subclass
  setup_optimizers     creates optimizers of the parts; before place_model if a rank keeps only some of the parameters
checkpoints            contain whole tensors, see whole_state.py
norms, total_norm      norms of whole gradients, over all ranks
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
    """Base class of strategies that split a network over ranks.

    A subclass implements `place_model`. If its parts are not DTensors, it also implements `gather`, `part` and
    `copies_in_model`.

    If `holds_every_name` is False, optimizers are created for the whole network. Afterwards, parameters of other ranks
    are removed. The optimizers' groups, and the indices in a checkpoint, therefore equal those of a run with one
    process.

    Attributes:
        is_placed: Whether the network is split.
        is_last_backward: Whether an optimizer step follows the current backward. False if another micro-batch is
            accumulated first.
        data_group: Ranks with the same part of the model. Each of them processes different samples of the global batch.
        model_group: Ranks that split one model. They process the same samples of the global batch.
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
        """Shard or split the network in place.

        Called once on every rank. The network has the same values on all ranks.
        """

    def copies(self, name: str, part: Tensor) -> int:
        """Return the number of ranks that store the same part of a tensor.

        A norm over all ranks is divided by this number, so that the part counts once.
        """
        in_model = self.copies_in_model(name)
        if not isinstance(part, DTensor):
            return in_model * self.placement.data_ranks
        # The mesh of a DTensor contains the ranks that have this part of the model.
        sizes = [part.device_mesh.size(dim) for dim, place in enumerate(part.placements) if place.is_replicate()]
        return in_model * math.prod(sizes)

    def copies_in_model(self, name: str) -> int:
        """Return the number of ranks in `model_group` that store the same part of a tensor. Default: 1."""
        return 1

    # --- placing ---

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if not self._is_grouped:
            self._make_groups()
            self._is_grouped = True

    def _make_groups(self) -> None:
        # In torch, every rank must create every group, in the same order.
        self.model_group = dist.new_subgroups_by_enumeration(self.placement.models())[0]
        self.data_group = dist.new_subgroups_by_enumeration(self.placement.peers())[0]
        if self.placement.backend == "nccl" and not self.holds_every_name:
            # The group contains all ranks, because a smaller group would make the other ranks split NCCL's communicator
            # (torch 2.13).
            self.host_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))

    def data_mesh(self) -> DeviceMesh:
        """Return the device mesh of the ranks in `data_group`, for FSDP2."""
        return DeviceMesh.from_group(self.data_group, self.root_device.type, mesh_dim_names=("data",))

    def setup(self, trainer: Trainer) -> None:
        """Prepare the accelerator, the model and the optimizers.

        Unlike in DDPStrategy, the module is not wrapped, and values of rank 0 are not broadcast.
        """
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
                raise RunError("training cannot follow an evaluation under this strategy. Train before you evaluate")
            self.setup_optimizers(trainer)
        if is_first:
            before = dict(module_of(self).named_parameters())
            self.place_model()
            self.is_placed = True
            self._keep_what_is_left(before)
            self._share_metrics()
        # The precision's hooks are attached after the hooks of place_model. If a test follows the training, they are
        # attached again, because the end of the training removed them.
        precision_of(self).attach(module_of(self))
        if fitting and self.holds_every_name:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # If one part must skip a step, all parts skip it.
        assert dist.group.WORLD is not None
        precision_of(self).scaler.agree_over(dist.group.WORLD)

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
        """Make metrics aggregate only over ranks with different samples.

        The ranks of one model process the same samples.
        """
        for module in module_of(self).modules():
            if isinstance(module, Metric):
                module.process_group = self.data_group

    # --- accumulated batches ---

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context for the backward of an accumulated micro-batch.

        Lightning enters the context for each micro-batch of a step except the last.
        """
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
        """Copy the running statistics of one model to the other models, for evaluation and checkpoints."""
        broadcast_buffers(module_of(self), group=self.data_group, are_saved_only=True)

    # --- norms ---

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the 2-norms of whole tensors, 0-d, by name. Every rank must call this method.

        The result contains the tensors of all ranks, even those without a part on this rank.

        Args:
            tensors: This rank's parts, such as gradients, by parameter name of the network.
        """
        squares = {name: self._share_of_square(f"{NETWORK}{name}", tensor)[None] for name, tensor in tensors.items()}
        return {name: total[0].sqrt() for name, total in self._reduce(squares, dist.ReduceOp.SUM, width=1).items()}

    def sums(self, found: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of counts over all parts, as described in Parts.

        A part that several ranks store counts once.
        """
        once = {name: one.double() / self.copies(f"{NETWORK}{name}", tensors[name]) for name, one in found.items()}
        # The sums are rounded, because in floating point three thirds may not add up to one.
        return {name: total.round() for name, total in self._reduce(once, dist.ReduceOp.SUM).items()}

    def maxima(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the maxima over all parts, as described in Parts."""
        return self._reduce(found, dist.ReduceOp.MAX)

    def _reduce(
        self, found: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType, *, width: int | None = None
    ) -> dict[str, Tensor]:
        """Return the elementwise sums or maxima over all ranks of one vector per parameter.

        Args:
            found: This rank's vectors of K numbers, by parameter name. Ranks of a pipeline have different parameters.
            op: Sum or maximum.
            width: The length K of the vectors. None determines K by a collective. Default: None.

        Returns:
            Vectors of K numbers by parameter name, for the parameters of all ranks.
        """
        places = {name.removeprefix(NETWORK): place for place, name in enumerate(self._parameter_names)}
        is_held = [float(name in found) for name in places]
        if width is None or not self.holds_every_name:
            # A rank without parameters cannot determine K.
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
        """Return the 2-norm of the gradients of all parameters together, 0-d, float64.

        Every rank must call this method.
        """
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
    """Return one tensor per rank, stacked in the order of the R ranks, `[R, ...]`.

    Every rank of the group must call this function.

    Args:
        tensor: Tensor of this rank, `[...]`.
        group: Process group. None uses all ranks. Without torch.distributed, R is 1. Default: None.
    """
    if not dist.is_available() or not dist.is_initialized():
        return tensor[None]
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return torch.stack(found)


def gather_data(tensor: Tensor, *, strategy: LightningStrategy) -> Tensor:
    """Gather a tensor from each copy of the model, and stack the tensors.

    The copies process different samples of the global batch.
    """
    return gather_ranks(tensor, group=strategy.data_group if isinstance(strategy, ModelParallel) else None)
