"""Reads each sample of a split once and in order. Batches have the indices and hashes of their samples."""

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

# Size of a hash in bytes. Two different samples have the same hash by chance in 1 of 10^38 pairs.
HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Read:
    """Batch of consecutive samples of a split.

    Args:
        data: The batch, before batch transforms.
        first: Index of the first sample in the split.
        count: Number of samples.
        hashes: Hashes of the inputs of each sample before transforms; None if the inputs cannot be compared.
        sizes: Shapes of the samples before padding, by name of the entry. Entries without padding are left out.
    """

    data: object
    first: int
    count: int
    hashes: list[bytes | None]
    sizes: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Hashed:
    """A sample after its transforms, and the hash of its inputs before them."""

    data: object
    hash: bytes | None


@dataclass(frozen=True, kw_only=True)
class HashBefore(SampleTransform):
    """Transform that hashes the inputs of a sample, and then applies the transforms of the data.

    The order matters, because transforms may change the sample in place.

    Args:
        hashed: Function that returns the hash of a sample.
        transforms: Transforms of the data.
    """

    hashed: Callable[[object], bytes | None]
    transforms: Sequence[Transform]

    def __call__(self, sample: object) -> Hashed:
        taken = self.hashed(sample)
        return Hashed(apply_transforms(sample, self.transforms), taken)


@dataclass(frozen=True, kw_only=True)
class ReadAssembly(Assembly):
    """Assembly that makes a Read from hashed samples.

    Args:
        inputs: Names of the values of a sample.
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
    """Yield batches of the first samples of a split, in order, with the transforms of epoch 0.

    Args:
        data: The data.
        stage: The split.
        count: Number of samples. The last batch may exceed it.
        targets: Entries of a sample that are targets. Hashes do not include them.

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
    """Return a loader of the first `count` samples in the order of the data set. A stream is loaded as a whole."""
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
    """Return the values of a sample or batch by name.

    A pair has the names `input` and `target`. Nested values have names such as `boxes.corners`.

    Args:
        data: The sample or batch.
        inputs: Names of the values if the sample is a tuple.
    """
    return dict(_flat("", named_entries(data, inputs)))


def origin(dataset: object, index: int) -> str | None:
    """Return the file of a sample, or else its index in the data set that was divided; None if both are unknown.

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
    """Return the hash of the inputs of a sample; None if the inputs contain an object that cannot be compared.

    Args:
        sample: The sample.
        inputs: Keys of the inputs if the sample is a mapping. If the sample has none of these keys, all entries except
            targets are inputs. Other entries are left out, because some, such as a path, are unique.
        targets: Keys of the targets if the sample is a mapping.
        values: Number of inputs before the target if the sample is a tuple; 0 if unknown.
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
            # NumPy lacks some of torch's dtypes.
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        try:
            array = np.asarray(plain)
        except (TypeError, ValueError):  # a sparse tensor, or arrays of several shapes
            return None
        shape = value.shape if isinstance(value, Tensor) else array.shape
        if array.dtype.hasobject:
            return None
        digest.update(f"{name} {kind or array.dtype}{list(shape)};".encode())
        digest.update(array.tobytes())
    return digest.digest()
