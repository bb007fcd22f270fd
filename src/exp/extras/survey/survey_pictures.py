"""Draws a survey: samples with their targets, histograms of columns, and shares of classes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor
from torch.nn.functional import avg_pool2d

from exp.data.data import Data
from exp.extras.survey.small_multiples import class_shares, histograms
from exp.extras.survey.survey import Part, Shown, Survey
from exp.hooks.figures import Caption, captioned
from exp.hooks.samples import coloured, pictures
from exp.shared_types import Stage

# The longer side of a picture in pixels; each pixel of a larger picture is the mean of several.
SIDE = 256
# Classes that are drawn.
BARS = 200


def sheets(data: Data, survey: Survey) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the pictures by name: samples/<entry>/<part>, histograms/<entry>, classes/<target>."""
    for stage, shown in survey.shown.items():
        for name, values in shown.pictures.items():
            yield f"samples/{name}/{stage}", _samples(data, stage, survey.parts[stage], shown, name, values)
    for name in dict.fromkeys(name for shown in survey.shown.values() for name in shown.rows):
        rows = {stage: shown.rows[name].numpy() for stage, shown in survey.shown.items() if name in shown.rows}
        numbers = survey.parts[next(iter(rows))].numbers[name]
        width = min(own.shape[1] for own in rows.values())
        columns = {
            one.name or name: {str(stage): own[:, place] for stage, own in rows.items()}
            for place, one in enumerate(numbers[:width])
        }
        yield f"histograms/{name}", histograms(columns, title=f"{name}, each part with the same area")
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.classes):
        yield f"classes/{name}", _class_shares(survey, name)


def _class_shares(survey: Survey, name: str) -> np.ndarray:
    own = {stage: part.classes[name] for stage, part in survey.parts.items() if name in part.classes}
    labels = sorted({label for one in own.values() for label in one.counts})
    few = labels[:BARS]
    rest = f", the first {BARS} of {len(labels):,} classes" if len(labels) > BARS else ""
    shares = {str(stage): [one.counts.get(label, 0) / max(one.total, 1) for label in few] for stage, one in own.items()}
    names = [next(iter(own.values())).named(label) for label in few]
    return class_shares(shares, names, title=f"{name}, share of each part{rest}")


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
