"""Derivatives held against differences: whether a backward, and the backward of it, are those of the forward.

In float64, by torch.autograd.gradcheck and gradgradcheck, whose verdict is told with the entry that is furthest off.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from exp.errors import one_line
from exp.nested import tensors_in

# Of torch.autograd.gradcheck: the step of a central difference.
STEP = 1e-6
# Numbers of the inputs times those of the outputs, from which on a random direction stands for all of them.
MAX_ENTRIES = 1_000_000

Of = Callable[..., "tuple[Tensor, ...]"]
What = Literal["gradient", "second gradient", "vmap"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one comparison. is_right: None where there was nothing to compare; said: why, or how far off."""

    what: What
    is_right: bool | None
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is differentiated.

    function: gives its floating outputs. inputs: of it; floats require a gradient. names: of the inputs.
    by_sample: the same with its outputs as they are, for torch.func.vmap; None where that is not asked.
    """

    function: Of
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    by_sample: Callable[..., object] | None = None

    @property
    def differentiated(self) -> list[int]:
        """The places of the inputs that require a gradient."""
        return [index for index, one in enumerate(self.inputs) if one.requires_grad]


def of_module(network: nn.Module, inputs: Sequence[Tensor], *, seed: int) -> Subject:
    """The outputs of a module in float64 as a function of its inputs and of the parameters that learn."""
    learning = {name: one.detach().requires_grad_() for name, one in network.named_parameters() if one.requires_grad}

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        # Statistics that a forward moves would move with every difference.
        parts = {name: buffer.clone() for name, buffer in network.named_buffers()}
        parts |= dict(zip(learning, given[len(inputs) :], strict=True))
        with _seeded(seed):
            return _floats(torch.func.functional_call(network, parts, tuple(given[: len(inputs)])))

    names = (*(f"input {index}" for index in range(len(inputs))), *learning)
    return Subject(function=function, inputs=(*inputs, *learning.values()), names=names)


def parameters_of(function: Any) -> tuple[str, ...]:
    """What a function of tensors takes, or the forward of a torch.autograd.Function beside its context."""
    is_class = inspect.isclass(function)
    names = tuple(inspect.signature(function.forward if is_class else function).parameters)
    return names[1:] if is_class and not _has_setup(function) else names


def of_function(function: Any, inputs: Sequence[Tensor], values: Mapping[str, Any], *, seed: int) -> Subject:
    """A function of tensors, or a torch.autograd.Function by its `apply`.

    values: of its parameters, by name; the inputs are the others, in order.
    """
    is_class = inspect.isclass(function)
    names = parameters_of(function)
    places = [name for name in names if name not in values]

    def call(*given: object) -> object:
        named = {**dict(zip(places, given, strict=False)), **values}
        ordered = {name: named[name] for name in names if name in named}
        with _seeded(seed):
            return function.apply(*ordered.values()) if is_class else function(**ordered)

    return Subject(
        function=lambda *given: _floats(call(*given)),
        inputs=tuple(inputs),
        names=tuple(places[: len(inputs)]),
        by_sample=call if is_class and _has_setup(function) else None,
    )


def compared(subject: Subject) -> list[Verdict]:
    """The verdicts on gradient, second gradient and vmap. What the forward raises is raised."""
    outputs = subject.function(*subject.inputs)
    entries = sum(subject.inputs[index].numel() for index in subject.differentiated) * sum(o.numel() for o in outputs)
    first = _gradient("gradient", subject, is_fast=entries > MAX_ENTRIES)
    if not first.is_right:
        return [first]  # what is wrong once is wrong twice
    return [first, _second(subject, outputs, is_fast=entries > MAX_ENTRIES), _vmap(subject)]


def _gradient(what: What, subject: Subject, *, is_fast: bool) -> Verdict:
    try:
        torch.autograd.gradcheck(
            subject.function, subject.inputs, eps=STEP, fast_mode=is_fast, check_batched_grad=False
        )
    except GradcheckError as error:
        return Verdict(what=what, is_right=False, said=one_line(error) if is_fast else _worst(subject))
    return Verdict(what=what, is_right=True, said="looked at in one random direction" if is_fast else "")


def _second(subject: Subject, outputs: Sequence[Tensor], *, is_fast: bool) -> Verdict:
    """The gradient as a function of the inputs and of what comes back to the outputs."""
    places = subject.differentiated
    given = len(subject.inputs)

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(
            subject.function(*values[:given]), [values[place] for place in places], values[given:],
            create_graph=True, materialize_grads=True,
        )  # fmt: skip
        return tuple(found)

    draw = torch.Generator().manual_seed(0)
    back = [torch.randn(o.shape, dtype=o.dtype, generator=draw).to(o.device).requires_grad_() for o in outputs]
    names = (*subject.names, *(f"gradient of output {index}" for index in range(len(outputs))))
    second = replace(subject, function=gradient, inputs=(*subject.inputs, *back), names=names)
    try:
        # Of what is once_differentiable, torch.autograd.grad would say that nothing depends on it.
        leaves = [one.detach().requires_grad_(one.requires_grad) for one in second.inputs]
        torch.stack([found.sum() for found in gradient(*leaves)]).sum().backward()
        return _gradient("second gradient", second, is_fast=is_fast)
    except RuntimeError as error:
        return Verdict(what="second gradient", is_right=None, said=one_line(error))


def _vmap(subject: Subject) -> Verdict:
    """torch.func.vmap over three samples against a loop over them."""
    if subject.by_sample is None:
        reason = "it is asked of a Function with setup_context, and of no other"
        return Verdict(what="vmap", is_right=None, said=reason)
    several = [torch.stack([one.detach() * factor for factor in (1, -1, 2)]) for one in subject.inputs]
    loop = [subject.function(*(one[index] for one in several)) for index in range(3)]
    try:
        found = _floats(torch.func.vmap(subject.by_sample, randomness="same")(*several))
    except RuntimeError as error:
        return Verdict(what="vmap", is_right=None, said=one_line(error))
    wanted = [torch.stack(parts) for parts in zip(*loop, strict=True)]
    off = [(mine - right).abs().max().item() for mine, right in zip(found, wanted, strict=True) if mine.numel()]
    is_right = all(torch.allclose(*pair, equal_nan=True) for pair in zip(found, wanted, strict=True))
    return Verdict(
        what="vmap", is_right=is_right, said="" if is_right else f"off by {max(off):.2g} from a loop over samples"
    )


def _worst(subject: Subject) -> str:
    """The entry of a Jacobian that is furthest off, beside what the difference of the forward gives for it."""
    furthest, said = -1.0, ""
    for place in subject.differentiated:

        def alone(value: Tensor, place: int = place) -> tuple[Tensor, ...]:
            return subject.function(*subject.inputs[:place], value, *subject.inputs[place + 1 :])

        value = subject.inputs[place].detach()
        steps = STEP * torch.eye(value.numel(), dtype=value.dtype).reshape(-1, *value.shape)
        ends = [(alone((value + step).requires_grad_()), alone((value - step).requires_grad_())) for step in steps]
        own = torch.autograd.functional.jacobian(alone, value.requires_grad_())
        for number, mine in enumerate(cast("tuple[Tensor, ...]", own)):
            slopes = [((plus[number] - minus[number]) / (2 * STEP)).detach() for plus, minus in ends]
            right = torch.stack(slopes, -1).reshape(mine.shape)
            off = (mine - right).abs().nan_to_num(nan=math.inf)
            if off.numel() and off.max().item() > furthest:
                furthest, entry = off.max().item(), off.argmax()
                at = [int(index) for index in torch.unravel_index(entry, off.shape)]
                of, by = at[: off.dim() - value.dim()], at[off.dim() - value.dim() :]
                said = (
                    f"of output {number} at {of} by {subject.names[place]} at {by} it is {mine.flatten()[entry]:.6g}, "
                    f"and the difference of the forward is {right.flatten()[entry]:.6g}"
                )
    return said


def _has_setup(function: Any) -> bool:
    """Whether a Function keeps what it needs in `setup_context`; else its forward takes the context first."""
    return function.setup_context is not torch.autograd.Function.setup_context


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within, random numbers are the same at each call, and leave no trace."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _floats(outputs: object) -> tuple[Tensor, ...]:
    return tuple(one for one in tensors_in(outputs) if one.is_floating_point())
