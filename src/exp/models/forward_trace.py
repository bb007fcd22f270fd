"""Record one forward of a network: the inputs and output of each module, and the functions that ran in it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from exp.models.containers import path_of
from exp.models.inference import network_call
from exp.nested import map_tensors, tensors_in

# Functions that accept a shape or a `dim` on the meta device that every other device refuses (torch 2.13, by its op_db
# with one size or dim changed).
UNCHECKED_ON_META = frozenset({
    "argsort", "bucketize", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "diagonal_scatter", "fold",
    "index_add", "index_add_", "index_put", "index_put_", "index_reduce", "index_reduce_", "index_select", "put",
    "put_", "select_scatter", "slice_scatter", "softmax", "softmin", "sort",
})  # fmt: skip
# Messages of a CPU about dtypes. A GPU may support halves that a CPU does not.
OF_DTYPES = re.compile(
    r"dtype|scalar type|not implemented for '|complex types|indices must be|used as indices|"
    r"\b(Long|Int|Short|Char|Byte|Bool|Float|Double|Half|BFloat16|Complex\w+)\b"
)
OF_HALF = re.compile(r"not implemented for '(Half|BFloat16)'")
# The largest call that is repeated on a CPU, in numbers: an embedding of 50,000 words passes.
MOST_NUMBERS = 2**26


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a module: its positional inputs and, after it returned, its output."""

    module: nn.Module
    inputs: tuple[object, ...]
    output: object = None


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of a torch function that took a tensor and returned one.

    Args:
        function: The function.
        module: The innermost module around the call. None outside of all modules.
        sources: The tensors among its arguments.
        results: The tensors that it returned.
    """

    function: Callable[..., object]
    module: nn.Module | None
    sources: Sequence[Tensor]
    results: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardTrace:
    """A forward of a network on stand-in inputs, usually on the meta device: shapes and dtypes without numbers.

    Args:
        network: The network.
        inputs: The batch's entries by name. The network took those that its forward names.
        output: The network's output.
        calls: The calls of all modules, in the order in which they returned.
        operations: The calls of torch functions, in order.
    """

    network: nn.Module
    inputs: Mapping[str, Tensor]
    output: object
    calls: Sequence[Call]
    operations: Sequence[Operation]

    def by_path(self) -> Mapping[str, Sequence[Call]]:
        """Return the calls of each module of the network, by the module's path. The network's own path is ''."""
        paths = {module: path for path, module in reversed(list(self.network.named_modules()))}
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.module in paths:
                found.setdefault(paths[call.module], []).append(call)
        return found

    @property
    def multiply_adds(self) -> Sequence[float]:
        """The multiply-adds of each operator with parameters for one sample: parameters times output positions.

        Exact for linear, convolutional and recurrent layers. Each step of a recurrent layer is an operator. Products of
        activations, as in attention, are left out.
        """
        samples = len(next(iter(self.inputs.values())))
        return [size / samples for call in self.calls for size in _operators(call)]


def _operators(call: Call) -> Sequence[float]:
    output = next((one for one in tensors_in(call.output) if one.dim()), None)
    own = list(call.module.parameters(recurse=False))
    if output is None or not own:
        return []
    # A kernel's channels are the second dimension, features the last.
    channels = output.shape[1] if max(one.dim() for one in own) > 2 and output.dim() > 2 else output.shape[-1]
    size = sum(one.numel() for one in own) * output.numel() / max(channels, 1)
    steps = 1
    if isinstance(call.module, nn.RNNBase) and output.dim() > 1:
        steps = output.shape[1 if call.module.batch_first and output.dim() > 2 else 0]
    return [size / steps] * steps


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The dtypes in which a run computes.

    Args:
        autocast: The dtype of torch.autocast. None (default): no autocast.
        mixes: Whether the network's floats have the dtypes of the run. False if precision changes the dtype of
            parameters: mixed dtypes here say nothing about the run then. Default: true.
    """

    autocast: torch.dtype | None = None
    mixes: bool = True


SINGLE = Arithmetic()


@dataclass(frozen=True, eq=False)
class Refused:
    """A torch function that raised, and the tensors among its arguments."""

    error: BaseException
    function: Callable[..., object]
    sources: Sequence[Tensor]


class Recorder(TorchFunctionMode):
    """Context that records every module's calls, and the functions called in them.

    A function with several dtypes, or with other numbers than floats, is repeated on a CPU, because the meta device
    accepts some calls that no other device does.

    Attributes:
        calls: The finished calls, in that order.
        operations: The functions that took and returned tensors.
        inside: The innermost unfinished call: after an exception, the failed one.
        refused: The last function that raised.

    Args:
        arithmetic: The dtypes of the run.
    """

    def __init__(self, *, arithmetic: Arithmetic = SINGLE) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self._asked: set[tuple[object, str]] = set()
        self.clear()

    def clear(self) -> None:
        """Discard what was recorded."""
        self.calls: list[Call] = []
        self.operations: list[Operation] = []
        self.refused: Refused | None = None
        self._stack: list[Call] = []

    @property
    def inside(self) -> Call | None:
        return self._stack[-1] if self._stack else None

    @property
    def root(self) -> nn.Module | None:
        return self._stack[0].module if self._stack else None

    def path_of(self, network: nn.Module, module: nn.Module) -> str:
        """Return the path of a module, or of the innermost module around it if the forward has made it."""
        held = set(network.modules())
        known = [call.module for call in self._stack if call.module in held]
        return path_of(network, module if module in held else known[-1] if known else network)

    def trace(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> ForwardTrace:
        """Run the network on a batch's entries, inside the context. Raise what the forward raises."""
        self.clear()
        output = network_call(network, tuple(inputs))(network, inputs)
        return ForwardTrace(network=network, inputs=inputs, output=output, calls=self.calls, operations=self.operations)

    def __enter__(self) -> Recorder:
        self._handles = [
            register_module_forward_pre_hook(lambda module, inputs: self._stack.append(Call(module, inputs))),
            register_module_forward_hook(self._record_return),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch gives it no types
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        sources = list(tensors_in([args, kwargs]))
        try:
            result = func(*args, **kwargs)
            if _is_repeatable(sources, getattr(func, "__name__", ""), self.arithmetic):
                self._repeat_on_cpu(func, args, kwargs)
        except Exception as error:
            self.refused = Refused(error, func, sources)
            raise
        results = list(tensors_in(result))
        if sources and results:
            module = self._stack[-1].module if self._stack else None
            self.operations.append(Operation(func, module, sources, results))
        return result

    def _repeat_on_cpu(
        self, function: Callable[..., object], arguments: Sequence[object], named: Mapping[str, object]
    ) -> None:
        """Raise what a CPU raises because of dtypes, shapes or dims. All values are zeros."""
        name = getattr(function, "__name__", "")
        question = function, str(map_tensors([arguments, named], lambda one: (one.shape, one.dtype)))
        if question in self._asked or name == "__get__":
            return  # a deep network repeats the call in every layer; an attribute computes nothing
        self._asked.add(question)
        autocast = self.arithmetic.autocast
        context = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), context:
            try:
                function(*map(_on_a_cpu, arguments), **{name: _on_a_cpu(value) for name, value in named.items()})
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                # Other messages, such as those on a matrix without an inverse, are caused by the zeros.
                is_certain = name in UNCHECKED_ON_META or OF_DTYPES.search(str(error))
                if is_certain and not OF_HALF.search(str(error)):
                    raise

    def _record_return(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        # If a module caught an exception of an inner module, the inner call is still on the stack.
        while self._stack and self._stack.pop().module is not module:
            pass
        self.calls.append(Call(module, inputs, output))


def _is_repeatable(sources: Sequence[Tensor], name: str, arithmetic: Arithmetic) -> bool:
    """Return whether another device may refuse a call that the meta device accepts, and a CPU can repeat it."""
    dtypes = {one.dtype for one in sources}
    floats = {one for one in dtypes if one.is_floating_point or one.is_complex}
    is_of_one = len(dtypes) < 2 and all(one.is_floating_point for one in dtypes)
    if (is_of_one and name not in UNCHECKED_ON_META) or any(is_lazy(one) for one in sources):
        return False
    is_plain = all(one.is_meta and type(one) in (Tensor, nn.Parameter) for one in sources)
    is_small = sum(one.numel() for one in sources) <= MOST_NUMBERS
    return is_plain and is_small and (arithmetic.mixes or floats <= {torch.float32})


def _on_a_cpu(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return map_tensors(value, lambda one: torch.zeros(one.shape, dtype=one.dtype, device="cpu"))
