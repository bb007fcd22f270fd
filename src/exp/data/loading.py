"""Settings that make batches from the samples of the splits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from exp.data.batching import Batching
from exp.data.collate import Collate, Pad, collate_of
from exp.data.data_errors import require_sample
from exp.data.entries import BatchForm, by_name, target_in
from exp.data.in_memory import (
    AnyDataset,
    Indexed,
    IndexedLoader,
    Tensors,
    gather_samples,
    sample_name,
    samples_in,
)
from exp.data.joint_transforms import StageTransforms, Transforms, apply_transforms, plain_tensors
from exp.data.labels import Labels
from exp.data.loader import Loader, ShareSampler
from exp.data.streams import Recorded, ShareOfStream, StreamLoader, open_stream
from exp.data.workers import Assembly, FetchOptions, SampleSource, WorkerLoader, batch_of
from exp.errors import ConfigError, RunError
from exp.shared_types import Stage

# The maximum number of samples of a split that the check before a run reads.
SAMPLES = 64


@dataclass(kw_only=True, eq=False)
class Loading:
    """Base class of Data: the splits, and the settings that make batches from their samples.

    Args:
        batching: The splits, and the settings that decide which samples form each global batch.
        form: The function that converts batches to the form that the network expects.
        collate_setting: The value of data.collate.
        transform_settings: The transforms in the config, by key below `data.`, such as `train_transforms`.
        labels: The valid labels.
        options: The options of torch's DataLoader.
        shuffle_buffer: The number of samples in the shuffle buffer of an IterableDataset.

    Attributes:
        collate: The function that makes a batch from a list of samples.
        names: The names of a sample's values before collation. Values that the collate function adds, such as masks,
            are not included.
        transforms: The transforms of samples and of batches.
    """

    batching: Batching
    form: BatchForm
    collate_setting: Collate | Literal["pad"] | None
    transform_settings: Mapping[str, Transforms]
    labels: Labels
    options: FetchOptions
    shuffle_buffer: int

    def __post_init__(self) -> None:
        names = self.form.names
        self.collate = collate_of(self.collate_setting, inputs=names)
        self.names = self.collate.sample_names(names) if isinstance(self.collate, Pad) else names
        self.transforms = StageTransforms(self.transform_settings, held=self.names, names=names)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The names of the splits: some or all of `train`, `val` and `test`."""
        return tuple(self.parts)

    @property
    def parts(self) -> Mapping[Stage, AnyDataset]:
        """The splits by name."""
        return self.batching.parts

    def part(self, stage: Stage) -> Any:
        """Return a split by its name. Raise RunError if the data has no such split."""
        if stage not in self.parts:
            raise RunError(
                f"data has no {stage} split; expected one of {', '.join(self.parts)}. "
                f"Give data.parts.{stage} a size, or data.{stage} a data set"
            )
        return self.parts[stage]

    def is_indexed(self, stage: Stage) -> bool:
        """Return whether the batches of a split are read with index operations instead of torch's DataLoader."""
        is_plain = self.collate is default_collate and not self.transforms.of(stage)
        return is_plain and isinstance(self.parts[stage], Indexed)

    def loader(self, stage: Stage, *, rank: int = 0, world_size: int = 1) -> Loader:
        """Return the loader of a split for one rank.

        Args:
            stage: The name of the split.
            rank: The rank. Default: 0.
            world_size: The number of ranks. Default: 1.

        Raises:
            RunError: The data has no such split.
        """
        dataset = self.part(stage)
        if isinstance(dataset, IterableDataset):
            stream = replace(self.stream(stage, dataset), rank=rank, world_size=world_size)
            return StreamLoader(stage=stage, stream=stream, options=self.options)
        sampler = ShareSampler(batches=self.batching.of(stage), rank=rank, world_size=world_size)
        if self.is_indexed(stage) and isinstance(dataset, Indexed):
            return IndexedLoader(
                stage=stage,
                dataset=dataset,
                sampler=sampler,
                pin_memory=self.options.pin_memory,
                form=self.form,
                # check_labels has already checked all labels of a Tensors data set.
                labels=None if isinstance(dataset, Tensors) else self.labels,
            )
        source = self.source(stage)
        assembly = self.assembly(source.name_of)
        return WorkerLoader(stage=stage, source=source, sampler=sampler, options=self.options, assembly=assembly)

    def stream(self, stage: Stage, dataset: IterableDataset[object]) -> ShareOfStream:
        """Return the batches of a split that is an IterableDataset, for a run with a single rank."""
        shuffle = self.batching.shuffle and stage == "train"
        return ShareOfStream(
            dataset=dataset,
            transforms=self.transforms.of(stage),
            assembly=self.assembly(f"sample {{}} of {stage}".format),
            batch_size=self.batching.batch_size,
            drop_last=self.batching.drop_last and stage == "train",
            shuffle_buffer=self.shuffle_buffer if shuffle else 0,
            shuffle=shuffle,
            seed=self.batching.seed,
            stage=stage,
            rank=0,
            world_size=1,
        )

    def source(self, stage: Stage) -> SampleSource:
        """Return the samples of a split after their transforms. The key of a sample is the pair (epoch, index)."""
        dataset = cast(Dataset[object], self.part(stage))
        return SampleSource(dataset=dataset, transforms=self.transforms.of(stage), seed=self.batching.seed, stage=stage)

    def assembly(self, name_of: Callable[[int], str]) -> Assembly:
        """Return the function that makes a batch from a list of samples and checks its labels.

        Args:
            name_of: A function that returns the name of a sample for messages, given the index of the sample.
        """
        return Assembly(collate=self.collate, form=self.form, labels=self.labels, name_of=name_of)

    def check_labels(self) -> None:
        """Raise ConfigError if a split that is a Tensors data set has an invalid label.

        The labels of other data sets are checked when their samples are read.
        """
        for stage, part in self.parts.items():
            targets = target_in(by_name(part.entries, self.form.names)) if isinstance(part, Tensors) else None
            if (wrong := self.labels.first_wrong(targets)) is not None:
                index, label = wrong
                raise ConfigError([self.labels.error(label, of=sample_name(part, index, stage=stage))])

    def first_sample(self, stage: Stage) -> object:
        """Return a batch that contains only the first sample of a split."""
        part = self.part(stage)
        if isinstance(part, Indexed) and self.is_indexed(stage):
            return self.form(gather_samples(part, torch.zeros(1, dtype=torch.int64), stage=stage))
        if not isinstance(part, IterableDataset):
            source = self.source(stage)
            return batch_of(self.assembly(source.name_of)([source[0, 0]]))
        sample = next(open_stream(part, epoch=0), None)
        require_sample(int(sample is not None), "an empty stream", key=stage)
        read = apply_transforms(sample, self.transforms.of(stage))
        return self.form(self.collate([plain_tensors(read) if self.collate is default_collate else read]))

    def read_first(self, stage: Stage, *, seconds: float) -> object:
        """Return a batch of the first samples of a split before batch transforms; see Data.first_samples."""
        part, size = self.part(stage), self.batching.batch_size
        if isinstance(part, IterableDataset):
            if not isinstance(part, Recorded):
                return None
            few = replace(self.stream(stage, part), batch_size=min(size, SAMPLES), drop_last=False)
            found = next(iter(replace(few, shuffle=False, shuffle_buffer=0)), None)
            require_sample(int(found is not None), "an empty stream", key=stage)
            return None if found is None else batch_of(found[0])
        if self.is_indexed(stage) and isinstance(part, Tensors):
            return self.form(part.entries)
        count = min(size, SAMPLES, samples_in(part))
        if self.is_indexed(stage) and isinstance(part, Indexed):
            entries = self.form(gather_samples(part, torch.arange(count), stage=stage))
            self.labels.refuse(entries, lambda place: sample_name(part, place, stage=stage))
            return entries
        source, ends = self.source(stage), time.monotonic() + seconds
        read = [source[0, 0]]
        while len(read) < count and time.monotonic() < ends:
            read.append(source[0, len(read)])
        return batch_of(self.assembly(source.name_of)(read))
