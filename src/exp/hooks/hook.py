"""The base class of hooks, which observe or transform tensors while a network trains.

A hook of your own is one .py with a subclass that overrides one method, and one .yaml in conf/hooks that names it.

    once                   setup
    each micro-batch       passed("batch")
                           around_forward: forward_pre, forward at the modules that match; the objective
                           after_forward, passed("forward")
                           tensor_gradient, full_backward, post_accumulate_grad; passed("backward")
    once an optimizer step after_backward, clipping, after_clipping, the optimizer, passed("optimizer"), after_step
    an evaluation          evaluated, for each batch; after_evaluation
    once                   ended, or on_error if the run fails; teardown
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, MinLen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.errors import ConfigError, ErrorDetails, RunError
from exp.hooks.declarations import class_errors
from exp.models.matching import find_modules
from exp.nested import tensors_in
from exp.shared_types import Stage

if TYPE_CHECKING:
    from pathlib import Path

    from exp.hooks.panels import Panel
    from exp.hooks.step import Step, Update
    from exp.models.flop_count import FlopCount
    from exp.strategies.strategy import Blueprint

Values = Mapping[str, "Tensor | float | Panel"]
Boundary = Literal["batch", "forward", "backward", "optimizer"]
# A number of optimizer steps, or `auto`, which depends on the length of the run.
Period = int | Literal["auto"]
FEWEST_POINTS = 20
AT_MODULES = ("forward_pre", "forward", "tensor_gradient", "full_backward", "post_accumulate_grad")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step.

    Args:
        precision: Precision word.
        devices: Number of devices of all ranks together.
        flops: Returns the FLOPs of one sample in a step, from a batch of the data set.
    """

    precision: str
    devices: int
    flops: Callable[[object], FlopCount]


class Hook:
    """Observes or transforms at chosen steps and modules. The base class does nothing.

    A returned value is a 0-d tensor, left on its device, a float, or a panel of `exp.hooks.panels`. Its key is the
    TensorBoard tag.

    An observer is attached to its modules in due steps of training alone, so that other steps cost nothing. It runs
    without a graph and returns None there. A compiled network runs uncompiled in such a step. A transform is always
    attached, in evaluation too, and its result replaces the value that it was given.

    Args:
        every_n_steps: The hook is due at the first step and at every multiple. `auto` depends on the length of the run,
            for a class with an entry in `longest`.
        modules: Patterns of module names, such as `encoder.*`, or names of types, such as `Linear`; `*` is all.

    Attributes:
        transforms: Whether the methods at modules change values.
        keeps_batches: Whether the hook reads `step.batches`. Then all micro-batches stay in memory until the step.
        needs: Words of `exp.hooks.declarations.NEEDS`. Needs that follow from the methods are added.
        longest: The longest period of each setting that may be `auto`.
        fewest: The least number of points in a run for each such setting, if it is not FEWEST_POINTS.
        name: The name in the config. Files of a hook are in a folder of that name.
        directory: The run directory, while the hook is attached.
    """

    transforms: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    longest: ClassVar[Mapping[str, int]] = {}
    fewest: ClassVar[Mapping[str, int]] = {}

    def __init__(self, *, every_n_steps: Period = 1, modules: Sequence[str] = ("*",)) -> None:
        # Settings that depend on the length of the run.
        self._by_length: list[str] = []
        if every_n_steps != "auto" and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; expected a whole number of steps, 1 or more, or auto")
        self.every_n_steps = self.steps_of("every_n_steps", every_n_steps)
        self.modules = tuple(modules)
        self.name = type(self).__name__.lower()
        self.directory: Path | None = None
        # Names of the classes of each target, if the data have them.
        self._class_names: Mapping[str, Sequence[str]] = {}
        self._attached: Attached | None = None
        self._loss_scale: Callable[[], Tensor | float] | None = None

    def steps_of(self, setting: str, period: Period) -> int:
        """Return a period in steps; for `auto` the longest, until `fit_periods` knows the length of the run.

        Raises:
            ValueError: auto for a setting without an entry in `longest`.
        """
        if period != "auto":
            return period
        if setting not in self.longest:
            raise ValueError(f"{setting} is auto; expected a whole number of steps, 1 or more")
        self._by_length.append(setting)
        return self.longest[setting]

    # --- before the run ---

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield the errors of this hook in a run, other than needs that the run does not meet."""
        kind = type(self)
        yield from class_errors(kind, Hook, key=f"hooks.{self.name}")
        if not self.modules:
            yield self.error("modules", got="[]", expected="one pattern or more; ['*'] is every module")
        try:
            find_modules(planned.network, self.modules, key=f"hooks.{self.name}.modules")
        except ConfigError as error:
            yield from error.errors

    def error(
        self, setting: str = "", *, got: object, expected: str, fix: str | None = None, key: str | None = None
    ) -> ErrorDetails:
        """Return an error of this hook, or of one of its settings. key: the key of another node to blame."""
        own = f"hooks.{self.name}.{setting}" if setting else f"hooks.{self.name}"
        return ErrorDetails(key=key or own, got=str(got), expected=expected, fix=fix and fix[0].upper() + fix[1:])

    @property
    def leave_out(self) -> str:
        """Advice to remove the hook, as the end of a sentence."""
        return f"leave the hook out with ~hooks.{self.name}"

    @property
    def all_needs(self) -> frozenset[str]:
        """The declared needs, and those that follow from the methods."""
        needs = set(self.needs)
        if self.transforms:
            if self.overrides("full_backward") or self.overrides("tensor_gradient"):
                needs.add("gradient_flow")
        elif self.is_at_modules or self.overrides("after_forward") or self.overrides("evaluated"):
            needs.add("all_layers")
        if self.overrides("after_forward") or self.overrides("evaluated"):
            needs.add("known_values")
        if self.overrides("before_update"):
            needs.add("known_step")
        return frozenset(needs)

    # --- the run ---

    def setup(self, network: nn.Module) -> None:
        """Called once a stage, fit or test, before its first step."""

    def pause(self) -> None:
        """Called when training pauses after a step, for an epoch's end or a validation."""

    def ended(self) -> None:
        """Called after the last step of a run that succeeds, before the strategy is taken down."""

    def on_error(self, error: BaseException, step: Step | None) -> None:
        """Called when the run fails, with the step under way. An exception raised here is logged."""

    def teardown(self) -> None:
        """Called once a stage after its last step, also if the run fails."""

    # --- a due training step ---

    def passed(self, boundary: Boundary, step: Step) -> None:
        """Called when the batch is there, and when forward with objective, backward and optimizer step are done.

        Called for each micro-batch, and once a step for the optimizer. With phases each phase has its own calls, except
        for the batch.
        """

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        """Return a context that is entered before the forward of each micro-batch, and left before its backward."""

    def after_forward(self, step: Step, values: Mapping[str, object]) -> Values | None:
        """Called after the forward and the objective of each micro-batch, with gradients disabled.

        values: by name, with their graph: entries of the batch (input and target if they have no names), outputs of the
            network, and `output`.
        """

    def after_backward(self, step: Step) -> Values | None:
        """Called once an optimizer step when the gradients are complete and unscaled, before clipping.

        With phases it is called for each phase of the step, at its last repeat, and tags end with `/<phase>`.
        """

    def before_update(self, step: Step, update: Update) -> None:
        """Called before each step of each optimizer, and before after_backward; with phases at all of their repeats.

        An exception ends the run with the parameters unchanged.
        """

    def after_clipping(self, step: Step) -> Values | None:
        """Called like after_backward, with the gradients that the optimizer takes."""

    def after_step(self, step: Step) -> Values | None:
        """Called once an optimizer step when the parameters are updated."""

    # --- at the modules that match ---

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> object:
        """Called before the forward of a module, with its positional inputs."""

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
        """Called after the forward of a module."""

    def full_backward(self, name: str, module: nn.Module, grad_inputs: object, grad_outputs: object) -> object:
        """Called when the gradients of a module's inputs are known, multiplied by `loss_scale`."""

    def tensor_gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        """Called with the gradient of each tensor that a module returned, multiplied by `loss_scale`."""

    def post_accumulate_grad(self, name: str, parameter: nn.Parameter) -> None:
        """Called when `parameter.grad` has taken the gradient of a micro-batch, multiplied by `loss_scale`."""

    # --- an evaluation: validation in fit, and test ---

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        """Called for each batch of which this rank has a share. values: as in after_forward, without a graph."""

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        """Called at the end of a stage on every rank, except after the sanity check.

        gather: as in Step, over the ranks that share the data.
        """

    # --- called by the engine ---

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor of gradients at modules: the loss scale, 0-d or a float; 1.0 without one."""
        return 1.0 if self._loss_scale is None else self._loss_scale()

    def due(self, index: int) -> bool:
        """Return whether the hook is due at step `index`, counted from 1."""
        return is_due_at(self.every_n_steps, index)

    def idle_at(self, index: int) -> frozenset[str]:
        """Return the methods that have nothing to do at this due step, and are not called."""
        return frozenset()

    def overrides(self, method: str) -> bool:
        """Return whether a subclass overrides `method`. The engine calls no other method."""
        return getattr(type(self), method) is not getattr(Hook, method)

    @property
    def is_at_modules(self) -> bool:
        """True if the hook observes or transforms at modules during a step."""
        return any(self.overrides(method) for method in AT_MODULES)

    def attach(
        self,
        network: nn.Module,
        *,
        name: str | None = None,
        directory: Path | None = None,
        loss_scale: Callable[[], Tensor | float] | None = None,
        class_names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Check the patterns, attach a transform to its modules, and call `setup`.

        Args:
            network: Network of the run.
            name: Name in the config; by default the class's.
            directory: Run directory.
            loss_scale: Returns the loss scale.
            class_names: Names of the classes of each target.

        Raises:
            ConfigError: A pattern matches no module.
        """
        self.name = name or self.name
        self.directory, self._loss_scale, self._class_names = directory, loss_scale, class_names or {}
        modules = find_modules(network, self.modules, key=f"hooks.{self.name}.modules")
        self._attached = Attached(self, modules, network=network)
        self.setup(network)

    def fit_periods(self, total_steps: int | None) -> None:
        """Set periods that are `auto` for a run of so many steps; None if its end is not known."""
        for setting in self._by_length:
            points = self.fewest.get(setting, FEWEST_POINTS)
            setattr(self, setting, period_of(total_steps, longest=self.longest[setting], fewest=points))

    def engaged(self) -> AbstractContextManager[object]:
        """Return the context of the forward of a due step. An observer stays in the backward until `disengage`."""
        return nullcontext() if self._attached is None else self._attached.engaged()

    def disengage(self) -> None:
        """End a due step."""
        if self._attached is not None:
            self._attached.disengage()

    def detach(self) -> None:
        """Undo `attach`. Safe to call twice, and before `attach`."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
            self._loss_scale = None
            self.teardown()


def period_of(total_steps: int | None, *, longest: int, fewest: int = FEWEST_POINTS) -> int:
    """Return the period that gives a run at least `fewest` points, and a shorter run one a step.

    total_steps: None if the end of the run is not known.
    """
    return longest if total_steps is None else max(1, min(longest, total_steps // fewest))


def is_due_at(period: int | None, index: int) -> bool:
    """Return whether step `index`, counted from 1, is the first or a multiple of the period; None is never."""
    return period is not None and (index % period == 0 or index == 1)


StepNumbers = Annotated[Sequence[Annotated[int, Ge(1)]], "optimizer steps counted from 1, such as [1, 100]", MinLen(1)]


class OnChosenSteps(Hook):
    """A hook that is due at the optimizer steps of a list. steps: counted from 1."""

    def __init__(self, *, steps: StepNumbers = (1,), modules: Sequence[str] = ("*",)) -> None:
        super().__init__(modules=modules)
        self.steps = frozenset(steps)

    def due(self, index: int) -> bool:
        return index in self.steps


class Attached:
    """A hook at its modules. A transform is attached from the start. network: for the names of parameters."""

    def __init__(self, hook: Hook, modules: Mapping[str, nn.Module], *, network: nn.Module) -> None:
        self._hook, self._modules = hook, modules
        taken = {id(one) for module in modules.values() for one in module.parameters()}
        self._parameters = {name: one for name, one in network.named_parameters() if id(one) in taken}
        self._forward: list[RemovableHandle] = []
        self._backward: list[RemovableHandle] = []
        if hook.transforms:
            self._forward, self._backward = self._forward_handles(), self._backward_handles()

    @contextmanager
    def engaged(self) -> Iterator[None]:
        if self._hook.transforms or not self._hook.is_at_modules:
            yield
            return
        self.disengage()
        self._forward, self._backward = self._forward_handles(), self._backward_handles()
        try:
            yield
        finally:
            _remove(self._forward)

    def disengage(self) -> None:
        if not self._hook.transforms:
            self.remove()

    def remove(self) -> None:
        _remove(self._forward)
        _remove(self._backward)

    def _forward_handles(self) -> list[RemovableHandle]:
        handles = self._handles("forward_pre", nn.Module.register_forward_pre_hook)
        handles += self._handles("forward", nn.Module.register_forward_hook)
        if self._hook.overrides("tensor_gradient"):
            handles += [one.register_forward_hook(self._on_outputs(name)) for name, one in self._modules.items()]
        return handles

    def _backward_handles(self) -> list[RemovableHandle]:
        handles = self._handles("full_backward", nn.Module.register_full_backward_hook)
        if self._hook.overrides("post_accumulate_grad"):
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    accumulated = partial(self._hook.post_accumulate_grad, name)
                    handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
        return handles

    def _handles(self, method: str, register: Callable[..., RemovableHandle]) -> list[RemovableHandle]:
        if not self._hook.overrides(method):
            return []
        return [register(module, partial(self._guard_method(method), name)) for name, module in self._modules.items()]

    def _on_outputs(self, name: str) -> Callable[..., None]:
        call = self._guard_method("tensor_gradient")

        def on_outputs(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not is_transformed(tensor):
                    tensor.register_hook(lambda gradient: call(name, gradient))

        return on_outputs

    def _guard_method(self, method: str) -> Callable[..., object]:
        """Return a method of the hook; an observer's without a graph, and with an error if it changes anything."""
        hook = self._hook
        own: Callable[..., object] = getattr(hook, method)
        if hook.transforms:
            return own

        def observing(*arguments: object) -> None:
            seen = list(tensors_in(arguments))
            if any(map(is_transformed, seen)):
                return  # a call inside torch.func, whose tensors have no numbers
            before = _versions(seen)
            with torch.no_grad(), OBSERVING:
                returned = own(*arguments)
            place = f"hooks.{hook.name}: {type(hook).__name__}.{method}"
            if _versions(seen) != before:
                raise RunError(
                    f"{place} changed a tensor in place; expected no change, because the hook observes. Work on a copy"
                )
            if returned is not None:
                raise RunError(
                    f"{place} returned a {type(returned).__name__}; an observing hook returns None there. Write "
                    "`transforms = True` in its class if it is to change what it sees"
                )

        return observing


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor stands for numbers inside torch.func.vmap, grad and so on.

    torch has no public function for it (2.13; tests/hooks/test_torch_func.py).
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return autograd's counts of in-place changes."""
    return [tensor._version for tensor in tensors]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class Observing:
    """A context around the computations of observing hooks, so that other hooks do not count them as the network's.

    Attributes:
        depth: Number of contexts that are entered.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# One for the process, like the network.
OBSERVING = Observing()
