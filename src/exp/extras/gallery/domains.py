"""Data set for domain adaptation on handwritten digits.

The digits of the source domain have labels. The digits of the target domain are changed and have no labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from exp.data.digits import CENTRE, SPREAD, Digits
from exp.data.in_memory import Tensors, tensors_of
from exp.data.randomness import permutation
from exp.shared_types import Stage

UNLABELLED = -100
DARKEST = 16.0
Change = Literal["lit", "shifted", "inverted"]
CHANGES: tuple[Change, ...] = ("lit", "shifted", "inverted")


class DigitDomains(Tensors):
    """Data set of handwritten digits from two domains.

    A sample has `input` float32 `[1, 8, 8]`, `target` int64 and `domain` int64 (0 source, 1 target). The training split
    has 600 labeled digits of the source domain and 600 unlabeled digits of the target domain. The target of an
    unlabeled digit is -100. The validation and test splits have other digits of the target domain, with labels.

    Args:
        part: Split: train, val or test.
        change: Change of pictures in the target domain. `lit`: the contrast is halved, and light comes from the right.
            `shifted`: pictures are moved down and right by one pixel, and the last row and column become the first
            ones. `inverted`: pictures are negatives. Default: lit.
    """

    def __init__(self, *, part: Stage, change: Change = "lit") -> None:
        images, classes = tensors_of(Digits().entries)
        # The split does not depend on the run's seed, so that no checkpoint is tested on digits of its training split.
        order = permutation(seed=0, epoch=0, length=len(images))
        source, unlabelled, val, test = order.split([600, 600, 297, 300])
        if part == "train":
            changed = _change_domain(images[unlabelled], change)
            entries = {
                "input": torch.cat([images[source], changed]),
                "target": torch.cat([classes[source], torch.full((len(unlabelled),), UNLABELLED)]),
                "domain": torch.cat(
                    [torch.zeros(len(source), dtype=torch.int64), torch.ones(len(unlabelled), dtype=torch.int64)]
                ),
            }
        else:
            own = val if part == "val" else test
            entries = {
                "input": _change_domain(images[own], change),
                "target": classes[own],
                "domain": torch.ones(len(own), dtype=torch.int64),
            }
        super().__init__(entries=entries, num_classes=10)


def _change_domain(images: Tensor, change: Change) -> Tensor:
    """Return images `[N, 1, 8, 8]` of the source domain, changed to the target domain."""
    if change == "inverted":
        return (DARKEST - 2 * CENTRE) / SPREAD - images
    if change == "shifted":
        return images.roll((1, 1), (-2, -1))
    return 0.5 * images + torch.linspace(-1.0, 1.0, images.shape[-1])
