"""Checks of derivatives in float64 by torch.autograd.gradcheck and gradgradcheck."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from exp.errors import one_line
from exp.nested import tensors_in

# Number of input entries times number of output entries above which one random direction is compared.
MAX_ENTRIES = 1_000_000

Of = Callable[..., "tuple[Tensor, ...]"]
What = Literal["gradient", "second gradient"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one comparison.

    Args:
        what: Name of the comparison.
        is_right: Result, or None if the comparison is not possible.
        said: Reason for a result other than True.
    """

    what: What
    is_right: bool | None
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A function and the inputs at which it is differentiated.

    Args:
        function: Returns the floating-point outputs.
        inputs: Inputs of the function; floats require a gradient.
        names: Names of the inputs.
    """

    function: Of
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]


def parameters_of(function: Any) -> tuple[str, ...]:
    """Return the parameter names of a function, or of the forward of a torch.autograd.Function without its context."""
    is_class = inspect.isclass(function)
    names = tuple(inspect.signature(function.forward if is_class else function).parameters)
    return names[1:] if is_class and not _has_setup(function) else names


def of_function(function: Any, inputs: Sequence[Tensor], values: Mapping[str, Any], *, seed: int) -> Subject:
    """Return the subject of a function of tensors, or of a torch.autograd.Function.

    Args:
        values: Values by parameter name. The inputs are the other parameters, in order.
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
    )


def compared(subject: Subject) -> list[Verdict]:
    """Compare the gradient and the gradient of the gradient.

    Raises: any exception of the forward.
    """
    outputs = subject.function(*subject.inputs)
    sizes = [one.numel() for one in subject.inputs if one.requires_grad]
    is_fast = sum(sizes) * sum(one.numel() for one in outputs) > MAX_ENTRIES
    first = _checked("gradient", torch.autograd.gradcheck, subject, is_fast=is_fast)
    if not first.is_right:
        return [first]  # a wrong gradient has a wrong gradient
    try:
        _differentiate_twice(subject)
    except RuntimeError as error:
        return [first, Verdict(what="second gradient", is_right=None, said=one_line(error))]
    return [first, _checked("second gradient", torch.autograd.gradgradcheck, subject, is_fast=is_fast)]


def _checked(what: What, check: Callable[..., bool], subject: Subject, *, is_fast: bool) -> Verdict:
    try:
        with _seeded(0):
            check(subject.function, subject.inputs, fast_mode=is_fast)
    except GradcheckError as error:
        names = ", ".join(f"input {place} is {name}" for place, name in enumerate(subject.names))
        return Verdict(what=what, is_right=False, said=f"{names}. {str(error).strip()}")
    return Verdict(what=what, is_right=True, said="looked at in one random direction" if is_fast else "")


def _differentiate_twice(subject: Subject) -> None:
    """Raise RuntimeError if a function is once_differentiable, which gradgradcheck reports as a wrong gradient."""
    leaves = [one.detach().requires_grad_(one.requires_grad) for one in subject.inputs]
    outputs = subject.function(*leaves)
    # The decorator acts only if the gradients of the outputs require a gradient.
    back = [torch.ones_like(one).requires_grad_() for one in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outputs, wanted, back, create_graph=True, materialize_grads=True)
    torch.stack([one.sum() for one in found]).sum().backward()


def _has_setup(function: Any) -> bool:
    """Return whether a Function has `setup_context`; if not, its forward takes the context first."""
    return function.setup_context is not torch.autograd.Function.setup_context


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw the same random numbers at each call, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _floats(outputs: object) -> tuple[Tensor, ...]:
    return tuple(one for one in tensors_in(outputs) if one.is_floating_point())
