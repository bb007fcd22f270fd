"""Which modules of a network are a unit: gathered, computed and freed together, or computed twice to save memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint

from exp.errors import ErrorDetails
from exp.models.matching import matching

AUTO = "auto"


def units(network: nn.Module, shard: str | Sequence[str], *, min_parameters: int, key: str) -> dict[str, nn.Module]:
    """The modules below the network that are sharded by themselves, by name, outermost first.

    What is in none of them belongs to the network's own unit.

    shard: `auto` takes the layers of every list of layers (a `repeat`), or, with min_parameters, the innermost modules
        that have so many; otherwise patterns of module names, or names of types.
    min_parameters: a module with fewer, those of units below it not counted, is left to what it is in.
    key: of `shard` in the config.
    Raises: ConfigError for a pattern that matches no module that is called.
    """
    if shard != AUTO:
        chosen = matched(network, [shard] if isinstance(shard, str) else shard, key=key)
    elif min_parameters:
        chosen = {name: module for name, module in network.named_modules() if name and _is_called(module)}
    else:
        chosen = _repeated(network)
    return _large_enough(chosen, min_parameters)


def scalar_errors(network: nn.Module) -> list[ErrorDetails]:
    """Return an error for each parameter without an axis: torch's fully_shard cannot divide it."""
    return [
        ErrorDetails(
            key="model",
            got=f"the parameter {name} of shape [], and a strategy that shards parameters",
            expected="parameters with an axis or more",
            fix="Give it the shape [1], or write strategy=ddp",
        )
        for name, parameter in network.named_parameters()
        if not parameter.dim()
    ]


def uniform(network: nn.Module, chosen: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the same units, and one for each layer whose parameters have another dtype than the unit around it.

    A unit is gathered as one flat tensor; `precision.keep` leaves some layers in a dtype of their own. The dtype of a
    unit is that of its own parameters, which it cannot leave out, or else that of most parameters of its layers.
    """
    owners = {
        name: max((unit for unit in chosen if name == unit or name.startswith(f"{unit}.")), key=len, default="")
        for name, _ in network.named_modules()
    }
    sizes: dict[str, Counter[torch.dtype]] = {}
    for name, module in network.named_modules():
        for parameter in module.parameters(recurse=False):
            sizes.setdefault(owners[name], Counter())[parameter.dtype] += parameter.numel()
    dtypes = {}
    for unit, counted in sizes.items():
        own = [parameter.dtype for parameter in network.get_submodule(unit).parameters(recurse=False)]
        dtypes[unit] = own[0] if own else counted.most_common(1)[0][0]
    extra = {
        name
        for name, module in network.named_modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dtype != dtypes[owners[name]]
    }
    return {name: module for name, module in network.named_modules() if name in chosen or name in extra}


def matched(network: nn.Module, patterns: Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """The modules below the network, by name, that one of the patterns means, as exp.models.matching says it.

    Raises: ConfigError for each pattern that means none that is called.
    """
    modules = {name: module for name, module in network.named_modules() if name and _is_called(module)}
    return matching(network, patterns, key=key, modules=modules, got=", which matches no layer")


def _is_called(module: nn.Module) -> bool:
    """Nothing could be gathered in time for what is never called itself: lists and mappings of layers, and the Linear
    inside torch's MultiheadAttention, which reads its weights (torch 2.13)."""
    holders = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, NonDynamicallyQuantizableLinear)
    return not isinstance(module, holders)


def _repeated(network: nn.Module) -> dict[str, nn.Module]:
    """Layers of lists of layers; of lists in lists, the outer ones."""
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{unit}.") for unit in found):
            found |= {f"{name}.{child}": layer for child, layer in module.named_children() if _is_called(layer)}
    return found


def _large_enough(chosen: dict[str, nn.Module], min_parameters: int) -> dict[str, nn.Module]:
    """Innermost first, so that an outer module counts what the units in it leave."""
    taken: set[int] = set()
    kept = set()
    for name, module in reversed(chosen.items()):
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if own and sum(own.values()) >= min_parameters:
            kept.add(name)
            taken |= own.keys()
    return {name: module for name, module in chosen.items() if name in kept}


def checkpoint_activations(modules: Iterable[nn.Module]) -> None:
    """Lets each module keep its inputs alone, and compute its activations again in the backward.

    In place: names in the state dict stay what they are.
    Random numbers are drawn again as they were (torch.utils.checkpoint keeps the generators' states). The second
    forward works on copies of the buffers that the first one began with.
    """
    for module in modules:
        # On the instance, which nn.Module calls, hooks around it as before.
        module.forward = _checkpointed(module, module.forward)


def _checkpointed(module: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(forward)
    def checkpointed(*inputs: object, **named: Any) -> object:
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

    return checkpointed


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {(one, name): buffer for one in module.modules() for name, buffer in one.named_buffers(recurse=False)}
