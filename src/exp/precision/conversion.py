"""A network in the dtypes of a word: its tensors are cast, its layers get their edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from exp.precision.edges import Edge, Ends
from exp.precision.entrance import Entrance
from exp.precision.keep import outermost
from exp.precision.words import HALF, Word

# torch's layers with running statistics. Their kernels take half inputs with float32 parameters and statistics.
STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def cast_tensors(network: nn.Module, word: Word, kept: Mapping[str, torch.dtype]) -> None:
    """Parameters and floating buffers in the word's dtype, in place; the Parameter objects stay the same.

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
    """A module's own floating parameters and buffers, not those of modules in it."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            setattr(module, name, buffer.to(dtype))


def attach_edges(network: nn.Module, word: Word, kept: Mapping[str, torch.dtype], *, device_type: str) -> list[Any]:
    """The hooks that cast what goes in and out. Returns: their handles."""
    # What flows between layers that are not kept: the word's, else float32, which autocast casts as it needs.
    flowing = word.parameters or torch.float32
    ends = Ends()
    handles = []
    if word.parameters is not None:
        handles += Entrance(dtype=word.parameters, ends=ends).attach(network)
    modules = dict(network.named_modules(remove_duplicate=False))
    for name, inside, around in outermost(kept):
        edge = Edge(
            name=name,
            device_type=device_type,
            inside=inside,
            around=around or flowing,
            ends=ends if around is None and flowing in HALF else None,
        )
        handles += edge.attach(modules[name])
    return handles


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, STATISTICS) and module.running_mean is not None
