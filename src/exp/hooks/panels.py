r"""Values of a tag that are not numbers: histograms, columns of heat maps, images, texts, curves.

    def after_backward(self, step):
        return {
            "gradients/norm/total": norm,                                  # a 0-d tensor or a float
            "gradients/histogram/head.weight": Histogram.of(gradient),     # 64 bins
            "gradients/norm": Column.of(norms, healthy=Healthy(low=1e-6)), # a heat map, layers by steps
            "features/conv": Image.of(maps[:, None], stretched=True),      # [N, 1, H, W], one grid
            "operators": Text("| operator | calls |\\n|---|---|\\n..."),     # Markdown
            "pr_curve/val": PrecisionRecallCurve.of(scores, targets),
        }

`of` computes on the device of the tensors without waiting for the device. The result stays on the device until the next
flush. A flush occurs every `trainer.log_every_n_steps` steps, and copies the tensors of all these steps to the host
together. Call `of` within the step, do not call `.item()`, and copy tensors that change later. TensorBoard shows all
kinds of values. Other loggers warn once about kinds that they do not support.
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
    """Base class of logged values that are not numbers."""

    def draw(self) -> Panel:
        """Return the panel to write, with its tensors on the host. Called when the panel is written.

        Most subclasses return this panel. A subclass that needs the host for drawing returns a panel of another class.
        """
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Panel):
    """Histogram: the counts of values in K equal bins.

    Args:
        counts: Counts, `[K]`, float or integer.
        low: Start of the first bin, 0-d; nan if no value is finite.
        high: End of the last bin, 0-d. If all values are equal, `high` equals `low`.
    """

    counts: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, values: Tensor, *, bins: int = BINS) -> Self:
        """Return the histogram of a tensor's finite values, from the smallest to the largest value.

        Args:
            values: Real tensor of any shape.
            bins: Number of bins. Default: 64.
        """
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
        """Return a histogram, given the counts of its bins and the limits from `finite_range`."""
        empty = low > high
        return cls(counts, low.masked_fill(empty, torch.nan), high.masked_fill(empty, torch.nan))


def finite_range(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest finite value of a vector `[K]`, 0-d.

    If no value is finite, return inf and -inf.
    """
    if not len(flat):
        return flat.new_full((), torch.inf), flat.new_full((), -torch.inf)
    # torch.where is used, because a condition on the numbers would wait for the device.
    finite = flat.isfinite()
    return torch.where(finite, flat, torch.inf).amin(), torch.where(finite, flat, -torch.inf).amax()


def bin_counts(flat: Tensor, low: Tensor, high: Tensor, *, bins: int) -> Tensor:
    """Return the number of values in each of several bins of equal width.

    Args:
        flat: Values, `[K]`.
        low: Start of the first bin, 0-d.
        high: End of the last bin, 0-d.
        bins: Number of bins.

    Returns:
        Counts, `[bins]`, float.
    """
    low, high = low.to(flat.dtype), high.to(flat.dtype)
    # Both limits are halved, because the distance of two finite floats may be infinite.
    half = torch.where(high > low, high / 2 - low / 2, torch.ones_like(low))
    shares = torch.add(low / -2, flat, alpha=0.5) / half
    if shares.is_cuda and torch.are_deterministic_algorithms_enabled():
        return deterministic_counts(shares, bins)
    # The values are scaled to the range 0 to 1, because histc would wait for limits that are tensors. histc ignores
    # values that are not finite.
    return torch.histc(shares, bins, 0.0, 1.0)


def deterministic_counts(shares: Tensor, bins: int) -> Tensor:
    """Return the same counts as torch.histc from 0 to 1, deterministically on CUDA.

    torch.histc has no deterministic implementation on CUDA.

    Args:
        shares: Values, `[K]`. Values outside of 0 to 1 are ignored.
        bins: Number of bins.
    """
    counted = (shares >= 0.0) & (shares <= 1.0)
    # A share of 1 belongs to the last bin. Shares outside of 0 to 1 go to an additional bin, which is dropped.
    places = (shares * bins).clamp(0, bins - 1).masked_fill(~counted, bins).long()
    return shares.new_zeros(bins + 1).index_add_(0, places, torch.ones_like(shares))[:bins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """Bounds of healthy numbers. A heat map shows other numbers in saturated colors.

    Args:
        low: Lower bound. Default: None, for no bound.
        high: Upper bound. Default: None, for no bound.
        is_logarithmic: Whether the color scale is logarithmic. Default: True.
    """

    low: float | None = None
    high: float | None = None
    is_logarithmic: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Column(Panel):
    """Column of a tag's heat map: one number for each of R parts of a network, such as parameters or layers.

    A run draws the columns of a tag next to each other. The numbers are saved in table.csv, under the tag and the
    names.

    Args:
        names: Names of the R parts. They must be different.
        values: Numbers, `[R]`.
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
        """Return a column, given numbers by name.

        Args:
            numbers: Floats, or 0-d tensors on any devices, by name. At least one number is required.
            healthy: Bounds of healthy numbers.
        """
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
        pixels: Colors of the N pictures, uint8 `[N, C, H, W]`. C is 1 (gray), 3 (color) or 4 (color and opacity).
        columns: Number of pictures per row. Default: None, which makes the grid almost square.
    """

    pixels: Tensor
    columns: int | None = None

    @classmethod
    def of(cls, pictures: Tensor, *, stretched: bool = False, columns: int | None = None) -> Self:
        """Return a grid of pictures.

        Args:
            pictures: Tensor `[N, C, H, W]`, `[C, H, W]` or `[H, W]`. uint8 numbers are used unchanged. In other dtypes,
                0 is black and 1 is white.
            stretched: Whether each picture is scaled so that its smallest value is black and its largest value white,
                as for feature maps. Default: False.
            columns: Number of pictures per row. Default: None, which makes the grid almost square.

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
        """Return the grid as one picture on the host, with black lines between the pictures: uint8 `[H', W', C]`."""
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
    """Text in Markdown."""

    markdown: str


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionRecallCurve(Panel):
    """Precision-recall curve of a binary classification, over T increasing thresholds.

    Args:
        counts: Numbers of true positives, false positives, true negatives and false negatives, `[4, T]`.
    """

    counts: Tensor

    @classmethod
    def of(cls, scores: Tensor, targets: Tensor, *, thresholds: int = THRESHOLDS) -> Self:
        """Return the curve of a batch.

        Args:
            scores: Scores from 0 to 1, `[B]`. A score that is equal to a threshold counts as positive.
            targets: Targets, `[B]`, bool, or 0 and 1.
            thresholds: Number of thresholds, T. Default: 127.
        """
        limits = torch.linspace(0, 1, thresholds, device=scores.device)
        predicted = scores.detach().reshape(1, -1).to(torch.float32) >= limits[:, None]
        positive = targets.detach().reshape(1, -1).to(torch.bool)
        cases = (predicted & positive, predicted & ~positive, ~predicted & ~positive, ~predicted & positive)
        return cls(torch.stack([case.sum(1) for case in cases]))


def on_host(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels with their tensors on the host. Tensors of the same device and dtype are copied together."""
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


def png(sheet: np.ndarray) -> bytes:
    """Return a picture as the bytes of a PNG file.

    Args:
        sheet: Colors of the picture, uint8 `[H, W, C]`. C is 1 (gray), 3 (color) or 4 (color and opacity).
    """
    from PIL import Image as PillowImage

    file = io.BytesIO()
    PillowImage.fromarray(sheet[..., 0] if sheet.shape[2] == 1 else sheet).save(
        # Compression level 1 is twice as fast as the default level. Files are a tenth larger.
        file,
        format="png",
        compress_level=1,
    )
    return file.getvalue()
