"""Loader that reads each sample of a split once and in order, with the hash of its inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from exp.data.collate import Pad
from exp.data.data import Data
from exp.data.entries import named_entries
from exp.data.in_memory import Samples, samples_in
from exp.data.joint_transforms import SampleTransform, Transform, apply_transforms
from exp.data.loader import GlobalBatches, Loader, ShareSampler
from exp.data.loading import Loading
from exp.data.streams import StreamLoader
from exp.data.workers import Assembly, Sample, WorkerLoader, as_batch
from exp.errors import ExpError
from exp.shared_types import Stage

# Size of a hash in bytes. The probability that two different samples have the same hash is about 1 in 10^38.
HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Read:
    """Batch of consecutive samples of a split.

    Args:
        data: The batch before batch transforms.
        first: Index of the first sample in the split.
        count: Number of samples.
        hashes: Hash of the inputs of each sample before its transforms. None if the inputs cannot be hashed.
        sizes: Shape of a value in each sample before padding, by name of the value. Values that were not padded are
            left out.
    """

    data: object
    first: int
    count: int
    hashes: list[bytes | None]
    sizes: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Hashed:
    """Sample with a hash.

    Args:
        data: The sample after its transforms.
        hash: Hash of the inputs before the transforms. None if the inputs cannot be hashed.
    """

    data: object
    hash: bytes | None


@dataclass(frozen=True, kw_only=True)
class HashBefore(SampleTransform):
    """Transform that computes the hash of a sample, and then applies the transforms of the data.

    The hash is computed first, because transforms may change the sample in place.

    Args:
        hashed: Function that returns the hash of a sample.
        transforms: Transforms of the samples in the config.
    """

    hashed: Callable[[object], bytes | None]
    transforms: Sequence[Transform]

    def __call__(self, sample: object) -> Hashed:
        taken = self.hashed(sample)
        return Hashed(apply_transforms(sample, self.transforms), taken)


@dataclass(frozen=True, kw_only=True)
class ReadAssembly(Assembly):
    """Function that makes a Read from a list of samples with hashes.

    Args:
        inputs: Names of the values of a sample. Empty if the values have no names.
    """

    inputs: Sequence[str]

    def __call__(self, samples: Sequence[Sample | ExpError]) -> object:
        read = [replace(one, data=cast(Hashed, one.data).data) for one in samples if isinstance(one, Sample)]
        batch = super().__call__(read if len(read) == len(samples) else samples)
        if isinstance(batch, ExpError):
            return batch
        hashes = [cast(Hashed, one.data).hash for one in samples if isinstance(one, Sample)]
        sizes: dict[str, list[tuple[int, ...]]] = {}
        if isinstance(self.collate, Pad):
            named = [entries_of(sample.data, self.inputs) for sample in read]
            shapes = {name: [tuple(np.shape(one[name])) for one in named] for name in named[0]}
            sizes = {name: own for name, own in shapes.items() if len({*own}) > 1}
        return Read(data=as_batch(batch), first=read[0].index, count=len(read), hashes=hashes, sizes=sizes)


def read_once(data: Data, stage: Stage, *, count: int, targets: Sequence[str]) -> Iterator[Read]:
    """Yield the first samples of a split in order, as batches. The samples are transformed as in epoch 0.

    Args:
        data: The data.
        stage: The name of the split.
        count: Number of samples to read. The last batch is complete, so that a few more samples may be read.
        targets: Names of the values of a sample that are targets. They are not part of the hash.

    Raises:
        ExpError: A sample cannot be read, or a label is not a class.
    """
    hashed = partial(input_hash, inputs=tuple(data.spec.inputs), targets=tuple(targets), values=len(data.names))
    loader = _ordered_loader(data, stage, count=count, hashed=hashed)
    seen = 0
    for batch in loader:
        assert isinstance(batch.data, Read)
        yield batch.data
        seen += batch.data.count
        if seen >= count:
            return


def _ordered_loader(loading: Loading, stage: Stage, *, count: int, hashed: Callable[[object], bytes | None]) -> Loader:
    """Return a loader of the first samples of a split, in the order of the data set.

    Args:
        loading: The data.
        stage: The name of the split.
        count: Number of samples. It is ignored for an IterableDataset, because its loader always reads all samples.
        hashed: Function that returns the hash of a sample.
    """
    part = loading.part(stage)
    options = replace(loading.options, pin_memory=False, persistent_workers=False)
    transform = HashBefore(hashed=hashed, transforms=loading.transforms.of(stage))
    if isinstance(part, IterableDataset):
        stream = replace(loading.stream(stage, part), shuffle=False, shuffle_buffer=0, drop_last=False)
        assembly = ReadAssembly(**vars(stream.assembly), inputs=loading.names)
        return StreamLoader(
            stage=stage, stream=replace(stream, transforms=(transform,), assembly=assembly), options=options
        )
    source = loading.source(stage)
    source.transforms = (transform,)
    batches = GlobalBatches(
        length=min(count, samples_in(part)),
        batch_size=loading.batching.batch_size,
        shuffle=False,
        drop_last=False,
        seed=0,
    )
    sampler = ShareSampler(batches=batches, rank=0, world_size=1)
    assembly = ReadAssembly(**vars(loading.assembly(source.name_of)), inputs=loading.names)
    return WorkerLoader(stage=stage, source=source, sampler=sampler, options=options, assembly=assembly)


def entries_of(data: object, inputs: Sequence[str] = ()) -> dict[str, Any]:
    """Return a mapping from the names of the values in a sample or batch to the values.

    The values of a pair have the names `input` and `target`. Nested values have names such as `boxes.corners`.

    Args:
        data: The sample or batch.
        inputs: Names of the values, if the sample is a tuple with named values. Default: no names.
    """
    return dict(_flat("", named_entries(data, inputs)))


def origin(dataset: object, index: int) -> str | None:
    """Return the origin of a sample for messages: its file, or its index in the data set that was divided into splits.

    Return None if both are unknown.

    Args:
        dataset: The split.
        index: Index of the sample in the split.
    """
    indices = getattr(dataset, "indices", None)
    if isinstance(dataset, Subset):
        within = int(dataset.indices[index])
        return origin(dataset.dataset, within) or f"sample {within} of the whole"
    files = getattr(dataset, "files", None)
    if isinstance(files, list) and isinstance(dataset, Samples) and len(files) == len(dataset):
        return str(files[index])
    return f"sample {int(indices[index])} of the whole" if isinstance(indices, Tensor) else None


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    inside: Mapping[Any, object] = {}
    if isinstance(value, Mapping):
        inside = value
    elif isinstance(value, tuple | list) and any(isinstance(one, Tensor | Mapping | tuple | list) for one in value):
        inside = dict(enumerate(value))
    else:
        yield name, value
    for key, one in inside.items():
        yield from _flat(f"{name}.{key}" if name else str(key), one)


def input_hash(sample: object, *, inputs: Sequence[str], targets: Sequence[str], values: int = 0) -> bytes | None:
    """Return the hash of the inputs of a sample. Return None if the inputs contain an object that cannot be hashed.

    Args:
        sample: The sample.
        inputs: Names of the inputs in a mapping. Other values are not hashed, because some are unique, such as a path.
            If the mapping contains no input, all values except targets are hashed.
        targets: Names of the targets in a mapping.
        values: Number of inputs in a tuple, before the target. Default: 0, if the number is unknown.
    """
    given: object = sample
    if isinstance(sample, Mapping):
        rest = {name: value for name, value in sample.items() if name not in targets}
        given = {name: value for name, value in rest.items() if name in inputs} or rest
    elif isinstance(sample, tuple | list) and len(sample) in (2, max(values, 1) + 1):
        given = sample[:-1]
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for name, value in _flat("", given):
        kind, plain = getattr(value, "dtype", None), value
        if isinstance(value, Tensor) and value.layout is torch.strided:
            # The tensor is converted to bytes, because NumPy does not support all dtypes of torch.
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        try:
            array = np.asarray(plain)
        except (TypeError, ValueError):  # The value is a sparse tensor, or a list of arrays with different shapes.
            return None
        shape = value.shape if isinstance(value, Tensor) else array.shape
        if array.dtype.hasobject:
            return None
        digest.update(f"{name} {kind or array.dtype}{list(shape)};".encode())
        digest.update(array.tobytes())
    return digest.digest()
