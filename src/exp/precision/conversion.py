"""Conversion of a network's tensors and inputs to a precision, with exceptions (precision.keep) and float8 layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.models.containers import forward_name
from exp.models.matching import FEATURE_NORMS
from exp.nested import Nested, map_tensors
from exp.precision.words import HALF, Word, refuse_without_torchao

Arguments = tuple[object, ...]
Keywords = dict[str, object]
Function = TypeVar("Function", bound=Callable[..., object])
never_compiled: Callable[[Function], Function] = torch.compiler.disable
# The sides of matrices must be multiples of this number for float8 kernels.
FLOAT8_MULTIPLE = 16


def cast(data: Nested, dtype: torch.dtype, *, notes: list[tuple[Tensor, Tensor]] | None = None) -> Nested:
    """Return the same structure with its floating-point tensors converted to `dtype`.

    Args:
        data: Nested data.
        dtype: The dtype.
        notes: A list to which the pair (converted tensor, original tensor) is added for every tensor that changes.
    """

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        changed = tensor.to(dtype)
        if notes is not None:
            notes.append((changed, tensor))
        return changed

    return map_tensors(data, change)


def cast_tensors(network: nn.Module, word: Word, kept: Mapping[str, torch.dtype]) -> None:
    """Convert parameters and floating-point buffers in place. The Parameter objects stay the same.

    A layer in `kept` gets the dtype in this mapping. If the precision has half parameters, layers with running
    statistics stay in float32. In bfloat16, updates of the statistics by momentum would be rounded to 0 long before the
    statistics converge.
    """
    for name, module in network.named_modules():
        if name in kept:
            # With autocast, parameters are float32, so that a layer kept in float32 needs no conversion.
            dtype = kept[name] if word.parameters is not None or kept[name] == torch.float64 else None
        elif word.parameters in HALF and isinstance(module, FEATURE_NORMS) and module.running_mean is not None:
            # torch's kernels support half-precision inputs with float32 parameters and statistics.
            dtype = torch.float32
        else:
            dtype = word.parameters
        if dtype is not None:
            cast_own_tensors(module, dtype)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's own floating-point parameters and buffers in place. Submodules are not changed."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            setattr(module, name, buffer.to(dtype))


def attach_edges(
    network: nn.Module, word: Word, kept: Mapping[str, torch.dtype], *, device_type: str
) -> list[RemovableHandle]:
    """Attach the hooks that convert inputs and outputs of the network and of kept layers. Return the hooks' handles."""
    # The dtype of tensors between layers that are not kept. Autocast converts float32 if a layer needs it.
    flowing = word.parameters or torch.float32
    ends = Ends()
    handles = []
    if word.parameters is not None:
        handles += _attach(Entrance(dtype=word.parameters, ends=ends), network)
    modules = dict(network.named_modules(remove_duplicate=False))
    for name, inside in kept.items():
        around = kept.get(name.rpartition(".")[0]) if name else None
        if inside == around:
            continue
        own_ends = ends if around is None and flowing in HALF else None
        edge = Edge(name=name, device_type=device_type, inside=inside, around=around or flowing, ends=own_ends)
        handles += _attach(edge, modules[name])
    return handles


class Ends:
    """Storage of the outputs of kept layers (precision.keep) before they are rounded to half precision.

    If a kept layer gives an output of the network, its exact output replaces the rounded one there. The loss therefore
    receives exact values.

    The first call of each forward program, in training and in evaluation, stores the outputs of all kept layers. It
    detects which of them are outputs of the network. Later calls store only those outputs. If a strategy runs layers
    without calling the network, no output is stored.
    """

    def __init__(self) -> None:
        self.call: tuple[bool, str | None] | None = None
        self.waiting: list[tuple[str, Tensor, Tensor]] = []
        self.known: dict[tuple[bool, str | None], set[str]] = {}

    def begin(self, *, training: bool, forward: str | None) -> None:
        """Start a call of the network.

        Args:
            training: Whether the network is in training mode.
            forward: The name of the forward program or method; None for the network's forward.
        """
        self.call = training, forward

    def hold(self, name: str, notes: list[tuple[Tensor, Tensor]]) -> None:
        if self.call is not None and (self.call not in self.known or name in self.known[self.call]):
            self.waiting += [(name, rounded, full) for rounded, full in notes]

    def restore(self, output: Nested) -> Nested:
        """Return the network's output with the exact float32 outputs of kept layers instead of the rounded tensors."""
        waiting, self.waiting = self.waiting, []
        call, self.call = self.call, None
        found: set[str] = set()

        def full(tensor: Tensor) -> Tensor:
            for name, rounded, before in waiting:
                if tensor is rounded:
                    found.add(name)
                    return before.float()
            return tensor

        restored = map_tensors(output, full) if waiting else output
        if output is not None and call is not None:  # None: the forward raised
            self.known.setdefault(call, found)
        return restored


class Edge:
    """The hooks of a kept layer, which turn autocast off and convert floating-point inputs and outputs.

    Inputs are converted to the layer's dtype, and outputs to the dtype of the surrounding layers. The hooks are methods
    of a plain object, so that a module with hooks can be copied and pickled.
    """

    def __init__(
        self, *, name: str, device_type: str, inside: torch.dtype, around: torch.dtype, ends: Ends | None
    ) -> None:
        self.name, self.device_type = name, device_type
        self.inside, self.around, self.ends = inside, around, ends
        self.autocast: list[bool] = []

    def enter(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        # The switch is set directly, because torch.compile does not support an autocast context that is entered in
        # `enter` and exited in `leave`.
        enabled = torch.is_autocast_enabled(self.device_type)
        self.autocast.append(enabled)
        if enabled:
            torch.set_autocast_enabled(self.device_type, False)
        return cast(args, self.inside), cast(kwargs, self.inside)

    def leave(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Nested) -> Nested:
        if self.autocast and self.autocast.pop():
            torch.set_autocast_enabled(self.device_type, True)
        if output is None or self.ends is None:
            return cast(output, self.around)
        notes: list[tuple[Tensor, Tensor]] = []
        output = cast(output, self.around, notes=notes)
        self.ends.hold(self.name, notes)
        return output


class Entrance:
    """The hooks of the whole network, if the precision changes the dtype of parameters.

    The hooks convert floating-point inputs of the network. They do not convert the batch, so that targets stay exact.
    They also set the default dtype, so that
    tensors created without a dtype (torch.zeros(n)) have the network's dtype.

    The hooks are never compiled, because torch.compile would make separate graphs of them.
    """

    def __init__(self, *, dtype: torch.dtype, ends: Ends) -> None:
        self.dtype, self.ends = dtype, ends
        self.defaults: list[torch.dtype] = []

    @never_compiled
    def enter(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        self.ends.begin(training=module.training, forward=forward_name(module))
        self.defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)
        return cast(args, self.dtype), cast(kwargs, self.dtype)

    @never_compiled
    def leave(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Nested) -> Nested:
        if self.defaults:
            torch.set_default_dtype(self.defaults.pop())
        return self.ends.restore(output) if self.dtype in HALF else output


def _attach(crossing: Edge | Entrance, module: nn.Module) -> list[RemovableHandle]:
    """Attach the hooks `enter` and `leave` to a module.

    With always_call, `leave` undoes the changes of `enter` even if the forward raises an error.
    """
    return [
        module.register_forward_pre_hook(crossing.enter, with_kwargs=True),
        module.register_forward_hook(crossing.leave, with_kwargs=True, always_call=True),
    ]


def convert_linear(network: nn.Module, *, kept: Collection[str] = (), emulated: bool = False) -> list[str]:
    """Replace nn.Linear layers in `network` by torchao's Float8Linear. Return the names of the replaced layers.

    The parameter objects stay the same. Layers in `kept`, layers with sides that are not multiples of 16, and
    subclasses of nn.Linear are not replaced.

    Args:
        network: The network.
        kept: The names of layers that are not replaced.
        emulated: Whether to compute in float32 with numbers rounded to float8, on any device. For tests.
    """
    refuse_without_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [name for name, module in network.named_modules() if name and name not in kept and _fits_float8(module)]
    if names:
        convert_to_float8_training(
            network,
            module_filter_fn=lambda module, name: name in names,
            # The number of rows may not be a multiple of 16, for example in the last batch of an epoch, and then needs
            # padding.
            config=Float8LinearConfig(emulate=emulated, pad_inner_dim=True),
        )
    return names


def _fits_float8(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
