"""The hook `samples`: what the network is shown, what it should say, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from exp.errors import Fault
from exp.hooks.class_counts import stage_faults
from exp.hooks.hook import Hook, Values
from exp.hooks.panels import Image, Panel
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.shared_types import STAGES, DataSpec, Stage
from exp.spelling import among

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

# A caption has room for so many numbers.
NUMBERS = 3
CHANNELS = (1, 3, 4)


class Samples(Hook):
    """Draws `samples/<stage>`: pictures of an evaluation, or of a due training step, each with its captions.

    A caption says the target and what the network gave: of a classification the classes, with a blue frame where they
    agree and an orange one where they do not (for a class at each of several places the share that agrees); of a
    regression the numbers, up to three; of anything else its shape. Pictures are un-normalised by `mean` and `std`;
    bytes are shown as they are; without the two, each picture's smallest value is black and its largest white.

    Of an evaluation they are chosen at random from the first rank's whole share, the same ones each time. Of a training
    step they are the first ones. Classes are called as the data calls them.

    stages: of train, val, test. every_n_steps: for train; an evaluation is drawn each time.
    count: pictures. columns: of the grid.
    mean, std: by which the data set normalised pixels from 0 to 1, one number or one a channel; null where it did not.
    threshold: of a network with one output for two classes: above it is class 1. 0 of a score, 0.5 of a probability.
    input, output, target: names among the batch's entries and the network's outputs.
    """

    least = {"count": 1, "columns": 1}

    def __init__(
        self,
        *,
        every_n_steps: int = 500,
        stages: Sequence[str] = ("val",),
        count: int = 16,
        columns: int = 4,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        threshold: float = 0.0,
        input: str = "input",
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.stages, self.count, self.columns = tuple(stages), count, columns
        self.mean, self.std, self.threshold = mean, std, threshold
        self.input, self.output, self.target = input, output, target
        # Of an evaluation: its pictures so far, by the numbers that were drawn for them.
        self._parts: dict[float, Shown] = {}
        self._draw = np.random.default_rng(0)
        self._drawn_step = 0

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        yield from stage_faults(self, self.stages, known=STAGES)
        inputs = DataSpec.of(planned.config["data"]).inputs
        if self.input not in inputs:
            if self.input == "input":
                yield self.fault("input", got="input", expected=f"one of {among(inputs)}, the data's inputs")
            yield from self._scale_faults(None)  # of another entry of the batch nothing is declared
            return
        shape, dtype = list(inputs[self.input].shape), inputs[self.input].dtype
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in CHANNELS):
            expected = "data whose input is a picture, [H, W] or [C, H, W] with C of 1, 3 or 4"
            yield self.fault(got=f"input of shape {shape}", expected=expected, cure=self.leave_out)
        elif dtype.startswith("int"):
            yield self.fault(got=f"input of {dtype}", expected="pixels: float32 or uint8")
        else:
            yield from self._scale_faults(shape[0] if len(shape) == 3 else 1)

    def after_forward(self, step: Step, values: Mapping[str, object]) -> Values | None:
        if "train" not in self.stages or self._drawn_step == step.index:
            return None
        self._drawn_step = step.index
        return {"samples/train": self._shown(values, slice(self.count))}

    def evaluated(self, stage: Stage, values: Mapping[str, object]) -> None:
        if stage not in self.stages:
            return
        # The samples with the smallest numbers are a random choice, whatever the order and the batch size.
        drawn = self._draw.random(len(next(tensors_in(values[self.input])))).tolist()
        largest = sorted([*self._parts, *drawn])[: self.count][-1]
        self._parts = {number: part for number, part in self._parts.items() if number <= largest}
        for place, number in enumerate(drawn):
            if number <= largest:
                self._parts[number] = self._shown(values, slice(place, place + 1))

    def after_evaluation(self, stage: Stage, gather: Callable[[Tensor], Tensor]) -> Values | None:
        parts, self._parts, self._draw = list(self._parts.values()), {}, np.random.default_rng(0)
        return {f"samples/{stage}": joined(parts)} if parts else None

    def _scale_faults(self, channels: int | None) -> Iterator[Fault]:
        if (self.mean is None) != (self.std is None):
            given, other = ("mean", "std") if self.std is None else ("std", "mean")
            yield self.fault(other, got="null", expected=f"a list as hooks.{self.name}.{given} is, or null for both")
            return
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers is not None and channels is not None and len(numbers) not in (1, channels):
                expected = "one number" + (f", or {channels}: one a channel" if channels > 1 else "")
                yield self.fault(name, got=f"{len(numbers)} numbers", expected=expected)
        if self.std is not None and min(self.std, default=0.0) <= 0:
            yield self.fault("std", got=list(self.std), expected="numbers above 0")

    def _shown(self, values: Mapping[str, object], places: slice) -> Shown:
        """Return some samples of a batch."""
        shown = next(tensors_in(values[self.input]))
        pixels = pictures(shown.detach()[places], mean=self.mean, std=self.std)
        output = next(tensors_in(values.get(self.output)), None)
        target = next(tensors_in(values.get(self.target)), None)
        if output is not None:
            output = output.detach()[places]
        if target is not None:
            target = target.detach()[places]
            output = _as_classes(output, target, threshold=self.threshold)
        names = tuple(self._class_names.get(self.target, ()))
        return Shown(pixels, _numbers(target), _numbers(output), _shape(target), _shape(output), self.columns, names)


def pictures(values: Tensor, *, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """`[N, H, W]` or `[N, C, H, W]` as pixels: uint8 `[N, C, H, W]`. Nothing waits for the device.

    mean, std: see Samples; without them floats are stretched, each picture from black to white.
    """
    values = values[:, None] if values.dim() == 3 else values
    if values.dtype == torch.uint8 or mean is None or std is None:
        return Image.of(values, stretched=values.dtype != torch.uint8).pixels
    channels = values.shape[1]
    restored = [values[:, channel] * std[channel % len(std)] + mean[channel % len(mean)] for channel in range(channels)]
    return Image.of(torch.stack(restored, dim=1)).pixels


@dataclass(frozen=True, slots=True, eq=False)
class Shown(Panel):
    """Pictures and what is said of them, which is drawn on the host.

    pixels: uint8 `[N, C, H, W]`.
    targets, outputs: `[N, K]`, a few numbers for each, whole ones of classes; None where there are none, or too many.
    target_shape, output_shape: of one sample's; None where there is none.
    names: of the classes, in the order of their numbers; empty where they have none.
    """

    pixels: Tensor
    targets: Tensor | None
    outputs: Tensor | None
    target_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    columns: int
    names: Sequence[str] = ()

    def drawn(self) -> Image:
        from exp.hooks.figures import Caption, captioned

        captions, hits = [], []
        for place in range(len(self.pixels)):
            target = _words(self.targets, self.target_shape, place, self.names)
            output = _words(self.outputs, self.output_shape, place, self.names)
            right = self._right(place)
            hits.append(right)
            lines = [f"{name} {words}" for name, words in (("target", target), ("output", output)) if words]
            captions.append(Caption(lines=lines, right=right))
        judged = [right for right in hits if right is not None]
        title = f"{sum(judged)} of {len(judged)} right; orange is wrong" if judged else f"{len(captions)} samples"
        sheet = captioned(coloured(self.pixels), captions, title=title, columns=self.columns)
        return Image(torch.from_numpy(sheet).permute(2, 0, 1)[None])

    def _right(self, place: int) -> bool | None:
        if self.targets is None or self.outputs is None or self.targets.shape != self.outputs.shape:
            return None
        if self.targets.is_floating_point() or self.outputs.is_floating_point():
            return None
        return bool((self.targets[place] == self.outputs[place]).all())


def joined(parts: Sequence[Shown]) -> Shown:
    """The pictures of several batches as one panel."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def whole(name: str) -> Tensor | None:
        tensors = [one for part in parts if (one := getattr(part, name)) is not None]
        is_same = len(tensors) == len(parts) and len({one.shape[1:] for one in tensors}) == 1
        return torch.cat(tensors) if is_same else None

    high, wide = (max(part.pixels.shape[side] for part in parts) for side in (2, 3))
    sizes = [(0, wide - part.pixels.shape[3], 0, high - part.pixels.shape[2]) for part in parts]
    pixels = torch.cat([pad(part.pixels, size, value=255) for part, size in zip(parts, sizes, strict=True)])
    return replace(first, pixels=pixels, targets=whole("targets"), outputs=whole("outputs"))


def _as_classes(output: Tensor | None, target: Tensor, *, threshold: float) -> Tensor | None:
    """Scores for class numbers as the classes that they choose; another output as it is."""
    if output is None or target.is_floating_point():
        return output
    if output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape and output.shape[-1] > 1:
        return output.argmax(-1)
    return (output > threshold).to(target.dtype).reshape(target.shape) if output.numel() == target.numel() else output


def _numbers(tensor: Tensor | None) -> Tensor | None:
    """`[N, K]` where K is small: what a caption has room for."""
    if tensor is None or not tensor.dim():
        return None
    flat = tensor.reshape(len(tensor), -1)
    if flat.dtype == torch.bool:
        flat = flat.long()
    return flat if 1 <= flat.shape[1] <= NUMBERS else None


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape[1:])


def _words(numbers: Tensor | None, shape: tuple[int, ...] | None, place: int, names: Sequence[str]) -> str:
    if numbers is None:
        return "" if shape is None else str(list(shape))
    row = numbers[place].tolist()
    if numbers.is_floating_point():
        return " ".join(f"{number:.3g}" for number in row)
    return " ".join(names[number] if 0 <= number < len(names) else str(number) for number in row)


def coloured(pixels: Tensor) -> np.ndarray:
    """uint8 `[N, C, H, W]` as NumPy `[N, H, W, 3]`; opacity is laid on white."""
    if pixels.shape[1] == 4:
        opacity = pixels[:, 3:].float() / 255
        pixels = (pixels[:, :3] * opacity + 255 * (1 - opacity)).round().to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
