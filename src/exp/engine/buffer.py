"""Values of many steps that wait on their device, and come to the host in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from exp.errors import RunError
from exp.hooks.values import Panel, on_host

EXPECTED = "a hook must give one number, or a panel of exp.hooks.values, for a tag"


@dataclass(slots=True)
class Recorded:
    """One optimizer step.

    index: counted from 1. size: samples of the global batches in it.
    losses: the objective and, where there are several, its terms: tensors 0-d, this rank's share.
    values: by tag: 0-d tensors on the device, floats, or panels.
    terms: the names of the terms that were computed; None where all were.
    panels: by tag, on the host: where the panels among the values are once the step is taken.
    """

    index: int
    size: int
    losses: Sequence[Tensor]
    values: dict[str, Any]
    terms: Sequence[str] | None = None
    panels: dict[str, Panel] = field(default_factory=dict)


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
            (step.values, tag, _one_number(tag, value))
            for step in steps
            for tag, value in step.values.items()
            if type(value) is Tensor
        ]
        numbers = _on_host([losses, *(value for _, _, value in waiting)])
        end = len(losses)
        for (values, tag, _), number in zip(waiting, numbers[end:], strict=True):
            values[tag] = number
        _take_panels(steps)
        # A NumPy number would be refused by the report, at the very end.
        for step in steps:
            for tag, value in step.values.items():
                if type(value) is not float:
                    step.values[tag] = _float(tag, value)
        # Not all steps have all terms: a phase need not run in each.
        ends = list(accumulate(len(step.losses) for step in steps))
        return [(step, numbers[end - len(step.losses) : end]) for step, end in zip(steps, ends, strict=True)]


def on_host_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Panel]]:
    """What hooks gave, by tag: the numbers as floats, and the panels, all on the host."""
    panels = {tag: value for tag, value in values.items() if isinstance(value, Panel)}
    numbers = {
        tag: _one_number(tag, value).item() if isinstance(value, Tensor) else _float(tag, value)
        for tag, value in values.items()
        if tag not in panels
    }
    return numbers, dict(zip(panels, on_host(list(panels.values())), strict=True)) if panels else {}


def _take_panels(steps: Sequence[Recorded]) -> None:
    """Moves the panels from the values of each step to its panels, on the host."""
    found = [(step, tag, value) for step in steps for tag, value in step.values.items() if isinstance(value, Panel)]
    if found:
        for (step, tag, _), panel in zip(found, on_host([panel for _, _, panel in found]), strict=True):
            del step.values[tag]
            step.panels[tag] = panel


def _one_number(tag: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise RunError(f"{tag} is a tensor of shape {list(value.shape)}; {EXPECTED}")
    return value.reshape(())


def _float(tag: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{tag} is {value!r}; a hook must give one number, or a panel of exp.hooks.values, for a tag"
        ) from error


def _on_host(tensors: Sequence[Tensor]) -> list[float]:
    """All numbers of the tensors, in order. The first is a vector, the others are 0-d."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors[0].tolist() + [tensor.item() for tensor in tensors[1:]]
    return gathered(tensors)


def gathered(tensors: Sequence[Tensor]) -> list[float]:
    """The same through one copy to the host, which is one wait for the device: one stack for each kind of tensor."""
    losses, others = tensors[0], tensors[1:]
    # float64 keeps counts and float32 exact; mps has none.
    dtype = torch.float32 if losses.device.type == "mps" else torch.float64
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(others):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    stacks = [torch.stack([others[place].detach() for place in places]) for places in kinds.values()]
    joined = torch.cat([losses.to(dtype), *(stack.to(device=losses.device, dtype=dtype) for stack in stacks)])
    numbers = joined.tolist()
    result = numbers[: len(losses)] + [0.0] * len(others)
    places = [place for kind in kinds.values() for place in kind]
    for place, number in zip(places, numbers[len(losses) :], strict=True):
        result[len(losses) + place] = number
    return result
