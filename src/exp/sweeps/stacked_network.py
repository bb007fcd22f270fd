"""Networks of one architecture as one: tensors stacked, gradients by one vmap, each one's random draws its own.

A member's parameters and buffers are rows of the stack, so that its own network, optimizer and state dict see what the
stack computes, and the stack what they change.

Private of torch (2.13), and tested: torch.nn.functional's dropouts draw `empty_like(input).bernoulli_(1 - p)` on a CPU
and divide by 1 - p; with p of 0 they draw nothing, and with p of 1 neither. Fused attention on a CPU has no rule for
vmap: the plain one is taken.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from exp.data.randomness import step_seed
from exp.engine.forward import Forward, Values
from exp.models.kept_state import KeptState
from exp.nested import mapped
from exp.objectives.objective import Objective, Term
from exp.shared_types import Batch
from exp.sweeps.member import Member

Tensors = dict[str, Tensor]
Step = Callable[..., Any]
# Of torch's functions, whether they leave out whole channels.
DROPOUTS: Mapping[Callable[..., Any], bool] = {
    functional.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}


class Unstackable(Exception):
    """What the parts of a run tell only once they are built, and why it forbids a stack, in one line."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One call of a dropout in a forward.

    shape, strides: of its input, as torch.empty_like has them. by_channel: whether it leaves out whole channels.
    """

    rate: float
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    by_channel: bool

    def mask(self, rate: float) -> Tensor:
        """What the input is multiplied by, drawn from torch's default generator as torch draws it."""
        if self.by_channel:
            shape = [*self.shape[:2], *[1] * (len(self.shape) - 2)]
            noise = torch.empty(shape, dtype=self.dtype)
        else:
            noise = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        if rate in (0.0, 1.0):
            return noise.fill_(1.0 - rate)
        return noise.bernoulli_(1 - rate).div_(1 - rate)


class _AtDropouts(TorchFunctionMode):
    """Calls a function instead of each dropout of torch in training. Dropouts in evaluation return their input.

    Args:
        dropout: Called with the input, the rate, and whether whole channels are left out. Returns the output.
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


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of one batch and of each of M members: the objective and its terms `[M]`, and by what each divided its sum.

    divisors: None is the number of samples; a tensor is `[M]` or 0-d, and a float the same for all.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    divisors: Mapping[str, Tensor | float | None]


class StackedNetwork:
    """The networks of M members, computed as one.

    Args:
        members: Members with networks of one architecture. Their objectives differ only in weights and label smoothing.
        run: Result of `forward_by_name` for the network of the first member.
        autocast: Returns the context of a forward.
        compiled: Compiles the function of a step. None runs it uncompiled.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        run: Forward,
        autocast: Callable[[], Any],
        compiled: Callable[[Step], Step] | None = None,
    ) -> None:
        self._members, self._compiled = list(members), compiled
        objectives = [member.objective for member in members]
        # By what is no tensor in a batch: one function each, or torch would compile each step's anew.
        self._steps: dict[tuple[Batch, bool], Step] = {}
        self._template, self._run, self._autocast = members[0].network, run, autocast
        self._objective = objectives[0]
        self._weights = {
            name: torch.tensor([one.terms[name].weight for one in objectives], dtype=torch.float64)
            for name in self._objective.terms
        }
        self._has_weights = any(bool((weights != 1.0).any()) for weights in self._weights.values())
        self._smoothing = _differing_smoothing(objectives)
        # The names of the parameters that learn, in the order of the network.
        self.trained = [name for name, one in self._template.named_parameters() if one.requires_grad]
        self._tensors: Tensors = {}
        # Of each member the rates of the dropouts in the order of a forward; by batch size what they draw.
        self._rates: list[list[float]] | None = None
        self._draws: dict[int, list[Drawn]] = {}
        own = [_tensors_of(member.network) for member in members]
        for name, first in own[0].items():
            rows = [one[name] for one in own]
            if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
                raise Unstackable(f"model cannot be stacked: {name} has another shape in another member")
            self._tensors[name] = torch.stack(rows)
        self._bind()

    def keep(self, places: Sequence[int]) -> None:
        """Keep the members at these places. The networks of the others keep their numbers."""
        index = torch.tensor(places, dtype=torch.int64)
        self._tensors = {name: tensor.index_select(0, index) for name, tensor in self._tensors.items()}
        self._weights = {name: weights.index_select(0, index) for name, weights in self._weights.items()}
        self._smoothing = {name: one.index_select(0, index) for name, one in self._smoothing.items()}
        self._members = [self._members[place] for place in places]
        self._rates = self._rates and [self._rates[place] for place in places]
        self._bind()

    def _bind(self) -> None:
        """Make the tensors of each member's network rows of the stack."""
        rows = {name: tensor.unbind(0) for name, tensor in self._tensors.items()}
        for place, network in enumerate(member.network for member in self._members):
            for name, parameter in network.named_parameters():
                parameter.data = rows[name][place]
            for name, _ in list(network.named_buffers()):
                path, _, leaf = name.rpartition(".")
                setattr(network.get_submodule(path), leaf, rows[name][place])

    # --- a step ---

    def gradients(self, batch: Batch, *, is_shared: bool, epoch: int, index: int) -> tuple[Tensors, Losses]:
        """The gradient of each trained parameter `[M, ...]`, and the losses.

        batch: with data `[M, B, ...]`, or `[B, ...]` where all members have the same one, which `is_shared`.
        epoch, index: of the batch: what is random in it is a function of them.
        """
        self._template.train()
        tensors = dict(self._tensors)
        trained = {name: tensors.pop(name) for name in self.trained}
        masks = self._masks(batch, is_shared=is_shared, epoch=epoch, index=index)
        given = (masks, self._weights_as(trained), self._smoothing)
        step = self._step(batch._replace(data=None), is_shared=is_shared)
        with self._autocast(), sdpa_kernel(SDPBackend.MATH):
            gradients, losses = step(trained, tensors, given, batch.data)
        return {name: _like(gradients[name], trained[name]) for name in self.trained}, losses

    def _step(self, sizes: Batch, *, is_shared: bool) -> Step:
        """The function of a step: of trained and other tensors, what each member is given, and the data.

        sizes: a batch without its data, which all are given by itself.
        """
        key = (sizes, is_shared)
        if key in self._steps:
            return self._steps[key]

        def objective(trained: Tensors, fixed: Tensors, given: Any, data: Any) -> tuple[Tensor, Any]:
            masks, weights, smoothing = given
            left = iter(masks)
            with _AtDropouts(lambda input, *_: input * next(left)):
                values = self._run(functools.partial(_called, self._template, {**fixed, **trained}), data)
                total, parts, divisors = self._losses(values, sizes, weights, smoothing)
            plain.update({name: divisor for name, divisor in divisors.items() if not isinstance(divisor, Tensor)})
            taken = {name: divisor for name, divisor in divisors.items() if isinstance(divisor, Tensor)}
            return total, (total.detach(), parts, taken)

        # A transform gives nothing but tensors back.
        plain: dict[str, float | None] = {}
        stepped = vmap(grad_and_value(objective, has_aux=True), in_dims=(0, 0, 0, None if is_shared else 0))
        called = stepped

        def step(trained: Tensors, fixed: Tensors, given: Any, data: Any) -> tuple[Tensors, Losses]:
            nonlocal called
            gradients, (_, (total, parts, divisors)) = called(trained, fixed, given, data)
            if called is stepped and self._compiled is not None:
                # Behind its first call, for torch compiles anew what was compiled beside a dictionary still empty.
                called = self._compiled(stepped)
            return gradients, Losses(total=total, parts=parts, divisors={**plain, **divisors})

        self._steps[key] = step
        return step

    def evaluate(self, batch: Batch) -> list[Values]:
        """The values by name of one batch that all members look at, of each member."""
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
            {**shared, **{name: mapped(value, operator.itemgetter(place)) for name, value in stacked.items()}}
            for place in range(len(self._members))
        ]

    def _losses(
        self, values: Values, batch: Batch, weights: Tensors, smoothing: Tensors
    ) -> tuple[Tensor, Tensors, dict[str, Tensor | float | None]]:
        """What an Objective computes, of one member, with numbers of its own for weights and label smoothing."""
        # Autocast is off in the objective, as in Objective.forward.
        with torch.autocast("cpu", enabled=False):
            total: Tensor | None = None
            parts: Tensors = {}
            divisors: dict[str, Tensor | float | None] = {}
            weighed = self._objective.weighed
            for name, term in self._objective.terms.items():
                if name in smoothing:
                    loss, divisor = _smoothed(term, values, batch, smoothing[name])
                elif name in weighed:
                    loss, divisor = term.weighed(values, batch, None)
                else:
                    loss, divisor = term(values, batch), None
                divisors[name] = divisor if name in weighed else term.divisor(values)
                parts[name] = loss.detach()
                weighted = loss * weights[name] if self._has_weights else loss
                total = weighted if total is None else total + weighted
            assert total is not None
            return total, parts, divisors

    def _weights_as(self, tensors: Tensors) -> Tensors:
        """The terms' weights in the precision in which they are multiplied."""
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        dtype = torch.float64 if is_double else torch.float32
        return {name: weights.to(dtype) for name, weights in self._weights.items()}

    def _masks(self, batch: Batch, *, is_shared: bool, epoch: int, index: int) -> list[Tensor]:
        """Of each dropout in the order of a forward what it multiplies by, `[M, ...]`: each member's own draws."""
        draws = self._draws.get(batch.size)
        if draws is None:
            first = batch if is_shared else batch._replace(data=mapped(batch.data, operator.itemgetter(0)))
            draws = self._draws[batch.size] = self._watched(self._template, first)
            if self._rates is None:
                self._rates = self._rates_of_all(first) if draws else [[] for _ in self._members]
        if not draws:
            return []
        assert self._rates is not None
        drawn = []
        for member, rates in zip(self._members, self._rates, strict=True):
            torch.default_generator.manual_seed(step_seed(seed=member.seed, rank=0, epoch=epoch, batch=index))
            drawn.append([draw.mask(rate) for draw, rate in zip(draws, rates, strict=True)])
        return [torch.stack(masks) for masks in zip(*drawn, strict=True)]

    def _rates_of_all(self, batch: Batch) -> list[list[float]]:
        """Of each member the rates of its dropouts, in the order of a forward."""
        found = []
        for network in (member.network for member in self._members):
            network.train()
            found.append([one.rate for one in self._watched(network, batch)])
        return found

    def _watched(self, network: nn.Module, batch: Batch) -> list[Drawn]:
        with torch.no_grad(), self._autocast():
            return _watched(network, batch, run=self._run, objective=self._objective)[0]


def examine(network: nn.Module, batch: Batch, *, run: Forward, objective: Objective) -> None:
    """Run a step's forward and backward, and forwards of training and evaluation, of a network that no job trains.

    Raises:
        Unstackable: something besides a dropout draws random numbers, a parameter gets no gradient, or a step changes
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


def _watched(network: nn.Module, batch: Batch, *, run: Forward, objective: Objective) -> tuple[list[Drawn], Tensor]:
    """Return the dropouts of a training forward, and its objective. Dropouts draw nothing, buffers do not change."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    found: list[Drawn] = []

    def note(input: Tensor, rate: float, by_channel: bool) -> Tensor:
        like = torch.empty_like(input, device="meta")
        shape, strides = tuple(like.shape), like.stride()
        found.append(Drawn(rate=float(rate), shape=shape, strides=strides, dtype=like.dtype, by_channel=by_channel))
        return input

    with _AtDropouts(note):
        values = run(functools.partial(_called, network, buffers), batch.data)
        loss, _ = objective(values, batch)
    return found, loss


def _called(network: nn.Module, tensors: Mapping[str, Tensor], *inputs: Any, **named: Any) -> Any:
    return functional_call(network, dict(tensors), inputs, named)


def _tensors_of(network: nn.Module) -> Tensors:
    return {name: one.detach() for name, one in (*network.named_parameters(), *network.named_buffers())}


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in its parameter's layout: a fused optimizer walks through both in the order of their memory."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _differing_smoothing(objectives: Sequence[Objective]) -> Tensors:
    """Of each term whose label smoothing differs from member to member all of them, `[M]`."""
    found = {}
    for name, term in objectives[0].terms.items():
        if isinstance(term, Term) and isinstance(getattr(term.loss, "label_smoothing", None), float | int):
            each = [float(vars(cast(Term, one.terms[name]).loss)["label_smoothing"]) for one in objectives]
            if len(set(each)) > 1:
                found[name] = torch.tensor(each, dtype=torch.float64)
    return found


def _smoothed(term: Any, values: Values, batch: Batch, share: Tensor) -> tuple[Tensor, Tensor | float | None]:
    """A term with a label smoothing of the member's own: a cross entropy is linear in it."""
    settings = vars(term.loss)
    before = settings["label_smoothing"]
    ends = []
    try:
        for end in (0.0, 1.0):
            settings["label_smoothing"] = end
            ends.append(term.weighed(values, batch, None) if term.is_weighed else (term(values, batch), None))
    finally:
        settings["label_smoothing"] = before
    (none, divisor), (whole, _) = ends
    share = share.to(none.dtype)
    return none * (1 - share) + whole * share, divisor
