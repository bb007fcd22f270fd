"""Convert a network to the dtypes of a word: its tensors, its inputs, the edges of kept layers, and float8 layers."""

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
# The kernels of float8 take matrices whose sides are multiples of this.
FLOAT8_MULTIPLE = 16


def cast(data: Nested, dtype: torch.dtype, *, notes: list[tuple[Tensor, Tensor]] | None = None) -> Nested:
    """Return the same structure with its floating-point tensors in `dtype`.

    Args:
        data: Nested data.
        dtype: The dtype.
        notes: Receives (tensor after, tensor before) of every tensor that changed.
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
    """Cast parameters and floating buffers in place. The Parameter objects stay the same.

    Kept layers get their own dtype. Layers with running statistics stay in float32 under a half word, because an
    update by momentum is smaller than half a unit of bfloat16 long before the statistics have converged.
    """
    for name, module in network.named_modules():
        if name in kept:
            # Under autocast a kept float32 layer is float32 already.
            dtype = kept[name] if word.parameters is not None or kept[name] == torch.float64 else None
        elif word.parameters in HALF and isinstance(module, FEATURE_NORMS) and module.running_mean is not None:
            # torch's kernels take half inputs with float32 parameters and statistics.
            dtype = torch.float32
        else:
            dtype = word.parameters
        if dtype is not None:
            cast_own_tensors(module, dtype)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters and buffers, without those of its submodules."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            setattr(module, name, buffer.to(dtype))


def attach_edges(
    network: nn.Module, word: Word, kept: Mapping[str, torch.dtype], *, device_type: str
) -> list[RemovableHandle]:
    """Attach the hooks that cast inputs and outputs, and return their handles."""
    # Between layers that are not kept: the word's dtype, or float32, which autocast casts if needed.
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
    """Unrounded outputs of kept layers at the end of the network, before they are cast to the dtype around them.

    A layer's output is held until the network returns if it was among the outputs before, or if nothing is known yet:
    at the first call of each forward, in training and in evaluation. If a strategy runs the layers without calling the
    network, nothing is held.
    """

    def __init__(self) -> None:
        self.call: tuple[bool, str | None] | None = None
        self.waiting: list[tuple[str, Tensor, Tensor]] = []
        self.known: dict[tuple[bool, str | None], set[str]] = {}

    def begin(self, *, training: bool, forward: str | None) -> None:
        """Begin a call of the network. forward: the name of its program or method; None is its own forward."""
        self.call = training, forward

    def hold(self, name: str, notes: list[tuple[Tensor, Tensor]]) -> None:
        if self.call is not None and (self.call not in self.known or name in self.known[self.call]):
            self.waiting += [(name, rounded, full) for rounded, full in notes]

    def restore(self, output: Nested) -> Nested:
        """Return the network's output with the unrounded outputs of kept layers, in float32, for the loss."""
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
    """The hooks of one kept layer: autocast off, floating inputs cast, the output cast to the dtype around the layer.

    The hooks are methods of a plain object, so that a module with them can be copied and pickled.
    """

    def __init__(
        self, *, name: str, device_type: str, inside: torch.dtype, around: torch.dtype, ends: Ends | None
    ) -> None:
        self.name, self.device_type = name, device_type
        self.inside, self.around, self.ends = inside, around, ends
        self.autocast: list[bool] = []

    def enter(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        # Not an autocast object that is entered here and left there: torch.compile follows only this form.
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
    """The hooks of the whole network under a true word: floating inputs are cast, integer inputs are not.

    They cast the inputs and not the batch, so that targets stay exact. Tensors that a forward creates without a dtype
    (torch.zeros(n)) have the network's dtype, too.

    Never compiled: torch.compile would make separate graphs of the hooks.
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
    """Attach both hooks. With always_call, `leave` restores what `enter` set even if the forward raises."""
    return [
        module.register_forward_pre_hook(crossing.enter, with_kwargs=True),
        module.register_forward_hook(crossing.leave, with_kwargs=True, always_call=True),
    ]


def convert_linear(network: nn.Module, *, kept: Collection[str] = (), emulated: bool = False) -> list[str]:
    """Replace nn.Linear below `network` by torchao's Float8Linear, and return the names of the replaced layers.

    The parameters stay the same objects. Layers in `kept`, layers whose sides are not multiples of 16, and subclasses
    of nn.Linear are not replaced.

    Args:
        network: The network.
        kept: Names of layers to leave out.
        emulated: Compute in float32 with numbers rounded to float8, on any device. For tests.
    """
    refuse_without_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [name for name, module in network.named_modules() if name and name not in kept and _fits_float8(module)]
    if names:
        convert_to_float8_training(
            network,
            module_filter_fn=lambda module, name: name in names,
            # Products over a number of rows that is no multiple of 16, as in the last batch of an epoch, need padding.
            config=Float8LinearConfig(emulate=emulated, pad_inner_dim=True),
        )
    return names


def _fits_float8(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
