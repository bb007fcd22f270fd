"""Finds samples that are the same by a hash of their values before transforms."""

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

# Bytes of a hash: two different samples have the same one by chance in 1 of 10^38 pairs.
SIZE = 16
# Pairs of the same samples that are kept.
MOST_PAIRS = 100


class Fingerprint(NamedTuple):
    """Hashes of the inputs and of the targets of a sample."""

    inputs: bytes
    targets: bytes


def fingerprint(
    sample: object, *, inputs: Sequence[str], targets: Sequence[str], values: int = 0
) -> Fingerprint | None:
    """Return the fingerprint of a sample; None if it holds an object without bytes to compare.

    Args:
        sample: The sample.
        inputs: The entries of a mapping that are inputs; if the sample has none of them, all but the targets are. Other
            entries, such as a path, are left out because no two samples share them.
        targets: The entries of a mapping that are targets.
        values: How many values of a tuple are inputs, before one target; 0 if unknown.
    """
    given: object = sample
    wanted: object = None
    if isinstance(sample, Mapping):
        rest = {name: value for name, value in sample.items() if name not in targets}
        given = {name: value for name, value in rest.items() if name in inputs} or rest
        wanted = {name: value for name, value in sample.items() if name in targets}
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        given, wanted = sample
    elif isinstance(sample, tuple | list) and values and len(sample) == values + 1:
        given, wanted = sample[:-1], sample[-1]
    try:
        return Fingerprint(_hash(given), _hash(wanted))
    except (TypeError, ValueError, RuntimeError):
        return None


def _hash(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=SIZE)
    for part in _bytes_of(value):
        digest.update(part)
    return digest.digest()


def _bytes_of(value: object) -> Iterator[bytes]:
    """Yield the bytes of numbers, text, and containers of them.

    Raises:
        TypeError, ValueError, RuntimeError: Another object.
    """
    if isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        # NumPy lacks some of torch's dtypes.
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
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
    """Samples of a part that are also in another part, or several times in their own.

    Args:
        part, within: The part of the samples, and the part in which they are found.
        count: How many samples of `part`.
        other_target: How many of them have another target there.
        pairs: The first of them: the number in `part` and the number in `within`.
    """

    part: Stage
    within: Stage
    count: int = 0
    other_target: int = 0
    pairs: list[tuple[int, int]] = field(default_factory=list)


class Comparison:
    """Finds repeated samples, part by part.

    `leaks` are samples that are in an earlier part too, `duplicates` the second and later ones within a part.
    `incomparable` counts samples without a fingerprint, by part.
    """

    def __init__(self) -> None:
        self._first: dict[Stage, dict[bytes, tuple[int, bytes]]] = {}
        self._found: dict[tuple[Stage, Stage], Repeats] = {}
        self.incomparable: dict[Stage, int] = {}

    def add(self, stage: Stage, first: int, prints: Sequence[Fingerprint | None]) -> None:
        """Add the next samples of a part. first: the number of the first one."""
        own = self._first.setdefault(stage, {})
        for index, one in enumerate(prints, first):
            if one is None:
                self.incomparable[stage] = self.incomparable.get(stage, 0) + 1
                continue
            for within, known in self._first.items():
                if one.inputs in known:
                    found, targets = known[one.inputs]
                    repeats = self._found.setdefault((stage, within), Repeats(part=stage, within=within))
                    repeats.count += 1
                    repeats.other_target += targets != one.targets
                    repeats.pairs += [(index, found)] if repeats.count <= MOST_PAIRS else []
            own.setdefault(one.inputs, (index, one.targets))

    @property
    def leaks(self) -> list[Repeats]:
        return [one for one in self._found.values() if one.part != one.within]

    @property
    def duplicates(self) -> list[Repeats]:
        return [one for one in self._found.values() if one.part == one.within]
