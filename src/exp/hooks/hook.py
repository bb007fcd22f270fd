"""What a hook is: the base class of everything that observes or transforms tensors while a network trains.

A hook of one's own is one .py with a subclass that overrides one method, and one .yaml below conf/hooks that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault
from exp.hooks.norms import norms_by_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Values = Mapping[str, "Tensor | float"]


@dataclass(kw_only=True, slots=True)
class Step:
    """One optimizer step, as a hook sees it.

    index: the optimizer step under way, counted from 1: the x axis of everything that is logged.
    network: the network itself, not the wrapper of a strategy.
    optimizers: those that step, in the order in which they do.
    batch_size: samples of the global batch, over all ranks and accumulated micro-batches.
    device: where the network's input is.
    loss: the objective of the last micro-batch, 0-d and detached; None before it is known.
    data: the last micro-batch, as the data set gives it: a pair or a mapping of tensors.
    norms: the 2-norms of tensors by the names of their parameters, of whole ones where this process has parts of them.
        Where ranks hold parts of one network every rank must call it alike, and it gives those of all ranks.
    phase: in after_backward, of a run with phases: the one whose gradients are there, in its own parameters alone.
    """

    index: int
    network: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch_size: int
    device: torch.device
    loss: Tensor | None = None
    data: Any = None
    norms: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = norms_by_name
    phase: str | None = None


class Hook:
    """Observes (or, in `forward`, transforms) at chosen steps and modules. The base does nothing.

    The engine calls `attach` once before the first step and `detach` once after the last, and between them, for
    steps that are `due`, those of `around_forward`, `after_backward` and `after_step` that a subclass overrides.
    A returned value is a 0-d tensor, left on its device, a float, or a panel of `exp.hooks.values`: a histogram,
    images, a text, a precision-recall curve. Its key is the TensorBoard tag.

    every_n_steps: the hook is due at the first step and at every multiple of it.
    modules: patterns of module names, such as `encoder.*`; `*` is every module.
    """

    def __init__(self, *, every_n_steps: int = 1, modules: Sequence[str] = ("*",)) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; expected a whole number of steps, 1 or more")
        self.every_n_steps = every_n_steps
        self.modules = tuple(modules)
        self._handles: list[Any] = []

    def setup(self, network: nn.Module) -> None:
        """Called once, before the first step."""

    def around_forward(self, step: Step) -> AbstractContextManager[Any] | None:
        """A context entered before the forward of each micro-batch, and left before its backward."""

    def after_backward(self, step: Step) -> Values | None:
        """Once an optimizer step, when its gradients are complete: true (unscaled), and before clipping.

        With phases once for each that runs in the step, at its last repeat, and `/<phase>` is added to each tag.
        """

    def after_step(self, step: Step) -> Values | None:
        """Once an optimizer step, when the parameters are updated."""

    def forward(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any | None:
        """After each forward of a module that matches `modules`; what is not None takes the output's place.

        It runs at every step, in evaluation too: test `module.training`, or `self.every_n_steps`, where that matters.
        """

    def pause(self) -> None:
        """Training pauses behind a step (an epoch's end, validation): the time to the next step is not its own."""

    def teardown(self) -> None:
        """Called once, after the last step, also where the run fails."""

    def due(self, index: int) -> bool:
        """Whether step `index`, counted from 1, is one of this hook's."""
        return index % self.every_n_steps == 0 or index == 1

    def overrides(self, method: str) -> bool:
        """Whether a subclass gave `method` a body: the engine calls no empty one."""
        return getattr(type(self), method) is not getattr(Hook, method)

    def attach(self, network: nn.Module, *, name: str | None = None) -> None:
        """Check the patterns, register `forward` where it is overridden, and call `setup`.

        name: the hook's name in the config, for errors; by default its class's.

        Raises ConfigError: a pattern that matches no module, with the names that are there.
        """
        matched = matching(network, self.modules, key=f"hooks.{name or type(self).__name__.lower()}.modules")
        if self.overrides("forward"):
            for path, module in matched.items():
                self._handles.append(module.register_forward_hook(partial(self.forward, path)))
        self.setup(network)

    def detach(self) -> None:
        """Undo `attach`. Safe to call twice, and before `attach`."""
        while self._handles:
            self._handles.pop().remove()
        self.teardown()


def matching(network: nn.Module, patterns: Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """The modules below `network` whose names match one of `patterns`, by name, in the network's order.

    The network itself has the empty name; it matches `*` only. key: the patterns' key in the config.

    Raises ConfigError: all patterns that match no module, with the names that are there.
    """
    modules = dict(network.named_modules())
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if unmatched:
        names = [name for name in modules if name]
        there = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        expected = f"a pattern of module names; there are {there or 'no modules below the network'}"
        raise ConfigError([Fault(key=key, got=repr(pattern), expected=expected) for pattern in unmatched])
    return {name: module for name, module in modules.items() if any(fnmatchcase(name, one) for one in patterns)}
