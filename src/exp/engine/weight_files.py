"""Function that reads a network's weights from files of several programs, without executing code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from exp.engine.checkpoint import CURRENT, load_plain, read_plain
from exp.errors import MissingExtraError, RunError
from exp.models.lora import merge_state_dict
from exp.spelling import among

# Entries under which programs usually save a state dict.
PLACES = ("state_dict", "model_state_dict", "model", "module", "params", "net")
# Prefixes that wrapper modules add to all names.
WRAPPERS = ("module.", "_orig_mod.")
OWN = "network."


def read_weights(path: Path, *, averaged: bool = True) -> dict[str, Tensor]:
    """Return the tensors of an exp checkpoint, a state dict of torch, or a safetensors file, on the CPU.

    Args:
        path: Path of the file.
        averaged: Whether to return the averaged weights of a run that averages weights. If false, the trained weights
            are returned. Default: True.

    Raises:
        RunError: The file is missing or damaged, or has no weights.
        MissingExtraError: safetensors is not installed.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    # Files of torch before 1.6 are not zip files.
    content = read_plain(path) if zipfile.is_zipfile(path) else _legacy(path)
    if isinstance(content, Mapping) and not averaged:
        if CURRENT not in content:
            raise RunError(f"{path} has no averaged weights; leave weights.averaged out")
        content = content[CURRENT]
    weights = _state_dict(content)
    if not weights:
        entries = f" It has {among(map(str, content))}" if isinstance(content, Mapping) else ""
        raise RunError(f"{path} has no tensors by name; expected a state dict.{entries}")
    return _bare(weights)


def _state_dict(content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    for place in (content, *(content[name] for name in PLACES if name in content)):
        if isinstance(place, Mapping):
            found = {str(name): value for name, value in place.items() if isinstance(value, Tensor)}
            if found:
                return found
    return {}


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of exp, DDP and torch.compile from names, and merge LoRA's products into the weights."""
    own = {name.removeprefix(OWN): tensor for name, tensor in weights.items() if name.startswith(OWN)}
    weights = own or weights
    for _ in WRAPPERS:
        for wrapper in WRAPPERS:
            if all(name.startswith(wrapper) for name in weights):
                weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    return merge_state_dict(weights)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtraError(feature=str(path), package="safetensors", extra="safetensors") from error
    try:
        return _bare(load_file(path))
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read as safetensors: {error}") from error


def _legacy(path: Path) -> Any:
    if not path.is_file():
        raise RunError(f"{path} is not a file; expected weights")
    return load_plain(path, kind="weights")
