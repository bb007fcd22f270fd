"""Base class of the hooks `confusion` and `pr_curve`, which count the samples of an evaluation by class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from exp.errors import ErrorDetails, RunError
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Values
from exp.shared_types import Stage

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

EVALUATIONS: tuple[Stage, ...] = ("val", "test")


class ClassCounts(Hook, ABC):
    """Base class of hooks that count the samples of an evaluation by class.

    The counts are added up on the device after each batch. The sum over all ranks is logged at the end of the
    evaluation.

    Args:
        num_classes: Number of classes V, from 2 to `most_classes`.
        stages: Splits for which samples are counted: `val`, `test`.
        output: Name of the scores in the outputs of the network.
        target: Name of the class numbers in the batch.

    Attributes:
        most_classes: Maximum number of classes that the hook supports.
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
        """The shape of the tensor that `count` returns."""

    @abstractmethod
    def count(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Return the counts of a batch, int64, with the shape in the property `shape`.

        Args:
            scores: Scores of the classes, `[N, V]`, or `[N]` if there is one score for two classes.
            classes: Target class numbers, int64 `[N]`.
        """

    @abstractmethod
    def make_panels(self, stage: Stage, counts: Tensor) -> Values:
        """Return a mapping from TensorBoard tags to the panels to log.

        Args:
            stage: Name of the split that was evaluated.
            counts: Sum of the counts over all batches and ranks.
        """

    @property
    def classes(self) -> int:
        """The number of classes V."""
        assert self.num_classes is not None, "errors() rejects it"
        return self.num_classes

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        yield from stage_errors(self, self.stages, known=EVALUATIONS)
        if self.num_classes is None or not 2 <= self.num_classes <= self.most_classes:
            got = "null" if self.num_classes is None else self.num_classes
            expected = f"2 to {self.most_classes} classes, for data with classes"
            yield self.error("num_classes", got=got, expected=expected, fix=self.leave_out)
        elif planned.trace is not None:
            yield from self._output_errors(planned.trace.output, self.num_classes)

    def _output_errors(self, returned: object, classes: int) -> Iterator[ErrorDetails]:
        """Yield an error if the network does not return a score for each class.

        Args:
            returned: Output of the network for a batch on the meta device.
            classes: Number of classes.
        """
        output = returned.get(self.output) if isinstance(returned, Mapping) else returned
        if not isinstance(output, Tensor) or (self.output != "output" and output is returned):
            return
        # The shape is not checked for two classes, because one score suffices. An output [B, T] may then contain one
        # score for each of T positions.
        if classes != 2 and (output.dim() < 2 or output.shape[-1] != classes):
            got = f"{self.output} of shape [{', '.join(['B', *(str(size) for size in output.shape[1:])])}]"
            expected = f"an output [B, ..., {classes}]: a score for each class"
            fix = f"Name another output with hooks.{self.name}.output, or {self.leave_out}"
            yield self.error("output", got=got, expected=expected, fix=fix)

    def setup(self, network: nn.Module) -> None:
        self._device = next((parameter.device for parameter in network.parameters()), self._device)
        self._counts = None

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        if stage not in self.stages:
            return
        scores, classes = rows(values, output=self.output, target=self.target, num_classes=self.classes, hook=self.name)
        found = self.count(scores, classes)
        self._counts = found if self._counts is None else self._counts + found

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        if stage not in self.stages:
            return None
        mine, self._counts = self._counts, None
        if mine is None:  # A rank without samples must also call `gather`, because all ranks take part in it.
            mine = torch.zeros(self.shape, dtype=torch.int64, device=self._device)
        return self.make_panels(stage, gather(mine).sum(0))


def rows(
    values: Mapping[str, object], *, output: str, target: str, num_classes: int, hook: str
) -> tuple[Tensor, Tensor]:
    """Return the scores and class numbers of a batch, with one row for each sample or position.

    Args:
        values: Values of the batch and outputs of the network, by name. Scores are `[..., V]`, and class numbers are
            `[...]`. If there are two classes, scores may also be `[...]` or `[..., 1]`.
        output: Name of the scores in `values`.
        target: Name of the class numbers in `values`.
        num_classes: Number of classes V.
        hook: Name of the hook, for error messages.

    Returns:
        Scores `[N, V]`, or `[N]` if the network has one score for two classes. Class numbers `[N]`, int64.

    Raises:
        RunError: The scores or the class numbers are missing, or their shapes do not match.
    """
    scores, classes = values.get(output), values.get(target)
    names = f"Name other values with hooks.{hook}.output and hooks.{hook}.target, or leave it out with ~hooks.{hook}"
    if not isinstance(scores, Tensor) or not isinstance(classes, Tensor):
        missing = target if isinstance(scores, Tensor) else output
        tensors = ", ".join(key for key, value in values.items() if isinstance(value, Tensor))
        raise RunError(f"hooks.{hook}: no tensor {missing}; expected one of {tensors}. {names}")
    # The output may be on a different device than the batch, because layers may be split over devices.
    classes = classes.to(scores.device, non_blocking=True)
    if scores.dim() == classes.dim() + 1 and scores.shape[:-1] == classes.shape and scores.shape[-1] == num_classes:
        return scores.detach().flatten(end_dim=-2), classes.flatten().long()
    if num_classes == 2 and scores.squeeze().shape == classes.squeeze().shape:
        return scores.detach().flatten(), classes.flatten().long()
    one = f", or one output of the target's shape {list(classes.shape)}" if num_classes == 2 else ""
    raise RunError(
        f"hooks.{hook}: {output} has shape {list(scores.shape)}, and {target} {list(classes.shape)}; expected "
        f"{[*classes.shape, num_classes]} for {num_classes} classes{one}. {names}"
    )


def count_at(places: Tensor, *, counted: Tensor, size: int) -> Tensor:
    """Return the number of occurrences of each index from 0 to `size` - 1, int64 `[size]`.

    The function does not synchronize with the device.

    Args:
        places: Indices, int64, of any shape.
        counted: Mask, bool, broadcastable to the shape of `places`. Indices are ignored if their mask is False.
        size: Number of different indices.
    """
    # Ignored indices are replaced by `size`. Selecting the others with a mask would synchronize with the device.
    kept = torch.where(counted, places, size).flatten()
    found = torch.zeros(size + 1, dtype=torch.int64, device=places.device)
    found.index_add_(0, kept, torch.ones_like(kept))
    return found[:-1]


def predict_classes(scores: Tensor, *, threshold: float) -> Tensor:
    """Return the predicted class numbers, int64 `[N]`.

    Args:
        scores: Scores `[N, V]`, or `[N]` if there is one score for two classes. The class with the largest of V scores
            is predicted.
        threshold: Limit for scores `[N]`: class 1 is predicted if the score is larger than the threshold.
    """
    return scores.argmax(-1) if scores.dim() == 2 else (scores > threshold).long()


def probabilities(scores: Tensor, *, given: bool) -> Tensor:
    """Return the probabilities of the classes, float32 or float64, with the shape of the scores.

    Args:
        scores: Scores `[N, V]`, or `[N]` if there is one score for two classes.
        given: Whether the scores are already probabilities. If not, softmax or sigmoid is applied.
    """
    scores = scores.to(at_least_float32(scores.dtype))
    if given:
        return scores
    return scores.softmax(-1) if scores.dim() == 2 else scores.sigmoid()


def stage_errors(hook: Hook, stages: Sequence[str], *, known: Sequence[str]) -> Iterator[ErrorDetails]:
    """Yield the errors in the option `stages` of a hook: an unknown name, or an empty list.

    Args:
        hook: The hook.
        stages: The value of the option.
        known: The valid names.
    """
    expected = f"some of {', '.join(known)}"
    if not stages:
        yield hook.error("stages", got="[]", expected=expected, fix=hook.leave_out)
    for stage in stages:
        if stage not in known:
            yield hook.error("stages", got=repr(stage), expected=expected)
