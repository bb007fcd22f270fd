"""Conversion of a network's parameters, buffers and inputs to the dtypes of a precision.

Layers in precision.keep are exceptions with another dtype. Linear layers may be replaced by float8 layers.
"""

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
    """Return nested data with floating-point tensors converted to a dtype. Other values are not changed.

    Args:
        data: Nested data.
        dtype: New dtype.
        notes: List to which a pair (converted tensor, original tensor) is appended for every converted tensor. Default:
            None.
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
    """Convert the parameters and floating-point buffers of a network in place. The Parameter objects stay the same.

    If the precision has half-precision parameters, layers with running statistics (batch norm) stay in float32. In
    bfloat16, momentum updates of the statistics would be rounded to 0 long before the statistics converge.

    Args:
        network: Network to convert.
        word: Settings of the precision.
        kept: Dtype of each exception (precision.keep), by module name.
    """
    for name, module in network.named_modules():
        if name in kept:
            # With autocast, all parameters are float32, so a layer that is kept in float32 needs no conversion.
            dtype = kept[name] if word.parameters is not None or kept[name] == torch.float64 else None
        elif word.parameters in HALF and isinstance(module, FEATURE_NORMS) and module.running_mean is not None:
            # torch's kernels support half-precision inputs with float32 parameters and statistics.
            dtype = torch.float32
        else:
            dtype = word.parameters
        if dtype is not None:
            cast_own_tensors(module, dtype)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters and buffers of a module in place. Submodules are not changed."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            setattr(module, name, buffer.to(dtype))


def attach_edges(
    network: nn.Module, word: Word, kept: Mapping[str, torch.dtype], *, device_type: str
) -> list[RemovableHandle]:
    """Attach the hooks that convert inputs and outputs of the network and of kept layers.

    Args:
        network: Network, with converted parameters.
        word: Settings of the precision.
        kept: Dtype of each kept layer (precision.keep), by module name.
        device_type: torch's name of the device, such as "cpu" or "cuda".

    Returns:
        Handles that remove the hooks.
    """
    # The dtype of tensors between layers that are not kept. Autocast converts float32 tensors if a layer needs it.
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
    """Storage for the outputs of kept layers (precision.keep), before the outputs are rounded to half precision.

    If the output of a kept layer is also an output of the network, the network returns the exact tensor instead of the
    rounded tensor. The loss therefore receives exact values.

    The first call of a forward program stores the outputs of all kept layers. It also detects which of these outputs
    are outputs of the network. Later calls store only the detected outputs. Training and evaluation mode have separate
    first calls. If a strategy runs layers without calling the network, no output is stored.
    """

    def __init__(self) -> None:
        self.call: tuple[bool, str | None] | None = None
        self.waiting: list[tuple[str, Tensor, Tensor]] = []
        self.known: dict[tuple[bool, str | None], set[str]] = {}

    def begin(self, *, training: bool, forward: str | None) -> None:
        """Start a call of the network.

        Args:
            training: Whether the network is in training mode.
            forward: Name of the forward program or method. None: the network's method `forward`.
        """
        self.call = training, forward

    def hold(self, name: str, notes: list[tuple[Tensor, Tensor]]) -> None:
        if self.call is not None and (self.call not in self.known or name in self.known[self.call]):
            self.waiting += [(name, rounded, full) for rounded, full in notes]

    def restore(self, output: Nested) -> Nested:
        """Return the network's output with the float32 outputs of layers that `precision.keep` keeps in float32.

        The network rounds these outputs. The rounded tensors are replaced by the tensors that the layers returned.

        Args:
            output: Output of the network. None: the forward raised an exception.
        """
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
    """Hooks of a kept layer (precision.keep) that disable autocast and convert floating-point inputs and outputs.

    Inputs are converted to the layer's dtype, and outputs to the dtype of the surrounding layers. The hooks are methods
    of an object instead of closures, so that a module with hooks can be copied and pickled.

    Args:
        name: Module name of the layer.
        device_type: torch's name of the device, such as "cpu" or "cuda".
        inside: Dtype of the layer.
        around: Dtype of the surrounding layers.
        ends: Storage for the layer's output before the conversion. None: the output is not stored.
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
    """Module hooks on the whole network, for a precision that changes the dtype of the parameters.

    The hooks convert the floating-point inputs of the network. Targets are not converted, so that they stay exact. The
    hooks also set torch's default dtype, so that the network creates tensors in this dtype, as in torch.zeros(n).

    The hooks are excluded from torch.compile, which would otherwise compile separate graphs for the hooks.

    Args:
        dtype: Dtype of the parameters.
        ends: Storage for the float32 outputs of layers that `precision.keep` keeps in float32.
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
    """Attach the hooks `enter` and `leave` to a module, and return their handles.

    `leave` also runs if the forward raises an exception, because it must undo the changes of `enter`.
    """
    return [
        module.register_forward_pre_hook(crossing.enter, with_kwargs=True),
        module.register_forward_hook(crossing.leave, with_kwargs=True, always_call=True),
    ]


def convert_linear(network: nn.Module, *, kept: Collection[str] = (), emulated: bool = False) -> list[str]:
    """Replace nn.Linear layers of a network by torchao's Float8Linear. The Parameter objects stay the same.

    Subclasses of nn.Linear are not replaced. Layers are not replaced if the number of input or output features is not a
    multiple of 16.

    Args:
        network: Network to change.
        kept: Module names of layers that must not be replaced. Default: none.
        emulated: Compute in float32 with numbers rounded to float8, for tests without a GPU. Default: false.

    Returns:
        Module names of the replaced layers.
    """
    refuse_without_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [name for name, module in network.named_modules() if name and name not in kept and _fits_float8(module)]
    if names:
        convert_to_float8_training(
            network,
            module_filter_fn=lambda module, name: name in names,
            # Padding is needed because the number of rows may not be a multiple of 16, for example in the last batch of
            # an epoch.
            config=Float8LinearConfig(emulate=emulated, pad_inner_dim=True),
        )
    return names


def _fits_float8(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
