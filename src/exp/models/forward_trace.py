"""Recording of a forward pass of a network. The record contains the inputs and outputs of each module."""

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

# Functions that accept some invalid shapes or dims on the meta device, although they reject them on every other device.
# The list was made with torch 2.13: each sample of torch's op_db was called with one size or dim changed.
UNCHECKED_ON_META = frozenset({
    "argsort", "bucketize", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "diagonal_scatter", "fold",
    "index_add", "index_add_", "index_put", "index_put_", "index_reduce", "index_reduce_", "index_select", "put",
    "put_", "select_scatter", "slice_scatter", "softmax", "softmin", "sort",
})  # fmt: skip
# Error messages about dtypes on a CPU. OF_HALF matches the messages that may not occur on a GPU, because a GPU supports
# more operations in half precision.
OF_DTYPES = re.compile(
    r"dtype|scalar type|not implemented for '|complex types|indices must be|used as indices|"
    r"\b(Long|Int|Short|Char|Byte|Bool|Float|Double|Half|BFloat16|Complex\w+)\b"
)
OF_HALF = re.compile(r"not implemented for '(Half|BFloat16)'")
# The maximum number of elements in the tensors of a call that is repeated on a CPU. A call of an embedding of 50,000
# words is below this maximum.
MOST_NUMBERS = 2**26


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a module.

    Attributes:
        module: The module.
        inputs: The positional arguments.
        output: The result. None while the call is running.
    """

    module: nn.Module
    inputs: tuple[object, ...]
    output: object = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardTrace:
    """The record of a forward pass on placeholder inputs, usually on the meta device, where tensors have no numbers.

    Args:
        network: The network.
        inputs: The values of the batch by name. The network received the values that its forward has as parameters.
        output: The network's output.
        calls: The calls of all modules, in the order in which the calls returned.
    """

    network: nn.Module
    inputs: Mapping[str, Tensor]
    output: object
    calls: Sequence[Call]

    def by_path(self) -> Mapping[str, Sequence[Call]]:
        """Return the calls of each module of the network, by the module's path. The network has an empty path."""
        paths = {module: path for path, module in reversed(list(self.network.named_modules()))}
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.module in paths:
                found.setdefault(paths[call.module], []).append(call)
        return found

    @property
    def multiply_adds(self) -> Sequence[float]:
        """The multiply-adds per sample of each call of an operator with parameters.

        The number of multiply-adds is the number of parameters times the number of output positions. It is exact for
        linear, convolutional and recurrent layers. Each time step of a recurrent layer is a separate element. Products
        of activations, as in attention, are not included.
        """
        samples = len(next(iter(self.inputs.values())))
        return [size / samples for call in self.calls for size in _operators(call)]


def _operators(call: Call) -> Sequence[float]:
    output = next((one for one in tensors_in(call.output) if one.dim()), None)
    own = list(call.module.parameters(recurse=False))
    if output is None or not own:
        return []
    # The channels of a convolution are on the second axis, and features of other layers on the last.
    channels = output.shape[1] if max(one.dim() for one in own) > 2 and output.dim() > 2 else output.shape[-1]
    size = sum(one.numel() for one in own) * output.numel() / max(channels, 1)
    steps = 1
    if isinstance(call.module, nn.RNNBase) and output.dim() > 1:
        steps = output.shape[1 if call.module.batch_first and output.dim() > 2 else 0]
    return [size / steps] * steps


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Dtypes of the computations of a run. They determine the errors that a trace reports.

    Args:
        autocast: The dtype of torch.autocast. Default: None, for no autocast.
        mixes: Whether parameters have the same dtypes in the trace as in the run. False: the precision converts
            parameters before the run, and errors about different dtypes in one call are not reported. Default: true.
    """

    autocast: torch.dtype | None = None
    mixes: bool = True


SINGLE = Arithmetic()


@dataclass(frozen=True, eq=False)
class Refused:
    """A call of a torch function that raised an error.

    Args:
        error: The exception.
        function: The torch function.
        sources: The tensors among the arguments of the call.
    """

    error: BaseException
    function: Callable[..., object]
    sources: Sequence[Tensor]


class Recorder(TorchFunctionMode):
    """Context that records the calls of all modules, and of the torch functions that the modules call.

    Some calls succeed on the meta device, but fail on every other device. These calls are therefore repeated on a CPU:

    - calls with tensors of several dtypes, or of a dtype that is not floating-point;
    - calls of a function in UNCHECKED_ON_META.

    Calls on large tensors are not repeated.

    Attributes:
        calls: The completed calls of modules, in the order in which the calls returned.
        inside: The innermost call that is still running. After an exception, this is the call that failed.
        refused: The last call of a torch function that raised an error.

    Args:
        arithmetic: The dtypes of the run.
    """

    def __init__(self, *, arithmetic: Arithmetic = SINGLE) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self._asked: set[tuple[object, str]] = set()
        self.clear()

    def clear(self) -> None:
        """Delete all records."""
        self.calls: list[Call] = []
        self.refused: Refused | None = None
        self._stack: list[Call] = []

    @property
    def inside(self) -> Call | None:
        return self._stack[-1] if self._stack else None

    @property
    def root(self) -> nn.Module | None:
        return self._stack[0].module if self._stack else None

    def path_of(self, network: nn.Module, module: nn.Module) -> str:
        """Return the path of a module in the network.

        If the forward pass created the module, the network does not contain it. In this case, return the path of the
        innermost running module that the network contains.
        """
        held = set(network.modules())
        known = [call.module for call in self._stack if call.module in held]
        return path_of(network, module if module in held else known[-1] if known else network)

    def trace(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> ForwardTrace:
        """Run a forward pass and return its record.

        Call this method inside the context. Exceptions of the forward pass are not caught.
        """
        self.clear()
        output = network_call(network, tuple(inputs))(network, inputs)
        return ForwardTrace(network=network, inputs=inputs, output=output, calls=self.calls)

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
        return result

    def _repeat_on_cpu(
        self, function: Callable[..., object], arguments: Sequence[object], named: Mapping[str, object]
    ) -> None:
        """Repeat a call on a CPU with tensors of zeros. Raise the exception if it is about dtypes, shapes or dims."""
        name = getattr(function, "__name__", "")
        question = function, str(map_tensors([arguments, named], lambda one: (one.shape, one.dtype)))
        if question in self._asked or name == "__get__":
            return  # an equal call in another layer was already checked, or an attribute of a tensor was read
        self._asked.add(question)
        autocast = self.arithmetic.autocast
        context = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), context:
            try:
                function(*map(_on_a_cpu, arguments), **{name: _on_a_cpu(value) for name, value in named.items()})
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                # Other errors are ignored, because zeros may cause them. For example, a matrix of zeros has no inverse.
                is_certain = name in UNCHECKED_ON_META or OF_DTYPES.search(str(error))
                if is_certain and not OF_HALF.search(str(error)):
                    raise

    def _record_return(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        # If a module has caught an exception of an inner module, the call of the inner module is still on the stack.
        while self._stack and self._stack.pop().module is not module:
            pass
        self.calls.append(Call(module, inputs, output))


def _is_repeatable(sources: Sequence[Tensor], name: str, arithmetic: Arithmetic) -> bool:
    """Return whether to repeat a call on a CPU.

    A call is repeated if it may fail on devices other than the meta device, its tensors are plain meta tensors, and
    they are small.
    """
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
