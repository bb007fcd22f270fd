"""Tell samples that are the same: by a hash of what they hold, before any transform."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exp.nested import is_record
from exp.shared_types import Stage

# Bytes of a hash: two samples that differ have the same one by chance in 1 of 10^38 pairs.
SIZE = 16
# Of the pairs of samples that are the same, those that are told.
TOLD = 100


class Fingerprint(NamedTuple):
    """Hashes of what a network is given of a sample, and of its targets."""

    inputs: bytes
    targets: bytes


def fingerprint(
    sample: object, *, inputs: Sequence[str], targets: Sequence[str], values: int = 0
) -> Fingerprint | None:
    """That of one sample; None where it holds an object of which nobody knows when two are the same.

    inputs, targets: which entries of a mapping a network may be given, and which are targets: a number or a path of the
        sample, which no other one has, is neither. Where none of the inputs is there, before transforms, all but the
        targets count.
    values: how many values of a tuple are inputs, with the target behind them; 0 where nobody knows.
    """
    given, wanted = _divided(sample, inputs, targets, values)
    try:
        return Fingerprint(_hash(given), _hash(wanted))
    except (TypeError, ValueError, RuntimeError):
        return None


def _divided(sample: object, inputs: Sequence[str], targets: Sequence[str], values: int) -> tuple[object, object]:
    """What a sample holds for the network, and its target; all of it is for the network where nobody can tell."""
    if isinstance(sample, Mapping):
        rest = {name: value for name, value in sample.items() if name not in targets}
        given = {name: value for name, value in rest.items() if name in inputs}
        return given or rest, {name: value for name, value in sample.items() if name in targets}
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    if isinstance(sample, tuple | list) and values and len(sample) == values + 1:
        return sample[:-1], sample[-1]
    return sample, None


def _hash(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=SIZE)
    for part in _bytes_of(value):
        digest.update(part)
    return digest.digest()


def _bytes_of(value: object) -> Iterator[bytes]:
    """Raises: TypeError, ValueError, RuntimeError for an object that is neither numbers nor text, nor made of them."""
    if isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        # As bytes, for NumPy does not know all of torch's dtypes.
        yield (
            value.detach()
            .cpu()
            .resolve_conj()
            .resolve_neg()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield f"{type(value).__name__} {value!r};".encode(errors="backslashreplace")
    elif isinstance(value, Mapping | list | tuple):
        yield f"{'{' if isinstance(value, Mapping) else '['}{len(value)}".encode()
        for one in value.items() if isinstance(value, Mapping) else value:
            yield from _bytes_of(one)
    elif is_record(value):
        yield from _bytes_of(vars(value))
    else:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"a {type(value).__name__} has no bytes to compare")
        yield f"{array.dtype}{list(array.shape)}".encode()
        yield array.tobytes()


@dataclass(kw_only=True)
class Repeats:
    """Samples of a part that are in another one, or are in it twice.

    part, within: the sample's part, and that in which it is found; the same for those that are there twice.
    count: how many samples of `part`. other_target: how many of them have another target there.
    pairs: the first of them, a sample's number in `part` and one in `within`.
    """

    part: Stage
    within: Stage
    count: int = 0
    other_target: int = 0
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def add(self, index: int, found: int, *, has_other_target: bool) -> None:
        self.count += 1
        self.other_target += has_other_target
        if len(self.pairs) < TOLD:
            self.pairs.append((index, found))


class Comparison:
    """Finds the samples that are the same, part by part. incomparable: how many cannot be compared, by part."""

    def __init__(self) -> None:
        self._first: dict[Stage, dict[bytes, tuple[int, bytes]]] = {}
        self._found: dict[tuple[Stage, Stage], Repeats] = {}
        self.incomparable: dict[Stage, int] = {}

    def add(self, stage: Stage, first: int, prints: Sequence[Fingerprint | None]) -> None:
        """Takes the samples of a part from number `first` on, in their order."""
        own = self._first.setdefault(stage, {})
        for index, one in enumerate(prints, first):
            if one is None:
                self.incomparable[stage] = self.incomparable.get(stage, 0) + 1
                continue
            for within, known in self._first.items():
                if one.inputs in known:
                    found, targets = known[one.inputs]
                    repeats = self._found.setdefault((stage, within), Repeats(part=stage, within=within))
                    repeats.add(index, found, has_other_target=targets != one.targets)
            own.setdefault(one.inputs, (index, one.targets))

    @property
    def leaks(self) -> list[Repeats]:
        """Samples of a part that are in an earlier one, too."""
        return [one for one in self._found.values() if one.part != one.within]

    @property
    def duplicates(self) -> list[Repeats]:
        """Samples that a part has twice or more often: all of them but the first."""
        return [one for one in self._found.values() if one.part == one.within]
