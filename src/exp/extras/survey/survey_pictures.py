"""Draws a survey: samples with their targets, histograms of columns, and shares of classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import avg_pool2d

from exp.data.data import Data
from exp.errors import is_installed
from exp.extras.survey.survey import Part, Shown, Survey
from exp.hooks.figures import Caption, captioned
from exp.hooks.samples import coloured, pictures
from exp.shared_types import Stage

# The longer side of a picture in pixels; each pixel of a larger picture is the mean of several.
SIDE = 256
# Classes that are drawn, and those up to which they are named.
BARS, NAMED = 200, 40
STYLE: dict[Any, Any] = {"font.size": 8.0, "text.parse_math": False, "axes.titlesize": 8.0}


def sheets(data: Data, survey: Survey) -> Iterator[tuple[str, np.ndarray]]:
    """Yield pictures by name: samples/<entry>/<part>, and with Matplotlib histograms/<entry> and classes/<target>."""
    for stage, shown in survey.shown.items():
        for name, values in shown.pictures.items():
            yield f"samples/{name}/{stage}", _samples(data, stage, survey.parts[stage], shown, name, values)
    if is_installed("matplotlib"):
        import matplotlib

        with matplotlib.rc_context(STYLE):
            for name in dict.fromkeys(name for shown in survey.shown.values() for name in shown.rows):
                yield f"histograms/{name}", _histograms(survey, name)
            for name in dict.fromkeys(name for part in survey.parts.values() for name in part.classes):
                yield f"classes/{name}", _class_shares(survey, name)


def _histograms(survey: Survey, name: str) -> np.ndarray:
    """Return the distribution of each column, the parts over each other."""
    rows = {stage: shown.rows[name].numpy() for stage, shown in survey.shown.items() if name in shown.rows}
    width = min(own.shape[1] for own in rows.values())
    across = min(4, width)
    figure = _figure(max(3.5, 2.0 * across), 0.6 + 1.4 * -(-width // across), title=name)
    axes = figure.subplots(-(-width // across), across, squeeze=False).ravel()
    for place, one in enumerate(survey.parts[next(iter(rows))].numbers[name][:width]):
        finite = {stage: own[np.isfinite(own[:, place]), place].astype(np.float64) for stage, own in rows.items()}
        # The same bins for all parts.
        bins = np.histogram_bin_edges(np.concatenate(list(finite.values())), bins=24)
        for stage, values in finite.items():
            axes[place].hist(values, bins, density=len(values) > 0, histtype="step", label=stage)
        axes[place].set_title(one.name or name)
        axes[place].set_yticks([])
    for empty in axes[width:]:
        empty.set_axis_off()
    return _pixels(figure, axes[0])


def _class_shares(survey: Survey, name: str) -> np.ndarray:
    """Return the share of each class in each part, as bars beside each other."""
    own = {stage: part.classes[name] for stage, part in survey.parts.items() if name in part.classes}
    labels = sorted({label for one in own.values() for label in one.counts})
    few = labels[:BARS]
    rest = f", the first {BARS} of {len(labels):,} classes" if len(labels) > BARS else ""
    figure = _figure(min(14.0, 3.5 + 0.2 * len(few)), 3.0, title=f"{name}, share of each part{rest}")
    axes = figure.add_subplot()
    for place, (stage, one) in enumerate(own.items()):
        shares = [one.counts.get(label, 0) / max(one.total, 1) for label in few]
        axes.bar(np.arange(len(few)) + 0.8 * place / len(own), shares, 0.8 / len(own), align="edge", label=stage)
    names = [next(iter(own.values())).named(label) for label in few] if len(few) <= NAMED else []
    axes.set_xticks(np.arange(len(names)) + 0.4, names, rotation=30, ha="right")
    return _pixels(figure, axes)


def _figure(width: float, height: float, *, title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    figure.suptitle(title)
    return figure


def _pixels(figure: Any, axes: Any) -> np.ndarray:
    """Return a figure with the legend of some axes, uint8 `[H, W, 3]`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _samples(data: Data, stage: Stage, part: Part, shown: Shown, name: str, values: Tensor) -> np.ndarray:
    """Return some samples as pictures, each with its number and its targets."""
    is_input = name == "input"
    pixels = pictures(values, mean=data.input_mean if is_input else None, std=data.input_std if is_input else None)
    factor = -(-max(pixels.shape[-2:]) // SIDE)
    if factor > 1:
        pixels = avg_pool2d(pixels.float(), factor, ceil_mode=True).round().to(pixels.dtype)
    captions = []
    for place, index in enumerate(shown.indices[: len(pixels)]):
        targets = [f"{target} {_words(part, target, labels[place])}" for target, labels in shown.labels.items()]
        captions.append(Caption(lines=[f"{stage} {index}", *targets]))
    title = f"{name} of {stage}, {len(captions)} of {part.looked_at:,} samples"
    return captioned(coloured(pixels), captions, title=title, columns=4)


def _words(part: Part, name: str, label: Tensor) -> str:
    """Return a target as a caption shows it."""
    if label.numel() > 3:
        return str(list(label.shape))
    if name in part.classes and not label.dim():
        return part.classes[name].named(int(label))
    return " ".join(f"{number:.3g}" for number in label.reshape(-1).tolist())
