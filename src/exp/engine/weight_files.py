"""Read the weights of a network from a file: tensors by name, whoever wrote it, and nothing that would be code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from exp.engine.checkpoint import CURRENT, load_plain, read_plain
from exp.errors import MissingExtraError, RunError
from exp.models.lora import merged
from exp.spelling import among

# Where programs keep a state dict among other things, by habit.
PLACES = ("state_dict", "model_state_dict", "model", "module", "params", "net")
# What wraps a network, and stands before all of its names.
WRAPPERS = ("module.", "_orig_mod.")
OWN = "network."


def read_weights(path: Path, *, averaged: bool = True) -> dict[str, Tensor]:
    """The tensors of a checkpoint of exp, of a state dict that torch wrote, or of a safetensors file, on the CPU.

    averaged: of a run with an average of the weights, whether that is taken, or the weights as they were trained.
    Raises: RunError where the file is not there, is damaged, or holds no weights; MissingExtraError.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    # What torch wrote before 1.6 is no zip file.
    content = read_plain(path) if zipfile.is_zipfile(path) else _legacy(path)
    if isinstance(content, Mapping) and not averaged:
        if CURRENT not in content:
            raise RunError(f"{path} has no average beside its weights; leave weights.averaged out")
        content = content[CURRENT]
    weights = _state_dict(content)
    if not weights:
        there = f" It holds {among(map(str, content))}" if isinstance(content, Mapping) else ""
        raise RunError(f"{path} holds no tensors by name; expected a state dict.{there}")
    return _bare(weights)


def _state_dict(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    for place in (content, *(content[name] for name in PLACES if name in content)):
        if isinstance(place, Mapping):
            found = {str(name): value for name, value in place.items() if isinstance(value, Tensor)}
            if found:
                return found
    return {}


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what exp, ddp or torch.compile put before the names of a network, and with LoRA's part in the weights."""
    own = {name.removeprefix(OWN): tensor for name, tensor in weights.items() if name.startswith(OWN)}
    weights = own or weights
    for _ in WRAPPERS:
        for wrapper in WRAPPERS:
            if all(name.startswith(wrapper) for name in weights):
                weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    return merged(weights)


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
        raise RunError(f"{path} is not there, or is not a file; expected weights")
    return load_plain(path, kind="weights")
