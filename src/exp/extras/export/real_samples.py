"""Batches of a run's own data as its network gets them: what an export is checked with, calibrated by and timed on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exp.data.data import Data
from exp.data.entries import inputs_in, target_in
from exp.data.randomness import preserve_generators
from exp.errors import RunError
from exp.extras.export.named_network import NamedNetwork
from exp.extras.export.preprocessing import Preparation
from exp.nested import mapped
from exp.shared_types import Batch, Stage

# Whose samples are seen without augmentation, first.
BY_CHOICE: tuple[Stage, ...] = ("val", "test", "train")
# Batches whose lengths may differ.
LOOKED_AT = 4


@dataclass(frozen=True, kw_only=True)
class RealSamples:
    """The samples of a run's data by the names of a network's inputs.

    data: of the run. network: whose inputs they are. preparations: by input, undone where raw numbers are asked for.
    """

    data: Data
    network: NamedNetwork
    preparations: Mapping[str, Preparation]

    def stage(self, wanted: Stage | None = None) -> Stage:
        """A part that there is. Raises: RunError where that part is not there."""
        if wanted is not None:
            self.data.part(wanted)
            return wanted
        return next(stage for stage in BY_CHOICE if stage in self.data.stages)

    def batches(self, stage: Stage) -> Iterator[tuple[dict[str, Tensor], Batch]]:
        """Each batch of a part: the network's inputs, raw where it prepares them itself, and the batch."""
        with preserve_generators():
            for number, read in enumerate(self.data.loader(stage)):
                batch = read
                if self.data.transforms_batches(stage):
                    batch = self.data.transform_batch(batch, stage=stage, rank=0, epoch=0, number=number)
                yield self._inputs(batch, number=number), batch

    def examples(self, *, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """A batch of each size, repeated where the data is smaller, and further ones of other lengths.

        Raises: RunError where there is not one sample.
        """
        found: list[dict[str, Tensor]] = []
        for inputs, _ in self.batches(self.stage()):
            found.append(inputs)
            if len(found) == LOOKED_AT:
                break
        if not found:
            raise RunError("the run's data has no sample to check the export with")
        # Of one length only: batches that were brought to different ones do not go together.
        alike = [one for one in found if _lengths(one) == _lengths(found[0])]
        whole = {name: torch.cat([one[name] for one in alike]) for name in found[0]}
        return [*(resized(whole, size) for size in sizes), *(one for one in found if _lengths(one) != _lengths(whole))]

    def _inputs(self, batch: Batch, *, number: int) -> dict[str, Tensor]:
        entries = inputs_in(batch.data)
        size = max(batch.size, 1)
        generator = torch.Generator().manual_seed(number)
        found = {}
        for name, one in self.network.inputs.items():
            dtype = getattr(torch, one.dtype)
            if name in self.network.noise.values():
                shape = (size, *(extent or 1 for extent in one.shape))
                found[name] = torch.randn(shape, generator=generator, dtype=dtype)
            elif name in entries:
                value = entries[name]
                found[name] = self.preparations[name].raw(value) if name in self.preparations else value
            else:  # the only input goes by any name
                found[name] = next(iter(entries.values()))
            found[name] = found[name].to(dtype)
        return found


def targets_of(batch: Batch) -> object:
    """The target of a batch; None where it has none."""
    return target_in(batch.data)


def resized(inputs: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The first `size` samples of a batch, from the beginning again where there are fewer."""
    return {name: one[torch.arange(size) % len(one)] for name, one in inputs.items()}


def shortened_axes(inputs: Mapping[str, Tensor], dimensions: Mapping[str, Mapping[int, str]]) -> dict[str, Tensor]:
    """A batch with every named length about two thirds of what it is."""
    found = dict(inputs)
    for name, axes in dimensions.items():
        for axis in axes:
            length = inputs[name].shape[axis]
            found[name] = found[name].narrow(axis, 0, max(1, math.floor(length * 2 / 3)))
    return mapped(found, Tensor.contiguous)


def _lengths(inputs: Mapping[str, Tensor]) -> list[torch.Size]:
    return [one.shape[1:] for one in inputs.values()]
