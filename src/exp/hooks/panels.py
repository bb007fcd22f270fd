"""The values of a tag that are not numbers: a histogram, a column of a heat map, images, a text, a curve.

    def after_backward(self, step):
        return {
            "gradients/norm/total": norm,                                  # a 0-d tensor or a float
            "gradients/histogram/head.weight": Histogram.of(gradient),     # 64 bins
            "gradients/norm": Column.of(norms, healthy=Healthy(low=1e-6)), # a heat map, layers by steps
            "features/conv": Image.of(maps[:, None], stretched=True),      # [N, 1, H, W], one grid
            "operators": Text("| operator | calls |\\n|---|---|\\n..."),     # Markdown
            "pr_curve/val": PrecisionRecallCurve.of(scores, targets),
        }

`of` computes on the device of the tensors and does not wait for it. The result stays there until the next flush, every
`trainer.log_every_n_steps` steps, which copies the tensors of all steps to the host together. So call `of` in the step,
do not call `.item()`, and copy a tensor that changes later. TensorBoard shows all kinds. Another logger warns once of
those that it cannot show.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32

BINS = 64
THRESHOLDS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """A value to show that is not a number."""

    def draw(self) -> Panel:
        """Return the panel to show, with tensors on the host. It is called when the panel is written.

        A panel of a hook that cannot be drawn on a device returns a panel of another kind, except a column.
        """
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Panel):
    """The counts of values in K equal bins.

    Args:
        counts: `[K]`, float or integer.
        low: Start of the first bin, 0-d. nan if no value is finite.
        high: End of the last bin, 0-d. Equal to low if all values are equal.
    """

    counts: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, values: Tensor, *, bins: int = BINS) -> Self:
        """Return the histogram of the finite values of a real tensor, between the smallest and the largest."""
        flat = values.detach().reshape(-1).to(at_least_float32(values.dtype))
        if not len(flat):
            nan = flat.new_full((), torch.nan)
            return cls(flat.new_zeros(bins), nan, nan)
        if flat.device.type == "cpu":
            low, high = flat.aminmax()
            if (high - low).isfinite() and high > low:
                return cls(torch.histc(flat, bins, low.item(), high.item()), low, high)
        low, high = finite_range(flat)
        return cls.from_counts(bin_counts(flat, low, high, bins=bins), low, high)

    @classmethod
    def from_counts(cls, counts: Tensor, low: Tensor, high: Tensor) -> Self:
        """Return the histogram of counts between the limits of `finite_range`."""
        empty = low > high
        return cls(counts, low.masked_fill(empty, torch.nan), high.masked_fill(empty, torch.nan))


def finite_range(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest finite value of `[K]`, 0-d; inf and -inf without a finite value."""
    if not len(flat):
        return flat.new_full((), torch.inf), flat.new_full((), -torch.inf)
    # By where, because a test for infinities would wait for the device.
    finite = flat.isfinite()
    return torch.where(finite, flat, torch.inf).amin(), torch.where(finite, flat, -torch.inf).amax()


def bin_counts(flat: Tensor, low: Tensor, high: Tensor, *, bins: int) -> Tensor:
    """Return the counts of `[K]` values in equal bins between low and high, 0-d: `[bins]`, float."""
    low, high = low.to(flat.dtype), high.to(flat.dtype)
    # Halves, because the distance of two finite floats may be infinite.
    half = torch.where(high > low, high / 2 - low / 2, torch.ones_like(low))
    shares = torch.add(low / -2, flat, alpha=0.5) / half
    if shares.is_cuda and torch.are_deterministic_algorithms_enabled():
        return deterministic_counts(shares, bins)
    # Between 0 and 1: histc with limits that are tensors would wait for them. It leaves out what is not finite.
    return torch.histc(shares, bins, 0.0, 1.0)


def deterministic_counts(shares: Tensor, bins: int) -> Tensor:
    """Return the counts of torch.histc between 0 and 1, which has no deterministic implementation on CUDA."""
    counted = (shares >= 0.0) & (shares <= 1.0)
    # A share of 1 is in the last bin, and a share that is not counted in a bin after it.
    places = (shares * bins).clamp(0, bins - 1).masked_fill(~counted, bins).long()
    return shares.new_zeros(bins + 1).index_add_(0, places, torch.ones_like(shares))[:bins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """The bounds of healthy numbers. Other numbers are saturated in a heat map.

    Args:
        low: Lower bound, or None.
        high: Upper bound, or None.
        is_logarithmic: Whether the scale of the colors is logarithmic.
    """

    low: float | None = None
    high: float | None = None
    is_logarithmic: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Column(Panel):
    """A column of the heat map of a tag: a number for each of R parts of a network, such as parameters or layers.

    A run draws the columns of a tag side by side, and keeps the numbers in table.csv, under the tag and their names.

    Args:
        names: R names.
        values: `[R]`.
        healthy: Bounds of healthy numbers.
    """

    names: tuple[str, ...]
    values: Tensor
    healthy: Healthy

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (len(self.names),) or len({*self.names}) != len(self.names):
            raise ValueError(
                f"a column has values of shape {list(self.values.shape)} and {len({*self.names})} names; expected [R] "
                "and R different names"
            )

    @classmethod
    def of(cls, numbers: Mapping[str, Tensor | float], *, healthy: Healthy) -> Self:
        """Return a column of numbers by name: floats, or 0-d tensors on any devices. At least one."""
        values = list(numbers.values())
        like = next((one for one in values if isinstance(one, Tensor)), None)
        if like is None:
            return cls(tuple(numbers), torch.tensor(values, dtype=torch.float64), healthy)
        dtype, place = at_least_float32(like.dtype), like.device
        parts = [torch.as_tensor(one, dtype=dtype, device=place) for one in values]
        return cls(tuple(numbers), torch.stack(parts).detach(), healthy)


@dataclass(frozen=True, slots=True, eq=False)
class Image(Panel):
    """A picture, or a grid of pictures.

    Args:
        pixels: uint8 `[N, C, H, W]`, C is 1 (gray), 3 (color) or 4 (color and opacity).
        columns: Pictures in a row. None makes the grid almost square.
    """

    pixels: Tensor
    columns: int | None = None

    @classmethod
    def of(cls, pictures: Tensor, *, stretched: bool = False, columns: int | None = None) -> Self:
        """Return pictures of `[N, C, H, W]`, `[C, H, W]` or `[H, W]`. Bytes are unchanged; else 0 is black, 1 white.

        stretched: Whether the smallest value of each picture is black and its largest white, as for feature maps.

        Raises:
            ValueError: The tensor has another shape.
        """
        pixels = pictures.detach()
        if pixels.dim() < 4:
            pixels = pixels.reshape((1,) * (4 - pixels.dim()) + tuple(pixels.shape))
        if pixels.dim() != 4 or pixels.shape[1] not in (1, 3, 4) or not pixels.numel():
            raise ValueError(
                f"the pictures have shape {list(pictures.shape)}; expected [N, C, H, W], [C, H, W] or [H, W] with C of "
                "1, 3 or 4"
            )
        if stretched:
            pixels = pixels.to(torch.float32)
            low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
            pixels = (pixels - low) / torch.where(high > low, high - low, torch.ones_like(low))
        if pixels.dtype != torch.uint8:
            pixels = pixels.to(torch.float32).nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
        return cls(pixels, columns)

    def sheet(self) -> np.ndarray:
        """Return the grid with black lines between the pictures: uint8 `[H', W', C]`, on the host."""
        pictures = self.pixels.permute(0, 2, 3, 1).numpy()
        count, height, width, channels = pictures.shape
        columns = min(self.columns or math.ceil(math.sqrt(count)), count)
        rows = math.ceil(count / columns)
        sheet = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
        for place, picture in enumerate(pictures):
            top, left = place // columns * (height + 1), place % columns * (width + 1)
            sheet[top : top + height, left : left + width] = picture
        return sheet


@dataclass(frozen=True, slots=True, eq=False)
class Text(Panel):
    """A Markdown text."""

    markdown: str


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionRecallCurve(Panel):
    """Precision against recall of a binary classification, over T rising thresholds.

    counts: `[4, T]`: true positives, false positives, true negatives, false negatives.
    """

    counts: Tensor

    @classmethod
    def of(cls, scores: Tensor, targets: Tensor, *, thresholds: int = THRESHOLDS) -> Self:
        """Return the curve of a batch.

        Args:
            scores: `[B]`, from 0 to 1. A score at a threshold counts as positive.
            targets: `[B]`, bool or 0 and 1.
            thresholds: Number of thresholds, T.
        """
        limits = torch.linspace(0, 1, thresholds, device=scores.device)
        predicted = scores.detach().reshape(1, -1).to(torch.float32) >= limits[:, None]
        positive = targets.detach().reshape(1, -1).to(torch.bool)
        cases = (predicted & positive, predicted & ~positive, ~predicted & ~positive, ~predicted & positive)
        return cls(torch.stack([case.sum(1) for case in cases]))


def on_host(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels with their tensors on the host. Each device and dtype needs one copy, and so one wait."""
    found = [
        (place, field.name, value)
        for place, panel in enumerate(panels)
        for field in fields(panel)
        if isinstance(value := getattr(panel, field.name), Tensor)
    ]
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
    for one in found:
        kinds.setdefault((one[2].device, one[2].dtype), []).append(one)
    changes: list[dict[str, Tensor]] = [{} for _ in panels]
    for kind in kinds.values():
        joined = torch.cat([tensor.detach().reshape(-1) for _, _, tensor in kind]).cpu()
        parts = joined.split([tensor.numel() for _, _, tensor in kind])
        for (place, name, tensor), part in zip(kind, parts, strict=True):
            changes[place][name] = part.reshape(tensor.shape)
    return [replace(panel, **change) for panel, change in zip(panels, changes, strict=True)]


def pictures(values: Tensor, *, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return pixels, uint8 `[N, C, H, W]`. It does not wait for the device.

    Args:
        values: `[N, H, W]` or `[N, C, H, W]`. Without mean and std, floats are stretched from black to white.
        mean: Mean by which pixels from 0 to 1 were normalized, one number or one a channel.
        std: Deviation by which they were normalized.
    """
    values = values[:, None] if values.dim() == 3 else values
    if values.dtype == torch.uint8 or mean is None or std is None:
        return Image.of(values, stretched=values.dtype != torch.uint8).pixels
    channels = values.shape[1]
    restored = [values[:, channel] * std[channel % len(std)] + mean[channel % len(mean)] for channel in range(channels)]
    return Image.of(torch.stack(restored, dim=1)).pixels


def to_rgb(pixels: Tensor) -> np.ndarray:
    """Return NumPy `[N, H, W, 3]` of uint8 `[N, C, H, W]`, with transparent pixels on white."""
    if pixels.shape[1] == 4:
        opacity = pixels[:, 3:].float() / 255
        pixels = (pixels[:, :3] * opacity + 255 * (1 - opacity)).round().to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


def png(sheet: np.ndarray) -> bytes:
    """Return the bytes of a PNG file. sheet: uint8 `[H, W, C]`, C is 1, 3 or 4."""
    from PIL import Image as PillowImage

    file = io.BytesIO()
    PillowImage.fromarray(sheet[..., 0] if sheet.shape[2] == 1 else sheet).save(
        # Twice as fast as the usual level, for a file that is a tenth larger.
        file,
        format="png",
        compress_level=1,
    )
    return file.getvalue()
