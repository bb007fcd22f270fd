"""Runs one forward and one backward, and finds the first module with a value that is not finite.

Forward hooks inspect the outputs of modules. Hooks on the nodes of the autograd graph inspect the gradients in the
backward. A node belongs to the module that created it in the forward. Backward hooks of modules are not used, because
they would miss in-place operations, functions between layers, and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from exp.engine.module import TrainingModule
from exp.engine.observer import UNOBSERVED
from exp.engine.phased_module import PhasedModule
from exp.engine.runtime import run_uncompiled
from exp.extras.debugging.module_calls import ModuleCalls, nodes_of
from exp.hooks.norms import norms
from exp.hooks.step import Window
from exp.nested import tensors_in
from exp.optim.parameter_groups import trained_parameters
from exp.optim.phase import Phase
from exp.precision.plugin import RunPrecision

OUTSIDE = "objective"


class Trace(NamedTuple):
    """Result of tracing the micro-batches of a step, up to the first micro-batch that is not finite.

    Args:
        is_bad: Whether the loss or a gradient is not finite.
        where: Sentences that name the first module with a value that is not finite. Empty if all values are finite.
    """

    is_bad: bool
    where: str


def is_lost(tensors: Iterable[Tensor]) -> bool:
    """Return whether a tensor has a nan or infinite value. The infinite values of masks are ignored."""
    return any(not _is_finite(one) and not _is_mask(one) for one in tensors)


def _is_finite(tensor: Tensor) -> bool:
    stored = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(stored.isfinite().all())


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor may be an attention mask.

    A mask needs no gradient, and -inf is its only value that is not finite.
    """
    return not tensor.requires_grad and not (tensor.isnan().any() or (tensor == math.inf).any())


def named_modules(network: nn.Module, objective: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a step by name.

    The modules of the network come first, followed by the objective and its terms. A term has the name
    `objective.<config key of the term>`.
    """
    terms: Mapping[str, nn.Module] = getattr(objective, "terms", {"": objective})
    found: dict[str, nn.Module] = {**dict(network.named_modules()), OUTSIDE: objective}
    for term, one in terms.items():
        for name, module in one.named_modules():
            found.setdefault(".".join(filter(None, [OUTSIDE, term, name])), module)
    return found


class Tracer:
    """Tracer of one micro-batch through a network and an objective."""

    def __init__(self, network: nn.Module, objective: nn.Module) -> None:
        self._modules = named_modules(network, objective)
        self._calls = ModuleCalls(outside=OUTSIDE)
        # Open calls: name of the module, number of the call, and whether the inputs were finite.
        self._open: list[tuple[str, int, bool]] = []
        self._count = self._order = 0
        self._forward = self._backward = ""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context that traces the forward and the objective of a micro-batch."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(partial(self._leave, name), with_kwargs=True).remove)
            yield

    def backward(self, loss: Tensor) -> None:
        """Register hooks that trace the next backward pass from `loss`."""
        for node in nodes_of(loss):
            node.register_hook(partial(self._trace_backward, node.name(), self._calls.maker(node)))

    def first(self, *, is_lost: bool) -> str:
        """Return the sentence that names the first module with a value that is not finite.

        The sentence is empty if no module was found.

        Args:
            is_lost: Whether the loss is not finite. If it is, only the forward can be the cause.
        """
        return self._forward if is_lost else self._backward or self._forward

    @torch.no_grad()
    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        self._count += 1
        # The inputs are checked before the forward, because the forward may change them in place.
        self._open.append((name, self._count, not is_lost([*tensors_in(args), *tensors_in(kwargs)])))
        self._calls.begin(name)

    @torch.no_grad()
    def _leave(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        self._calls.end(name)
        while self._open[-1][0] != name:  # an inner forward raised, and the exception was caught
            self._open.pop()
        _, order, was_fine = self._open.pop()
        is_fine = all(map(_is_finite, tensors_in(output)))
        if not is_fine and was_fine and not self._forward:
            self._order = order
            self._forward = (
                f"The first module is {self._label(name)}, in the forward: its inputs were finite, its output is not."
            )
        elif self._forward and is_fine and (not was_fine or order < self._order):
            # A module that got these values, or the module that contains their origin, has a finite output. The values
            # are therefore intended, such as a mask before a softmax.
            self._forward = ""

    @torch.no_grad()
    def _trace_backward(self, operator: str, name: str, given: object, taken: object) -> None:
        if self._backward or all(map(_is_finite, tensors_in(given))) or not all(map(_is_finite, tensors_in(taken))):
            return
        operator = operator.split("::")[-1]
        self._backward = (
            f"The first module is {self._label(name)}, in the backward: {operator} returned a gradient that is not "
            "finite, from finite gradients."
        )

    def _label(self, name: str) -> str:
        kind = f" ({type(self._modules[name]).__name__})"
        return f"`{name}`{kind}" if name else f"the network itself{kind}"


def run_again(
    module: TrainingModule, window: Window, place: int, tracer: Tracer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Run the forward and backward of one micro-batch of a step again, uncompiled, with a tracer as the only observer.

    The caller must restore the buffers to their values before the step. The call changes the buffers. It does not
    change parameters, their gradients or the optimizer. The call draws the same random numbers as the step. If ranks
    share the data, every rank must call this function.

    Args:
        module: The training module.
        window: The micro-batches of the step.
        place: Index of the micro-batch in the window.
        tracer: The tracer.

    Returns:
        The loss, 0-d and detached, and the gradients by parameter name. Parameters without a gradient are left out.
    """
    named = _trained_in(module, window)
    observer, module.observer = module.observer, UNOBSERVED
    try:
        with torch.enable_grad(), run_uncompiled(module.network):
            with tracer.forward():
                loss = _scaled_loss(module, window, place)
            if not loss.requires_grad:
                return loss, {}
            tracer.backward(loss)
            # torch.autograd.grad is used, because loss.backward() would call ddp's hooks at the parameters.
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    finally:
        module.observer = observer
    pairs = zip(named, found, strict=True)
    return loss.detach(), {name: gradient for name, gradient in pairs if gradient is not None}


def _phase_of(module: TrainingModule, window: Window) -> Phase:
    return next(phase for phase in module.phases if phase.name == window.phase)


def _trained_in(module: TrainingModule, window: Window) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer step changes, by name."""
    named = {name: one for name, one in module.network.named_parameters() if one.requires_grad}
    if not module.phases:
        return named
    chosen = {id(one) for one in trained_parameters(module.network, _phase_of(module, window).parameters)}
    return {name: one for name, one in named.items() if id(one) in chosen}


def _scaled_loss(module: TrainingModule, window: Window, place: int) -> Tensor:
    """Recompute the loss of one micro-batch, multiplied by the loss scale, and return it with its graph, 0-d.

    Args:
        module: The training module.
        window: The micro-batches of the step.
        place: Index of the micro-batch in the window.
    """
    batches, precision = module.divisors.of_step(window.batches), module.trainer.precision_plugin
    if isinstance(module, PhasedModule):
        loss = module.compute_phases([_phase_of(module, window)], *batches[place], window.turn)[1][0][0]
    else:
        with precision.train_step_context():
            loss = module.compute(*batches[place])[1]
    loss = loss / len(batches)
    return precision.scale(loss) if isinstance(precision, RunPrecision) else loss


def trace_of(module: TrainingModule, window: Window) -> Trace:
    """Run the micro-batches of a step again, and return the trace up to the first micro-batch that is not finite."""
    network = module.network
    held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    lost_before = [name for name, tensor in held.items() if is_lost([tensor])]
    found: Trace | None = None
    sums: dict[str, Tensor] = {}
    for place, (batch, _) in enumerate(window.batches):
        tracer = Tracer(network, module.objective)
        loss, gradients = run_again(module, window, place, tracer)
        if found is not None:
            continue  # other ranks may wait for this rank in the rest of the step
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        if _is_finite(loss) and all(map(_is_finite, sums.values())):
            continue
        count = len(window.batches)
        sentences = [
            tracer.first(is_lost=not _is_finite(loss)) or "No module made it from finite values.",
            f"It is micro-batch {place + 1} of {count}." if count > 1 else "",
            "The batch has values that are not finite." if is_lost(tensors_in(batch.data)) else "",
            f"Weights or buffers not finite before the step: {', '.join(lost_before[:5])}." if lost_before else "",
        ]
        found = Trace(is_bad=True, where=" ".join(filter(None, sentences)))
        if batch.world_size == 1:
            break
    if found is not None:
        return found
    sizes = dict(zip(sums, norms(list(sums.values())), strict=True))
    overflown = [name for name, size in sizes.items() if not size.isfinite()]
    return Trace(
        is_bad=bool(overflown),
        where=f"The gradients are finite, but not the norms of {', '.join(overflown[:5])}." if overflown else "",
    )
