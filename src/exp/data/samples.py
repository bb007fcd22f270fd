"""One sample at a time: drawn from its own random stream, and transformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from exp.data.randomness import reseed_sample

Transform = Callable[[Any], Any]


class SampleSource(Dataset):
    """Samples by (epoch, index), each with the random generators set to (seed, epoch, index) first.

    So augmentation that draws from Python, NumPy or torch gives the same sample whoever fetches it, and when.
    """

    def __init__(self, *, dataset: Dataset, transforms: Sequence[Transform], seed: int) -> None:
        self.dataset = dataset
        self.transforms = tuple(transforms)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: tuple[int, int]) -> Any:
        epoch, index = position
        reseed_sample(seed=self.seed, epoch=epoch, index=index)
        return transformed(self.dataset[index], self.transforms)


def transformed(sample: Any, transforms: Sequence[Transform]) -> Any:
    """The sample with each transform applied to its input: the first of a pair, the entry `input` of a mapping."""
    if not transforms:
        return sample
    if isinstance(sample, Mapping):
        return {**sample, "input": applied(sample["input"], transforms)}
    if isinstance(sample, tuple | list):
        return (applied(sample[0], transforms), *sample[1:])
    return applied(sample, transforms)


def applied(value: Any, transforms: Sequence[Transform]) -> Any:
    for transform in transforms:
        value = transform(value)
    return value


def as_batch(data: Any) -> Any:
    """A batch with its pair as a tuple: collating and pinning turn one into a list."""
    return tuple(data) if type(data) is list else data
