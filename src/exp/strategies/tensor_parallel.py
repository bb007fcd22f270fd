"""Tensor parallel strategy: each rank has a part of each large layer, and all ranks process the same batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from exp.data.data import Data
from exp.errors import ConfigError, ErrorDetails, RunError, invalid_value, not_supported_with
from exp.models.inference import example_inputs
from exp.precision.words import WORDS
from exp.shared_types import DataSpec
from exp.spelling import among
from exp.strategies.footprint import (
    Footprint,
    Held,
    Load,
    Place,
    Transfer,
    all_reduce_bytes,
    gather_bytes,
    merge_equal_places,
    shard_parameters,
)
from exp.strategies.gradient_averaging import average_gradients
from exp.strategies.model_parallel import NETWORK, ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of, move_all_but_network, network_of, precision_of
from exp.strategies.tensor_layers import MOST_NUMBERS, Cut, apply_plan, find_difference, model_mesh
from exp.strategies.tensor_plan import AUTO, PLAN, Plan, division_errors, make_plan, tied_errors
from exp.strategies.units import choose_units, split_by_dtype

# Second gradients are missing, because the gradients of a split layer cannot be differentiated again. See
# exp.strategies.tensor_layers.
MEETS = frozenset({"forward_passes"})


class TensorParallel(Strategy):
    """Strategy in which ranks split each layer of one model.

    All ranks of the run split one model. For several models, use the strategy `hybrid`.

    Args:
        name: Name of the strategy. Default: tensor_parallel.
        plan: Split of the layers. `auto` supports models with the layer names of gpt and transformer. A mapping assigns
            the words of exp.strategies.tensor_plan to name patterns. Default: auto.
        divide: Name patterns of integer constants in containers that are divided by the number of ranks, such as the
            number of attention heads. With the plan `auto`, `auto` selects constants that end with `heads`. Default:
            auto.
    """

    splits_batch = False
    splits_tensors = True
    meets = MEETS

    def __init__(
        self,
        *,
        name: str = "tensor_parallel",
        plan: str | Mapping[str, str] = AUTO,
        divide: str | Sequence[str] = AUTO,
    ) -> None:
        super().__init__(name=name)
        self.plan, self.divide = plan, divide

    @property
    def demand(self) -> Demand:
        """Devices to use: all devices. Their ranks process the same samples of a batch."""
        return Demand(rest="tensor")

    def plan_of(self, network: nn.Module) -> Plan:
        """Return the plan for a network.

        Raises:
            ConfigError: An option does not match the network.
        """
        return make_plan(network, self.plan, divide=self.divide)

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return an error for each layer that cannot be split, and for float8 layers."""
        network = planned.network
        errors: list[ErrorDetails] = []
        if WORDS[planned.precision].float8:
            expected = "another precision: layers in float8 cannot be split"
            errors.append(not_supported_with("precision.word", "fp8", f"strategy={self.name}", expected))
        try:
            plan = self.plan_of(network)
        except ConfigError as error:
            return [*errors, *error.errors]
        ranks = planned.placement.tensor
        return [*errors, *division_errors(network, plan, ranks=ranks), *tied_errors(network, plan)]

    def footprint(self, load: Load) -> Footprint:
        """Return the parts of the split layers on each rank.

        If the placement has a dimension `shard`, parts are split by rows.
        """
        placement = load.placement
        ranks, shard = placement.tensor, placement.shard
        plan, places = self.plan_of(load.network), []
        shares = _kept_shares(load.network, plan, ranks)
        for rank in range(placement.world_size):
            held = _cut(load.whole_parameters(), load, plan, ranks=ranks, rank=rank % ranks)
            if shard > 1:
                held = shard_parameters(held, load.sizes, ranks=shard, rank=placement.data_rank(rank))
            places.append(Place(ranks=(rank,), held=held, activations=shares))
        sent = _layer_bytes(load, plan, ranks) * load.micro_batches
        what, calls = "all-reduce of layer outputs and their gradients", len(plan.layers) * load.micro_batches
        transfers = [Transfer(what=what, sent=sent, over=ranks, messages=calls)]
        own = sum(one.stored for one in places[0].held.values())
        if shard > 1:
            times = 3 * load.micro_batches
            sent = gather_bytes(own * shard, shard) * times
            transfers.append(
                Transfer(what="all-gathers of weights, reduce-scatter of gradients", sent=sent, over=shard)
            )
        else:
            transfers += load.gradient_transfers(factor=own / max(load.parameter_bytes, 1))
        note = (
            "activations of split layers are an estimate: from a column layer to its row layer, a rank keeps its part"
        )
        # The work of an embedding is not divided, because each rank searches all tokens in its part of the vocabulary.
        work = {**shares, **{name: 1 / ranks for name, word in plan.layers.items() if word != "vocabulary"}}
        return Footprint(places=merge_equal_places(places), transfers=transfers, layer_work=work, notes=(note,))

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return a Lightning strategy for one rank."""
        return TensorParallelStrategy(placement=placement, tensor=self)


def _cut(held: Mapping[str, Held], load: Load, plan: Plan, *, ranks: int, rank: int) -> dict[str, Held]:
    """Return the parts of parameters that one rank stores.

    A split dimension has ceil(size / ranks) entries on each rank. The last ranks may have fewer entries.
    """
    found = dict(held)
    for layer, word in plan.layers.items():
        cuts = {f"{layer}.weight": 1} if word == "row" else {f"{layer}.weight": 0, f"{layer}.bias": 0}
        for name, dim in cuts.items():
            if name in held:
                shape, each = held[name].shape, -(-held[name].shape[dim] // ranks)
                own = max(0, min(each, shape[dim] - rank * each))
                part = (*shape[:dim], own, *shape[dim + 1 :])
                size = math.prod(part) * load.sizes[name].itemsize
                found[name] = replace(held[name], shape=part, stored=size, gradient=size if held[name].gradient else 0)
    return found


def _kept_shares(network: nn.Module, plan: Plan, ranks: int) -> dict[str, float]:
    """Return the fractions of activations that a rank keeps in memory, by layer path.

    A row layer keeps a part of its input. A module that contains column layers keeps a part of its activations.
    """
    found: dict[str, float] = {}
    for name, word in plan.layers.items():
        if word == "column":
            holder = name.rpartition(".")[0]
            children = (path for path, _ in network.get_submodule(holder).named_children())
            found = {**dict.fromkeys((f"{holder}.{path}".lstrip(".") for path in children), 1.0), **found}
            found[holder] = 1 / ranks
    return found | {name: 1 / ranks for name, word in plan.layers.items() if word == "row"}


def _layer_bytes(load: Load, plan: Plan, ranks: int) -> float:
    """Return the bytes that a rank sends for one micro-batch.

    A row layer sends its output, and a column layer sends the gradient of its input.
    """
    sent = 0.0
    for name, word in plan.layers.items():
        layer, given = load.network.get_submodule(name), load.outputs.get(name, 0)
        if word in ("row", "vocabulary"):
            sent += all_reduce_bytes(given, ranks)
        elif isinstance(layer, nn.Linear):
            sent += all_reduce_bytes(given * layer.in_features / layer.out_features, ranks)
            sent += gather_bytes(given, ranks) if word == "column_whole" else 0
    return sent


def check_function(plan: Plan, network: nn.Module, spec: DataSpec, *, mesh: DeviceMesh) -> None:
    """Compare a small split network with the whole network, which must compute the same.

    Every rank of the mesh must call this function.

    Args:
        plan: Plan of the split.
        network: The network. Networks with more than MOST_NUMBERS parameter entries are not compared.
        spec: Description of the data.
        mesh: Device mesh of the ranks that split the model.

    Raises:
        RunError: The plan changes the result of the network.
    """
    if mesh.size() == 1 or sum(parameter.numel() for parameter in network.parameters()) > MOST_NUMBERS:
        return
    if found := find_difference(network, plan, example_inputs(spec), mesh=mesh):
        expected = (
            "a column layer before each row layer, and only elementwise operations between the two layers. "
            f"List each number to divide, such as the heads, in strategy.divide; it has {among(plan.counts(network))}"
        )
        because = f"which changes what the network computes with {mesh.size()} ranks: {found}"
        raise RunError(str(invalid_value(PLAN, dict(plan.layers), expected, "Or write strategy=ddp", because=because)))


class TensorParallelStrategy(ModelParallel):
    """Strategy of neighboring ranks that split each layer.

    If several groups of ranks split models, the groups average their gradients. With a dimension `shard`, the groups
    instead share the parts of each layer, and FSDP2 gathers them unit by unit.
    """

    def __init__(self, *, placement: Placement, tensor: TensorParallel) -> None:
        super().__init__(placement=placement)
        self.tensor = tensor
        self._cuts: dict[str, Cut] = {}

    def place_model(self) -> None:
        network = network_of(self)
        network.to(self.root_device)
        # The precision's hooks are removed, so that copies of the network run without them. `setup` attaches them
        # again.
        precision_of(self).teardown()
        mesh = model_mesh(self.model_group, self.root_device)
        data = getattr(getattr(module_of(self).trainer, "datamodule", None), "data", None)
        plan = self.tensor.plan_of(network)
        if isinstance(data, Data):
            check_function(plan, network, data.spec, mesh=mesh)
        cuts = apply_plan(plan, network, mesh)
        self._cuts = {f"{NETWORK}{name}": cut for name, cut in cuts.items()}
        if self.placement.shard > 1:
            data_mesh = self.data_mesh()
            chosen = split_by_dtype(network, choose_units(network, AUTO, key="strategy.shard"))
            for unit in [*reversed(chosen.values()), network]:
                fully_shard(unit, mesh=data_mesh)

    def model_to_device(self) -> None:
        if self.is_placed:
            super().model_to_device()
            return
        move_all_but_network(module_of(self), self.root_device)

    # --- parts ---

    def gather(self, name: str, part: Tensor) -> Tensor:
        part = super().gather(name, part)
        return self._cuts[name].as_dtensor(part).full_tensor() if name in self._cuts else part

    def part(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        if name in self._cuts:
            whole = self._cuts[name].part(whole.to(self.root_device))
        return super().part(name, whole, like)

    def copies_in_model(self, name: str) -> int:
        return 1 if name in self._cuts else self.placement.model_ranks

    # --- several groups ---

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.is_last_backward and self.placement.replicate > 1:
            average_gradients(network_of(self).parameters(), group=self.data_group)
        return loss
