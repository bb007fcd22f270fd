"""What hooks that count by class over an evaluation have in common: `confusion` and `pr_curve`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from exp.errors import Fault
from exp.hooks.classified import class_faults, rows
from exp.hooks.hook import Hook, Values
from exp.types import Stage

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned


class ClassCounts(Hook, ABC):
    """Adds up counts, batch by batch, on the device, and shows those of all ranks at a stage's end.

    num_classes: V, 2 to `most_classes`. stages: of which evaluations.
    output, target: names among the batch's entries and the network's outputs.
    """

    most_classes: ClassVar[int]

    def __init__(self, *, num_classes: int | None, stages: Sequence[str], output: str, target: str) -> None:
        super().__init__()
        self.num_classes, self.stages = num_classes, tuple(stages)
        self.output, self.target = output, target
        self._counts: Tensor | None = None
        self._device = torch.device("cpu")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the counts."""

    @abstractmethod
    def counted(self, scores: Tensor, classes: Tensor) -> Tensor:
        """The counts of one batch, int64. scores: `[N, V]` or `[N]`. classes: `[N]`, int64; see classified.rows."""

    @abstractmethod
    def shown(self, stage: Stage, counts: Tensor) -> Values:
        """What there is to see of the counts of all ranks."""

    @property
    def classes(self) -> int:
        """V."""
        assert self.num_classes is not None, "faults() refuses it"
        return self.num_classes

    def faults(self, planned: Planned) -> Sequence[Fault]:
        own = class_faults(
            self.name,
            planned,
            num_classes=self.num_classes,
            most=self.most_classes,
            stages=self.stages,
            output=self.output,
        )
        return [*super().faults(planned), *own]

    def setup(self, network: nn.Module) -> None:
        self._device = next((parameter.device for parameter in network.parameters()), self._device)
        self._counts = None

    def evaluated(self, stage: Stage, values: Mapping[str, Any]) -> None:
        if stage not in self.stages:
            return
        found = self.counted(
            *rows(values, output=self.output, target=self.target, num_classes=self.classes, hook=self.name)
        )
        self._counts = found if self._counts is None else self._counts + found

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        if stage not in self.stages:
            return None
        mine, self._counts = self._counts, None
        if mine is None:  # a rank without a share of the data still takes part in the sum
            mine = torch.zeros(self.shape, dtype=torch.int64, device=self._device)
        return self.shown(stage, gather(mine).sum(0))
