"""Networks of one architecture computed as one: stacked tensors, and one vmap for the gradients of all members.

The parameters and buffers of a member are rows of the stack. Its network, optimizer and state dict therefore see what
the stack computes. Each member draws its own dropout masks.

Private of torch (2.13), and tested: on a CPU the dropouts of torch.nn.functional draw `empty_like(input).bernoulli_(1 -
p)` and divide by 1 - p. With p of 0 or 1 they draw nothing. Fused attention on a CPU has no rule for vmap, so that the
plain kernel is used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from exp.data.randomness import step_seed
from exp.engine.forward import Forward, Values
from exp.models.kept_state import KeptState
from exp.nested import map_tensors
from exp.objectives.objective import Objective
from exp.shared_types import Batch

Tensors = dict[str, Tensor]
Step = Callable[[Tensors, Tensors, Sequence[Tensor], Any], tuple[Tensors, Tensor]]
# The functions of torch that are dropouts, and whether they drop whole channels.
DROPOUTS: Mapping[Callable[..., Any], bool] = {
    functional.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}


class Unstackable(Exception):
    """The reason, in one line, why jobs cannot be stacked, found when their parts are built."""


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """One call of a dropout in a forward, with the shape, the strides and the dtype of its input."""

    rate: float
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    by_channel: bool

    def mask(self) -> Tensor:
        """Return the factors of the input, drawn from torch's default generator in the same way as torch."""
        if self.by_channel:
            noise = torch.empty([*self.shape[:2], *[1] * (len(self.shape) - 2)], dtype=self.dtype)
        else:
            noise = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        if self.rate in (0.0, 1.0):
            return noise.fill_(1.0 - self.rate)
        return noise.bernoulli_(1 - self.rate).div_(1 - self.rate)


class _AtDropouts(TorchFunctionMode):
    """Calls a function instead of each dropout of torch in training. Dropouts in evaluation return their input.

    Args:
        dropout: Called with the input, the rate, and whether whole channels are dropped. Returns the output.
    """

    def __init__(self, dropout: Callable[[Tensor, float, bool], Tensor]) -> None:
        super().__init__()
        self._dropout = dropout

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        input, rate, training = _of_dropout(*args, **(kwargs or {}))
        return self._dropout(input, rate, DROPOUTS[func]) if training else input


def _of_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    return input, p, training


class StackedNetwork:
    """The networks of M members, computed as one.

    Args:
        networks: Networks of one architecture.
        seeds: Seed of each member.
        run: Result of `forward_by_name` for the first network.
        objective: Objective of all members.
        autocast: Returns the context of a forward.
        compiled: Compiles the function of a step. None runs it uncompiled.

    Attributes:
        trained: Names of the parameters that learn, in the order of the network.

    Raises:
        Unstackable: The networks have tensors of different shapes or dtypes.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        seeds: Sequence[int],
        run: Forward,
        objective: Objective,
        autocast: Callable[[], AbstractContextManager[object]],
        compiled: Callable[[Step], Step] | None = None,
    ) -> None:
        self._networks, self._seeds, self._template = networks, seeds, networks[0]
        self._run, self._objective, self._autocast, self._compiled = run, objective, autocast, compiled
        self.trained = [name for name, one in self._template.named_parameters() if one.requires_grad]
        # A step by the sizes of its batch. A step that served all sizes would be compiled anew for each.
        self._steps: dict[tuple[Batch, bool], Step] = {}
        # The dropouts of each member in the order of a forward, by batch size.
        self._dropouts: dict[int, list[list[Dropout]]] = {}
        self._tensors: Tensors = {}
        own = [{**dict(one.named_parameters()), **dict(one.named_buffers())} for one in networks]
        for name, first in own[0].items():
            rows = [tensors[name].detach() for tensors in own]
            if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
                raise Unstackable(f"model cannot be stacked: {name} has another shape in another member")
            self._tensors[name] = torch.stack(rows)
            path, _, leaf = name.rpartition(".")
            for network, row in zip(networks, self._tensors[name].unbind(0), strict=True):
                module = network.get_submodule(path)
                if isinstance(first, nn.Parameter):
                    module.get_parameter(leaf).data = row
                else:
                    setattr(module, leaf, row)

    def gradients(self, batch: Batch, *, is_shared: bool, epoch: int, index: int) -> tuple[Tensors, Tensor]:
        """Return the gradient of each trained parameter `[M, ...]`, and the losses `[T, M]`.

        The losses are the objective and, if it has several terms, each term.

        Args:
            batch: Batch with data `[B, ...]` that all members share, or `[M, B, ...]`.
            is_shared: Whether all members share the data.
            epoch: Epoch of the batch, counted from 0.
            index: Index of the batch in its epoch.
        """
        self._template.train()
        tensors = dict(self._tensors)
        trained = {name: tensors.pop(name) for name in self.trained}
        masks = self._masks(batch, is_shared=is_shared, epoch=epoch, index=index)
        step = self._step(batch._replace(data=None), is_shared=is_shared)
        with self._autocast(), sdpa_kernel(SDPBackend.MATH):
            gradients, losses = step(trained, tensors, masks, batch.data)
        return {name: _like(gradients[name], trained[name]) for name in self.trained}, losses

    def _step(self, sizes: Batch, *, is_shared: bool) -> Step:
        """Return the function of a step: of trained and other tensors, dropout masks, and the data of a batch."""
        key = (sizes, is_shared)
        if key in self._steps:
            return self._steps[key]

        def objective(trained: Tensors, fixed: Tensors, masks: Sequence[Tensor], data: Any) -> tuple[Tensor, Tensor]:
            left = iter(masks)
            with _AtDropouts(lambda input, *_: input * next(left)):
                values = self._run(functools.partial(_called, self._template, {**fixed, **trained}), data)
                total, parts = self._objective(values, sizes)
            return total, torch.stack([total.detach(), *(parts.values() if len(parts) > 1 else ())])

        stepped = vmap(grad_and_value(objective, has_aux=True), in_dims=(0, 0, 0, None if is_shared else 0))
        called = stepped if self._compiled is None else self._compiled(stepped)

        def step(trained: Tensors, fixed: Tensors, masks: Sequence[Tensor], data: Any) -> tuple[Tensors, Tensor]:
            gradients, (_, losses) = called(trained, fixed, masks, data)
            return gradients, losses.T

        self._steps[key] = step
        return step

    def evaluate(self, batch: Batch) -> list[Values]:
        """Return the values by name of one batch, for each member."""
        self._template.eval()
        shared: dict[str, Any] = {}
        data: Any = batch.data
        entries = data if isinstance(data, Mapping) else dict(zip(("input", "target"), data, strict=False))

        def forward(tensors: Tensors) -> dict[str, Any]:
            values = self._run(functools.partial(_called, self._template, tensors), batch.data)
            shared.update({name: value for name, value in entries.items() if values[name] is value})
            return {name: value for name, value in values.items() if name not in shared}

        with torch.no_grad(), self._autocast(), sdpa_kernel(SDPBackend.MATH):
            stacked = vmap(forward)(self._tensors)
        return [
            {**shared, **{name: map_tensors(value, operator.itemgetter(place)) for name, value in stacked.items()}}
            for place in range(len(self._networks))
        ]

    def _masks(self, batch: Batch, *, is_shared: bool, epoch: int, index: int) -> list[Tensor]:
        """Return the factors `[M, ...]` of each dropout in the order of a forward. Each member draws its own."""
        if batch.size not in self._dropouts:
            self._dropouts[batch.size] = self._find_dropouts(batch if is_shared else of_first(batch))
        drawn = []
        for seed, dropouts in zip(self._seeds, self._dropouts[batch.size], strict=True):
            if dropouts:
                torch.default_generator.manual_seed(step_seed(seed=seed, rank=0, epoch=epoch, batch=index))
            drawn.append([one.mask() for one in dropouts])
        return [torch.stack(masks) for masks in zip(*drawn, strict=True)]

    def _find_dropouts(self, batch: Batch) -> list[list[Dropout]]:
        found = []
        with torch.no_grad(), self._autocast():
            for network in self._networks:
                found.append(_watched(network.train(), batch, run=self._run, objective=self._objective)[0])
                if not found[0]:
                    return [[] for _ in self._networks]  # one architecture: no other network has any
        return found


def examine(network: nn.Module, batch: Batch, *, run: Forward, objective: Objective) -> None:
    """Run a training step's forward and backward, and a forward of evaluation, of a network that no job trains.

    Raises:
        Unstackable: Something besides a dropout draws random numbers, a parameter gets no gradient, or a step changes
            more of the network than the numbers in its buffers. All members share the objects of one network.
    """
    kept = {f"objective.{name}": KeptState(term, with_buffers=True) for name, term in objective.terms.items()}
    kept["model"] = KeptState(network.train())
    with torch.no_grad():
        run(network.eval(), batch.data)
        run(network.train(), batch.data)
    state = torch.default_generator.get_state()
    loss = _watched(network, batch, run=run, objective=objective)[1]
    if not torch.equal(state, torch.default_generator.get_state()):
        raise Unstackable("model cannot be stacked: something beside its dropouts draws random numbers in a step")
    for key, one in kept.items():
        if changed := one.changes():
            raise Unstackable(f"{key} cannot be stacked: a step changes {', '.join(changed)}, which jobs would share")
    named = {name: one for name, one in network.named_parameters() if one.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise Unstackable(f"model cannot be stacked: {name} gets no gradient, and its optimizer leaves it alone")


def of_first(batch: Batch) -> Batch:
    """Return a batch with the data `[B, ...]` of the first member, from data `[M, B, ...]`."""
    return batch._replace(data=map_tensors(batch.data, operator.itemgetter(0)))


def _watched(network: nn.Module, batch: Batch, *, run: Forward, objective: Objective) -> tuple[list[Dropout], Tensor]:
    """Return the dropouts of a training forward, and its objective. Dropouts draw nothing, buffers do not change."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    found: list[Dropout] = []

    def note(input: Tensor, rate: float, by_channel: bool) -> Tensor:
        like = torch.empty_like(input, device="meta")
        shape, strides = tuple(like.shape), like.stride()
        found.append(Dropout(rate=float(rate), shape=shape, strides=strides, dtype=like.dtype, by_channel=by_channel))
        return input

    with _AtDropouts(note):
        values = run(functools.partial(_called, network, buffers), batch.data)
        loss, _ = objective(values, batch)
    return found, loss


def _called(network: nn.Module, tensors: Mapping[str, Tensor], *inputs: Any, **named: Any) -> Any:
    return functional_call(network, dict(tensors), inputs, named)


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in the layout of its parameter. A fused optimizer walks both in the order of their memory."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
