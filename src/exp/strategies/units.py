"""Units of a network: modules that are sharded as a whole, or that are recomputed to save memory.

The shards of a unit are gathered and freed together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint

from exp.errors import ErrorDetails, not_supported_with
from exp.models.matching import find_modules

AUTO = "auto"
# These modules are never called, so the hooks that gather their parameters never run. For example, torch's
# MultiheadAttention reads the weights of its Linear layer without calling the layer (torch 2.13).
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, NonDynamicallyQuantizableLinear)


def choose_units(network: nn.Module, shard: str | Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """Return the submodules that are sharded as separate units, by name. Outer modules come first.

    Parameters outside of these modules belong to the unit of the network.

    Args:
        network: The network.
        shard: `auto` for the layers of every list of layers (a `repeat`), or patterns of module names or type names.
        key: Config key of `shard`.

    Raises:
        ConfigError: A pattern matches no module that is called.
    """
    found: dict[str, nn.Module] = {}
    if shard != AUTO:
        found = match_modules(network, [shard] if isinstance(shard, str) else shard, key=key)
    for name, module in network.named_modules() if shard == AUTO else ():
        # If lists are nested, the layers of the outer list are units.
        if isinstance(module, nn.ModuleList) and not unit_of(name, found):
            layers = {f"{name}.{child}": layer for child, layer in module.named_children()}
            found |= {path: layer for path, layer in layers.items() if not isinstance(layer, NEVER_CALLED)}
    return {name: module for name, module in found.items() if list(module.parameters())}


def unit_of(path: str, units: Iterable[str]) -> str:
    """Return the name of the innermost unit that contains a module or parameter.

    The name is '' for a module that is only in the unit of the network.
    """
    return max((unit for unit in units if f"{path}.".startswith(f"{unit}.")), key=len, default="")


def scalar_errors(network: nn.Module) -> list[ErrorDetails]:
    """Return an error for each 0-d parameter, because torch's fully_shard cannot split it."""
    expected, fix = "parameters with at least one axis", "Give this parameter the shape [1], or write strategy=ddp"
    return [
        not_supported_with("model", f"the parameter {name} of shape []", "sharded parameters", expected, fix)
        for name, parameter in network.named_parameters()
        if not parameter.dim()
    ]


def split_by_dtype(network: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the units, and an additional unit for each layer with another dtype than its unit.

    The parameters of a unit are gathered as one flat tensor with one dtype, but `precision.keep` changes the dtype of
    some layers. The dtype of a unit is the dtype of its direct parameters, which are outside of its layers. If the unit
    has no direct parameters, its dtype is the dtype of most parameters in its layers.
    """
    modules = dict(network.named_modules())
    owners = {name: unit_of(name, units) for name in modules}
    sizes: dict[str, Counter[torch.dtype]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            sizes.setdefault(owners[name], Counter())[parameter.dtype] += parameter.numel()
    dtypes = {}
    for unit, counted in sizes.items():
        own = [parameter.dtype for parameter in modules[unit].parameters(recurse=False)]
        dtypes[unit] = own[0] if own else counted.most_common(1)[0][0]
    extra = {
        name
        for name, module in modules.items()
        for parameter in module.parameters(recurse=False)
        if parameter.dtype != dtypes[owners[name]]
    }
    return {name: module for name, module in modules.items() if name in units or name in extra}


def match_modules(network: nn.Module, patterns: Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """Return the submodules that match at least one pattern, by name. The patterns are those of exp.models.matching.

    Raises:
        ConfigError: A pattern matches no module that is called.
    """
    modules = {name: one for name, one in network.named_modules() if name and not isinstance(one, NEVER_CALLED)}
    return find_modules(network, patterns, key=key, modules=modules, got=", which matches no layer")


def checkpoint_activations(modules: Iterable[nn.Module]) -> None:
    """Make each module keep only its inputs in the forward, and recompute its activations in the backward.

    The modules are changed in place. Names in the state dict do not change. torch.utils.checkpoint saves the states of
    the random generators, so that the recomputation draws the same numbers. The recomputation uses copies of the
    buffers from before the first forward.
    """
    for module in modules:
        # The attribute of the instance overrides the method, and nn.Module still runs the module's hooks.
        module.forward = _recompute(module, module.forward)


def _recompute(module: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(forward)
    def run_checkpointed(*inputs: object, **named: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        before = {place: buffer.clone() for place, buffer in _buffers(module).items()}
        is_again = False

        def run(*inputs: object, **named: Any) -> object:
            nonlocal is_again
            if not is_again:
                is_again = True
                return forward(*inputs, **named)
            own = _buffers(module)
            try:
                for (owner, name), buffer in before.items():
                    setattr(owner, name, buffer.clone())
                return forward(*inputs, **named)
            finally:
                for (owner, name), buffer in own.items():
                    setattr(owner, name, buffer)

        return checkpoint(run, *inputs, use_reentrant=False, **named)

    return run_checkpointed


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {(one, name): buffer for one in module.modules() for name, buffer in one.named_buffers(recurse=False)}
