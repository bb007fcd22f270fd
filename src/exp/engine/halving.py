"""Going on where memory ran out: fewer samples at a time go through the network, and their gradients are added up."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from exp.errors import RunError, words_of
from exp.nested import mapped
from exp.shared_types import Batch

log = logging.getLogger(__name__)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Halving:
    """The parts in which the micro-batches of a run are computed: all samples at once, until memory has run out.

    A step stays what it was: the parts of a micro-batch count by their samples, and for Lightning, hooks, schedules and
    checkpoints there is one micro-batch, as before.

    most: the samples that go through the network at a time; None is all.
    window: the micro-batches of the step under way, each with its batch_idx: they begin anew where memory runs out, for
        a backward that failed has spoilt their gradients.
    seen: what the metrics of training look at of the micro-batch under way, by name; they take it behind it.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.window: list[tuple[Batch, int]] = []
        self.seen: list[Mapping[str, object]] = []

    def begin(self, batch: Batch, batch_idx: int, *, is_first: bool) -> None:
        """Begin a micro-batch. An optimizer may evaluate its closure several times. is_first: of its window."""
        if is_first:
            self.window = []
        if not self.window or self.window[-1][1] != batch_idx:
            self.window.append((batch, batch_idx))

    def parts(self, batch: Batch) -> list[Batch]:
        """Return a micro-batch in parts of nearly equal size, none larger than `most`."""
        if self.most is None or batch.size <= self.most:
            return [batch]
        count = math.ceil(batch.size / self.most)
        ends = [batch.size * place // count for place in range(count + 1)]
        return [_part(batch, *limits) for limits in itertools.pairwise(ends)]

    def halve(self, batch: Batch, error: BaseException, *, step: int, network: nn.Module) -> None:
        """Take half the samples at a time from here on.

        Raises: the error, where one sample is too much.
        """
        tried = max(part.size for part in self.parts(batch))
        if tried <= 1:
            raise error
        self.most = math.ceil(tried / 2)
        drops = any(isinstance(module, DROPOUTS) for module in network.modules())
        log.warning(
            "out of memory in step %d with %d samples at a time (%s). From here on at most %d go through the network "
            "at a time, and their gradients are added up: the step stays the same%s",
            step,
            tried,
            words_of(error),
            self.most,
            ", but for dropout, which draws other numbers" if drops else "",
        )

    def release_memory(self) -> None:
        """Give back what the failed part held."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _part(batch: Batch, start: int, end: int) -> Batch:
    def part(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        if len(tensor) != batch.size:
            raise RunError(
                f"runtime.out_of_memory is halve, and a batch of {batch.size} samples has an entry of shape "
                f"{list(tensor.shape)}; expected samples along the first axis of each. Write runtime.out_of_memory=stop"
            )
        return tensor[start:end]

    # Its weight is its share of the micro-batch.
    return batch._replace(data=mapped(batch.data, part), size=end - start)
