"""One forward of a network, recorded: which module was given what and returned what, and which functions ran in it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from exp.models.containers import path_of
from exp.models.inference import network_call
from exp.nested import map_tensors, tensors_in

# Functions that refuse a `dim` which the tensor does not have on every device but meta (torch 2.13, by its op_db).
UNCHECKED_ON_META = frozenset({
    "argsort", "index_reduce", "index_reduce_", "index_select", "select_scatter", "slice_scatter", "softmax", "softmin",
    "sort",
})  # fmt: skip
# Functions that let pass shapes which every other device refuses, and cost little (torch 2.13, by its op_db with one
# size changed); of transposed convolutions, which cost more, see _require_channels.
SHAPES_UNCHECKED_ON_META = frozenset({
    "bucketize", "diagonal_scatter", "fold", "index_add", "index_add_", "index_put", "index_put_", "index_reduce",
    "index_reduce_", "index_select", "put", "put_", "select_scatter", "slice_scatter",
})  # fmt: skip
# Of what a CPU says: words on dtypes. A GPU may have what it lacks for halves.
OF_DTYPES = re.compile(
    r"dtype|scalar type|not implemented for '|complex types|indices must be|used as indices|"
    r"\b(Long|Int|Short|Char|Byte|Bool|Float|Double|Half|BFloat16|Complex\w+)\b"
)
OF_HALF = re.compile(r"not implemented for '(Half|BFloat16)'")
# Numbers that a CPU is given as zeros, of which most are never touched: an embedding of 50,000 words passes.
MOST_NUMBERS = 2**26


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its positional inputs and, once it returned, its output."""

    module: nn.Module
    inputs: tuple[object, ...]
    output: object = None


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a torch function that took a tensor and gave one.

    module: the innermost module around it; None outside of all.
    """

    function: Callable[..., object]
    module: nn.Module | None
    sources: Sequence[Tensor]
    results: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardTrace:
    """One forward of a network on stand-in inputs, on the meta device in most cases: shapes and dtypes, no numbers.

    inputs: the batch's entries by name, of which the network took those that its forward names.
    calls: of all modules, in the order in which they returned. operations: of all torch functions, in their order.
    """

    network: nn.Module
    inputs: Mapping[str, Tensor]
    output: object
    calls: Sequence[Call]
    operations: Sequence[Operation]

    def by_path(self) -> Mapping[str, Sequence[Call]]:
        """The calls of each module that the network holds, by the module's path; the network's own is ''."""
        paths = {module: path for path, module in reversed(list(self.network.named_modules()))}
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.module in paths:
                found.setdefault(paths[call.module], []).append(call)
        return found

    @property
    def multiply_adds(self) -> Sequence[float]:
        """Of each operator with parameters, for one sample: they count once at each position of its module's output.

        Exact for linear, convolutional and recurrent layers, of which each step is an operator of its own; products of
        activations, as of attention, are left out.
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

    autocast: the dtype of torch.autocast; None for none.
    mixes: whether the network's floats are those of the run: false where precision changes the dtype of parameters, so
        that what a float64 meets in the run is not known from what it meets here.
    """

    autocast: torch.dtype | None = None
    mixes: bool = True


SINGLE = Arithmetic()


@dataclass(frozen=True, eq=False)
class Refused:
    """A torch function that raised, and the tensors that it was given."""

    error: BaseException
    function: Callable[..., object]
    sources: Sequence[Tensor]


class Recorder(TorchFunctionMode):
    """Records every module's calls, and the functions called in them, while it is entered as a context.

    calls: those that returned, in that order. operations: those of tensors.
    inside: the innermost call that has not returned, which after an exception is the one that failed.
    refused: the last function that raised.

    arithmetic: of the run. A function that is given several dtypes, or other numbers than floats, is asked once more on
    a CPU, for the meta device lets pass what no other does.
    """

    def __init__(self, *, arithmetic: Arithmetic = SINGLE) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self._asked: set[tuple[object, ...]] = set()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
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
        """The path of the innermost module of the network on the way to `module`, which may be made on the fly."""
        held = set(network.modules())
        known = [call.module for call in self._stack if call.module in held]
        return path_of(network, module if module in held else known[-1] if known else network)

    def trace(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> ForwardTrace:
        """Run the network on a batch's entries while entered. Raises whatever the forward raises."""
        self.clear()
        output = network_call(network, tuple(inputs))(network, inputs)
        return ForwardTrace(network=network, inputs=inputs, output=output, calls=self.calls, operations=self.operations)

    def __enter__(self) -> Recorder:
        self._handles = [
            register_module_forward_pre_hook(lambda module, inputs: self._stack.append(Call(module, inputs))),
            register_module_forward_hook(self._returned),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch gives it no types
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever the function gives
        kwargs = kwargs or {}
        sources = list(tensors_in([args, kwargs]))
        try:
            name = getattr(func, "__name__", "")
            if name in UNCHECKED_ON_META:
                _require_dim(args, kwargs)
            elif name.startswith("conv_transpose"):
                _require_channels(name, *args, **kwargs)
            result = func(*args, **kwargs)
            if _can_be_asked(sources, name, self.arithmetic):
                self._ask_a_cpu(func, args, kwargs)
        except Exception as error:
            self.refused = Refused(error, func, sources)
            raise
        results = list(tensors_in(result))
        if sources and results:
            module = self._stack[-1].module if self._stack else None
            self.operations.append(Operation(func, module, sources, results))
        return result

    def _ask_a_cpu(
        self, function: Callable[..., Any], arguments: Sequence[object], named: Mapping[str, object]
    ) -> None:
        """Raise what a CPU raises of dtypes and shapes; zeros stand for the values, of which nothing else is known."""
        name = getattr(function, "__name__", "")
        question = function, *((one.shape, one.dtype) for one in tensors_in([arguments, named]))
        if question in self._asked or name == "__get__":
            return  # a deep network asks the same at every layer; an attribute computes nothing
        self._asked.add(question)
        autocast = self.arithmetic.autocast
        context = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), context:
            try:
                function(*map(_on_a_cpu, arguments), **{name: _on_a_cpu(value) for name, value in named.items()})
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                # Of other words, such as those on a matrix without an inverse, the zeros are the reason.
                is_told = name in SHAPES_UNCHECKED_ON_META or OF_DTYPES.search(str(error))
                if is_told and not OF_HALF.search(str(error)):
                    raise

    def _returned(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        # A module that caught an exception of an inner one leaves the inner call on the stack.
        while self._stack and self._stack.pop().module is not module:
            pass
        self.calls.append(Call(module, inputs, output))


def _can_be_asked(sources: Sequence[Tensor], name: str, arithmetic: Arithmetic) -> bool:
    """Whether a real device may refuse what the meta device takes: other numbers than floats, or several dtypes."""
    dtypes = {one.dtype for one in sources}
    floats = {one for one in dtypes if one.is_floating_point or one.is_complex}
    is_of_one = len(dtypes) < 2 and all(one.is_floating_point for one in dtypes)
    if (is_of_one and name not in SHAPES_UNCHECKED_ON_META) or any(is_lazy(one) for one in sources):
        return False
    is_plain = all(one.is_meta and type(one) in (Tensor, nn.Parameter) for one in sources)
    is_small = sum(one.numel() for one in sources) <= MOST_NUMBERS
    return is_plain and is_small and (arithmetic.mixes or floats <= {torch.float32})


def _on_a_cpu(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return map_tensors(value, lambda one: torch.zeros(one.shape, dtype=one.dtype, device="cpu"))


def _require_channels(
    name: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> None:
    """Raise what torch raises on a CPU of a transposed convolution."""
    axes = weight.dim() - 2
    channels = input.shape[-axes - 1] if input.dim() in (axes + 1, axes + 2) else weight.shape[0]
    if channels != weight.shape[0]:
        raise RuntimeError(f"{name} expected input to have {weight.shape[0]} channels, but got {channels} channels")
    steps, gaps, more = ([one] * axes if isinstance(one, int) else one for one in (stride, dilation, output_padding))
    for step, gap, pad in zip(steps, gaps, more, strict=False):
        if pad >= max(step, gap):
            raise RuntimeError(f"output_padding must be smaller than stride or dilation, but got {pad}")


def _require_dim(arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Raise what torch raises on a CPU. The dim is the first whole number among the arguments."""
    dim = named["dim"] if "dim" in named else next((one for one in arguments if type(one) is int), None)
    tensor = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
    if tensor is None or type(dim) is not int:
        return
    size = max(tensor.dim(), 1)
    if not -size <= dim < size:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-size}, {size - 1}], but got {dim})")
