"""Lightning's side of strategies whose ranks hold parts of one network: fsdp, tensor_parallel, hybrid, pipeline.

setup, once, in fit or test        the network is whole and the same on every rank, weights of a checkpoint included
  place_model()                    shards or cuts it in place; a subclass says how
  configure_optimizers             of the parts; before placing where a rank holds only some of the parameters
checkpoints                        whole, see whole_state.py
norms, total_norm                  of whole gradients, over all ranks
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

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

# The network's place in the module: names in its state dict begin so.
NETWORK = "network."


class ModelParallel(WholeState):
    """Base. A subclass gives `place_model`, and `gather`, `part` and `copies_in_model` where its parts are no DTensors.

    With `holds_every_name` False the optimizers are made of the whole network, before it is cut, and keep the
    parameters that this rank is left with: their groups, and a checkpoint's indices, are those of one process.

    is_placed: whether the network is in parts already.
    is_last_backward: whether an optimizer step follows, and not the backward of another accumulated batch.
    data_group: the ranks that hold the same part of the model, one a share of the batch. model_group: the ranks that
        hold the parts of one model, and work on one share of a batch. Set when the process group is joined.
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
        """Shards or cuts `self.lightning_module.network` in place. Called once, on every rank.

        Every rank has the whole network with the same numbers, on `root_device` where `model_to_device` is inherited.
        """

    def copies(self, name: str, part: Tensor) -> int:
        """How many ranks of the run hold this same part of a tensor: in a norm over all ranks it counts once."""
        in_model = self.copies_in_model(name)
        if not isinstance(part, DTensor):
            return in_model * self.placement.data_ranks
        # A mesh is of ranks of the data: those of a model share what it has not.
        sizes = [part.device_mesh.size(dim) for dim, place in enumerate(part.placements) if place.is_replicate()]
        return in_model * math.prod(sizes)

    def copies_in_model(self, name: str) -> int:
        """How many ranks of one model hold the same part of a tensor; by default each has its own."""
        return 1

    # --- placing ---

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if not self._is_grouped:
            self._make_groups()
            self._is_grouped = True

    def _make_groups(self) -> None:
        """Every rank makes every group, in the same order, as torch asks."""
        self.model_group = self.subgroup(self.placement.models())
        self.data_group = self.subgroup(self.placement.peers())
        if self.placement.backend == "nccl" and not self.holds_every_name:
            # Of all ranks: those outside of a group split NCCL's communicator, and gloo's members do not (torch 2.13).
            self.host_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))

    def subgroup(self, ranks: list[list[int]]) -> dist.ProcessGroup:
        """Makes a group of each list of ranks; this rank's. Every rank must call it."""
        return cast("dist.ProcessGroup", dist.new_subgroups_by_enumeration(ranks)[0])

    def data_mesh(self) -> DeviceMesh:
        """The ranks that share the batch, for what FSDP2 keeps in shards over them."""
        return DeviceMesh.from_group(self.data_group, self.root_device.type, mesh_dim_names=("data",))

    def setup(self, trainer: Trainer) -> None:
        """In the place of DDPStrategy's, which wraps the module and sends rank 0's numbers to all."""
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
        # Again: behind the hooks that placing made, and in a second stage, for the first took them off.
        precision_of(self).attach(module_of(self))
        if fitting and self.holds_every_name:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # A step that one part must skip is skipped by all.
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
        """Ranks of one model see the same samples, which count once: over the ranks of the data."""
        for module in module_of(self).modules():
            if isinstance(module, Metric):
                module.process_group = self.data_group

    # --- accumulated batches ---

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it around the backward of accumulated batches, but for the last."""
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

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree_on_buffers()
        return super().lightning_module_state_dict()

    def _agree_on_buffers(self) -> None:
        """Running statistics are those of the first share, whichever rank evaluates with them or resumes."""
        broadcast_buffers(module_of(self), group=self.data_group, are_saved_only=True)

    # --- norms ---

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The 2-norm of each whole tensor, 0-d, of all that any rank has. Every rank must call it.

        tensors: gradients, say: this rank's parts of them, by the names of the network's parameters.
        """
        tensors = {f"{NETWORK}{name}": tensor for name, tensor in tensors.items()}
        # The squares, and whether a rank has the tensor at all.
        found = torch.zeros(2, len(self._parameter_names), dtype=torch.float64, device=self.root_device)
        for place, name in enumerate(self._parameter_names):
            if name in tensors:
                found[0, place] = self._share_of_square(name, tensors[name])
                found[1, place] = 1.0
        dist.all_reduce(found)
        roots = found[0].sqrt()
        # Where every rank has the same names nobody has to wait for the device to know them.
        there = None if self.holds_every_name else found[1].tolist()
        return {
            name.removeprefix(NETWORK): roots[place]
            for place, name in enumerate(self._parameter_names)
            if (name in tensors if there is None else there[place])
        }

    # --- what is counted in parts ---

    def sums(self, found: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As Parts has it: a part that several ranks hold counts once."""
        names = {name: f"{NETWORK}{name}" for name in found}
        once = {name: found[name].double() / self.copies(names[name], tensors[name]) for name in found}
        # Thirds do not add up to a whole number of entries.
        return {name: total.round() for name, total in self._reduced(once, dist.ReduceOp.SUM).items()}

    def maxima(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As Parts has it."""
        return self._reduced(found, dist.ReduceOp.MAX)

    def _reduced(self, found: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, Tensor]:
        """`[K]` of each name that any rank has; the same K for all."""
        there = torch.zeros(len(self._parameter_names) + 1, dtype=torch.float64, device=self.root_device)
        there[-1] = max((len(one) for one in found.values()), default=0)
        places = {name.removeprefix(NETWORK): place for place, name in enumerate(self._parameter_names)}
        for name in found:
            there[places[name]] = 1.0
        # A rank may have no parameter at all, and has to know how much the others send.
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        *held, width = there.tolist()
        smallest = 0.0 if op == dist.ReduceOp.SUM else -math.inf
        values = torch.full((len(held), int(width)), smallest, dtype=torch.float64, device=self.root_device)
        for name, one in found.items():
            values[places[name]] = one.to(device=self.root_device, dtype=torch.float64)
        dist.all_reduce(values, op=op)
        return {name: values[place] for name, place in places.items() if held[place]}

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all parameters together, 0-d, in float64. Every rank must call it."""
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
    """`[...]` of each of R ranks becomes `[R, ...]`, in their order. Every rank of the group must call it alike.

    group: None is all ranks. A process without others gets `[1, ...]`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return tensor[None]
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return torch.stack(found)


def gather_data(tensor: Tensor, *, strategy: LightningStrategy) -> Tensor:
    """The same over the ranks that share the data: ranks of one model, which see the same samples, give one."""
    return gather_ranks(tensor, group=strategy.data_group if isinstance(strategy, ModelParallel) else None)
