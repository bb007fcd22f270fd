"""Make a batch of samples whose tensors vary in size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import default_collate

from exp.data.entries import TARGET, by_name
from exp.data.faults import SampleError, data_fault
from exp.data.labels import IGNORED, is_whole
from exp.errors import Fault
from exp.spelling import among, did_you_mean

KEY = "collate"
Collate = Callable[[Any], Any]


class Pad:
    """Brings the tensors of a batch to one size, each entry to that of its own largest, by padding behind them.

    An entry may be a tensor, an array or a list of numbers; whatever else a sample holds is batched as torch does.

    padding_value: what stands behind the numbers, for all entries or by entry name. An entry that is not named gets 0,
        and a target of class numbers -100, which the losses of torch leave out.
    masks: further entries of the batch, bool `[B, T]`, each with the name of the entry that it is of: true where a
        sample has a number along its first axis.
    lengths: further entries, int64 `[B]`, each with the name of the entry whose length along the first axis it is.
    length: by entry name, of its first axis in every batch; one that is not named is as long as its longest sample.
    """

    def __init__(
        self,
        *,
        padding_value: float | Mapping[str, float] | None = None,
        masks: Mapping[str, str] | None = None,
        lengths: Mapping[str, str] | None = None,
        length: Mapping[str, Annotated[int, Ge(1)]] | None = None,
    ) -> None:
        self.padding_value, self.length = padding_value, dict(length or {})
        self.masks, self.lengths = dict(masks or {}), dict(lengths or {})
        self._inputs: Sequence[str] = ()

    def of(self, inputs: Sequence[str]) -> Pad:
        """The same for samples whose values have the names data.inputs, but for those that it adds."""
        made = copy.copy(self)
        made._inputs = self.held(inputs)
        return made

    def held(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Of these entries of a batch those that samples have."""
        return tuple(name for name in inputs if name not in self.masks and name not in self.lengths)

    def __call__(self, samples: Sequence[object]) -> object:
        """Raises: ConfigError for a name that samples do not have; SampleError for tensors that no padding helps."""
        first = by_name(samples[0], self._inputs)
        if isinstance(first, Mapping):
            rows = [named for sample in samples if isinstance(named := by_name(sample, self._inputs), Mapping)]
            return self._batch({name: [row[name] for row in rows] for name in first})
        values = first if isinstance(first, tuple | list) else (first,)
        if len(values) > 2:
            got = f"null, and samples of {len(values)} values"
            expected = "the names of all of them but the target, which is the last"
            raise data_fault("inputs", got=got, expected=expected)
        names = ("input", TARGET)[: len(values)]
        pairs = [sample if isinstance(sample, tuple | list) else (sample,) for sample in samples]
        batch = self._batch({name: [pair[place] for pair in pairs] for place, name in enumerate(names)})
        if self.masks or self.lengths:
            return batch
        return tuple(batch.values()) if len(values) == 2 else batch["input"]

    def _batch(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        for key, wanted in (("masks", self.masks), ("lengths", self.lengths)):
            for name, entry in wanted.items():
                self._refuse_other(f"{key}.{name}", entry, columns)
        by_entry = {"padding_value": self.padding_value, "length": self.length}
        for key, given in by_entry.items():
            for entry in given if isinstance(given, Mapping) else ():
                self._refuse_other(f"{key}.{entry}", entry, columns)
        batch, counts = {}, {}
        for name, values in columns.items():
            if not all(map(is_padded, values)):
                batch[name] = default_collate(list(values))
                continue
            tensors = [torch.as_tensor(value) for value in values]
            counts[name] = torch.tensor([len(tensor) for tensor in tensors])
            batch[name] = self._padded(name, tensors)
        for name, entry in self.masks.items():
            steps = torch.arange(batch[entry].shape[1])
            batch[name] = steps < self._count(counts, f"masks.{name}", entry)[:, None]
        return {
            **batch,
            **{name: self._count(counts, f"lengths.{name}", entry) for name, entry in self.lengths.items()},
        }

    def _padded(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """`[B, ...]` of tensors `[...]`, each axis as long as the longest."""
        dims = {tensor.dim() for tensor in tensors}
        if len(dims) > 1:
            got = f"samples whose {name} has {' and '.join(map(str, sorted(dims)))} axes"
            raise SampleError(Fault(key=f"data.{KEY}", got=got, expected="as many axes in every sample"))
        size = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        if name in self.length:
            if size[0] > self.length[name]:
                got = f"{self.length[name]}, and a sample whose {name} has the length {size[0]}"
                raise SampleError(
                    Fault(key=f"data.{KEY}.length.{name}", got=got, expected=f"{size[0]} or more, or null")
                )
            size[0] = self.length[name]
        batch = torch.full((len(tensors), *size), self._value(name, tensors[0]), dtype=tensors[0].dtype)
        for row, tensor in zip(batch, tensors, strict=True):
            row[tuple(slice(length) for length in tensor.shape)] = tensor
        return batch

    def _value(self, name: str, tensor: Tensor) -> float:
        given = self.padding_value
        if isinstance(given, Mapping):
            given = given.get(name)
        if given is not None:
            return given
        return IGNORED if name == TARGET and is_whole(tensor) else 0

    def _count(self, counts: Mapping[str, Tensor], key: str, entry: str) -> Tensor:
        if entry not in counts:
            got = f"{entry}, which is one number in each sample"
            raise data_fault(f"{KEY}.{key}", got=got, expected="an entry with a length")
        return counts[entry]

    def _refuse_other(self, key: str, entry: str, columns: Mapping[str, object]) -> None:
        if entry not in columns:
            expected = f"an entry of the samples, which have {among(columns, word=entry)}"
            raise data_fault(f"{KEY}.{key}", got=entry, expected=expected, cure=did_you_mean(entry, columns))


def collate_of(collate: Collate | Literal["pad"] | None, *, inputs: Sequence[str]) -> Collate:
    """What makes the batches. collate: data.collate. inputs: the names of a sample's values."""
    if collate is None:
        return default_collate
    found = Pad() if isinstance(collate, str) else collate
    return found.of(inputs) if isinstance(found, Pad) else found


def is_padded(value: object) -> bool:
    """Whether a value of a sample has a length: a tensor, an array or a list of numbers."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, list | tuple):
        return all(isinstance(one, int | float) or is_padded(one) for one in value)
    return hasattr(value, "__array__") and len(getattr(value, "shape", ())) > 0
