"""Networks of one architecture that are computed together by vmap.

The parameters and buffers of a member are rows of stacked tensors. A change of the stacked tensors therefore changes
the member's network, optimizer and state dict, too. Each member draws its dropout masks from the same random stream as
a single run.

The module depends on two properties of torch 2.13, which tests check. A dropout on a CPU draws
`empty_like(input).bernoulli_(1 - p)` and divides by 1 - p. At p = 0 and p = 1, a dropout draws no numbers. Fused
attention on a CPU does not support vmap, so the plain kernel is used.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.data.randomness import step_seed
from exp.engine.forward import Forward, Values
from exp.functions.identities import apply_function
from exp.models.kept_state import KeptState
from exp.nested import map_tensors
from exp.objectives.objective import Objective
from exp.shared_types import Batch

Tensors = dict[str, Tensor]
# Dropout layers that a stack supports. It draws the masks of these layers separately for each member.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Unstackable(Exception):
    """Error of jobs that cannot be trained in a stack. It is raised after their networks and data were built.

    The message states the reason in one line.
    """


class _Mask(torch.autograd.Function):
    """An autograd function that draws dropout factors, separately for each member under vmap.

    Args:
        input: Input of the dropout, detached.
        member: Index of the member. vmap calls the method `vmap` only if an argument is batched. This index is always
            batched.
        draw: Function that returns the factors of one member. Its arguments are the index and the input of the member.
    """

    @staticmethod
    def forward(input: Tensor, member: Tensor, draw: Callable[[int, Tensor], Tensor]) -> Tensor:
        return draw(int(member), input)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], input: Tensor, member: Tensor, draw: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, int]:
        dim = in_dims[0]
        rows = [input] * info.batch_size if dim is None else input.unbind(dim)
        return torch.stack([draw(place, row) for place, row in enumerate(rows)]), 0


class StackedNetwork:
    """The networks of M members, computed together.

    Args:
        networks: Networks of one architecture.
        seeds: Seed of each member.
        run: Result of `forward_by_name` for the first network.
        objective: Objective of all members.
        autocast: Function that returns the context manager for a forward.

    Attributes:
        trained: Names of the trainable parameters, in the order of the network.

    Raises:
        Unstackable: A tensor has different shapes or dtypes in the members.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        seeds: Sequence[int],
        run: Forward,
        objective: Objective,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._seeds, self._run, self._objective, self._autocast = seeds, run, objective, autocast
        self.trained = [name for name, one in networks[0].named_parameters() if one.requires_grad]
        self._members = torch.arange(len(networks))
        self._generators = [torch.Generator() for _ in networks]
        # Indices of the members. During a step, the attribute is the batched index that vmap passes.
        self._member = self._members
        # Network for functional_call, which uses the stacked tensors instead of the network's tensors.
        self._template = copy.deepcopy(networks[0])
        dropouts = zip(_dropouts_of(self._template), *map(_dropouts_of, networks), strict=True)
        for module, *own in dropouts:
            module.forward = self._dropout(module, [one.p for one in own])
        self._tensors: Tensors = {}
        own = [{**dict(one.named_parameters()), **dict(one.named_buffers())} for one in networks]
        for name, first in own[0].items():
            rows = [tensors[name].detach() for tensors in own]
            if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
                raise Unstackable(f"model cannot be stacked: {name} differs in shape or dtype between the jobs")
            self._tensors[name] = torch.stack(rows)
            path, _, leaf = name.rpartition(".")
            for network, row in zip(networks, self._tensors[name].unbind(0), strict=True):
                module = network.get_submodule(path)
                if isinstance(first, nn.Parameter):
                    module.get_parameter(leaf).data = row
                else:
                    setattr(module, leaf, row)

    def _dropout(self, module: nn.Dropout, rates: Sequence[float]) -> Callable[[Tensor], Tensor]:
        """Return a forward method for a dropout layer, with a separate dropout rate for each member.

        Args:
            module: The dropout layer.
            rates: Dropout rate of each member.
        """
        by_channel = type(module) is not nn.Dropout

        def draw(place: int, row: Tensor) -> Tensor:
            rate = rates[place]
            noise = row.new_empty([*row.shape[:2], *[1] * (row.dim() - 2)]) if by_channel else torch.empty_like(row)
            if rate in (0.0, 1.0):
                return noise.fill_(1.0 - rate)
            return noise.bernoulli_(1 - rate, generator=self._generators[place]).div_(1 - rate)

        def forward(input: Tensor) -> Tensor:
            if not module.training:
                return input
            return input * apply_function(_Mask, input.detach(), self._member, draw)

        return forward

    def gradients(self, batch: Batch, *, is_shared: bool, epoch: int, index: int) -> tuple[Tensors, Tensor]:
        """Return the gradients and the losses of all M members for one batch.

        Args:
            batch: Batch with data `[B, ...]` if all members share the data, and `[M, B, ...]` otherwise.
            is_shared: Whether all members share the data.
            epoch: Epoch of the batch, counted from 0.
            index: Index of the batch in its epoch.

        Returns:
            The gradient `[M, ...]` of each trained parameter by name, and the losses `[T, M]`. The first of the T rows
            is the objective. If the objective has several terms, each term follows in one row.
        """
        self._template.train()
        fixed = dict(self._tensors)
        trained = {name: fixed.pop(name) for name in self.trained}
        sizes = batch._replace(data=None)
        for seed, generator in zip(self._seeds, self._generators, strict=True):
            generator.manual_seed(step_seed(seed=seed, rank=0, epoch=epoch, batch=index))

        def objective(trained: Tensors, fixed: Tensors, member: Tensor, data: Any) -> tuple[Tensor, Tensor]:
            self._member = member
            values = self._run(functools.partial(_call, self._template, {**fixed, **trained}), data)
            total, parts = self._objective(values, sizes)
            return total, torch.stack([total.detach(), *(parts.values() if len(parts) > 1 else ())])

        step = vmap(grad_and_value(objective, has_aux=True), in_dims=(0, 0, 0, None if is_shared else 0))
        with self._autocast(), sdpa_kernel(SDPBackend.MATH):
            gradients, (_, losses) = step(trained, fixed, self._members, batch.data)
        return {name: _like(gradients[name], trained[name]) for name in self.trained}, losses.T

    def evaluate(self, batch: Batch) -> list[Values]:
        """Return a dict for each member with the values of the forward on one batch, by name."""
        self._template.eval()

        def forward(tensors: Tensors) -> Values:
            return self._run(functools.partial(_call, self._template, tensors), batch.data)

        with torch.no_grad(), self._autocast(), sdpa_kernel(SDPBackend.MATH):
            stacked = vmap(forward)(self._tensors)
        return [map_tensors(stacked, operator.itemgetter(place)) for place in range(len(self._seeds))]


def examine(network: nn.Module, batch: Batch, *, run: Forward, objective: Objective) -> None:
    """Raise Unstackable if a training step and an evaluation of a network are not supported in a stack.

    Raises:
        Unstackable: A module other than a dropout draws random numbers, or a parameter gets no gradient. Also raised if
            a step changes state that all members would share. This is the state of a loss term, and the state of the
            network except buffers.
    """
    network = copy.deepcopy(network)
    for dropout in _dropouts_of(network):
        dropout.p = 0.0
    kept = {f"objective.{name}": KeptState(term, with_buffers=True) for name, term in objective.terms.items()}
    kept["model"] = KeptState(network.train())
    with torch.no_grad():
        run(network.eval(), batch.data)
        run(network.train(), batch.data)
    state = torch.default_generator.get_state()
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    loss, _ = objective(run(functools.partial(_call, network, buffers), batch.data), batch)
    if not torch.equal(state, torch.default_generator.get_state()):
        raise Unstackable("model cannot be stacked: random numbers are drawn outside of its dropout layers")
    for key, one in kept.items():
        if changed := one.changes():
            raise Unstackable(f"{key} cannot be stacked: a training step changes {', '.join(changed)} of all jobs")
    named = {name: one for name, one in network.named_parameters() if one.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise Unstackable(f"model cannot be stacked: {name} gets no gradient, so a single run does not update it")


def _dropouts_of(network: nn.Module) -> list[nn.Dropout]:
    return [cast(nn.Dropout, module) for module in network.modules() if type(module) in DROPOUTS]


def _call(network: nn.Module, tensors: Mapping[str, Tensor], *inputs: Any, **named: Any) -> Any:
    return functional_call(network, dict(tensors), inputs, named)


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the strides of its parameter, because fused optimizers read both in memory order."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
