"""Values of many steps that wait on their device, and come to the host in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


@dataclass(slots=True)
class Recorded:
    """One optimizer step.

    index: counted from 1. size: samples of the global batches in it.
    losses: the objective and, where there are several, its terms: tensors 0-d, this rank's share.
    values: by tag: 0-d tensors on the device, or floats.
    """

    index: int
    size: int
    losses: Sequence[Tensor]
    values: dict[str, Any]


class StepBuffer:
    """Holds steps until they are taken."""

    def __init__(self) -> None:
        self._steps: list[Recorded] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Recorded) -> None:
        self._steps.append(step)

    def take(self, strategy: Strategy) -> list[tuple[Recorded, list[float]]]:
        """The steps with plain floats for values, and their losses, means over ranks. Every rank must call it."""
        steps, self._steps = self._steps, []
        if not steps:
            return []
        losses = torch.stack([loss for step in steps for loss in step.losses])
        losses = strategy.reduce(losses, reduce_op="mean")
        waiting = [
            (step.values, tag, value) for step in steps for tag, value in step.values.items() if type(value) is Tensor
        ]
        numbers = _on_host([losses, *(value for _, _, value in waiting)])
        width = len(steps[0].losses)
        end = len(losses)
        for (values, tag, _), number in zip(waiting, numbers[end:], strict=True):
            values[tag] = number
        return [(step, numbers[i * width : (i + 1) * width]) for i, step in enumerate(steps)]


def _on_host(tensors: Sequence[Tensor]) -> list[float]:
    """All numbers of the tensors, in order."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors[0].tolist() + [tensor.item() for tensor in tensors[1:]]
    # float64 keeps counts and float32 exact; mps has none.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors[1:]):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    # One stack a kind of tensor, one copy of everything.
    stacks = [torch.stack([tensors[1 + place].detach() for place in places]) for places in groups.values()]
    joined = torch.cat([tensors[0].to(dtype), *(stack.to(device=device, dtype=dtype) for stack in stacks)])
    numbers = joined.tolist()
    count = len(tensors[0])
    result = numbers[:count] + [0.0] * (len(tensors) - 1)
    places = [place for group in groups.values() for place in group]
    for place, number in zip(places, numbers[count:], strict=True):
        result[count + place] = number
    return result


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """A hook's values as they can wait: detached."""
    return {tag: value.detach() if isinstance(value, Tensor) else value for tag, value in values.items()}
