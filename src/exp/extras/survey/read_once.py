"""Reads each sample of a part once and in order, as batches that know the numbers of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
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

Print = Callable[[object], Fingerprint | None]


@dataclass(frozen=True, kw_only=True)
class Read:
    """Consecutive samples of a part.

    Args:
        data: Their batch, before batch transforms.
        first, count: The number of the first sample, and how many there are.
        prints: The fingerprint of each sample, before transforms.
        sizes: By the name of a padded entry, the shape of each sample.
    """

    data: object
    first: int
    count: int
    prints: list[Fingerprint | None]
    sizes: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadAssembly(Assembly):
    """Makes a Read from samples. inputs: the names of a sample's values."""

    inputs: Sequence[str]

    def __call__(self, samples: Sequence[Sample | ExpError]) -> object:
        batch = super().__call__(samples)
        if isinstance(batch, ExpError):
            return batch
        read = [sample for sample in samples if isinstance(sample, Sample)]
        prints = [cast(Fingerprint | None, sample.fingerprint) for sample in read]
        sizes: dict[str, list[tuple[int, ...]]] = {}
        if isinstance(self.collate, Pad):
            named = [entries_of(sample.data, self.inputs) for sample in read]
            shapes = {name: [tuple(np.shape(one[name])) for one in named] for name in named[0]}
            sizes = {name: own for name, own in shapes.items() if len({*own}) > 1}
        return Read(data=as_batch(batch), first=read[0].index, count=len(read), prints=prints, sizes=sizes)


def read_once(data: Data, stage: Stage, *, count: int, targets: Sequence[str]) -> Iterator[Read]:
    """Yield the first samples of a part in order, each once, with the transforms of epoch 0.

    Args:
        data: The data.
        stage: The stage of the part.
        count: The number of samples; the last batch may exceed it.
        targets: The entries of a sample that are targets. Fingerprints keep inputs and targets apart.

    Raises:
        ExpError: A sample cannot be read, or a label is not a class.
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
        yield Read(data=batch, first=first, count=len(indices), prints=[taken(row) for row in _rows(raw)])


def _rows(entries: Entries) -> Iterator[Entries]:
    """Yield each sample of a batch."""
    if isinstance(entries, Mapping):
        for row in zip(*entries.values(), strict=True):
            yield dict(zip(entries, row, strict=True))
    else:
        yield from zip(*entries, strict=True)


def entries_of(data: object, inputs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a sample or batch by name: `input` and `target` of a pair, `boxes.corners` of nested ones.

    Args:
        data: The sample or batch.
        inputs: The names of the values of a tuple.
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
