"""Selection of layers that have another dtype than the network (precision.keep), by module name or by type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors
from exp.models.matching import matches, unmatched_error

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
KEY = "precision.keep"


def kept_layers(
    network: nn.Module, keep: Mapping[str, str], *, otherwise: torch.dtype | None = None
) -> dict[str, torch.dtype]:
    """Return the modules that precision.keep selects, with their dtypes. Submodules get the dtype of their parent.

    Args:
        network: Network.
        keep: Value of precision.keep: "fp32" or "fp64" by pattern. A pattern is a module name with wildcards
            (`blocks.*.norm1`) or a class name (`LayerNorm`, `torch.nn.Softmax`). A class name also matches subclasses.
            If several patterns match a module, the last pattern applies.
        otherwise: Dtype of all other layers. Default: None, float32.

    Returns:
        Dtypes by module name.

    Raises:
        ConfigError: A key matches no module, or modules of different dtypes share a parameter.
    """
    modules = dict(network.named_modules())
    raise_errors(
        unmatched_error(pattern, network, key=f"{KEY}.{pattern}", got="the pattern matches no layer")
        for pattern in keep
        if not any(matches(name, module, pattern) for name, module in modules.items())
    )
    kept: dict[str, torch.dtype] = {}
    owners: dict[nn.Parameter, tuple[str, torch.dtype]] = {}
    # named_modules yields a parent before its children, so that children inherit its dtype.
    for name, module in network.named_modules(remove_duplicate=False):
        own = [word for pattern, word in keep.items() if matches(name, module, pattern)]
        dtype = DTYPES[own[-1]] if own else kept.get(name.rpartition(".")[0]) if name else None
        if dtype is not None:
            kept[name] = dtype
        dtype = dtype or otherwise or torch.float32
        for parameter_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            first, before = owners.setdefault(parameter, (f"{name}.{parameter_name}", dtype))
            if before != dtype:
                got = f"{first} and {name}.{parameter_name} are one parameter, and only one of the layers is kept"
                raise config_error(KEY, got=got, expected="patterns that match both layers or neither")
    return kept


def keep_errors(network: nn.Module, keep: Mapping[str, str], *, otherwise: torch.dtype | None) -> list[ErrorDetails]:
    """Return the errors that `kept_layers` raises for the same arguments."""
    try:
        kept_layers(network, keep, otherwise=otherwise)
    except ConfigError as error:
        return list(error.errors)
    return []
