"""Each sample of a part once and in its order, as batches that know of which samples they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from exp.data.collate import Pad
from exp.data.data import Data
from exp.data.entries import TARGET, by_name
from exp.data.in_memory import Entries, Tensors, gathered, sample_name, samples_in
from exp.data.workers import Assembly, Sample, as_batch
from exp.errors import ExpError
from exp.extras.survey.fingerprints import Fingerprint, fingerprint
from exp.shared_types import Stage

# Of a sample as the data set gives it.
Print = Callable[[object], Fingerprint | None]


@dataclass(frozen=True, kw_only=True)
class Read:
    """Some samples of a part that follow each other.

    data: their batch, as a rank gets it, before batch transforms.
    first, count: the number of the first one in its part, and how many there are.
    prints: one each, of what the data set gave.
    sizes: of the entries of a batch that were made of tensors of several sizes, each sample's own, by name.
    """

    data: object
    first: int
    count: int
    prints: list[Fingerprint | None]
    sizes: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadAssembly(Assembly):
    """Makes a Read of samples. inputs: the names of a sample's values."""

    inputs: Sequence[str]

    def __call__(self, samples: Sequence[Sample | ExpError]) -> object:
        batch = super().__call__(samples)
        if isinstance(batch, ExpError):
            return batch
        read = [sample for sample in samples if isinstance(sample, Sample)]
        return Read(
            data=as_batch(batch),
            first=read[0].index,
            count=len(read),
            prints=[cast(Fingerprint | None, sample.fingerprint) for sample in read],
            # What a collate function of the user's own takes need not have the names of the batch.
            sizes=_unequal([entries_of(sample.data, self.inputs) for sample in read])
            if isinstance(self.collate, Pad)
            else {},
        )


def read_once(data: Data, stage: Stage, *, count: int, targets: Sequence[str]) -> Iterator[Read]:
    """Yield the first samples of a stage in the order of its part, each once, with the transforms of epoch 0.

    The last batch makes them `count` or more.

    targets: the entries of a sample that are targets. Samples with the same inputs are the same.
    Raises: as the loader of the stage does; UserCodeError for samples that cannot be gathered; SampleError for a label
        outside the classes.
    """
    inputs = data.held
    taken = partial(fingerprint, inputs=tuple(data.spec.inputs), targets=tuple(targets), values=len(inputs))
    if data.is_indexed(stage):
        yield from _read_indexed(data, stage, count=min(count, samples_in(data.part(stage))), taken=taken)
        return
    seen = 0
    for batch in data.ordered_loader(
        stage, count=count, fingerprint=taken, assembled=lambda one: ReadAssembly(**vars(one), inputs=inputs)
    ):
        assert isinstance(batch.data, Read)
        yield batch.data
        seen += batch.data.count
        if seen >= count:
            return


def _read_indexed(data: Data, stage: Stage, *, count: int, taken: Print) -> Iterator[Read]:
    dataset, size = data.part(stage), data.batch_size
    for first in range(0, count, size):
        indices = torch.arange(first, min(first + size, count))
        raw = gathered(dataset, indices, stage=stage)
        batch = data.form(raw)
        if not isinstance(dataset, Tensors):
            named = [sample_name(dataset, index, stage=stage) for index in indices.tolist()]
            data.labels.refuse(batch, named.__getitem__)
        yield Read(data=batch, first=first, count=len(indices), prints=[taken(row) for row in rows_of(raw)])


def rows_of(entries: Entries) -> Iterator[Entries]:
    """The samples of a batch."""
    if isinstance(entries, Mapping):
        for row in zip(*entries.values(), strict=True):
            yield dict(zip(entries, row, strict=True))
    else:
        yield from zip(*entries, strict=True)


def entries_of(data: object, inputs: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a sample or batch by name, `input` and `target` of a pair; those within a value as `boxes.corners`.

    inputs: the names of a tuple's values.
    """
    named = by_name(data, inputs)
    if not isinstance(named, Mapping):
        values = named if isinstance(named, tuple | list) else (named,)
        named = dict(zip(("input", TARGET), values, strict=False))
    return dict(_flat("", named))


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    inside: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, tuple | list) and any(isinstance(one, Tensor | Mapping | tuple | list) for one in value):
        inside = enumerate(value)
    else:
        yield name, value
    for key, one in inside:
        yield from _flat(f"{name}.{key}" if name else str(key), one)


def _unequal(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, ...]]]:
    """The sizes of those entries of samples that have several."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name in samples[0]:
        sizes = [_size(sample[name]) for sample in samples if name in sample]
        known = [size for size in sizes if size is not None]
        if len(known) == len(samples) and len(set(known)) > 1:
            found[name] = known
    return found


def _size(value: object) -> tuple[int, ...] | None:
    """Of a tensor, an array, a list of numbers or a text."""
    if isinstance(value, list | tuple | str):
        return (len(value),)
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)
