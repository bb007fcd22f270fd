"""The hook `samples`, which draws input pictures with their targets and the outputs of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import torch
from annotated_types import Ge
from PIL import Image as Pillow
from torch import Tensor
from torch.nn.functional import pad

from exp.errors import ErrorDetails
from exp.extras.evaluation.class_counts import stage_errors
from exp.hooks.figures import INK, LINE, MARGIN, RIGHT, TEXT_SIZE, WRONG, blank, widest
from exp.hooks.hook import Hook, Values
from exp.hooks.panels import Image, Panel
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.shared_types import STAGES, DataSpec, Stage
from exp.spelling import among

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

# Maximum number of values in a caption.
NUMBERS = 3
COLUMNS = 4
CHANNELS = (1, 3, 4)


class Samples(Hook):
    """Hook that draws input pictures with their targets and outputs as captions, with the tag `samples/<stage>`.

    A caption shows the names of the target class and of the predicted class. The frame of the picture is blue if they
    are equal, and orange if they differ. A caption of a regression shows up to three numbers.

    The normalization of pictures is inverted with `mean` and `std`. If they are None, the smallest value of a picture
    is drawn black, and the largest value white. Pictures of uint8 are drawn unchanged.

    An evaluation shows a random selection of the samples of rank 0, which is the same in all evaluations. A training
    step shows the first samples of its batch.

    Args:
        every_n_steps: Period in training, in optimizer steps. Default: 500. Every evaluation is drawn.
        stages: Splits that are drawn: `train`, `val`, `test`. Default: only `val`.
        count: Number of pictures. Default: 16.
        mean: Mean with which pixels from 0 to 1 were normalized: one number, or one number per channel. Default: None.
        std: Standard deviation with which the pixels were normalized, in the same form as `mean`. Default: None.
        threshold: Limit for a network with one output for two classes: a larger output predicts class 1. Default: 0,
            which is correct for scores. Set 0.5 for probabilities.
        input: Name of the pictures in the batch. Default: `input`.
        output: Name of the predictions in the outputs of the network. Default: `output`.
        target: Name of the targets in the batch. Default: `target`.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 500,
        stages: Sequence[str] = ("val",),
        count: Annotated[int, Ge(1)] = 16,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        threshold: float = 0.0,
        input: str = "input",
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.stages, self.count = tuple(stages), count
        self.mean, self.std, self.threshold = mean, std, threshold
        self.input, self.output, self.target = input, output, target
        # The selected samples of the current evaluation. The key of a sample is its random number.
        self._parts: dict[float, Shown] = {}
        self._draw = np.random.default_rng(0)
        self._drawn_step = 0

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        yield from stage_errors(self, self.stages, known=STAGES)
        inputs = DataSpec.of(planned.settings.data).inputs
        channels = None
        if self.input in inputs:
            shape, dtype = list(inputs[self.input].shape), inputs[self.input].dtype
            channels = shape[0] if len(shape) == 3 else 1
            if len(shape) not in (2, 3) or channels not in CHANNELS or dtype.startswith("int"):
                expected = "pictures, float32 or uint8 [H, W] or [C, H, W] with C of 1, 3 or 4"
                yield self.error(got=f"{dtype} input of shape {shape}", expected=expected, fix=self.leave_out)
                return
        elif self.input == "input":
            # Other names are not checked, because a batch may contain values that the data do not declare.
            yield self.error("input", got="input", expected=f"one of {among(inputs)}, the data's inputs")
        yield from self._scale_errors(channels)

    def _scale_errors(self, channels: int | None) -> Iterator[ErrorDetails]:
        if (self.mean is None) != (self.std is None):
            given, other = ("mean", "std") if self.std is None else ("std", "mean")
            yield self.error(other, got="null", expected=f"a list like hooks.{self.name}.{given}, or null for both")
            return
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers is not None and channels is not None and len(numbers) not in (1, channels):
                expected = f"one number, or one per channel: {channels}"
                yield self.error(name, got=f"{len(numbers)} numbers", expected=expected)
        if self.std is not None and min(self.std, default=0.0) <= 0:
            yield self.error("std", got=list(self.std), expected="numbers above 0")

    def after_forward(self, step: Step, values: Mapping[str, object]) -> Values | None:
        if "train" not in self.stages or self._drawn_step == step.index:
            return None
        self._drawn_step = step.index
        return {"samples/train": self._select(values, slice(self.count))}

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        if stage not in self.stages:
            return
        # Each sample of the evaluation gets a random number. The samples with the smallest numbers are shown, so that
        # the selection does not depend on the batch size.
        drawn = self._draw.random(len(next(tensors_in(values[self.input])))).tolist()
        largest = sorted([*self._parts, *drawn])[: self.count][-1]
        self._parts = {number: part for number, part in self._parts.items() if number <= largest}
        for place, number in enumerate(drawn):
            if number <= largest:
                self._parts[number] = self._select(values, slice(place, place + 1))

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        parts, self._parts, self._draw = list(self._parts.values()), {}, np.random.default_rng(0)
        return {f"samples/{stage}": join_pictures(parts)} if parts else None

    def _select(self, values: Mapping[str, object], places: slice) -> Shown:
        """Return the panel of some samples of a batch.

        Args:
            values: Values of the batch and outputs of the network, by name.
            places: Positions of the samples in the batch.
        """
        shown, output, target = (
            None if found is None else found.detach()[places]
            for found in (next(tensors_in(values.get(name)), None) for name in (self.input, self.output, self.target))
        )
        assert shown is not None
        if output is not None and target is not None:
            output = _as_classes(output, target, threshold=self.threshold)
        pixels = pictures(shown, mean=self.mean, std=self.std)
        return Shown(pixels, _numbers(target), _numbers(output), tuple(self._class_names.get(self.target, ())))


@dataclass(frozen=True, slots=True, eq=False)
class Shown(Panel):
    """Panel that draws pictures with captions on the host.

    Args:
        pixels: Pictures `[N, C, H, W]`, uint8.
        targets: K numbers for each sample, `[N, K]`, with K from 1 to 3. Integers are class numbers. None if there are
            no targets, or more than 3 numbers for each sample.
        outputs: K numbers for each sample, `[N, K]`, by the same rules as the targets. Integers are predicted classes.
        names: Names of the classes. Default: no names.
    """

    pixels: Tensor
    targets: Tensor | None
    outputs: Tensor | None
    names: Sequence[str] = ()

    def draw(self) -> Image:
        known = [("target", self.targets), ("output", self.outputs)]
        captions = [
            Caption(
                [f"{word} {self._words(numbers[place])}" for word, numbers in known if numbers is not None],
                self._right(place),
            )
            for place in range(len(self.pixels))
        ]
        judged = [caption.right for caption in captions if caption.right is not None]
        title = f"{sum(judged)} of {len(judged)} correct; orange is wrong" if judged else f"{len(captions)} samples"
        sheet = draw_captioned(to_rgb(self.pixels), captions, title=title, columns=COLUMNS)
        return Image(torch.from_numpy(sheet).permute(2, 0, 1)[None])

    def _words(self, numbers: Tensor) -> str:
        if numbers.is_floating_point():
            return " ".join(f"{number:.3g}" for number in numbers.tolist())
        known = range(len(self.names))
        return " ".join(self.names[one] if one in known else str(one) for one in numbers.tolist())

    def _right(self, place: int) -> bool | None:
        if self.targets is None or self.outputs is None or self.targets.shape != self.outputs.shape:
            return None
        if self.targets.is_floating_point() or self.outputs.is_floating_point():
            return None
        return bool((self.targets[place] == self.outputs[place]).all())


def join_pictures(parts: Sequence[Shown]) -> Shown:
    """Return one panel of the pictures in several panels. Pictures are padded with white to the largest size."""

    def whole(tensors: Sequence[Tensor | None]) -> Tensor | None:
        known = [one for one in tensors if one is not None]
        is_same = len(known) == len(tensors) and len({one.shape[1:] for one in known}) == 1
        return torch.cat(known) if is_same else None

    high, wide = (max(part.pixels.shape[side] for part in parts) for side in (2, 3))
    sizes = [(0, wide - part.pixels.shape[3], 0, high - part.pixels.shape[2]) for part in parts]
    pixels = torch.cat([pad(part.pixels, size, value=255) for part, size in zip(parts, sizes, strict=True)])
    targets, outputs = whole([part.targets for part in parts]), whole([part.outputs for part in parts])
    return replace(parts[0], pixels=pixels, targets=targets, outputs=outputs)


def _as_classes(output: Tensor, target: Tensor, *, threshold: float) -> Tensor:
    """Return the predicted class numbers. Return the output unchanged if it does not contain scores of classes.

    Args:
        output: Output of the network.
        target: Targets. They are class numbers if their dtype is integer or bool.
        threshold: Limit for one score for two classes: class 1 is predicted if the score is larger.
    """
    if target.is_floating_point():
        return output
    if output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape and output.shape[-1] > 1:
        return output.argmax(-1)
    return (output > threshold).to(target.dtype).reshape(target.shape) if output.numel() == target.numel() else output


def _numbers(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of N samples as numbers for captions, `[N, K]`.

    Return None if the tensor is None or a scalar, or if there are more than 3 numbers for each sample.
    """
    if tensor is None or not tensor.dim():
        return None
    flat = tensor.reshape(len(tensor), -1)
    if flat.dtype == torch.bool:
        flat = flat.long()
    return flat if 1 <= flat.shape[1] <= NUMBERS else None


def pictures(values: Tensor, *, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return the inputs of a network as pixels, uint8 `[N, C, H, W]`.

    The function does not synchronize with the device.

    Args:
        values: Inputs `[N, H, W]` or `[N, C, H, W]`.
        mean: Mean with which pixels from 0 to 1 were normalized: one number, or one number per channel. If `mean` or
            `std` is None, the smallest value of a picture becomes black, and the largest value white.
        std: Standard deviation with which the pixels were normalized, in the same form as `mean`.
    """
    values = values[:, None] if values.dim() == 3 else values
    if values.dtype == torch.uint8 or mean is None or std is None:
        return Image.of(values, stretched=values.dtype != torch.uint8).pixels
    channels = values.shape[1]
    restored = [values[:, channel] * std[channel % len(std)] + mean[channel % len(mean)] for channel in range(channels)]
    return Image.of(torch.stack(restored, dim=1)).pixels


def to_rgb(pixels: Tensor) -> np.ndarray:
    """Return pictures as RGB pixels on the host, a NumPy array of uint8, `[N, H, W, 3]`.

    Args:
        pixels: Pictures, uint8 `[N, C, H, W]`. If C is 4, the last channel is the opacity, and the background is white.
    """
    if pixels.shape[1] == 4:
        opacity = pixels[:, 3:].float() / 255
        pixels = (pixels[:, :3] * opacity + 255 * (1 - opacity)).round().to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


class Caption(NamedTuple):
    """Caption below a picture.

    Attributes:
        lines: Lines of text.
        right: Whether the prediction is correct. Default: None, if there is no predicted class.
    """

    lines: Sequence[str]
    right: bool | None = None


def draw_captioned(pictures: np.ndarray, captions: Sequence[Caption], *, title: str, columns: int) -> np.ndarray:
    """Draw pictures in a grid, with a frame and a caption for each picture.

    The frame is blue if the prediction is correct, and orange if it is wrong.

    Args:
        pictures: N pictures, uint8 `[N, H, W, 3]`. Small pictures are enlarged by an integer factor.
        captions: Captions of the N pictures.
        title: Text above the grid.
        columns: Number of pictures per row.

    Returns:
        Picture, uint8 `[H', W', 3]`.
    """
    factor = max(1, 64 // max(pictures.shape[1:3]))
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, _ = pictures.shape
    columns = min(columns, count)
    wide = max(width, widest([line for caption in captions for line in caption.lines])) + 2 * MARGIN
    high = height + 2 * MARGIN + max(len(caption.lines) for caption in captions) * LINE
    top = TEXT_SIZE + 2 * MARGIN
    sheet, pen, font = blank(columns * wide, top + -(-count // columns) * high, title)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = place % columns * wide, top + place // columns * high
        colour = INK if caption.right is None else RIGHT if caption.right else WRONG
        left = x + (wide - width) // 2
        pen.rectangle((left - 3, y - 3, left + width + 2, y + height + 2), outline=colour, width=2)
        sheet.paste(Pillow.fromarray(picture), (left, y))
        for number, line in enumerate(caption.lines):
            pen.text((left - 3, y + height + 4 + number * LINE), line, fill=colour, font=font)
    return np.array(sheet)
