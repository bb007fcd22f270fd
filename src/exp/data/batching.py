"""The samples of the global batches of each split, in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.utils.data import IterableDataset

from exp.data.data_errors import data_error
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.loader import EpochBatches, GlobalBatches
from exp.data.sampling import AnySampler, MakeSampler, SampledBatches, SampledOrder, maker
from exp.errors import ConfigError
from exp.shared_types import Stage


@dataclass(kw_only=True)
class Batching:
    """The settings that decide which samples form each global batch.

    Args:
        parts: The splits by stage.
        batch_size: The number of samples in a global batch.
        shuffle: Whether to shuffle the training samples.
        drop_last: Whether to drop a short last batch of training.
        seed: The seed of the run.
        order: The samples that data.sampler draws; None if each sample is read once.
        sampled: The batches of data.batch_sampler, by stage.

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
        """Return the global batches of a split. The split must not be an IterableDataset."""
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
        """Set the sampler or the batch sampler of the config.

        Args:
            sampler: The value of data.sampler.
            batch_sampler: The value of data.batch_sampler.
            inputs: The names of a sample's values.
            num_classes: The number of classes; None if targets are not classes.

        Raises:
            ConfigError: A sampler does not support the data, or both samplers are given.
        """
        if sampler is not None and batch_sampler is not None:
            got, expected = "a batch sampler, and data.sampler", "one of the two: a batch sampler chooses samples, too"
            raise data_error("batch_sampler", got=got, expected=expected)
        if sampler is not None:
            make = self._maker(sampler, "train", key="sampler", inputs=inputs, num_classes=num_classes)
            if not self.shuffle:
                got, expected = "false, and a sampler", "true: the sampler decides the order"
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
            got = f"a sampler, and {'no' if part is None else 'a stream as the'} {stage} split"
            raise data_error(key, got=got, expected="a data set with an index, to draw samples from")
        return maker(make, key=key, offers={"data_source": part, **offers})

    def _no_batch(self, held: int) -> ConfigError:
        got = f"{self.batch_size} with drop_last=true, and only {held} training samples"
        fix = "Make the batch smaller, or keep the short one with data.drop_last=false"
        return data_error("batch_size", got=got, expected=f"{held} or less", fix=fix)
