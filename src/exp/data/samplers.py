"""Samplers that choose the training samples: with weights, balanced by class, or from a subset.

exp constructs a sampler with the training split as its parameter `data_source`. Before each epoch, exp seeds torch's
generator from the seed of the run and the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.utils.data import Sampler

from exp.data.data_errors import data_error, is_share
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.labels import is_whole
from exp.data.sample_values import sample_numbers, targets_of
from exp.data.splits import random_splits

KEY = "sampler"
Weight = Annotated[float, Ge(0)]


class WeightedSampler(Sampler[int]):
    """Sampler that draws samples with replacement. The probability of a sample is proportional to its weight.

    Exactly one of `weights` and `class_weights` must be set.

    Args:
        data_source: The training split.
        weights: The weight of each sample of the training split, or of each sample of the whole data.dataset. A text is
            the name of the weights: an attribute of the data set, or a value of each sample. Default: None.
        class_weights: The weight of each class: a list, or a mapping from class numbers to weights. Default: None.
        num_samples: The number of samples to draw in an epoch. Default: the number of samples in the split.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: A weight is negative or not finite, all weights are 0, the number of weights is wrong, or a class
            has no weight.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        weights: Sequence[Weight] | str | None = None,
        class_weights: Sequence[Weight] | Mapping[int, Weight] | None = None,
        num_samples: Annotated[int, Gt(0)] | None = None,
        inputs: Sequence[str] = (),
    ) -> None:
        if (weights is None) == (class_weights is None):
            got = "weights and class_weights" if weights is not None else "neither weights nor class_weights"
            raise data_error(KEY, got=got, expected="exactly one of weights and class_weights")
        if weights is not None:
            self.weights = sample_numbers(data_source, weights, key=f"{KEY}.weights", inputs=inputs).double()
        else:
            self.weights = _weights_by_class(class_of_each(data_source, inputs=inputs), class_weights or ())
        self.num_samples = samples_in(data_source) if num_samples is None else num_samples
        wrong = (~torch.isfinite(self.weights) | (self.weights < 0)).nonzero()
        if len(wrong):
            index = int(wrong[0])
            got = f"{float(self.weights[index]):g} for sample {index} of train"
            raise data_error(f"{KEY}.weights", got=got, expected="finite numbers of at least 0")
        if not self.weights.any():
            raise data_error(f"{KEY}.weights", got="weights that are all 0", expected="a weight above 0")

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        yield from weighted_draw(self.weights, self.num_samples).tolist()


class BalancedSampler(WeightedSampler):
    """Sampler that draws samples with replacement, so that all classes have the same probability.

    Args:
        data_source: The training split.
        num_classes: The number of classes. exp passes the number of classes in the data. Default: None, which means the
            largest class number in the split plus 1.
        num_samples: The number of samples to draw in an epoch. Default: the number of samples in the split.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: The targets are not class numbers, or the training split has no sample of a class.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        num_classes: int | None = None,
        num_samples: Annotated[int, Gt(0)] | None = None,
        inputs: Sequence[str] = (),
    ) -> None:
        classes = class_of_each(data_source, inputs=inputs)
        known = classes[classes >= 0]  # Negative labels are those that the loss ignores.
        counts = torch.bincount(known, minlength=num_classes or 0)
        if missing := (counts == 0).nonzero().flatten().tolist():
            got = f"a balanced sampler, although the training split has no sample of the class {missing[0]}"
            fix = "Change data.parts_seed to divide the data differently, or correct data.num_classes"
            raise data_error(KEY, got=got, expected=f"a sample of each of the {len(counts)} classes", fix=fix)
        weights = {number: 1.0 / count for number, count in enumerate(counts.tolist())}
        super().__init__(
            data_source,
            weights=[weights.get(number, 0.0) for number in classes.tolist()],
            num_samples=num_samples,
        )


class SubsetSampler(Sampler[int]):
    """Sampler that reads only a random subset of the training split. All samples of the subset are read in every epoch.

    Args:
        data_source: The training split.
        size: The size of the subset: a fraction of the training split, or a whole number of samples.
        subset_seed: The seed that chooses the subset. Default: 0. It is independent of the seed of the run, so that all
            runs of a sweep over seeds use the same subset.

    Raises:
        ConfigError: The subset is empty, or larger than the training split.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        size: Annotated[float, Gt(0)],
        subset_seed: int = 0,
    ) -> None:
        count = samples_in(data_source)
        is_fraction = isinstance(size, float) and size <= 1
        number = 0 if not is_share(size) else round(size * count) if is_fraction else int(size)
        if not 1 <= number <= count:
            expected = f"a fraction from 0 to 1, or a whole number from 1 to {count}"
            raise data_error(f"{KEY}.size", got=f"{size:g} of {count} samples", expected=expected)
        self.indices = random_splits({"train": number}, length=count, seed=subset_seed)["train"]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices[torch.randperm(len(self.indices))].tolist()


def class_of_each(part: AnyDataset, *, inputs: Sequence[str]) -> Tensor:
    """Return the class numbers of all samples in a split, int64 `[N]`.

    Args:
        part: The split.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: The target of a sample is not a single class number.
    """
    targets = targets_of(part, stage="train", inputs=inputs, key=KEY)
    first = torch.as_tensor(targets[0])
    if first.dim() or not is_whole(first):
        got = f"a sampler by class, although targets have the shape {list(first.shape)} and the dtype {first.dtype}"
        raise data_error(KEY, got=got, expected="one class number for each sample")
    return torch.stack([torch.as_tensor(target) for target in targets]).long()


def weighted_draw(weights: Tensor, count: int) -> Tensor:
    """Return random indices of samples, int64 `[count]`, drawn with replacement.

    The probability of an index is proportional to its weight. The function exists because torch.multinomial supports at
    most 2 ** 24 weights.

    Args:
        weights: The weights of the N samples, float64 `[N]`.
        count: The number of indices to draw.
    """
    edges = weights.cumsum(0)
    # Rounding may make the random number equal to the last edge, which would return the index N.
    drawn = torch.searchsorted(edges, torch.rand(count, dtype=torch.float64) * edges[-1], right=True)
    return drawn.clamp_max(int(weights.nonzero()[-1]))


def _weights_by_class(classes: Tensor, weights: Sequence[float] | Mapping[int, float]) -> Tensor:
    by_class = weights if isinstance(weights, Mapping) else dict(enumerate(weights))
    by_class = {int(number): weight for number, weight in by_class.items()}
    held = [number for number in classes.unique().tolist() if number >= 0]
    if absent := [number for number in held if number not in by_class]:
        got = f"weights of {len(by_class)} classes, although the training split has the class {absent[0]}"
        raise data_error(f"{KEY}.class_weights", got=got, expected="a weight for each class")
    return torch.tensor([by_class.get(number, 0.0) for number in classes.tolist()], dtype=torch.float64)
