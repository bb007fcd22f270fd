"""Base class of hooks, which observe or transform tensors while a network trains.

To add a hook, write one .py file with a subclass that overrides a method. Also write one .yaml file in conf/hooks with
the name of the subclass. Order of the calls:

    once                   setup
    each micro-batch       passed("batch")
                           around_forward: forward_pre, forward at the modules that match; the objective
                           after_forward, passed("forward")
                           tensor_gradient, full_backward, post_accumulate_grad; passed("backward")
    each optimizer step    after_backward, clipping, after_clipping, the optimizer, passed("optimizer"), after_step
    an evaluation          evaluated, for each batch; after_evaluation
    once                   ended, or on_error if the run fails; teardown
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
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
# Number of optimizer steps between two records. `auto` computes the number from the length of the run.
Period = int | Literal["auto"]
FEWEST_POINTS = 20
AT_MODULES = ("forward_pre", "forward", "tensor_gradient", "full_backward", "post_accumulate_grad")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of one training step.

    Args:
        precision: Value of `precision` in the config.
        devices: Total number of devices over all ranks.
        flops: Function that returns the FLOPs of one sample in a step, given a batch of the data set.
    """

    precision: str
    devices: int
    flops: Callable[[object], FlopCount]


class Hook:
    """Base class of hooks, which observe or transform values at chosen steps and modules.

    A method does nothing unless a subclass overrides it. Most methods may return values by TensorBoard tag. A value is
    a float, a 0-d tensor on its device, or a panel of `exp.hooks.panels`. The hook is due in the steps that
    `every_n_steps` selects.

    An observing hook:

    - is attached to its modules only in due steps, so that other steps take no extra time;
    - runs without gradients, and its methods at modules return None;
    - makes a compiled network run uncompiled in due steps.

    A transforming hook is always attached, even in evaluation. The value that its method returns replaces the original
    value.

    Args:
        every_n_steps: Steps between two due steps. The first step and every multiple are due. `auto` depends on the
            length of the run, and requires an entry in `longest`. Default: 1.
        modules: Patterns of module names, such as `encoder.*`, or names of types, such as `Linear`. `*` selects all
            modules. Default: *.

    Attributes:
        transforms: Whether the methods at modules change values.
        keeps_batches: Whether the hook reads `step.batches`. If true, all micro-batches stay in memory until the step
            ends.
        needs: Names in `exp.hooks.declarations.NEEDS`. Needs that follow from the overridden methods are added.
        longest: Maximum number of steps between two records, by setting that may be `auto`.
        fewest: Minimum number of records per run, by setting that may be `auto`. Default: FEWEST_POINTS.
        name: Name of the hook in the config, and of the folder for the hook's files.
        directory: Run directory; set while the hook is attached.
    """

    transforms: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    longest: ClassVar[Mapping[str, int]] = {}
    fewest: ClassVar[Mapping[str, int]] = {}

    def __init__(self, *, every_n_steps: Period = 1, modules: Sequence[str] = ("*",)) -> None:
        # Names of the settings with the value `auto`.
        self._by_length: list[str] = []
        if every_n_steps != "auto" and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; expected a whole number of steps, 1 or more, or auto")
        self.every_n_steps = self.steps_of("every_n_steps", every_n_steps)
        self.modules = tuple(modules)
        self.name = type(self).__name__.lower()
        self.directory: Path | None = None
        # Class names of each target. Empty if the targets are not classes.
        self._class_names: Mapping[str, Sequence[str]] = {}
        self._attached: Attached | None = None
        self._loss_scale: Callable[[], Tensor | float] | None = None

    def steps_of(self, setting: str, period: Period) -> int:
        """Return a period in steps.

        For `auto`, this is the longest period. `fit_periods` later computes the period from the length of the run.

        Args:
            setting: Name of the setting with the period.
            period: Value of the setting.

        Raises:
            ValueError: The period is `auto`, and the setting has no entry in `longest`.
        """
        if period != "auto":
            return period
        if setting not in self.longest:
            raise ValueError(f"{setting} is auto; expected a whole number of steps, 1 or more")
        self._by_length.append(setting)
        return self.longest[setting]

    # --- before the run ---

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield the errors of this hook in a planned run. Needs that the run does not meet are checked elsewhere."""
        kind = type(self)
        yield from class_errors(kind, Hook, key=f"hooks.{self.name}")
        if not self.modules:
            yield self.error("modules", got="[]", expected="one or more patterns, such as ['*'] for all modules")
        try:
            find_modules(planned.network, self.modules, key=f"hooks.{self.name}.modules")
        except ConfigError as error:
            yield from error.errors

    def error(
        self, setting: str = "", *, got: object, expected: str, fix: str | None = None, key: str | None = None
    ) -> ErrorDetails:
        """Return an error of this hook or of one of its settings.

        Args:
            setting: Name of the setting. Default: empty, for the hook.
            got: Value of the setting.
            expected: Description of valid values.
            fix: Advice. Default: None.
            key: Config key of the error. Default: None, for the key of the hook or of the setting.
        """
        own = f"hooks.{self.name}.{setting}" if setting else f"hooks.{self.name}"
        return ErrorDetails(key=key or own, got=str(got), expected=expected, fix=fix and fix[0].upper() + fix[1:])

    @property
    def leave_out(self) -> str:
        """Advice to remove the hook, for the end of a sentence."""
        return f"leave the hook out with ~hooks.{self.name}"

    @property
    def all_needs(self) -> frozenset[str]:
        """Declared needs, and needs that follow from the overridden methods."""
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
        """Prepare a training (fit) or a test. Called once before the first step of the training or the test."""

    def pause(self) -> None:
        """React to a pause of training. Called after a step before a validation or the end of an epoch."""

    def ended(self) -> None:
        """Finish a successful run. Called after the last step. The strategy still exists."""

    def on_error(self, error: BaseException, step: Step | None) -> None:
        """React to a failed run. An exception that this method raises is logged.

        Args:
            error: Exception that ended the run.
            step: Current step; None outside of a step.
        """

    def teardown(self) -> None:
        """Release resources after a training or a test. Called once after its last step, even if the run fails."""

    # --- a due training step ---

    def passed(self, boundary: Boundary, step: Step) -> None:
        """React to the end of a part of a step.

        A step has four parts: loading a batch, the forward with the objective, the backward, and the optimizer step.
        The optimizer step is reported once per step, and the other parts for each micro-batch. With phases, each phase
        reports all parts except the batch.

        Args:
            boundary: Part that has ended: batch, forward, backward or optimizer.
            step: Current step.
        """

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        """Return a context for the forward of each micro-batch. The context ends before the backward."""

    def after_forward(self, step: Step, values: Mapping[str, object]) -> Values | None:
        """Return values after the forward and the objective of each micro-batch. Gradients are disabled.

        Args:
            step: Current step.
            values: Values by name, with their graph: values of the batch, outputs of the network, and `output`, the
                whole output. If the values of the batch have no names, they are `input` and `target`.
        """

    def after_backward(self, step: Step) -> Values | None:
        """Return values before clipping, once per optimizer step. The gradients are complete and unscaled.

        With phases, the method is called for each phase of the step, at the phase's last repeat. `/<phase>` is appended
        to the tags.
        """

    def before_update(self, step: Step, update: Update) -> None:
        """Check or record an update. Called before each optimizer step, and before the method `after_backward`.

        A phase may repeat its optimizer step, and then the method is called each time. An exception ends the run and
        leaves the parameters unchanged.
        """

    def after_clipping(self, step: Step) -> Values | None:
        """Return values of the clipped gradients that the optimizer uses. Called as often as after_backward."""

    def after_step(self, step: Step) -> Values | None:
        """Return values once per optimizer step, after the parameters are updated."""

    # --- at the modules that match ---

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> object:
        """Observe or transform the positional inputs of a module before its forward."""

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
        """Observe or transform the output of a module after its forward."""

    def full_backward(self, name: str, module: nn.Module, grad_inputs: object, grad_outputs: object) -> object:
        """Observe or transform the gradients of a module's inputs. The gradients are multiplied by `loss_scale`."""

    def tensor_gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        """Observe or transform the gradient, multiplied by `loss_scale`, of each tensor that a module returned."""

    def post_accumulate_grad(self, name: str, parameter: nn.Parameter) -> None:
        """Observe `parameter.grad`, multiplied by `loss_scale`, after the gradient of a micro-batch was added."""

    # --- an evaluation: validation in fit, and test ---

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        """Observe an evaluation batch. Called on ranks that have samples of the batch.

        Args:
            stage: Kind of evaluation: validation or test.
            values: Values by name as in after_forward, without a graph.
        """

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        """Return values at the end of an evaluation. Called on every rank, except after Lightning's sanity check.

        Args:
            stage: Kind of evaluation: validation or test.
            gather: Function that gathers a tensor over the ranks with different samples, as in Step.
        """

    # --- called by the engine ---

    @property
    def loss_scale(self) -> Tensor | float:
        """Factor by which gradients at modules are multiplied: a 0-d tensor or a float. Without a loss scale, 1.0."""
        return 1.0 if self._loss_scale is None else self._loss_scale()

    def due(self, index: int) -> bool:
        """Return whether the hook is due at step `index`, counted from 1."""
        return is_due_at(self.every_n_steps, index)

    def idle_at(self, index: int) -> frozenset[str]:
        """Return the names of methods that are not called in this due step, because they have nothing to do."""
        return frozenset()

    def overrides(self, method: str) -> bool:
        """Return whether a subclass overrides a method. The engine calls only overridden methods."""
        return getattr(type(self), method) is not getattr(Hook, method)

    @property
    def is_at_modules(self) -> bool:
        """True if the hook observes or transforms values at modules during a step."""
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
        """Check the patterns, attach a transforming hook to its modules, and call `setup`.

        Args:
            network: Network of the run.
            name: Name in the config. Default: None, which keeps the current name.
            directory: Run directory. Default: None.
            loss_scale: Function that returns the loss scale. Default: None, for a run without a loss scale.
            class_names: Class names of each target. Default: None.

        Raises:
            ConfigError: A pattern matches no module.
        """
        self.name = name or self.name
        self.directory, self._loss_scale, self._class_names = directory, loss_scale, class_names or {}
        modules = find_modules(network, self.modules, key=f"hooks.{self.name}.modules")
        self._attached = Attached(self, modules, network=network)
        self.setup(network)

    def fit_periods(self, total_steps: int | None) -> None:
        """Compute the periods of all settings that are `auto`. total_steps: optimizer steps of the run, if known."""
        for setting in self._by_length:
            points = self.fewest.get(setting, FEWEST_POINTS)
            setattr(self, setting, period_of(total_steps, longest=self.longest[setting], fewest=points))

    def engaged(self) -> AbstractContextManager[object]:
        """Return a context for the forward of a due step.

        After the context, an observing hook stays attached during the backward until `disengage` is called.
        """
        return nullcontext() if self._attached is None else self._attached.engaged()

    def disengage(self) -> None:
        """Detach an observing hook at the end of a due step."""
        if self._attached is not None:
            self._attached.disengage()

    def detach(self) -> None:
        """Undo `attach`. The method does nothing if the hook is not attached."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
            self._loss_scale = None
            self.teardown()


def period_of(total_steps: int | None, *, longest: int, fewest: int = FEWEST_POINTS) -> int:
    """Return the number of steps between two records, at most `longest`.

    A run gets at least `fewest` records. If the run has fewer steps, every step is recorded.

    Args:
        total_steps: Number of optimizer steps of the run; None if unknown.
        longest: Maximum number of steps between two records.
        fewest: Minimum number of records. Default: FEWEST_POINTS.
    """
    return longest if total_steps is None else max(1, min(longest, total_steps // fewest))


def is_due_at(period: int | None, index: int) -> bool:
    """Return whether a step is due: the first step, or a multiple of the period.

    Args:
        period: Period in steps. None: no step is due.
        index: Number of the step, counted from 1.
    """
    return period is not None and (index % period == 0 or index == 1)


class Attached:
    """A hook registered at its modules. A transforming hook is registered at once, an observing hook only in due steps.

    Args:
        hook: The hook.
        modules: Modules by name.
        network: Network that defines the parameter names passed to the hook.
    """

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
        """Return a method of the hook as a function that can be registered at modules.

        The method of an observing hook runs without gradients. An error is raised if it changes a tensor or returns a
        value.
        """
        hook = self._hook
        own: Callable[..., object] = getattr(hook, method)
        if hook.transforms:
            return own

        def observing(*arguments: object) -> None:
            seen = list(tensors_in(arguments))
            if any(map(is_transformed, seen)):
                return  # inside torch.func, tensors are placeholders without values
            before = _versions(seen)
            with torch.no_grad(), OBSERVING:
                returned = own(*arguments)
            place = f"hooks.{hook.name}: {type(hook).__name__}.{method}"
            if _versions(seen) != before:
                raise RunError(f"{place} changed a tensor in place; expected no change, because the hook only observes")
            if returned is not None:
                raise RunError(
                    f"{place} returned a {type(returned).__name__}; expected None, because the hook only observes. To "
                    "change values, write `transforms = True` in its class"
                )

        return observing


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is a placeholder inside torch.func.vmap, grad or another transform.

    torch has no public function for this check (2.13; tested in tests/hooks/test_torch_func.py).
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version of each tensor, which autograd increases at each in-place change."""
    return [tensor._version for tensor in tensors]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class Observing:
    """Context for computations of observing hooks. Other hooks do not count these computations as work of the network.

    Attributes:
        depth: Number of nested contexts that are active.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# One object per process, because the hooks of a process observe the same network.
OBSERVING = Observing()
