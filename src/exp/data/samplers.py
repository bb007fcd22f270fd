"""Samplers of the training part: weighted, balanced by class, a subset. Their draws are torch's own generator's.

Each is made with the training part as `data_source`. exp seeds the generators from (seed, epoch) before each pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.utils.data import Sampler

from exp.data.faults import data_fault
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.labels import is_whole
from exp.data.sample_values import entry_of, own_share, stated_values, targets_of, values_of, whole_length
from exp.data.splits import random_splits

KEY = "sampler"
Weight = Annotated[float, Ge(0)]


class WeightedSampler(Sampler[int]):
    """Draws samples in proportion to their weights.

    data_source: the training part. inputs: the names of a sample's values.
    weights: a number for each sample, of the training part or of the whole data.dataset; or the name of an entry of the
        samples, or of an attribute of the data set, that holds them.
    class_weights: instead of weights, a number for each class, or by class number; a sample has that of its target.
    num_samples: draws in an epoch; None takes as many as there are samples. replacement: whether a sample may be drawn
        again in the same epoch.

    Raises: ConfigError for negative weights, a wrong number of them, and more draws than samples have a weight.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        weights: Sequence[Weight] | str | None = None,
        class_weights: Sequence[Weight] | Mapping[int, Weight] | None = None,
        num_samples: Annotated[int, Gt(0)] | None = None,
        replacement: bool = True,
        inputs: Sequence[str] = (),
    ) -> None:
        if (weights is None) == (class_weights is None):
            got = "weights and class_weights" if weights is not None else "neither weights nor class_weights"
            raise data_fault(KEY, got=got, expected="one of the two")
        if weights is not None:
            found = _weights(data_source, weights, inputs)
        else:
            assert class_weights is not None
            found = _weights_by_class(class_of_each(data_source, inputs=inputs), class_weights)
        self.weights = refuse_wrong_weights(found)
        self.num_samples = samples_in(data_source) if num_samples is None else num_samples
        self.replacement = replacement
        drawable = int((self.weights > 0).sum())
        if not replacement and self.num_samples > drawable:
            raise data_fault(
                f"{KEY}.num_samples",
                got=f"{self.num_samples} without replacement, and {drawable} samples have a weight above 0",
                expected=f"{drawable} or less, or {KEY}.replacement=true",
            )

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        yield from weighted_draw(self.weights, self.num_samples, replacement=self.replacement).tolist()


class BalancedSampler(WeightedSampler):
    """Draws each class with the same probability, however many samples it has.

    num_classes: how many there are, which the data say by themselves. num_samples, replacement: see WeightedSampler.

    Raises: ConfigError where targets are no classes, and for a class without a sample.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        num_classes: int | None = None,
        num_samples: Annotated[int, Gt(0)] | None = None,
        replacement: bool = True,
        inputs: Sequence[str] = (),
    ) -> None:
        classes = class_of_each(data_source, inputs=inputs)
        known = classes[classes >= 0]  # a label below 0 is left out by the loss
        counts = torch.bincount(known, minlength=num_classes or 0)
        if missing := (counts == 0).nonzero().flatten().tolist():
            raise data_fault(
                KEY,
                got=f"balanced by class, and a training part without a sample of the class {missing[0]}",
                expected=f"a sample of each of the {len(counts)} classes",
                cure="Choose other parts with data.parts_seed, or correct data.num_classes",
            )
        weights = {number: 1.0 / count for number, count in enumerate(counts.tolist())}
        super().__init__(
            data_source,
            weights=[weights.get(number, 0.0) for number in classes.tolist()],
            num_samples=num_samples,
            replacement=replacement,
        )


class SubsetSampler(Sampler[int]):
    """Takes some samples of the training part, each once an epoch.

    indices: their numbers in the training part. size: instead of indices, how many: a fraction, or a whole number.
    subset_seed: chooses them where a size is given; not the run's seed, so that a sweep over seeds compares like with
        like. shuffle: another order in each epoch.

    Raises: ConfigError for numbers outside the training part, for none, and for one that is there twice.
    """

    def __init__(
        self,
        data_source: Any,
        *,
        indices: Sequence[Annotated[int, Ge(0)]] | None = None,
        size: Annotated[float, Gt(0)] | None = None,
        subset_seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        count = samples_in(data_source)
        if (indices is None) == (size is None):
            got = "indices and size" if indices is not None else "neither indices nor size"
            raise data_fault(KEY, got=got, expected="one of the two")
        if indices is not None:
            chosen = torch.tensor(list(indices), dtype=torch.int64)
            wrong = [index for index in indices if not 0 <= index < count]
            if not len(chosen) or wrong or len(chosen.unique()) < len(chosen):
                got = f"the sample {wrong[0]}" if wrong else "a sample twice" if len(chosen) else "none"
                raise data_fault(f"{KEY}.indices", got=got, expected=f"some of 0 to {count - 1}, each once")
        else:
            assert size is not None
            chosen = _chosen(size, count, seed=subset_seed)
        self.indices, self.shuffle = chosen, shuffle

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.indices)) if self.shuffle else torch.arange(len(self.indices))
        yield from self.indices[order].tolist()


def class_of_each(part: AnyDataset, *, inputs: Sequence[str]) -> Tensor:
    """The class of each sample, int64 `[N]`.

    Raises: ConfigError where targets are no class numbers, one each.
    """
    targets = targets_of(part, stage="train", inputs=inputs, key=KEY)
    first = torch.as_tensor(targets[0])
    if first.dim() or not is_whole(first):
        raise data_fault(
            KEY,
            got=f"by class, and targets of shape {list(first.shape)} and {first.dtype}",
            expected="a class number for each sample",
        )
    return torch.stack([torch.as_tensor(target) for target in targets]).long()


def refuse_wrong_weights(weights: Tensor) -> Tensor:
    """The weights of all samples, float64 `[N]`. Raises: ConfigError for those that nothing can be drawn by."""
    weights = weights.double()
    wrong = (~torch.isfinite(weights) | (weights < 0)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        got = f"{float(weights[index]):g} for sample {index} of train"
        raise data_fault(f"{KEY}.weights", got=got, expected="numbers from 0 on")
    if not weights.sum() > 0:
        raise data_fault(f"{KEY}.weights", got="0 for every sample of train", expected="one above 0, or more")
    return weights


def weighted_draw(weights: Tensor, count: int, *, replacement: bool) -> Tensor:
    """Indices drawn by weight, int64 `[count]`. weights: float64 `[N]`; N may exceed what torch.multinomial takes."""
    if replacement:
        edges = weights.cumsum(0)
        # A draw lies below the last edge, unless rounding takes it there.
        drawn = torch.searchsorted(edges, torch.rand(count, dtype=torch.float64) * edges[-1], right=True)
        return drawn.clamp_max(int(weights.nonzero()[-1]))
    # The smallest of exponential times with these rates are a draw without replacement.
    times = torch.empty_like(weights).exponential_() / weights
    return times.topk(count, largest=False).indices


def _weights(part: AnyDataset, weights: Sequence[float] | str, inputs: Sequence[str]) -> Tensor:
    if isinstance(weights, str):
        name = weights
        stated = stated_values(part, name)
        if stated is not None:
            return stated

        def pick(sample: object) -> float:
            return float(torch.as_tensor(entry_of(sample, name, inputs=inputs, key=f"{KEY}.weights")))

        return torch.tensor(values_of(part, pick, stage="train"), dtype=torch.float64)
    given = torch.as_tensor(weights, dtype=torch.float64)
    found = own_share(given, part)
    if found is None:
        count, whole = samples_in(part), whole_length(part)
        more = f", or {whole}, one for each of data.dataset" if whole not in (None, count) else ""
        raise data_fault(
            f"{KEY}.weights", got=f"{len(given)} numbers", expected=f"{count}, one for each sample of train{more}"
        )
    return found


def _weights_by_class(classes: Tensor, weights: Sequence[float] | Mapping[int, float]) -> Tensor:
    by_class = dict(weights) if isinstance(weights, Mapping) else dict(enumerate(weights))
    by_class = {int(number): weight for number, weight in by_class.items()}
    held = [number for number in classes.unique().tolist() if number >= 0]
    if absent := [number for number in held if number not in by_class]:
        got = f"weights of {len(by_class)} classes, and the training part holds the class {absent[0]}"
        raise data_fault(f"{KEY}.class_weights", got=got, expected="a weight for each class")
    if unused := [number for number, weight in by_class.items() if weight > 0 and number not in held]:
        got = f"a weight for class {unused[0]}, which has no sample in the training part"
        raise data_fault(f"{KEY}.class_weights", got=got, expected="weights of classes that are there")
    return torch.tensor([by_class.get(number, 0.0) for number in classes.tolist()], dtype=torch.float64)


def _chosen(size: float, count: int, *, seed: int) -> Tensor:
    wanted = size if size < 1 or (size == 1 and isinstance(size, float)) else int(size)
    whole = isinstance(wanted, float) or wanted == size
    number = round(wanted * count) if isinstance(wanted, float) else wanted
    if not whole or not math.isfinite(size) or not 1 <= number <= count:
        raise data_fault(
            f"{KEY}.size",
            got=f"{size:g} of {count} samples in the training part",
            expected=f"a fraction from 0 to 1, or a whole number from 1 to {count}",
        )
    return random_splits({"train": number}, length=count, seed=seed)["train"]
