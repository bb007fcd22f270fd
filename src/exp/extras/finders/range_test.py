"""The learning-rate range test: increases the rate at each step, records the losses, and suggests a rate.

The method is from Smith, Cyclical Learning Rates for Training Neural Networks, 2017, https://arxiv.org/abs/1506.01186.
As in fastai and Lightning's lr_find, the rate increases exponentially, and the test ends when the smoothed loss rises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from lightning.pytorch import Callback, LightningModule, Trainer

from exp.engine.recording import Recording
from exp.errors import RunError
from exp.extras.finders.short_run import write_table
from exp.files import write_atomic
from exp.hooks.figures import curves
from exp.hooks.panels import png
from exp.output import warn_not_written
from exp.shared_types import Batch
from exp.strategies.whole_state import local_part

TABLE, SUMMARY, PICTURE = "lr.csv", "lr.json", "lr.png"
# Weight of the old value in the running mean of the loss, as in fastai and Lightning.
BETA = 0.98
FEWEST_STEPS = 20
# The test ends when the smoothed loss rises above this multiple of its lowest value.
STOP_FACTOR = 4
# A loss diverges if it exceeds the mean of the first losses by DEVIATIONS standard deviations of the first losses, and
# by OF_FALL times the largest decrease.
DEVIATIONS, OF_FALL = 6, 0.25
# The suggestion is at most this fraction of the rate at which the loss diverged or the test ended. If a LeNet is
# trained with a quarter of that rate, SGD and momentum, its accuracy is at chance level after three epochs.
OF_LAST_RATE = 0.1
# A decrease below NOISE standard deviations of the first losses is noise. A decrease below ROUNDING times the loss is a
# rounding error.
NOISE, ROUNDING = 1.25, 1e-6
End = Literal["steps", "loss_rose", "not_finite"]


class RangeTest(Callback):
    """Callback that increases the learning rate at every optimizer step, and ends the training when the loss rises.

    The ratios between the learning rates of optimizer groups stay the same. The loss of a step is computed before the
    update of the step. The callback writes lr.csv, lr.json and lr.png to the run directory. The losses are those of the
    callback Recording, so trainer.log_every_n_steps must be 1.

    Args:
        lowest: First value of optimizer.lr.
        highest: Last value of optimizer.lr.
        steps: Number of optimizer steps.
    """

    def __init__(
        self,
        *,
        lowest: Annotated[float, Gt(0)],
        highest: Annotated[float, Gt(0)],
        steps: Annotated[int, Ge(FEWEST_STEPS)],
    ) -> None:
        super().__init__()
        self.rates = rising_rates(lowest, highest, steps)
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.end: End = "steps"
        self._mean, self._lowest, self._own = 0.0, math.inf, math.nan
        self._factors: list[tuple[dict[str, object], float]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # A loss that is not finite ends the test, and is no error of the run.
        self._recording(trainer).leave_out_lost()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self._own = own = float(optimizer.defaults["lr"])
        if not own > 0:
            raise RunError(
                f"optimizer.lr is {own:g}; expected a rate above 0, because groups have multiples of this rate"
            )
        self._factors = [(group, float(group["lr"]) / own) for group in optimizer.param_groups]
        for group, _ in self._factors:
            # The run's notes about its first steps recognize a warm-up by this key.
            group.setdefault("initial_lr", group["lr"])
        self._set_rate()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == len(self.losses):
            return  # not the last micro-batch of a step
        # The loss over all micro-batches and ranks, which is the same on each rank.
        loss = self._recording(trainer).latest["loss/train"]
        self.losses.append(loss)
        end = self._judge(loss)
        if end is not None:
            self.end = end
            trainer.should_stop = True
        elif len(self.losses) < len(self.rates):
            self._set_rate()
        if end == "not_finite":
            # Weights that are not finite would end the run with an error. They can be replaced, because they are not
            # used again.
            with torch.no_grad():
                for tensor in (*pl_module.parameters(), *pl_module.buffers()):
                    if tensor.is_floating_point():
                        torch.nan_to_num_(local_part(tensor))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        directory, done = Path(trainer.default_root_dir), len(self.losses)
        rates = self.rates[:done]
        found = suggestion(rates, self.losses)
        steps = zip(range(1, done + 1), rates, self.losses, self.smoothed, strict=True)
        write_table(directory / TABLE, ("step", "lr", "loss", "smoothed_loss"), steps)
        summary = {"end": self.end, "steps": done, "own_lr": self._own, "suggestion": found}
        write_atomic(directory / SUMMARY, json.dumps(summary, indent=2) + "\n")
        try:
            write_atomic(directory / PICTURE, png(picture(rates, self.losses, found)))
        except OSError as error:  # the numbers are more important than the picture
            warn_not_written(str(directory / PICTURE), error)

    def _set_rate(self) -> None:
        rate = self.rates[len(self.losses)]
        for group, factor in self._factors:
            group["lr"] = rate * factor

    def _judge(self, loss: float) -> End | None:
        """Update the smoothed loss with the loss of a step, and return the reason to end the test; None to continue."""
        if not math.isfinite(loss):
            self.smoothed.append(math.nan)
            return "not_finite"
        self._mean = BETA * self._mean + (1 - BETA) * loss
        # The initial mean of 0 has the weight BETA ** n after n losses.
        smoothed = self._mean / (1 - BETA ** len(self.losses))
        self.smoothed.append(smoothed)
        # A difference is compared instead of a ratio, because losses may be negative.
        is_high = smoothed > self._lowest + (STOP_FACTOR - 1) * abs(self._lowest)
        self._lowest = min(self._lowest, smoothed)
        return "loss_rose" if is_high else None

    def _recording(self, trainer: Trainer) -> Recording:
        return next(one for one in vars(trainer)["callbacks"] if isinstance(one, Recording))


def rising_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return the learning rate of each step.

    The rates increase from the lowest to the highest by a constant factor.
    """
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def suggestion(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which half of the largest decrease of the loss is reached.

    Losses are averaged over neighboring steps. Steps after the first divergence are ignored. The rate is at most
    OF_LAST_RATE times the rate at the divergence, or times the last rate if the loss does not diverge.

    Args:
        rates: Learning rate of each step.
        losses: Loss of each step.

    Returns:
        The rate. None: the loss has no decrease that is larger than its noise.
    """
    stop = steps_before_divergence(losses)
    first = np.array(losses[: _count_of_first(losses)])
    if stop <= len(first) or stop < FEWEST_STEPS // 2:
        return None
    means = neighbor_means(losses[:stop])
    start, low = first.mean(), int(means.argmin())
    fall = start - means[low]
    if fall <= max(NOISE * first.std(ddof=1), ROUNDING * abs(start)):
        return None
    above = np.flatnonzero(means[: low + 1] > start - fall / 2)
    return float(min(rates[int(above[-1])], rates[min(stop, len(rates) - 1)] * OF_LAST_RATE))


def steps_before_divergence(losses: Sequence[float]) -> int:
    """Return the number of steps before the loss diverges.

    A loss diverges if it is not finite or far above the first losses; see DEVIATIONS.
    """
    first = np.array(losses[: _count_of_first(losses)])
    if len(first) < 2 or not np.isfinite(first).all():
        return next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    fall = first.mean() - np.nanmin(losses)
    limit = first.mean() + max(DEVIATIONS * first.std(ddof=1), OF_FALL * fall)
    high = (step for step, loss in enumerate(losses) if not loss <= limit and step >= len(first))
    return next(high, len(losses))


def neighbor_means(losses: Sequence[float]) -> np.ndarray:
    """Return the moving average of the losses.

    The average covers 5 % of all steps on each side of a step. At both ends it covers fewer steps.
    """
    reach = max(len(losses) // 20, 1)
    return np.array([np.mean(losses[max(step - reach, 0) : step + reach + 1]) for step in range(len(losses))])


def _count_of_first(losses: Sequence[float]) -> int:
    return max(len(losses) // 10, FEWEST_STEPS // 4)


def picture(rates: Sequence[float], losses: Sequence[float], found: float | None) -> np.ndarray:
    """Return a picture `[H, W, 3]`, uint8, of losses, moving average and suggestion over the logarithm of the rate.

    Args:
        rates: Learning rate of each step.
        losses: Loss of each step.
        found: The suggested rate, or None.
    """
    stop = steps_before_divergence(losses)
    means = [*neighbor_means(losses[:stop]), *[math.nan] * (len(losses) - stop)]
    known = [loss for loss in losses[:stop] if math.isfinite(loss)] or [0.0]
    # Larger losses are not drawn, because a loss after the divergence may be a thousand times the others.
    ceiling = max(known) + (max(known) - min(known)) / 4
    shown = {"loss": [loss if loss <= ceiling else math.nan for loss in losses], "mean of neighbors": means}
    if found is not None:
        place = int(np.searchsorted(rates, found, side="right")) - 1
        shown[f"suggested {found:.3g}"] = [mean if step == place else math.nan for step, mean in enumerate(means)]
    powers = [math.log10(rate) for rate in rates]
    return curves(powers, shown, title="loss in the range test", along="learning rate, as a power of ten")
