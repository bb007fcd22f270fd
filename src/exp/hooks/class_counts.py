"""What hooks that count by class over an evaluation have in common: `confusion` and `pr_curve`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from exp.errors import Fault, RunError
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Values
from exp.shared_types import Stage

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


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

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        yield from stage_faults(self, self.stages, known=EVALUATIONS)
        if self.num_classes is None:
            expected = (
                "the number of classes: the data is no classification, so that there is nothing to count by class"
            )
            yield self.fault("num_classes", got="null", expected=expected, cure=self.leave_out)
        elif not 2 <= self.num_classes <= self.most_classes:
            expected = f"2 to {self.most_classes} classes"
            yield self.fault("num_classes", got=self.num_classes, expected=expected, cure=self.leave_out)
        elif planned.trace is not None:
            yield from self._output_faults(planned.trace.output)

    def _output_faults(self, returned: object) -> Iterator[Fault]:
        """returned: by the network, on the meta device."""
        output = returned.get(self.output) if isinstance(returned, Mapping) else returned
        if not isinstance(output, Tensor) or (self.output != "output" and output is returned):
            return
        # Of two classes one score is enough, and [B, T] may be one for each place.
        if self.num_classes == 2 or (output.dim() > 1 and output.shape[-1] == self.num_classes):
            return
        got = f"{self.output}, which is [{', '.join(['B', *(str(size) for size in output.shape[1:])])}]"
        expected = f"an output of the network that is [B, ..., {self.num_classes}]: a score for each class"
        cure = f"Name another one. L{self.leave_out[1:]} otherwise"
        yield self.fault("output", got=got, expected=expected, cure=cure)

    def setup(self, network: nn.Module) -> None:
        self._device = next((parameter.device for parameter in network.parameters()), self._device)
        self._counts = None

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
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


EVALUATIONS: tuple[Stage, ...] = ("val", "test")


def rows(
    values: Mapping[str, object], *, output: str, target: str, num_classes: int, hook: str
) -> tuple[Tensor, Tensor]:
    """The scores `[N, V]`, or `[N]` of a network with one output for two classes; and the class numbers `[N]`, int64.

    values: of a batch, by name. Outputs are `[..., V]` and targets `[...]`, so that a text or a map of pixels counts
    by its places; one output is `[...]` or `[..., 1]`. hook: its name, for errors.

    Raises: RunError for entries that are not there, and for shapes that are neither.
    """
    scores, classes = (_entry(values, name, hook=hook) for name in (output, target))
    classes = classes.to(scores.device, non_blocking=True)  # layers may be split over devices
    if scores.dim() == classes.dim() + 1 and scores.shape[:-1] == classes.shape and scores.shape[-1] == num_classes:
        return scores.detach().flatten(end_dim=-2), classes.flatten().long()
    if num_classes == 2 and scores.numel() == classes.numel() and _without_ones(scores) == _without_ones(classes):
        return scores.detach().flatten(), classes.flatten().long()
    one = f", or one output of the target's shape {list(classes.shape)}" if num_classes == 2 else ""
    raise RunError(
        f"hooks.{hook} counts by class: {output} is {list(scores.shape)}, {target} {list(classes.shape)}; with "
        f"{num_classes} classes it must be {[*classes.shape, num_classes]}{one}. Name other entries of the batch and "
        f"of the network's outputs with hooks.{hook}.output and hooks.{hook}.target, or leave it out with ~hooks.{hook}"
    )


def predicted(scores: Tensor, *, threshold: float) -> Tensor:
    """The class of the largest score, of `[N, V]`; of `[N]`, 1 where the score is above `threshold`. int64 `[N]`."""
    return scores.argmax(-1) if scores.dim() == 2 else (scores > threshold).long()


def probabilities(scores: Tensor, *, given: bool) -> Tensor:
    """The same as probabilities, in float32 or better: softmax of several outputs, sigmoid of one.

    given: they are that already.
    """
    scores = scores.to(at_least_float32(scores.dtype))
    if given:
        return scores
    return scores.softmax(-1) if scores.dim() == 2 else scores.sigmoid()


def stage_faults(hook: Hook, stages: Sequence[str], *, known: Sequence[str]) -> Iterator[Fault]:
    """Stages that a hook does not know, or none at all."""
    expected = f"some of {', '.join(known)}"
    if not stages:
        yield hook.fault("stages", got="[]", expected=expected, cure=hook.leave_out)
    for stage in stages:
        if stage not in known:
            yield hook.fault("stages", got=repr(stage), expected=expected)


def _entry(values: Mapping[str, object], name: str, *, hook: str) -> Tensor:
    if isinstance(found := values.get(name), Tensor):
        return found
    tensors = [key for key, value in values.items() if isinstance(value, Tensor)]
    what = f"{name} is a {type(values[name]).__name__}" if name in values else f"there is no {name}"
    raise RunError(
        f"hooks.{hook}: {what}; expected a tensor of the batch or of the network's outputs, by name: there are "
        f"{', '.join(tensors)}. Choose one with hooks.{hook}.output or hooks.{hook}.target"
    )


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]
