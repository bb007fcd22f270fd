"""Collate functions for samples with tensors of different sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import default_collate

from exp.data.data_errors import name_error, sample_error
from exp.data.entries import TARGET, inputs_in, named_entries
from exp.data.labels import IGNORED, is_whole

KEY = "collate"
Collate = Callable[[Any], Any]


class Pad:
    """Collate function that pads the tensors of a batch at the end of each axis, to the largest size in the batch.

    Tensors, arrays and lists of numbers are padded. torch's default_collate batches the other values of a sample. An
    entry is a named value of a sample, such as `input` or `target`.

    Args:
        padding_value: The number to append: one number for all entries, or a mapping from entry names to numbers.
            Default: -100 for a target of integers, because torch's losses ignore this label, and 0 otherwise.
        masks: Mapping from the name of a new mask to the entry that the mask describes. A mask is bool `[B, T]`. It is
            true at the positions of the entry's first axis that are not padding. Default: no masks.
        lengths: Mapping from the name of a new tensor to the entry that the tensor describes. The tensor contains the
            size of the entry's first axis before padding, int64 `[B]`. Default: no lengths.
    """

    def __init__(
        self,
        *,
        padding_value: float | Mapping[str, float] | None = None,
        masks: Mapping[str, str] | None = None,
        lengths: Mapping[str, str] | None = None,
    ) -> None:
        self.padding_value = padding_value
        self.masks, self.lengths = dict(masks or {}), dict(lengths or {})
        self.inputs: Sequence[str] = ()

    def of(self, inputs: Sequence[str]) -> Pad:
        """Return a copy of this collate function for samples with named inputs.

        Args:
            inputs: The names in data.inputs. They may include masks and lengths, which this function adds to the batch.
        """
        made = copy.copy(self)
        made.inputs = self.sample_names(inputs)
        return made

    def sample_names(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the inputs without masks and lengths, because samples do not contain these."""
        return tuple(name for name in inputs if name not in self.masks and name not in self.lengths)

    def __call__(self, samples: Sequence[object]) -> object:
        """Return the batch of a list of samples.

        Raises:
            ConfigError: An option refers to an entry that the samples do not have.
            SampleError: The tensors of an entry differ in their number of axes.
        """
        first = samples[0]
        if not self.inputs and isinstance(first, tuple | list) and len(first) > 2:
            inputs_in(first)  # Raises ConfigError, because the values have no names.
        rows = [named_entries(sample, self.inputs) for sample in samples]
        batch = self._batch({name: [row[name] for row in rows] for name in rows[0]})
        if self.inputs or self.masks or self.lengths or isinstance(first, Mapping):
            return batch
        if isinstance(first, tuple | list) and any(isinstance(value, Mapping) for value in first):
            return batch
        return tuple(batch.values()) if len(batch) == 2 else batch["input"]

    def _batch(self, columns: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        counted = {f"{key}.{name}": entry for key in ("masks", "lengths") for name, entry in getattr(self, key).items()}
        values = self.padding_value if isinstance(self.padding_value, Mapping) else {}
        named = {f"padding_value.{entry}": entry for entry in values}
        batch, counts = {}, dict[str, Tensor]()
        for name, held in columns.items():
            if not all(map(is_padded, held)):
                batch[name] = default_collate(list(held))
                continue
            tensors = [torch.as_tensor(value) for value in held]
            counts[name] = torch.tensor([len(tensor) for tensor in tensors])
            batch[name] = self._pad(name, tensors)
        for key, entry in {**named, **counted}.items():
            entries: Sequence[str] = list(counts) if key in counted else list(columns)
            if entry not in entries:
                expected = "an entry of the samples with a length" if key in counted else "an entry of the samples"
                raise name_error(f"{KEY}.{key}", entry, entries, expected=expected)
        for name, entry in self.masks.items():
            batch[name] = torch.arange(batch[entry].shape[1]) < counts[entry][:, None]
        return {**batch, **{name: counts[entry] for name, entry in self.lengths.items()}}

    def _pad(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return one padded tensor `[B, ...]` of the B tensors of an entry.

        The size of each axis is the largest size of this axis in the tensors.
        """
        dims = {tensor.dim() for tensor in tensors}
        if len(dims) > 1:
            got = f"samples whose {name} has {' and '.join(map(str, sorted(dims)))} axes"
            raise sample_error(KEY, got=got, expected="the same number of axes in every sample")
        size = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        value = self.padding_value
        if isinstance(value, Mapping):
            value = value.get(name)
        if value is None:
            value = IGNORED if name == TARGET and is_whole(tensors[0]) else 0
        batch = torch.full((len(tensors), *size), value, dtype=tensors[0].dtype)
        for row, tensor in zip(batch, tensors, strict=True):
            row[tuple(slice(length) for length in tensor.shape)] = tensor
        return batch


def collate_of(collate: Collate | Literal["pad"] | None, *, inputs: Sequence[str]) -> Collate:
    """Return the function that makes a batch from a list of samples.

    Args:
        collate: The value of data.collate. None means torch's default_collate, and `pad` means Pad.
        inputs: The names in data.inputs.
    """
    if collate is None:
        return default_collate
    found = Pad() if isinstance(collate, str) else collate
    return found.of(inputs) if isinstance(found, Pad) else found


def is_padded(value: object) -> bool:
    """Return whether a value of a sample can be padded.

    Tensors and arrays with at least one axis can be padded, and lists of numbers or of such values.
    """
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, list | tuple):
        return all(isinstance(one, int | float) or is_padded(one) for one in value)
    return hasattr(value, "__array__") and len(getattr(value, "shape", ())) > 0
