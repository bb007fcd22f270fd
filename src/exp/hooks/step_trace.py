"""One forward and one backward with a look at every module: which module gave the first number that is not finite.

Forward hooks look at the outputs. In the backward, a hook on each node of the graph looks at the gradients; the node
belongs to the module in whose forward it was made. Hooks of modules would miss operations in place, functions between
the layers, and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exp.hooks.module_calls import ModuleCalls, nodes_behind
from exp.hooks.norms import norms
from exp.hooks.step import Again, Window
from exp.nested import tensors_in

OUTSIDE = "objective"


def not_finite(tensors: Iterable[Tensor]) -> str:
    """Return how many numbers are nan or infinite, such as `3 nan of 12 numbers`; empty if all are finite."""
    count = nans = infinities = 0
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            values = _stored(tensor)
            count += values.numel()
            nans += int(values.isnan().sum())
            infinities += int(values.isinf().sum())
    kinds = [f"{number} {name}" for number, name in ((nans, "nan"), (infinities, "infinite")) if number]
    return f"{' and '.join(kinds)} of {count} numbers" if kinds else ""


def _stored(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values().detach() if tensor.is_sparse else tensor.detach()


def _is_mask(tensor: Tensor) -> bool:
    """Return whether infinities are meant: negative ones without a gradient, as in attention masks."""
    return not tensor.requires_grad and not (tensor.isnan().any() or (tensor == math.inf).any())


def named_modules(network: nn.Module, objective: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a step by name: the network's, then the objective and its terms by their config names."""
    terms: Mapping[str, nn.Module] = getattr(objective, "terms", {"": objective})
    found: dict[str, nn.Module] = {**dict(network.named_modules()), OUTSIDE: objective}
    for term, one in terms.items():
        for name, module in one.named_modules():
            found.setdefault(".".join(filter(None, [OUTSIDE, term, name])), module)
    return found


@contextmanager
def watched(modules: Mapping[str, nn.Module], enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter` and `leave` with a module's name, and what torch's hooks get, around each call of a module."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(leave, name), with_kwargs=True).remove)
        yield


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The result for the micro-batches of a step, up to the first that is not finite.

    Args:
        is_bad: Whether the loss or a gradient is not finite.
        where: Sentences on the first module; empty if all numbers are finite.
    """

    is_bad: bool
    where: str


class Tracer:
    """Looks at one micro-batch of a network and an objective."""

    def __init__(self, network: nn.Module, objective: nn.Module) -> None:
        self._modules = named_modules(network, objective)
        self._calls = ModuleCalls(outside=OUTSIDE)
        self._open: list[tuple[str, int, bool]] = []
        self._count = 0
        self._order = 0
        self._forward = ""
        self._backward = ""

    def forward(self) -> AbstractContextManager[None]:
        """Look at the forward and the objective within the block."""
        return watched(self._modules, self._enter, self._leave)

    def backward(self, loss: Tensor) -> None:
        """Look at the backward that starts from `loss`."""
        for node in nodes_behind(loss):
            node.register_hook(partial(self._passed, node.name(), self._calls.maker(node)))

    def first(self, *, is_lost: bool) -> str:
        """Return the sentence on the first module. The backward only passes on a loss that is not finite."""
        return self._forward if is_lost else self._backward or self._forward

    @torch.no_grad()
    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        self._count += 1
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        # Before the forward, which may change its inputs in place.
        is_fine = not any(not_finite([one]) and not _is_mask(one) for one in inputs)
        self._open.append((name, self._count, is_fine))
        self._calls.begin(name)

    @torch.no_grad()
    def _leave(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        self._calls.end(name)
        while self._open[-1][0] != name:  # the forward of a module within this one raised, and was caught
            self._open.pop()
        _, order, was_fine = self._open.pop()
        found = not_finite(tensors_in(output))
        if found and was_fine and not self._forward:
            self._order = order
            self._forward = (
                f"The first is {self._label(name)}, in the forward: its output has {found}, and its inputs were finite."
            )
        elif self._forward and not found and (not was_fine or order < self._order):
            # A module that takes the numbers, or contains their origin, gives finite ones: they were meant, such as
            # those of a mask before a softmax.
            self._forward = ""

    @torch.no_grad()
    def _passed(self, operator: str, name: str, given: object, taken: object) -> None:
        """Look at the backward of one operator."""
        if self._backward:
            return
        found = not_finite(tensors_in(given))
        if found and not not_finite(tensors_in(taken)):
            self._backward = (
                f"The first is {self._label(name)}, in the backward: {operator.split('::')[-1]} gave {found}, from "
                "gradients that were finite."
            )

    def _label(self, name: str) -> str:
        kind = f" ({type(self._modules[name]).__name__})"
        return f"`{name}`{kind}" if name else f"the network itself{kind}"


def trace_of(again: Again, window: Window, *, network: nn.Module, objective: nn.Module) -> Trace:
    """Run the micro-batches of a window again, and trace them up to the first that is not finite."""
    tensors = _named({**dict(network.named_parameters()), **dict(network.named_buffers())})
    found: Trace | None = None
    sums: dict[str, Tensor] = {}
    for place, (batch, _) in enumerate(window.batches):
        tracer = Tracer(network, objective)
        loss, gradients = again(window, place, tracer)
        if found is not None:
            continue  # other ranks may wait for this rank in the rest of the step
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        is_lost = not bool(loss.isfinite())
        if is_lost or not_finite(sums.values()):
            count = len(window.batches)
            data = _named(_entries(batch.data))
            first = tracer.first(is_lost=is_lost) or ("" if data else _unnamed(is_lost=is_lost))
            sentences = [
                first,
                f"It is micro-batch {place + 1} of {count}." if count > 1 else "",
                f"The data are not finite: {', '.join(data)}." if data else "",
                f"Not finite before the step already: {_some(tensors)}." if tensors else "",
            ]
            found = Trace(is_bad=True, where=" ".join(filter(None, sentences)))
            if batch.world_size == 1:
                break
    return found or _overflown(sums)


def _unnamed(*, is_lost: bool) -> str:
    if is_lost:
        return "No module gave it: it is in what the step makes of their outputs."
    return "The gradients of each micro-batch are finite; their sum is not."


def _overflown(gradients: Mapping[str, Tensor]) -> Trace:
    """Return the trace of a step with finite gradients, whose norms may be infinite."""
    sizes = zip(gradients, norms(list(gradients.values())), strict=True)
    names = [name for name, size in sizes if not size.isfinite()]
    if not names:
        return Trace(is_bad=False, where="")
    largest = max(float(_stored(gradients[name]).abs().max()) for name in names)
    where = f"Every gradient is finite, but its norm is not: {_some(names)}; the greatest number is {largest:.3g}."
    return Trace(is_bad=True, where=where)


def _entries(data: Any) -> dict[str, Any]:
    """Return the entries of a batch by name, or by place."""
    if isinstance(data, Tensor):
        return {"input": data}
    if isinstance(data, Mapping):
        return dict(data)
    names = ("input", "target") if len(data) <= 2 else map(str, range(len(data)))
    return dict(zip(names, data, strict=False))


def _named(values: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors that are not finite, except masks."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return [name for name, tensor in tensors.items() if not_finite([tensor]) and not _is_mask(tensor)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
