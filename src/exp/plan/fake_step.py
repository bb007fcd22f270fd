"""A training step on fake tensors, which have shapes, dtypes and storages, but no numbers in memory.

The network is built on the meta device, and its tensors are replaced by fake CPU tensors. The step keeps the same
activations for the backward as a run on a CPU. CUDA kernels keep the same activations, except for cuDNN and CUDA's
attention.

    forward and objective    run in the precision of the setting; bytes kept for the backward are counted
    backward                 computes gradients; operators are recorded
    optimizer                creates its state in a first step (in exp.plan.rank_memory)

The module uses three private parts of torch 2.13, which tests check. They are FakeTensorMode of torch._subclasses, the
property `is_view` of an operator, and the storage of a fake tensor, which is one Python object with a size.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exp.check.input_errors import describe_value
from exp.config.settings import Settings, Word
from exp.construct import build_network, build_objective, build_phases, build_run_precision
from exp.data.randomness import preserve_generators
from exp.engine.forward import enable_needs, forward_by_name, make_passes
from exp.errors import ConfigError, RunError, one_line
from exp.hooks.saved_tensors import Kept, dense_tensors, innermost_call, kept_by, storages
from exp.models.containers import with_forward
from exp.models.flop_count import flops_of
from exp.nested import map_tensors, tensors_in
from exp.objectives.objective import Objective
from exp.optim.parameter_groups import trained_parameters
from exp.optim.phase import turns_of
from exp.precision.conversion import cast_own_tensors
from exp.precision.words import WORDS
from exp.shared_types import Batch, dtype_name
from exp.strategies.footprint import OBJECTIVE, Size
from exp.strategies.units import checkpoint_activations, match_modules

if TYPE_CHECKING:
    from exp.check.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a step that differ between estimates.

    Attributes:
        samples: Number of samples in a rank's micro-batch.
        word: Name of the precision.
        recomputed: Patterns of module names. The backward recomputes the activations of these modules.
    """

    samples: int
    word: Word
    recomputed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A call of a torch operator during a step.

    Attributes:
        layer: Path of the innermost module that calls the operator. Empty for the network itself.
        flops: Number of multiplications and additions.
        moved: Bytes that the operator reads and writes.
        dtype: Dtype of the result, as torch names it.
        times: Number of calls per step. It is a fraction if a phase does not run at every step.
    """

    layer: str
    flops: int
    moved: int
    dtype: str
    times: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FakeNetwork:
    """A network with fake tensors as parameters and buffers.

    Attributes:
        module: The network.
        mode: FakeTensorMode in which the tensors were created.
    """

    module: nn.Module
    mode: FakeTensorMode


@dataclass(kw_only=True)
class StepFigures:
    """Memory and FLOPs of one micro-batch on a rank.

    Attributes:
        setting: Settings of the step.
        parameters: Sizes of the parameters, by name.
        buffers: Bytes of the buffers.
        batch: Bytes of the micro-batch.
        outputs: Shape and dtype of the output of each layer in its last call, as text. B stands for the batch size.
        output_bytes: Bytes of the same outputs.
        activations: Bytes kept for the backward. With several phases, the bytes of the phase that keeps the most. None:
            unknown.
        by_layer: Bytes of the activations that each layer keeps.
        gradients: Bytes of each parameter's gradient, in one dict for each phase. A phase is left out if its backward
            failed.
        temporaries: Largest number of bytes that temporary tensors use at the same time, except in the optimizer step.
        operators: Operators of forward and backward.
        notes: Texts that name unknown values and the reasons.
        fake: Network of the step. None for a user's LightningModule.
    """

    setting: Setting
    parameters: Mapping[str, Size]
    buffers: int = 0
    batch: int = 0
    outputs: dict[str, str] = field(default_factory=dict)
    output_bytes: dict[str, int] = field(default_factory=dict)
    activations: int | None = None
    by_layer: dict[str, int] = field(default_factory=dict)
    gradients: list[Mapping[str, int]] = field(default_factory=list)
    temporaries: int = 0
    operators: list[Operator] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fake: FakeNetwork | None = None

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient in the step.

        If no backward could run, the names of all trainable parameters.
        """
        if not self.gradients:
            return frozenset(name for name, one in self.parameters.items() if one.learns)
        return frozenset(name for found in self.gradients for name in found)

    def flops(self) -> float:
        """Return the FLOPs of a micro-batch."""
        return sum(one.flops * one.times for one in self.operators)


def take_step(plan: Plan, setting: Setting) -> StepFigures:
    """Run forward, objective and backward of a micro-batch on fake tensors, and return the figures.

    Fake tensors have no numbers. If code needs numbers, the figures that depend on the code are unknown, and a note
    gives the reason.
    """
    word = WORDS[setting.word]
    notes = ["the activations of fp8 are counted as those of bf16"] if word.float8 else []
    precision_settings = replace(plan.settings.precision, word="bf16" if word.float8 else setting.word)
    settings = replace(plan.settings, precision=precision_settings)
    network = build_network(settings, plan.spec, device="meta")
    precision = build_run_precision(settings, device_type="cpu")
    with quiet():
        precision.convert_module(network)
    try:
        recomputed = match_modules(network, setting.recomputed, key="strategy.activation_checkpointing")
        checkpoint_activations(recomputed.values())
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with preserve_generators(), mode:
            make_fake(network)
            network.train()
            data = precision.convert_input(fake_batch(plan, samples=setting.samples, notes=notes))
            step = _Step(plan, network, data, setting=setting, notes=notes)
            with Ones() as ones:
                step.run(settings, precision.forward_context, double=word.double)
            notes += [ASKED] if ones.asked else []
            step.figures.fake = FakeNetwork(module=network, mode=mode)
            return step.figures
    finally:
        precision.teardown()


def make_fake(network: nn.Module) -> None:
    """Replace the parameters, buffers and meta tensors in attributes of a network by fake CPU tensors.

    Tensors that several modules share remain shared. Call this function inside a FakeTensorMode.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, fake(parameter))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, fake(buffer))
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.device.type == "meta":
                vars(module)[name] = fake(value)


def fake_batch(plan: Plan, *, samples: int, notes: list[str]) -> object:
    """Return a fake batch with the structure of a batch of the data.

    If the data cannot be read, the structure is derived from the shapes in the config. Call this function inside a
    FakeTensorMode.

    Args:
        plan: Plan of the run.
        samples: Number of samples in the batch.
        notes: List to which a note is added if the data cannot be read.
    """
    try:
        # Samples are read as real tensors, because the code of a data set may use numbers. A few samples are enough.
        with unset_fake_temporarily():
            read = plan.data.first_samples("train", seconds=1.0)
    except (RunError, ConfigError) as error:
        read = None
        notes.append(f"the batch is made from the declared shapes, because the data cannot be read: {one_line(error)}")
    if read is None:
        return _declared_batch(plan, samples=samples)
    count = next(len(tensor) for tensor in tensors_in(read) if tensor.dim())

    def resize(tensor: Tensor) -> Tensor:
        shape = (samples, *tensor.shape[1:]) if tensor.dim() and len(tensor) == count else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype)

    return map_tensors(read, resize)


def _declared_batch(plan: Plan, *, samples: int) -> object:
    from exp.models.inference import example_inputs

    spec = plan.spec
    inputs = example_inputs(spec, batch_size=samples)
    trace = plan.shapes.traces.get(None)
    output = next(iter(tensors_in(trace.output)), None) if trace is not None else None
    shape = () if output is None else tuple(output.shape[1:])
    if spec.num_classes is not None:
        target = torch.empty((samples, *shape[:-1]), dtype=torch.int64)
    else:
        target = torch.empty((samples, *shape), dtype=torch.float32)
    if list(inputs) == ["input"]:
        return inputs["input"], target
    return {**inputs, "target": target}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable log messages of exp.precision.plugin in the context, because the messages are for runs, not for plans."""
    log = logging.getLogger("exp.precision.plugin")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


ASKED = "the step reads values of tensors. The plan assumes 1 or true; other values may select another branch"
FORWARD_UNKNOWN = "activations and FLOPs are not known"
BACKWARD_UNKNOWN = "gradients and the backward's FLOPs are not known"
# Types of exceptions that torch and code of users raise if they need the numbers of a fake tensor.
UNDECIDED = (NotImplementedError, RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class _Step:
    """The forwards and backwards of one step on a micro-batch. The method `run` computes the attribute `figures`."""

    def __init__(self, plan: Plan, network: nn.Module, data: object, *, setting: Setting, notes: list[str]) -> None:
        self.plan, self.network, self.data, self.notes = plan, network, data, notes
        self.paths = {module: path for path, module in reversed(list(network.named_modules()))}
        self.figures = StepFigures(setting=setting, parameters={}, notes=notes)
        self.figures.buffers = sum(storages(network.buffers()).values())
        self.figures.batch = sum(storages(tensors_in(data)).values())
        self.batch = Batch(data=data, size=setting.samples, global_size=setting.samples, world_size=1)

    def run(self, settings: Settings, context: Callable[[], AbstractContextManager[object]], *, double: bool) -> None:
        objective, phases = build_objective(settings), build_phases(settings)
        if double:
            for part in objective.modules():
                cast_own_tensors(part, torch.float64)
        learning = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        if not phases:
            self._pass(self.network, [objective], learning, context, times=1.0)
        for _, group in turns_of(phases):
            first = group[0]
            trained = [one for phase in group for one in trained_parameters(self.network, phase.parameters)]
            view = self.network if first.forward is None else with_forward(self.network, first.forward)
            parts = [objective.only(phase.terms) for phase in group]
            self._pass(view, parts, trained, context, times=first.repeats / first.every_n_steps)
        self.figures.parameters = sizes_of(self.network)

    def _pass(
        self,
        network: nn.Module,
        objectives: Sequence[Objective],
        trained: Sequence[nn.Parameter],
        context: Callable[[], AbstractContextManager[object]],
        *,
        times: float,
    ) -> None:
        """Run one forward and backward, and add their memory and operators to the figures.

        Args:
            network: The network, or a view of the network with the forward of a phase.
            objectives: Objectives that share the forward.
            trained: Parameters that get a gradient.
            context: Function that returns the context manager of the precision.
            times: Number of runs per step.
        """
        chosen = {id(parameter) for parameter in trained}
        others = [one for one in self.network.parameters() if one.requires_grad and id(one) not in chosen]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            self._measure(network, objectives, context, times=times)
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
            self.network.zero_grad()

    def _measure(
        self,
        network: nn.Module,
        objectives: Sequence[Objective],
        context: Callable[[], AbstractContextManager[object]],
        *,
        times: float,
    ) -> None:
        figures, log = self.figures, OperatorLog(self._layer, times=times)
        before = log.hold([*self.network.parameters(), *self.network.buffers(), *tensors_in(self.data)])
        losses: list[Tensor] = []

        def forward() -> None:
            with context():
                losses.extend(losses_of(network, objectives, self.batch, inputs=tuple(self.plan.spec.inputs)))

        handle = register_module_forward_hook(self._record_output)
        try:
            with log, log.owners:
                kept = kept_by(forward, network=self.network, data=self.data)
        except UNDECIDED as error:
            self.notes.append(f"{FORWARD_UNKNOWN}: {one_line(error)}")
            return
        finally:
            handle.remove()
        self._keep(kept)
        try:
            with log:
                log.is_backward = True
                for place, loss in enumerate(losses):
                    if loss.requires_grad:
                        loss.backward(retain_graph=place < len(losses) - 1)
        except UNDECIDED as error:
            self.notes.append(f"{BACKWARD_UNKNOWN}: {one_line(error)}")
        else:
            gradients = {name: one.grad for name, one in self.network.named_parameters() if one.grad is not None}
            figures.gradients.append({name: sum(storages([one]).values()) for name, one in gradients.items()})
            own = sum(figures.gradients[-1].values()) + kept.size + before
            figures.temporaries = max(figures.temporaries, log.peak - own)
        figures.operators += log.operators

    def _keep(self, kept: Kept) -> None:
        if kept.size < (self.figures.activations or 0):
            return
        self.figures.activations = kept.size
        by_layer: Counter[str] = Counter()
        for module, size in kept.by_module.items():
            by_layer[self._path(module)] += size
        self.figures.by_layer = dict(by_layer)

    def _path(self, module: nn.Module | None) -> str:
        return OBJECTIVE if module is None else self.paths.get(module, OBJECTIVE)

    def _layer(self) -> str:
        return self._path(innermost_call())

    def _record_output(self, module: nn.Module, inputs: object, output: object) -> None:
        if module in self.paths:
            self.figures.outputs[self.paths[module]] = describe_value(output)
            self.figures.output_bytes[self.paths[module]] = sum(tensor.nbytes for tensor in tensors_in(output))


def sizes_of(network: nn.Module) -> dict[str, Size]:
    """Return the sizes of a network's parameters by name. A storage of several parameters is counted once."""
    seen: set[int] = set()
    found = {}
    for name, one in network.named_parameters():
        storage = one.untyped_storage()
        size = 0 if id(storage) in seen else storage.nbytes()
        seen.add(id(storage))
        found[name] = Size(shape=tuple(one.shape), itemsize=one.itemsize, learns=one.requires_grad, size=size)
    return found


def losses_of(
    network: nn.Module, objectives: Sequence[Objective], batch: Batch, *, inputs: Sequence[str]
) -> list[Tensor]:
    """Return the loss of each objective, computed from a single forward of the batch, as in a run."""
    run, first = forward_by_name(network, inputs), objectives[0]
    losses: list[Tensor] = []
    if first.needs:
        with enable_needs(first.needs, network):
            passes = make_passes(first.needs, network=network, run=run, data=batch.data, inputs=inputs)
            values = passes.run()
            losses.append(first(values, batch, passes)[0])
    else:
        values = run(network, batch.data)
        losses.append(first(values, batch)[0])
    return [*losses, *(one(values, batch)[0] for one in objectives[1:])]


# torch declares no types for this constructor.
make_mode: Callable[[TorchDispatchMode], None] = TorchDispatchMode.__init__


class Ones(TorchDispatchMode):
    """Mode in which reading a number from a fake tensor returns 1 or True, and sets the attribute `asked`."""

    def __init__(self) -> None:
        make_mode(self)
        self.asked = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # the result of the operator
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        self.asked = True
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class OperatorLog(TorchDispatchMode):
    """Mode that records every operator and the peak memory.

    Args:
        layer: Function that returns the path of the layer that is running its forward.
        times: Number of runs per step.

    Attributes:
        is_backward: Whether a backward is running. The caller sets this attribute.
        operators: The recorded operators.
        peak: Largest number of bytes in memory at the same time.
        owners: Mode to enter during the forward. It records the layer of each autograd node, which the backward needs.
    """

    def __init__(self, layer: Callable[[], str], *, times: float) -> None:
        make_mode(self)
        self.layer, self.times = layer, times
        self.is_backward = False
        self.operators: list[Operator] = []
        self.owners = NodeOwners(layer)
        self.peak = self._live = 0
        self._known: set[int] = set()

    def hold(self, tensors: Sequence[Tensor]) -> int:
        """Add tensors that exist before the step to the memory in use. Return the memory in use in bytes."""
        for tensor in tensors:
            self._note(tensor)
        return self._live

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # the result of the operator
        if func is torch.ops.prim.device.default:
            return func(*args)  # return early, because autograd calls this operator most often
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = list(tensors_in(result))
        for tensor in results:
            self._note(tensor)
        if not func.is_view and results:
            layer = self.layer()
            # A layer that runs its forward during a backward recomputes its activations.
            if self.is_backward and layer == OBJECTIVE:
                layer = self.owners.current
            moved = sum(
                tensor.nbytes for tensor in {id(one): one for one in (*tensors_in([args, kwargs]), *results)}.values()
            )
            flops, dtype = flops_of(func, args, kwargs, result), dtype_name(results[0].dtype)
            self.operators.append(Operator(layer=layer, flops=flops, moved=moved, dtype=dtype, times=self.times))
        return result

    def _note(self, tensor: Tensor) -> None:
        for storage in (part.untyped_storage() for part in dense_tensors(tensor)):
            if id(storage) not in self._known:
                size = storage.nbytes()
                self._known.add(id(storage))
                self._live += size
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._forget, id(storage), size).atexit = False

    def _forget(self, at: int, size: int) -> None:
        self._known.discard(at)
        self._live -= size


class NodeOwners(TorchFunctionMode):
    """Mode that records the layer that creates each autograd node in the forward.

    During a backward, the attribute `current` is the layer of the node that runs.
    """

    def __init__(self, layer: Callable[[], str]) -> None:
        super().__init__()
        self.layer, self.current = layer, OBJECTIVE

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # the result of the function
        result = func(*args, **(kwargs or {}))
        owner = None
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                owner = self.layer() if owner is None else owner
                tensor.grad_fn.register_prehook(partial(self._begin, owner))
        return result

    def _begin(self, layer: str, gradients: object) -> None:
        self.current = layer
