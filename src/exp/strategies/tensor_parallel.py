"""Tensor parallel: every rank has a part of each large layer, and all work on the same batch."""

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
from exp.errors import ConfigError, ErrorDetails, RunError
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
    gradient_transfers,
    merge_equal_places,
    shard_parameters,
    whole_parameters,
)
from exp.strategies.gradient_averaging import average_gradients
from exp.strategies.model_parallel import NETWORK, ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of, move_all_but_network, network_of, precision_of
from exp.strategies.tensor_layers import MOST_NUMBERS, Cut, apply_plan, find_difference, model_mesh
from exp.strategies.tensor_plan import AUTO, Plan, division_errors, make_plan, tied_cuts
from exp.strategies.units import choose_units, split_by_dtype

# Gradients of a cut layer cannot be differentiated again, see exp.strategies.tensor_layers.
MEETS = frozenset({"forward_passes"})


class TensorParallel(Strategy):
    """Ranks of one model share each layer; all ranks of the run, unless exp.strategies.hybrid says how many.

    plan: `auto`, for models whose layers are called as those of gpt and transformer, or name patterns to the words of
        exp.strategies.tensor_plan.
    divide: constants of containers that count what is cut, such as heads; `auto` those of a plan `auto`.
    vocabulary: with `auto`, embeddings and the head are cut over the vocabulary.
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
        vocabulary: bool = False,
    ) -> None:
        super().__init__(name=name)
        self.plan, self.divide, self.vocabulary = plan, divide, vocabulary

    @property
    def demand(self) -> Demand:
        """Return a demand in which all ranks work on one batch together."""
        return Demand(rest="tensor")

    def plan_of(self, network: nn.Module) -> Plan:
        """Return the plan for a network. Raises: ConfigError."""
        return make_plan(network, self.plan, divide=self.divide, vocabulary=self.vocabulary)

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return an error for each layer that cannot be cut."""
        network, errors = planned.network, []
        if WORDS[planned.precision].float8:
            expected = "another word: the layers of fp8 are not cut"
            errors.append(ErrorDetails(key="precision.word", got="fp8 with layers in parts", expected=expected))
        try:
            plan = self.plan_of(network)
        except ConfigError as error:
            return [*errors, *error.errors]
        ranks = planned.placement.tensor
        return [*errors, *division_errors(network, plan, ranks=ranks), *tied_cuts(network, plan)]

    def footprint(self, load: Load) -> Footprint:
        """The part of each rank of each layer that is cut, and where models are in shards, too, its rows of these."""
        placement = load.placement
        ranks, shard = placement.tensor, placement.shard
        plan, places = self.plan_of(load.network), []
        shares = _kept_shares(load.network, plan, ranks)
        for rank in range(placement.world_size):
            held = _cut(whole_parameters(load), load, plan, ranks=ranks, rank=rank % ranks)
            if shard > 1:
                held = shard_parameters(held, load.sizes, ranks=shard, rank=placement.data_rank(rank))
            places.append(Place(ranks=(rank,), held=held, activations=shares))
        sent = _layer_bytes(load, plan, ranks) * load.micro_batches
        what, calls = "all-reduce of what layers give and of its gradients", len(plan.layers) * load.micro_batches
        transfers = [Transfer(what=what, sent=sent, over=ranks, messages=calls)]
        own = sum(one.stored for one in places[0].held.values())
        if shard > 1:
            times = 3 * load.micro_batches
            sent = gather_bytes(own * shard, shard) * times
            transfers.append(
                Transfer(what="all-gathers of weights, reduce-scatter of gradients", sent=sent, over=shard)
            )
        else:
            transfers += gradient_transfers(load, factor=own / max(load.parameter_bytes, 1))
        note = "activations of layers in parts are an estimate: what is between a column and its row counts by its part"
        # An embedding looks up every token on each rank.
        work = {**shares, **{name: 1 / ranks for name, word in plan.layers.items() if word != "vocabulary"}}
        return Footprint(places=merge_equal_places(places), transfers=transfers, layer_work=work, notes=(note,))

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank."""
        return TensorParallelStrategy(placement=placement, tensor=self)


def _cut(held: Mapping[str, Held], load: Load, plan: Plan, *, ranks: int, rank: int) -> dict[str, Held]:
    """Return parts along a dimension, each of ceil(size / ranks) except the last ones, which may have less."""
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
    """Return shares of activations: a row layer keeps a part of its input, a holder of columns a part of its own."""
    found: dict[str, float] = {}
    for name, word in plan.layers.items():
        if word == "column":
            holder = name.rpartition(".")[0]
            children = (path for path, _ in network.get_submodule(holder).named_children())
            found = {**dict.fromkeys((f"{holder}.{path}".lstrip(".") for path in children), 1.0), **found}
            found[holder] = 1 / ranks
    return found | {name: 1 / ranks for name, word in plan.layers.items() if word == "row"}


def _layer_bytes(load: Load, plan: Plan, ranks: int) -> float:
    """Return what cut layers send for one micro-batch: a row its output, a column the gradient of its input."""
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
    """Compare a small network in parts with the whole one. Every rank of the mesh must call it.

    Raises:
        RunError: The plan changes what the network computes.
    """
    if mesh.size() == 1 or sum(parameter.numel() for parameter in network.parameters()) > MOST_NUMBERS:
        return
    if found := find_difference(network, plan, example_inputs(spec), mesh=mesh):
        divided = [f"{path}.{name}".lstrip(".") for path, names in plan.constants.items() for name in names]
        error = ErrorDetails(
            key="strategy.plan",
            got=f"a plan that changes what the network computes with {mesh.size()} ranks: {found}",
            expected="a column layer before each row layer, what is between them by parts, and each constant that "
            f"counts parts, such as heads, in strategy.divide, which divides {among(divided)}",
            fix="Or write strategy=ddp",
        )
        raise RunError(str(error))


class TensorParallelStrategy(ModelParallel):
    """Neighbouring ranks share each layer.

    Where there are several such groups, gradients are averaged over them; with a dimension `shard`, the parts of each
    layer are in shards over the groups instead, which FSDP2 gathers unit by unit.
    """

    def __init__(self, *, placement: Placement, tensor: TensorParallel) -> None:
        super().__init__(placement=placement)
        self.tensor = tensor
        self._cuts: dict[str, Cut] = {}

    def place_model(self) -> None:
        network = network_of(self)
        network.to(self.root_device)
        # Attached again after placing: copies of the network run without them.
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
        return self._cuts[name].distributed(part).full_tensor() if name in self._cuts else part

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
