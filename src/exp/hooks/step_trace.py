"""One forward and one backward with a look at every module: which gave the first number that is none.

Looked at with torch's forward hooks, and, in the backward, at each node of the graph, which belongs to the module in
whose forward it was made. So it works where hooks of modules do not: behind operations in place, for functions that a
network calls between its layers, and for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exp.hooks.module_calls import ModuleCalls, nodes_behind
from exp.hooks.norms import norms
from exp.hooks.step import Again, Window
from exp.nested import tensors_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The numbers of some tensors: their count, how many are nan or infinite, and the largest finite absolute value."""

    count: int = 0
    nans: int = 0
    infinities: int = 0
    largest: float = 0.0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Extent:
        """Of floating and complex tensors; others are left out. Waits for their devices."""
        found = cls()
        for tensor in tensors:
            found = found + _of_one(tensor)
        return found

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            count=self.count + other.count,
            nans=self.nans + other.nans,
            infinities=self.infinities + other.infinities,
            largest=max(self.largest, other.largest),
        )

    @property
    def bad(self) -> int:
        """How many are not finite."""
        return self.nans + self.infinities

    def __str__(self) -> str:
        kinds = [f"{count} {name}" for count, name in ((self.nans, "nan"), (self.infinities, "infinite")) if count]
        return f"{' and '.join(kinds) or 'none'} of {self.count} numbers"


def is_mask(tensor: Tensor) -> bool:
    """Whether its infinities are meant: the negative ones of a tensor that learns nothing, as attention masks have."""
    return not tensor.requires_grad and not (tensor.isnan().any() or (tensor == math.inf).any())


def _of_one(tensor: Tensor) -> Extent:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    if not tensor.is_floating_point() or not tensor.numel():
        return Extent()
    finite = tensor.isfinite()
    nans = int(tensor.isnan().sum())
    bad = tensor.numel() - int(finite.sum())
    largest = float(tensor.abs().where(finite, 0).amax())
    return Extent(count=tensor.numel(), nans=nans, infinities=bad - nans, largest=largest)


OUTSIDE = "objective"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where numbers that are not finite came up first: from finite ones.

    direction: forward or backward. operator: of the backward, autograd's name of it. extent: of what it gave.
    """

    direction: str
    name: str
    kind: str
    extent: Extent
    operator: str | None = None


@dataclass(kw_only=True, slots=True)
class Trace:
    """What was found in the micro-batches of a step, one after the other up to the first that is not finite.

    place: of the last micro-batch that ran, counted from 0; count: of how many.
    loss: of it, with the loss scale if there is one.
    origin: None where all is finite, or no module can be named.
    batch, tensors: entries of the micro-batch, and parameters and buffers, that are not finite before anything runs.
    gradients: of all parameters, summed up over the micro-batches. overflown: the names of those whose 2-norm alone is
        not finite.
    """

    place: int = 0
    count: int = 1
    loss: float = 0.0
    origin: Origin | None = None
    batch: Sequence[str] = ()
    tensors: Sequence[str] = ()
    gradients: Extent = field(default_factory=Extent)
    overflown: Sequence[str] = ()

    @property
    def is_bad(self) -> bool:
        """Whether loss or gradients are not finite."""
        return self.loss - self.loss != 0.0 or bool(self.gradients.bad) or bool(self.overflown)


class Tracer:
    """Looks at one micro-batch. network, objective: what runs in it."""

    def __init__(self, network: nn.Module, objective: nn.Module) -> None:
        self._modules = {**dict(network.named_modules()), **named_terms(objective)}
        self._calls = ModuleCalls(outside=OUTSIDE)
        self._open: list[tuple[str, int, bool]] = []
        self._count = 0
        self._order = 0
        self._forward: Origin | None = None
        self._backward: Origin | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward and the objective."""
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, loss: Tensor) -> None:
        """Before the backward from `loss`."""
        for node in nodes_behind(loss):
            node.register_hook(partial(self._passed, node.name(), self._calls.maker(node)))

    def origin(self, *, is_lost: bool) -> Origin | None:
        """is_lost: whether the loss is not finite: then the backward only carries it on."""
        return self._forward if is_lost else self._backward or self._forward

    @torch.no_grad()
    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        self._count += 1
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        # Before the forward, which may change them in place.
        is_fine = not any(Extent.of([one]).bad and not is_mask(one) for one in inputs)
        self._open.append((name, self._count, is_fine))
        self._calls.begin(name)

    @torch.no_grad()
    def _leave(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        self._calls.end(name)
        while self._open[-1][0] != name:  # the forward of one within raised, and was caught
            self._open.pop()
        _, order, was_fine = self._open.pop()
        found = Extent.of(tensors_in(output))
        if found.bad and was_fine:
            if self._forward is None:
                self._forward = Origin(direction="forward", name=name, kind=self._kind(name), extent=found)
                self._order = order
        elif self._forward is not None and not found.bad and (not was_fine or order < self._order):
            # What takes the bad numbers, or is around their origin, gives finite ones: they were meant, as those of a
            # mask before a softmax.
            self._forward = None

    @torch.no_grad()
    def _passed(self, operator: str, name: str, given: object, taken: object) -> None:
        """An operator's backward is done."""
        found = Extent.of(tensors_in(given))
        if self._backward is None and found.bad and not Extent.of(tensors_in(taken)).bad:
            self._backward = Origin(
                direction="backward", name=name, kind=self._kind(name), extent=found, operator=operator.split("::")[-1]
            )

    def _kind(self, name: str) -> str:
        return type(self._modules[name]).__name__ if name in self._modules else ""


def trace_of(again: Again, window: Window, *, network: nn.Module, objective: nn.Module) -> Trace:
    """Run the micro-batches of a window again, and trace them up to the first that is not finite."""
    tensors = _not_finite({**dict(network.named_parameters()), **dict(network.named_buffers())})
    trace = Trace(count=len(window.batches), tensors=tensors)
    sums: dict[str, Tensor] = {}
    for place, (batch, _) in enumerate(window.batches):
        tracer = Tracer(network, objective)
        loss, gradients = again(window, place, tracer)
        if trace.is_bad:
            continue  # the other ranks may have to meet this one in what follows
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        trace.place, trace.batch = place, _broken_entries(batch.data)
        trace.loss = float(loss)
        trace.gradients = Extent.of(sums.values())
        trace.origin = tracer.origin(is_lost=trace.loss - trace.loss != 0.0)
        if trace.is_bad and batch.world_size == 1:
            return trace
    if not trace.is_bad:
        sizes = dict(zip(sums, norms(list(sums.values())), strict=True))
        trace.overflown = [name for name, size in sizes.items() if not size.isfinite()]
        trace.origin = None
    return trace


def _broken_entries(data: Any) -> list[str]:
    """The names of a batch's entries, or their places, that hold numbers that are none."""
    if isinstance(data, Tensor):
        data = {"input": data}
    elif not isinstance(data, Mapping):
        names = ("input", "target") if len(data) <= 2 else map(str, range(len(data)))
        data = dict(zip(names, data, strict=False))
    return _not_finite({name: value for name, value in data.items() if isinstance(value, Tensor)})


def _not_finite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with numbers that are none; masks aside."""
    return [name for name, tensor in named.items() if Extent.of([tensor]).bad and not is_mask(tensor)]


def named_terms(objective: nn.Module) -> dict[str, nn.Module]:
    """The objective and its terms by their names in the config, where they have some."""
    terms: Mapping[str, nn.Module] = getattr(objective, "terms", {})
    found = {
        f"{OUTSIDE}.{term}{'.' * bool(name)}{name}": module
        for term, one in terms.items()
        for name, module in one.named_modules()
    }
    return {OUTSIDE: objective, **(found or {f"{OUTSIDE}.{n}": m for n, m in objective.named_modules() if n})}
