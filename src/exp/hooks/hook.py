"""What a hook is: the base class of everything that observes or transforms tensors while a network trains.

A hook of one's own is one .py with a subclass that overrides one method, and one .yaml below conf/hooks that names it.

    once                   setup
    each micro-batch       passed("batch")
                           around_forward: forward_pre, forward at the modules that match; the objective
                           after_forward, passed("forward")
                           tensor_gradient, full_backward, post_accumulate_grad; passed("backward")
    once an optimizer step after_backward, clipping, after_clipping, the optimizer, passed("optimizer"), after_step
    a checkpoint           state_dict_save, state_dict_load
    an evaluation          evaluated, for each batch; after_evaluation
    once                   ended, or on_error where the run fails; teardown
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, MinLen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.errors import ConfigError, Fault, RunError
from exp.hooks.declarations import class_faults
from exp.models.matching import matching
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
# A number of optimizer steps, or `auto`: by the length of the run.
Period = int | Literal["auto"]
FEWEST_POINTS = 20
IN_FORWARD = ("forward_pre", "forward", "tensor_gradient")
IN_BACKWARD = ("full_backward", "post_accumulate_grad")
# In a step; a state dict's are always there.
AT_MODULES = (*IN_FORWARD, *IN_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run's step computes, and on what.

    precision: its word. devices: on which all ranks together compute.
    flops: of one sample in a step, from a batch as the data set gives it.
    """

    precision: str
    devices: int
    flops: Callable[[object], FlopCount]


class Hook:
    """Observes or transforms at chosen steps and modules. The base does nothing, and no method that does is called.

    A returned value is a 0-d tensor, left on its device, a float, or a panel of `exp.hooks.panels`: a histogram,
    images, a text, a precision-recall curve. Its key is the TensorBoard tag.

    At the modules that match, an observer is attached in due steps of training alone, so that others cost nothing, it
    runs without a graph, and what it returns must be None; a compiled network runs uncompiled in such a step. A
    transform is attached always, in evaluation too, and what it returns takes the place of what it was given.

    every_n_steps: the hook is due at the first step and at every multiple of it; `auto`, of a class that says the
        longest, goes by the length of the run: see `period_of`.
    modules: patterns of module names, such as `encoder.*`, or names of types, such as `Linear`; `*` is every module.

    transforms: whether its methods at modules change what they see.
    keeps_batches: whether it asks for `step.batches`: of accumulated micro-batches all stay in memory until the step.
    needs: what it needs of a run, words of `exp.hooks.declarations.NEEDS`; what follows from its methods is added.
    least: the smallest values of settings that are numbers, by their names; null is none of them.
    longest: of settings that are periods and may be `auto`, the longest that this makes of them.
    fewest: how many points a run has with them at least, where it is not FEWEST_POINTS.
    name: its name in the config. directory: the run directory, while attached; files of a hook lie below its name.
    """

    transforms: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    least: ClassVar[Mapping[str, int]] = {}
    longest: ClassVar[Mapping[str, int]] = {}
    fewest: ClassVar[Mapping[str, int]] = {}

    def __init__(self, *, every_n_steps: Period = 1, modules: Sequence[str] = ("*",)) -> None:
        # The settings that go by the length of the run.
        self._by_length: list[str] = []
        if every_n_steps != "auto" and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; expected a whole number of steps, 1 or more, or auto")
        self.every_n_steps = self.steps_of("every_n_steps", every_n_steps)
        self.modules = tuple(modules)
        self.name = type(self).__name__.lower()
        self.directory: Path | None = None
        # Of the data, by target; empty where the data has none.
        self._class_names: Mapping[str, Sequence[str]] = {}
        self._attached: Attached | None = None
        self._loss_scale: Callable[[], Tensor | float] | None = None

    def steps_of(self, setting: str, period: Period) -> int:
        """A period as a number of steps; of `auto` the longest, until the length of the run is known.

        Raises ValueError: auto for a setting that has no longest.
        """
        if period != "auto":
            return period
        if setting not in self.longest:
            raise ValueError(f"{setting} is auto; expected a whole number of steps, 1 or more")
        self._by_length.append(setting)
        return self.longest[setting]

    # --- before the run ---

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        """What this hook cannot do with a run beside what its needs exclude, and patterns that match nothing."""
        kind = type(self)
        yield from class_faults(kind, Hook, key=f"hooks.{self.name}")
        for setting, least in self.least.items():
            value = getattr(self, setting)
            if value is not None and value < least:
                yield self.fault(setting, got=value, expected=f"{least} or more")
        if not self.modules:
            yield self.fault("modules", got="[]", expected="one pattern or more; ['*'] is every module")
        try:
            matching(planned.network, self.modules, key=f"hooks.{self.name}.modules")
        except ConfigError as error:
            yield from error.faults

    def fault(
        self, setting: str = "", *, got: object, expected: str, cure: str | None = None, key: str | None = None
    ) -> Fault:
        """A fault of this hook, or of one of its settings. key: another node's, which the hook cannot live with."""
        own = f"hooks.{self.name}.{setting}" if setting else f"hooks.{self.name}"
        return Fault(key=key or own, got=str(got), expected=expected, cure=cure and cure[0].upper() + cure[1:])

    @property
    def leave_out(self) -> str:
        """The last cure of a fault, as the end of a sentence."""
        return f"leave the hook out with ~hooks.{self.name}"

    @property
    def all_needs(self) -> frozenset[str]:
        """What its class declares, and what follows from the methods that it has."""
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
        if self.overrides("state_dict_save") or self.overrides("state_dict_load"):
            needs.add("whole_state_dict")
        return frozenset(needs)

    # --- the run ---

    def setup(self, network: nn.Module) -> None:
        """Called once a stage, fit or test, before its first step."""

    def pause(self) -> None:
        """Training pauses behind a step (an epoch's end, validation): the time to the next step is not its own."""

    def ended(self) -> None:
        """The last step is done, well, and the strategy still stands: a place to let go of its tensors."""

    def on_error(self, error: BaseException, step: Step | None) -> None:
        """The run ends by this, in this step where it is in one. What is raised here is logged, and not raised."""

    def teardown(self) -> None:
        """Called once a stage that was set up, after its last step, also where the run fails."""

    # --- a due training step ---

    def passed(self, boundary: Boundary, step: Step) -> None:
        """The step has come so far: the batch is there; forward and objective, the backward, the optimizer are done.

        For each micro-batch; the optimizer's once a step. With phases each has its own, but for the batch's.
        """

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        """A context entered before the forward of each micro-batch, and left before its backward."""

    def after_forward(self, step: Step, values: Mapping[str, object]) -> Values | None:
        """After the forward and the objective of each micro-batch, without a graph of its own.

        values: by name, with their graph: the batch's entries (input and target where they have no names), what the
            network returned by name, and `output`.
        """

    def after_backward(self, step: Step) -> Values | None:
        """Once an optimizer step, when its gradients are complete: true (unscaled), and before clipping.

        With phases once for each that runs in the step, at its last repeat, and `/<phase>` is added to each tag.
        """

    def before_update(self, step: Step, update: Update) -> None:
        """Before each step of each optimizer, and before after_backward: of phases all of their repeats, too.

        What it raises ends the run, with the parameters as they are.
        """

    def after_clipping(self, step: Step) -> Values | None:
        """As after_backward, with the gradients as the optimizer takes them."""

    def after_step(self, step: Step) -> Values | None:
        """Once an optimizer step, when the parameters are updated."""

    # --- at the modules that match ---

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> object:
        """Before the forward of a module, with its positional inputs."""

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
        """After the forward of a module."""

    def full_backward(self, name: str, module: nn.Module, grad_inputs: object, grad_outputs: object) -> object:
        """When the gradients with respect to a module's inputs are known; multiplied by `loss_scale`."""

    def tensor_gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        """The gradient with respect to each tensor that a module returned; multiplied by `loss_scale`."""

    def post_accumulate_grad(self, name: str, parameter: nn.Parameter) -> None:
        """`parameter.grad` has taken a micro-batch's gradient, times `loss_scale`. name: of the parameter, in full."""

    def state_dict_save(self, name: str, module: nn.Module, state: Mapping[str, object]) -> Mapping[str, object] | None:
        """A module's entries are about to be saved, by their names in the module. A transform may return others."""

    def state_dict_load(self, name: str, module: nn.Module, state: Mapping[str, object]) -> Mapping[str, object] | None:
        """A module's entries are about to be loaded, by their names in the module. A transform may return others."""

    # --- an evaluation: validation in fit, and test ---

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        """Each batch of which this rank has a share. values: as in after_forward, without a graph."""

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        """At the end of a stage, on every rank. Not of the sanity check.

        gather: as Step's, over the ranks that share the data.
        """

    # --- what the engine calls ---

    @property
    def loss_scale(self) -> Tensor | float:
        """By what gradients are multiplied at modules: the scaler's factor, 0-d or a float; 1.0 without."""
        return 1.0 if self._loss_scale is None else self._loss_scale()

    def due(self, index: int) -> bool:
        """Whether step `index`, counted from 1, is one of this hook's."""
        return has_come(self.every_n_steps, index)

    def idle_at(self, index: int) -> frozenset[str]:
        """The methods that have nothing to do at this due step, and are not called: so each costs nothing then."""
        return frozenset()

    def overrides(self, method: str) -> bool:
        """Whether a subclass gave `method` a body: the engine calls no empty one."""
        return getattr(type(self), method) is not getattr(Hook, method)

    @property
    def is_at_modules(self) -> bool:
        """Whether it observes or transforms at modules during a step."""
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
        """Check the patterns, attach what is always at its modules, and call `setup`.

        name: the hook's name in the config; by default its class's.

        Raises ConfigError: a pattern that matches no module, with the names that are there.
        """
        self.name = name or self.name
        self.directory, self._loss_scale, self._class_names = directory, loss_scale, class_names or {}
        modules = matching(network, self.modules, key=f"hooks.{self.name}.modules")
        self._attached = Attached(self, modules, network=network)
        self.setup(network)

    def fit_periods(self, total_steps: int | None) -> None:
        """Make of the periods that are `auto` those of a run of so many steps; None where its end is not known."""
        for setting in self._by_length:
            points = self.fewest.get(setting, FEWEST_POINTS)
            setattr(self, setting, period_of(total_steps, longest=self.longest[setting], fewest=points))

    def engaged(self) -> AbstractContextManager[object]:
        """Around the forward of a due step: an observer is at its modules. What it has in the backward stays behind
        it, until `disengage`."""
        return nullcontext() if self._attached is None else self._attached.engaged()

    def disengage(self) -> None:
        """At the end of a due step."""
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
    """The period by which a run of so many steps has so many points at least, and one a step where it is shorter.

    total_steps: None where the end of the run is not known.
    """
    return longest if total_steps is None else max(1, min(longest, total_steps // fewest))


def has_come(period: int | None, index: int) -> bool:
    """Whether step `index`, counted from 1, is the first or a multiple of the period; None is never."""
    return period is not None and (index % period == 0 or index == 1)


StepNumbers = Annotated[Sequence[Annotated[int, Ge(1)]], "optimizer steps counted from 1, such as [1, 100]", MinLen(1)]


class OnChosenSteps(Hook):
    """Is due at the optimizer steps of a list, or at every n-th; at the first one alone where neither is given.

    steps: counted from 1. every_n_steps: in their place.
    """

    def __init__(
        self,
        *,
        steps: StepNumbers | None = None,
        every_n_steps: Annotated[int, "a whole number of steps", Ge(1)] | None = None,
        modules: Sequence[str] = ("*",),
    ) -> None:
        super().__init__(every_n_steps=every_n_steps or 1, modules=modules)
        if steps is not None and every_n_steps is not None:
            raise ValueError(f"steps is {[*steps]}, beside every_n_steps {every_n_steps}; expected one of the two")
        if every_n_steps is None:
            steps = steps or (1,)
        self.steps = None if steps is None else frozenset(steps)

    def due(self, index: int) -> bool:
        return super().due(index) if self.steps is None else index in self.steps


class Attached:
    """One hook at its modules, by name. A transform, and what watches state dicts, is there from the start.

    network: for the names of parameters.
    """

    def __init__(self, hook: Hook, modules: Mapping[str, nn.Module], *, network: nn.Module) -> None:
        self._hook, self._modules = hook, modules
        taken = {id(one) for module in modules.values() for one in module.parameters()}
        self._parameters = {name: one for name, one in network.named_parameters() if id(one) in taken}
        self._always: list[RemovableHandle] = []
        self._forward: list[RemovableHandle] = []
        self._backward: list[RemovableHandle] = []
        if hook.overrides("state_dict_save") or hook.overrides("state_dict_load"):
            self._always += self._state_dict_handles()
        if hook.transforms:
            self._always += [*self._forward_handles(), *self._backward_handles()]

    @contextmanager
    def engaged(self) -> Iterator[None]:
        if self._hook.transforms or not self._hook.is_at_modules:
            yield
            return
        self.disengage()
        self._backward = self._backward_handles()
        self._forward = self._forward_handles()
        try:
            yield
        finally:
            _remove(self._forward)

    def disengage(self) -> None:
        _remove(self._forward)
        _remove(self._backward)

    def remove(self) -> None:
        self.disengage()
        _remove(self._always)

    def _forward_handles(self) -> list[RemovableHandle]:
        hook, handles = self._hook, []
        for name, module in self._modules.items():
            if hook.overrides("forward_pre"):
                handles.append(module.register_forward_pre_hook(partial(self._called("forward_pre"), name)))
            if hook.overrides("forward"):
                handles.append(module.register_forward_hook(partial(self._called("forward"), name)))
            if hook.overrides("tensor_gradient"):
                handles.append(module.register_forward_hook(self._on_outputs(name)))
        return handles

    def _backward_handles(self) -> list[RemovableHandle]:
        hook, handles = self._hook, []
        if hook.overrides("full_backward"):
            for name, module in self._modules.items():
                handles.append(module.register_full_backward_hook(partial(self._called("full_backward"), name)))
        if hook.overrides("post_accumulate_grad"):
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    accumulated = partial(hook.post_accumulate_grad, name)
                    handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
        return handles

    def _on_outputs(self, name: str) -> Callable[..., None]:
        call = self._called("tensor_gradient")

        def on_outputs(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not is_transformed(tensor):
                    tensor.register_hook(lambda gradient: call(name, gradient))

        return on_outputs

    def _called(self, method: str) -> Callable[..., object]:
        """The hook's own method; an observer's without a graph, and held to returning None."""
        hook = self._hook
        own: Callable[..., object] = getattr(hook, method)
        if hook.transforms:
            return own

        def observing(*arguments: object) -> None:
            seen = list(tensors_in(arguments))
            if any(map(is_transformed, seen)):
                return  # it is no pass of the network's own, and has no numbers to look at
            before = [tensor._version for tensor in seen]
            with torch.no_grad(), OBSERVING:
                returned = own(*arguments)
            if [tensor._version for tensor in seen] != before:
                raise RunError(
                    f"hooks.{hook.name}: {type(hook).__name__}.{method} changed a tensor in place; an observing hook "
                    "leaves what it sees as it is. Work on a copy"
                )
            if returned is not None:
                raise RunError(
                    f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(returned).__name__}; an "
                    "observing hook returns None there. Write `transforms = True` in its class where it is to change "
                    "what it sees"
                )

        return observing

    def _state_dict_handles(self) -> list[RemovableHandle]:
        hook, handles = self._hook, []
        for name, module in self._modules.items():
            if hook.overrides("state_dict_save"):
                handles.append(module.register_state_dict_post_hook(self._on_state_dict("state_dict_save", name)))
            if hook.overrides("state_dict_load"):
                on_load = self._on_state_dict("state_dict_load", name)
                handles.append(module.register_load_state_dict_pre_hook(on_load))
        return handles

    def _on_state_dict(self, method: str, name: str) -> Callable[..., None]:
        call = self._called(method)

        def on_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            changed: Any = call(name, module, own)
            if changed is not None:
                state.update({prefix + key: value for key, value in changed.items()})

        return on_state_dict


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one that torch.func.vmap, grad and the like put in the place of the numbers, while they run.

    torch has no public question for it; seen with 2.13.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class Observing:
    """Entered around what an observing hook computes in the middle of a forward or a backward, so that no other hook
    takes that for the network's own.

    depth: how many are under way.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# One for the process, as the network that is being observed is.
OBSERVING = Observing()
