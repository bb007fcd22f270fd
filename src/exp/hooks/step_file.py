"""What is kept of a step, so that it can be run again alone: its micro-batches and the state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.hooks.step import Window
from exp.nested import mapped
from exp.shared_types import Batch

FORMAT, VERSION = "exp step", 1


@dataclass(frozen=True, kw_only=True)
class StepFile:
    """A step's file: tensors and plain values alone.

    step: the optimizer step, counted from 1; total_steps: of the run, None where its end is not known.
    rank: the share of the data; world_size: of how many ranks.
    window: its micro-batches and their place in the run; with seed and rank they give its random numbers.
    scale: the loss scale; None without.
    network, objective: all parameters and buffers by name, from before the step. evaluating, frozen: names of the
        network's modules in evaluation mode, and of its parameters without gradients.
    optimizers: their state dicts, from before the step.
    config: the run's config, as YAML; None of a run without one.
    """

    step: int
    total_steps: int | None
    rank: int
    world_size: int
    seed: int
    window: Window
    scale: float | None
    network: Mapping[str, Tensor]
    objective: Mapping[str, Tensor]
    evaluating: Sequence[str]
    frozen: Sequence[str]
    optimizers: Sequence[Mapping[str, Any]]
    config: str | None

    def contents(self) -> dict[str, Any]:
        """What is written."""
        window = self.window
        batches = [
            {
                "data": _plain(batch.data),
                "size": batch.size,
                "global_size": batch.global_size,
                "world_size": batch.world_size,
                "batch_idx": batch_idx,
            }
            for batch, batch_idx in window.batches
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            **vars(self),
            "window": {"batches": batches, "epoch": window.epoch, "phase": window.phase, "turn": list(window.turn)},
        }

    @classmethod
    def of(cls, contents: Any, *, path: Any) -> StepFile:
        """From what was read.

        Raises: RunError where it is not what `contents` gives.
        """
        if not isinstance(contents, dict) or contents.get("format") != FORMAT:
            raise RunError(
                f"{path} is not a step's file; expected one that hooks.nan_guard wrote, nan_guard/step-<n>.pt"
            )
        if contents["version"] != VERSION:
            raise RunError(f"{path} has version {contents['version']} of a step's file; expected {VERSION}")
        try:
            window = contents["window"]
            batches = [(_batch(entry), int(entry["batch_idx"])) for entry in window["batches"]]
            values = {field.name: contents[field.name] for field in fields(cls)}
            values["window"] = Window(
                batches=batches,
                epoch=int(window["epoch"]),
                phase=window["phase"],
                turn=tuple(map(int, window["turn"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} is a step's file that is not whole: {error!r}") from error
        return cls(**values)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the host of all parameters and buffers, those that no state dict has, too."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: copied(tensor) for name, tensor in named.items()}


def copied(tensor: Tensor) -> Tensor:
    """A copy on the host; of a part of a larger storage the part alone, for a file has whole storages."""
    return tensor.detach().cpu().clone()


def _plain(data: object) -> Any:
    """The same entries with copied tensors, in dicts, lists and tuples of Python's own."""
    if isinstance(data, Tensor):
        return copied(data)
    if isinstance(data, Mapping):
        return {name: _plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        parts = [_plain(value) for value in data]
        return parts if isinstance(data, list) else tuple(parts)
    return mapped(data, copied)


def _batch(entry: Mapping[str, Any]) -> Batch:
    return Batch(entry["data"], int(entry["size"]), int(entry["global_size"]), int(entry["world_size"]))


# A large buffer is a mask or a queue, and a copy of it at every step would cost.
SMALL_BYTES = 2**16


Copies = list[tuple[nn.Module, str, Tensor]]


class BuffersBefore:
    """Copies of buffers on their device: of small ones always, of large ones where they changed since the last copy.

    Compiled code does not count its changes on every path, so a compiled network has all of them copied. Modules that
    have no buffer when this is made are not looked at.
    """

    def __init__(self, network: nn.Module) -> None:
        self._owners = [one for one in network.modules() if any(True for _ in one.buffers(recurse=False))]
        self._large: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}

    def take(self, *, all_of_them: bool) -> Copies:
        """Owner, name and copy of what each buffer holds now; no copy is changed any more. Waits for nothing."""
        return [
            (owner, name, self._copy(owner, name, buffer, anew=all_of_them))
            for owner in self._owners
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor, *, anew: bool) -> Tensor:
        if anew or buffer.nbytes <= SMALL_BYTES:
            return buffer.detach().clone()
        key, version = (id(owner), name), buffer._version
        known = self._large.get(key)
        if known is None or known[0] is not buffer or known[1] != version:
            known = self._large[key] = (buffer, version, buffer.detach().clone())
        return known[2]


@torch.no_grad()
def put_back(copies: Copies) -> None:
    """The buffers hold again what they held."""
    for owner, name, before in copies:
        owner.get_buffer(name).copy_(before)
