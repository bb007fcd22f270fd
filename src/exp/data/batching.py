"""Choice of the samples in each global batch, for every split and epoch.

torch's samplers, and the user's subclasses of torch's Sampler, run with seeded random generators. exp checks the
indices that a sampler returns.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from exp.data.data_errors import data_error
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.loader import EpochBatches, Epochs, GlobalBatches, Listed, Order
from exp.data.randomness import preserve_generators, reseed_sampler
from exp.errors import (
    LIBRARIES,
    REFUSALS,
    ConfigError,
    ExpError,
    RunError,
    UserCodeError,
    constructor_error,
    message_of,
)
from exp.shared_types import Stage

# A sampler or a batch sampler. The items of a sampler are indices of samples. The items of a batch sampler are lists of
# indices.
AnySampler = Sampler[Any]
Items = list[Any]
# A sampler class, or a functools.partial of a sampler class.
MakeSampler = Callable[..., AnySampler]
# The packages whose samplers depend only on the random generators. Samplers of other packages may depend on earlier
# epochs.
STATELESS = ("exp", "torch")
# A function that checks the items of an epoch. It returns None if all items are valid. Otherwise it returns two texts:
# a description of the invalid item, and a description of valid items.
Judge = Callable[[Sequence[Any]], tuple[str, str] | None]


class Passes:
    """Function that returns the items of a sampler, or of a batch sampler, for any epoch.

    The generators of Python, NumPy and torch are seeded from (seed, stage, epoch) before each epoch. If the sampler
    has a method `set_epoch`, this method is called with the epoch.

    Samplers outside exp and torch may keep state between epochs. A resumed run therefore repeats all earlier epochs of
    such a sampler.

    Args:
        make: Function that constructs the sampler.
        key: The config key of the sampler below `data.`, for messages.
        stage: The name of the split: `train`, `val` or `test`.
        seed: The seed of the run.
        judge: Function that checks the items of an epoch; see Judge.

    Attributes:
        length: The number of items in an epoch, which is the same for all epochs.

    Raises:
        ConfigError: The items of epoch 0 are invalid.
    """

    def __init__(self, make: Callable[[], AnySampler], *, key: str, stage: Stage, seed: int, judge: Judge) -> None:
        self._make, self._key, self._stage, self._seed, self._judge = make, key, stage, seed, judge
        self._sampler, self._done = self._make_seeded(), 0
        self._last: tuple[int, Items] | None = None
        self.length = 0
        self.length = len(self(0))

    def __call__(self, epoch: int) -> Items:
        """Return all items of an epoch.

        Raises:
            RunError: An item is invalid, or the number of items differs from epoch 0.
            UserCodeError: The sampler raises an error.
        """
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        with preserve_generators():
            found = self._items(epoch)
        wrong = self._judge(found) if found else ("no items", "at least one sample or batch")
        if self.length and len(found) != self.length:
            wrong = f"{len(found)} items", f"{self.length} items, as in epoch 0"
        if wrong is not None:
            got = f"{type(self._sampler).__name__}, which returns {wrong[0]} in epoch {epoch}"
            if not self.length:
                raise data_error(self._key, got=got, expected=wrong[1])
            raise RunError(f"data.{self._key}: {got}; expected {wrong[1]}")
        self._last = (epoch, found)
        return found

    def _items(self, epoch: int) -> Items:
        if type(self._sampler).__module__.partition(".")[0] in STATELESS or isinstance(self._sampler, Epochs):
            return self._one(epoch)
        if epoch < self._done:
            self._sampler, self._done = self._make_seeded(), 0
        for earlier in range(self._done, epoch):
            self._one(earlier)
        self._done = epoch + 1
        return self._one(epoch)

    def _one(self, epoch: int) -> Items:
        sampler = self._sampler
        reseed_sampler(seed=self._seed, stage=self._stage, epoch=epoch)
        try:
            if isinstance(sampler, Epochs):
                sampler.set_epoch(epoch)
            return list(sampler)
        except Exception as error:
            raise UserCodeError.of(error, what=f"epoch {epoch} of the sampler {type(sampler).__name__}") from error

    def _make_seeded(self) -> AnySampler:
        with preserve_generators():
            reseed_sampler(seed=self._seed, stage=self._stage, epoch=-1)
            sampler = self._make()
        if isinstance(sampler, DistributedSampler):
            got = f"{type(sampler).__name__}, which divides its samples among ranks"
            expected = "a sampler of all samples, because exp divides the samples among the ranks"
            raise data_error(self._key, got=got, expected=expected)
        return sampler


class SampledOrder:
    """Function that returns the indices of the training samples that a sampler chooses in an epoch, int64.

    Args:
        make: Function that constructs the sampler.
        samples: The number of samples in the training split.
        seed: The seed of the run.
    """

    def __init__(self, make: Callable[[], AnySampler], *, samples: int, seed: int) -> None:
        judge = functools.partial(_wrong_index, samples=samples)
        self._passes = Passes(make, key="sampler", stage="train", seed=seed, judge=judge)

    def __len__(self) -> int:
        return self._passes.length

    def __call__(self, epoch: int) -> Tensor:
        return torch.tensor(self._passes(epoch), dtype=torch.int64)


class SampledBatches(EpochBatches):
    """Global batches that a batch sampler chooses.

    The batches of the validation and test splits must contain each sample exactly once.

    Args:
        make: Function that constructs the batch sampler.
        samples: The number of samples in the split.
        stage: The name of the split: `train`, `val` or `test`.
        seed: The seed of the run.
    """

    def __init__(self, make: Callable[[], AnySampler], *, samples: int, stage: Stage, seed: int) -> None:
        self._samples, self._is_whole, self.seed = samples, stage != "train", seed
        self._passes = Passes(make, key="batch_sampler", stage=stage, seed=seed, judge=self._wrong)
        self.batch_size = max(map(len, self._passes(0)))

    def __len__(self) -> int:
        return self._passes.length

    def order(self, epoch: int) -> Order:
        return Listed(torch.tensor([index for batch in self._passes(epoch) for index in batch], dtype=torch.int64))

    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        edges = list(itertools.accumulate(map(len, self._passes(epoch)), initial=0))
        return itertools.pairwise(edges[start:])

    def _wrong(self, found: Sequence[object]) -> tuple[str, str] | None:
        seen: list[int] = []
        for batch in found:
            if not isinstance(batch, list | tuple) or not batch:
                return f"the item {batch!r}", "lists of indices. Set data.sampler for a sampler of single indices"
            if error := _wrong_index(batch, samples=self._samples):
                return error
            seen += batch
        if self._is_whole and sorted(seen) != list(range(self._samples)):
            got = f"{len(seen)} indices, {len(set(seen))} of them different, for a split of {self._samples} samples"
            return got, "the index of each sample once"
        return None


def _wrong_index(found: Sequence[Any], *, samples: int) -> tuple[str, str] | None:
    """Return None if all items are indices of samples.

    Otherwise return two texts: the first invalid item, and a description of valid items.
    """
    for index in found:
        if not hasattr(index, "__index__") or not 0 <= index < samples:
            return f"the index {index!r}", f"integers from 0 to {samples - 1}, the indices of samples"
    return None


def maker(make: MakeSampler, *, key: str, offers: Mapping[str, object]) -> Callable[[], AnySampler]:
    """Return a function without parameters that constructs a sampler.

    The function raises ConfigError if the sampler's constructor rejects its arguments.

    Args:
        make: The class of the sampler, or a functools.partial of the class with the arguments in the config.
        key: The config key of the sampler below `data.`, for messages.
        offers: Additional arguments by parameter name. An argument is passed only if the constructor has this parameter
            and the config does not set it.
    """
    target, given = (make.func, dict(make.keywords)) if isinstance(make, functools.partial) else (make, {})
    taken = inspect.signature(make).parameters
    values = {name: value for name, value in offers.items() if name in taken and given.get(name) is None}

    def make_sampler() -> AnySampler:
        try:
            return make(**values)
        except ExpError:
            raise
        except Exception as error:
            if not isinstance(error, REFUSALS) and target.__module__.partition(".")[0] in LIBRARIES:
                raise  # The error is a bug in exp or in a library.
            name = getattr(target, "__name__", target)
            got = f"{name} refused its values ({type(error).__name__}: {message_of(error)})"
            raise ConfigError([constructor_error(error, key=f"data.{key}", known=given, got=got)]) from error

    return make_sampler


@dataclass(kw_only=True)
class Batching:
    """Settings that decide which samples form each global batch.

    Args:
        parts: The splits by name: `train`, `val`, `test`.
        batch_size: The number of samples in a global batch, over all ranks.
        shuffle: Whether to shuffle the training samples.
        drop_last: Whether to drop the last training batch if it has fewer samples than `batch_size`.
        seed: The seed of the run.
        order: The training samples that data.sampler chooses. Default: None, which reads each sample once per epoch.
        sampled: The batches that data.batch_sampler chooses, by split. Empty if the config has no batch sampler.

    Raises:
        ConfigError: A split has no samples or no batches.
    """

    parts: Mapping[Stage, AnyDataset]
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    order: SampledOrder | None = None
    sampled: dict[Stage, SampledBatches] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage, part in self.parts.items():
            if isinstance(part, IterableDataset):
                continue
            if not samples_in(part):
                raise data_error(stage, got="an empty data set", expected="at least one sample")
            if not len(self.of(stage)):
                raise self._no_batch(samples_in(part))

    def of(self, stage: Stage) -> EpochBatches:
        """Return the global batches of a split that is not an IterableDataset."""
        if stage in self.sampled:
            return self.sampled[stage]
        train, part = stage == "train", self.parts[stage]
        order = self.order if train else None
        return GlobalBatches(
            length=samples_in(part) if order is None else len(order),
            batch_size=self.batch_size,
            shuffle=self.shuffle and train,
            drop_last=self.drop_last and train,
            seed=self.seed,
            draw=order,
        )

    def choose(
        self,
        sampler: MakeSampler | None,
        batch_sampler: MakeSampler | None,
        *,
        inputs: Sequence[str],
        num_classes: int | None,
    ) -> None:
        """Use the sampler or the batch sampler that the config sets.

        Args:
            sampler: The value of data.sampler. None if the config does not set it.
            batch_sampler: The value of data.batch_sampler. None if the config does not set it.
            inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.
            num_classes: The number of classes. None if the targets are not classes.

        Raises:
            ConfigError: The config sets two samplers, or data.shuffle=false and data.sampler. A split is missing, or is
                an IterableDataset. A sampler returns invalid items.
        """
        if sampler is not None and batch_sampler is not None:
            got = "a batch sampler, although data.sampler is set"
            raise data_error("batch_sampler", got=got, expected="only one of the two, because both choose samples")
        if sampler is not None:
            make = self._maker(sampler, "train", key="sampler", inputs=inputs, num_classes=num_classes)
            if not self.shuffle:
                got, expected = "false, although data.sampler is set", "true, because the sampler decides the order"
                raise data_error("shuffle", got=got, expected=expected)
            self.order = SampledOrder(make, samples=samples_in(self.parts["train"]), seed=self.seed)
            if self.drop_last and len(self.order) < self.batch_size:
                raise self._no_batch(len(self.order))
        if batch_sampler is not None:
            for stage, part in self.parts.items():
                train = stage == "train"
                make = self._maker(
                    batch_sampler, stage, key="batch_sampler", inputs=inputs, batch_size=self.batch_size,
                    shuffle=self.shuffle and train, drop_last=self.drop_last and train,
                )  # fmt: skip
                self.sampled[stage] = SampledBatches(make, samples=samples_in(part), stage=stage, seed=self.seed)

    def _maker(self, make: MakeSampler, stage: Stage, *, key: str, **offers: object) -> Callable[[], AnySampler]:
        part = self.parts.get(stage)
        if part is None or isinstance(part, IterableDataset):
            got = f"a sampler, although {'there is no' if part is None else 'a stream is the'} {stage} split"
            raise data_error(key, got=got, expected="a split with indices, from which samples are drawn")
        return maker(make, key=key, offers={"data_source": part, **offers})

    def _no_batch(self, held: int) -> ConfigError:
        got = f"{self.batch_size} with data.drop_last=true, although there are only {held} training samples"
        fix = "Reduce the batch size, or set data.drop_last=false"
        return data_error("batch_size", got=got, expected=f"{held} or less", fix=fix)
