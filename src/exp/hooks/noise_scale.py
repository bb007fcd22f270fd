"""The gradient noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162.

B_simple = tr(S) / |G|^2, section 2.2: S the covariance of the gradients of single samples, G the true gradient. A batch
much smaller than it has a gradient that is mostly noise; in one much larger the samples say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class NoiseScale:
    """The estimators of appendix A.1, with batches of one sample for the small one and the step's for the big one.

        |G|^2  estimated by (B |g_B|^2 - mean |g_1|^2) / (B - 1)
        tr(S)  estimated by (mean |g_1|^2 - |g_B|^2) / (1 - 1 / B)

    Both are unbiased; of one step, the first may be below 0. Their quotient is biased, so that it is taken of running
    means of the two, as the paper does; these begin anew with the run and with each resume.

    smoothing: the share of the running mean that stays at each step, 0 to below 1; 0 takes each step by itself.
    """

    def __init__(self, *, smoothing: float) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing}; expected a number from 0 to below 1")
        self.smoothing = smoothing
        self._means: Tensor | None = None

    def of(self, *, squares: Tensor, whole: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The two estimates of a step, and the noise scale so far, 0-d; nan where |G|^2 is estimated below 0.

        squares: of the norms of single samples' gradients, `[B]`. whole: of the norm of the step's, 0-d.
        sizes: of its micro-batches, each of which has the same weight in the step's gradient.
        Returns: nothing where the step has one sample.
        """
        # A mean of means: as good as one over so many samples.
        samples = len(sizes) ** 2 / sum(1 / size for size in sizes)
        if samples <= 1:
            return {}
        small, big = squares.mean(), whole
        squared_norm = (samples * big - small) / (samples - 1)
        trace = (small - big) / (1 - 1 / samples)
        now = torch.stack([squared_norm, trace])
        if self._means is None:
            self._means = now
        else:
            mean = self.smoothing * self._means + (1 - self.smoothing) * now
            # Where the loss scale skips a step there is no gradient.
            self._means = torch.where(now.isfinite().all(), mean, self._means)
        scale = torch.where(self._means[0] > 0, self._means[1] / self._means[0], torch.nan)
        return {"squared_norm": squared_norm, "covariance_trace": trace, "noise_scale": scale}
