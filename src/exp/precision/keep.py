"""Layers that keep a dtype of their own (precision.keep), by patterns of module names or by type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors
from exp.models.matching import matches, unmatched

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
KEY = "precision.keep"


def kept_layers(network: nn.Module, keep: Mapping[str, str]) -> dict[str, torch.dtype]:
    """The dtype of every module that `keep` speaks of, those inside a matched one included, by name.

    keep: a pattern of module names (`blocks.*.norm1`) or the name of a type (`LayerNorm`, `torch.nn.Softmax`, which
        names subclasses, too) to fp32 or fp64. Of two that match one module, the later one counts.
    Raises: ConfigError for an unknown dtype, a pattern that matches nothing, and a parameter that is shared by modules
        of different dtypes.
    """
    modules = dict(network.named_modules())
    errors = [
        ErrorDetails(key=f"{KEY}.{pattern}", got=str(word), expected=f"one of {', '.join(DTYPES)}")
        for pattern, word in keep.items()
        if word not in DTYPES
    ]
    errors += [
        unmatched(pattern, network, key=f"{KEY}.{pattern}", got="it matches no layer")
        for pattern in keep
        if not any(matches(name, module, pattern) for name, module in modules.items())
    ]
    raise_errors(errors)
    kept: dict[str, torch.dtype] = {}
    # Parents come first.
    for name, module in network.named_modules(remove_duplicate=False):
        own = [word for pattern, word in keep.items() if matches(name, module, pattern)]
        around = kept.get(name.rpartition(".")[0]) if name else None
        dtype = DTYPES[own[-1]] if own else around
        if dtype is not None:
            kept[name] = dtype
    return kept


def outermost(kept: Mapping[str, torch.dtype]) -> Iterator[tuple[str, torch.dtype, torch.dtype | None]]:
    """The modules at whose edge the dtype changes: name, dtype inside, dtype around (None: the word's own)."""
    for name, inside in kept.items():
        around = kept.get(name.rpartition(".")[0]) if name else None
        if inside != around:
            yield name, inside, around


def keep_errors(network: nn.Module, keep: Mapping[str, str], *, otherwise: torch.dtype | None) -> list[ErrorDetails]:
    """Rejects patterns that match nothing, and shared parameters of which only one is kept."""
    try:
        refuse_shared(network, kept_layers(network, keep), otherwise=otherwise)
    except ConfigError as error:
        return list(error.errors)
    return []


def refuse_shared(network: nn.Module, kept: Mapping[str, torch.dtype], *, otherwise: torch.dtype | None) -> None:
    """otherwise: the dtype of layers that are not kept; None is float32.

    Raises: ConfigError where one parameter lies in two modules of different dtypes, as tied embeddings do.
    """
    seen: dict[int, tuple[str, torch.dtype]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        dtype = kept.get(name, otherwise or torch.float32)
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            first, before = seen.setdefault(id(parameter), (f"{name}.{own}", dtype))
            if before != dtype:
                raise config_error(
                    KEY,
                    got=f"{first} and {name}.{own} are one parameter, and only one of the two modules is kept",
                    expected="both or neither of them",
                )
