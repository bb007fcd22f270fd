"""One forward of a network, recorded: which module was given what and returned what, and which functions ran in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from exp.models.containers import path_of
from exp.models.inference import network_call
from exp.nested import tensors_in

# Functions that refuse a `dim` which the tensor does not have on every device but meta (torch 2.13, by its op_db).
UNCHECKED_ON_META = frozenset({
    "argsort", "index_reduce", "index_reduce_", "index_select", "select_scatter", "slice_scatter", "softmax", "softmin",
    "sort",
})  # fmt: skip


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


class Recorder(TorchFunctionMode):
    """Records every module's calls, and the functions called in them, while it is entered as a context.

    calls: those that returned, in that order. operations: those of tensors.
    inside: the innermost call that has not returned, which after an exception is the one that failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.calls: list[Call] = []
        self.operations: list[Operation] = []
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
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # whatever the function gives
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in UNCHECKED_ON_META:
            _require_dim(args, kwargs)
        result = func(*args, **kwargs)
        sources, results = list(tensors_in([args, kwargs])), list(tensors_in(result))
        if sources and results:
            module = self._stack[-1].module if self._stack else None
            self.operations.append(Operation(func, module, sources, results))
        return result

    def _returned(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        # A module that caught an exception of an inner one leaves the inner call on the stack.
        while self._stack and self._stack.pop().module is not module:
            pass
        self.calls.append(Call(module, inputs, output))


def _require_dim(arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Raise what torch raises on a CPU. The dim is the first whole number among the arguments."""
    dim = named["dim"] if "dim" in named else next((one for one in arguments if type(one) is int), None)
    tensor = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
    if tensor is None or type(dim) is not int:
        return
    size = max(tensor.dim(), 1)
    if not -size <= dim < size:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-size}, {size - 1}], but got {dim})")
