"""Convert a network to the dtypes of a word: its tensors, inputs, edges of kept layers, and float8 layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.models.containers import forward_name
from exp.nested import Nested, map_tensors
from exp.precision.keep import outermost
from exp.precision.words import HALF, Word, refuse_without_torchao

Arguments = tuple[object, ...]
Keywords = dict[str, object]
Function = TypeVar("Function", bound=Callable[..., object])
never_compiled: Callable[[Function], Function] = torch.compiler.disable
# torch's layers with running statistics. Their kernels take half inputs with float32 parameters and statistics.
STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
# The kernels of float8 take matrices whose sides are multiples of this.
FLOAT8_MULTIPLE = 16


def cast(data: Nested, dtype: torch.dtype, *, notes: list[tuple[Tensor, Tensor]] | None = None) -> Nested:
    """The same structure with its floating tensors in `dtype`; all else as it is.

    notes: takes (cast, before) of every tensor that changed.
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
    """Casts parameters and floating buffers to the word's dtype in place; the Parameter objects stay the same.

    Kept layers have their own. Layers with running statistics stay in float32 under a half word: an update of
    statistics by momentum is smaller than half a unit of bfloat16 long before they have settled.
    """
    for name, module in network.named_modules():
        if name in kept:
            # Under autocast a kept float32 layer is float32 already: nothing is touched.
            dtype = kept[name] if word.parameters is not None or kept[name] == torch.float64 else None
        elif word.parameters in HALF and _has_statistics(module):
            dtype = torch.float32
        else:
            dtype = word.parameters
        if dtype is not None:
            cast_own_tensors(module, dtype)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts a module's own floating parameters and buffers, not those of modules in it."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            setattr(module, name, buffer.to(dtype))


def attach_edges(
    network: nn.Module, word: Word, kept: Mapping[str, torch.dtype], *, device_type: str
) -> list[RemovableHandle]:
    """Attaches the hooks that cast inputs and outputs. Returns: their handles."""
    # What flows between layers that are not kept: the word's, else float32, which autocast casts as it needs.
    flowing = word.parameters or torch.float32
    ends = Ends()
    handles = []
    if word.parameters is not None:
        handles += _attach(Entrance(dtype=word.parameters, ends=ends), network)
    modules = dict(network.named_modules(remove_duplicate=False))
    for name, inside, around in outermost(kept):
        edge = Edge(
            name=name,
            device_type=device_type,
            inside=inside,
            around=around or flowing,
            ends=ends if around is None and flowing in HALF else None,
        )
        handles += _attach(edge, modules[name])
    return handles


class Ends:
    """Unrounded outputs of kept layers that end the network, before the cast to the dtype around them.

    A layer's output is held until the network returns only where it was among the outputs before, or where nothing is
    known yet: at the first call of each of the network's forwards, in training and in evaluation. Where a strategy
    runs the layers without calling the network, nothing is held.
    """

    def __init__(self) -> None:
        self.call: tuple[bool, str | None] | None = None
        self.waiting: list[tuple[str, Tensor, Tensor]] = []
        self.known: dict[tuple[bool, str | None], set[str]] = {}

    def begin(self, *, training: bool, forward: str | None) -> None:
        """The network is called. forward: the name of the forward that it is seen through; None is its own."""
        self.call = training, forward

    def hold(self, name: str, notes: list[tuple[Tensor, Tensor]]) -> None:
        if self.call is not None and (self.call not in self.known or name in self.known[self.call]):
            self.waiting += [(name, rounded, full) for rounded, full in notes]

    def restore(self, output: Nested) -> Nested:
        """The network's output with the full numbers of kept layers, in float32, for the loss."""
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
        if output is not None and call is not None:  # else the forward raised, and nothing is known of it
            self.known.setdefault(call, found)
        return restored


class Edge:
    """The hooks of one kept layer: autocast off, floating inputs cast, the output in the dtype around it.

    They are methods of a plain object, so that a module with them is copied and pickled like any other.
    """

    def __init__(
        self, *, name: str, device_type: str, inside: torch.dtype, around: torch.dtype | None, ends: Ends | None
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
        if self.around is None or output is None:
            return output
        if self.ends is None:
            return cast(output, self.around)
        notes: list[tuple[Tensor, Tensor]] = []
        output = cast(output, self.around, notes=notes)
        self.ends.hold(self.name, notes)
        return output


class Entrance:
    """The hooks of the whole network under a true word: floating inputs are cast, integer ones left alone.

    Here and not in the batch, so that targets stay as exact as the data set gave them. Within, what a forward creates
    without a dtype (torch.zeros(n)) has the network's, too.

    Never compiled: torch.compile makes one graph of a network's forward, and would make others of its own hooks.
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
    """Attaches its two hooks. always_call: what `enter` sets is put back where the forward raised, too."""
    return [
        module.register_forward_pre_hook(crossing.enter, with_kwargs=True),
        module.register_forward_hook(crossing.leave, with_kwargs=True, always_call=True),
    ]


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, STATISTICS) and module.running_mean is not None


def convert_linear(network: nn.Module, *, kept: Collection[str] = (), emulated: bool = False) -> list[str]:
    """Puts torchao's Float8Linear in the place of nn.Linear below `network`; the parameters stay the same objects.

    Left as they are: layers in `kept`, those whose sides are not multiples of 16, and subclasses of nn.Linear.
    emulated: compute in float32 with numbers rounded to float8, on any device: to try, not to train.
    Returns: the names of what was converted.
    """
    refuse_without_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [name for name, module in network.named_modules() if name and name not in kept and _fits_float8(module)]
    if names:
        convert_to_float8_training(
            network,
            module_filter_fn=lambda module, name: name in names,
            config=Float8LinearConfig(emulate=emulated),
        )
    return names


def _fits_float8(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
