"""Draws the pictures of a survey: samples with their targets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor
from torch.nn.functional import avg_pool2d

from exp.data.data import Data
from exp.extras.survey.survey import Part, Survey
from exp.hooks.figures import Caption, draw_captioned
from exp.hooks.panels import pictures, to_rgb

# Longer side of a picture in pixels. Larger pictures are averaged.
SIDE = 256


def sheets(data: Data, survey: Survey) -> Iterator[tuple[str, np.ndarray]]:
    """Yield pairs: the name samples_<entry>_<split>, and a picture with the samples, their indices and targets."""
    for stage, shown in survey.shown.items():
        part = survey.parts[stage]
        for name, values in shown.pictures.items():
            scale = {"mean": data.input_mean, "std": data.input_std} if name == "input" else {"mean": None, "std": None}
            pixels = pictures(values, **scale)
            factor = -(-max(pixels.shape[-2:]) // SIDE)
            if factor > 1:
                pixels = avg_pool2d(pixels.float(), factor, ceil_mode=True).round().to(pixels.dtype)
            captions = []
            for place, index in enumerate(shown.indices[: len(pixels)]):
                targets = [f"{target} {_words(part, target, labels[place])}" for target, labels in shown.labels.items()]
                captions.append(Caption(lines=[f"{stage} {index}", *targets]))
            title = f"{name} of {stage}, {len(captions)} of {part.looked_at:,} samples"
            yield f"samples_{name}_{stage}", draw_captioned(to_rgb(pixels), captions, title=title, columns=4)


def _words(part: Part, name: str, label: Tensor) -> str:
    """Return the text of a target for a caption."""
    if label.numel() > 3:
        return str(list(label.shape))
    if name in part.classes and not label.dim():
        return part.classes[name].name_of(int(label))
    return " ".join(f"{number:.3g}" for number in label.reshape(-1).tolist())
