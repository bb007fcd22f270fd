"""How a rank's share of a batch is cut into the micro-batches of a pipeline: arithmetic, and slices of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from exp.nested import mapped, rebuilt

# Micro-batches a rank of the pipeline: GPipe's paper finds the idle time small from 4 on (Huang 2019, section 2.3).
WISH = 4


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One of a share's micro-batches, all of the same size, as a schedule needs them.

    data: as the share's, sliced. size: how many of its samples are the share's own; the others repeat its last one and
    count for nothing.
    """

    data: Any
    size: int


def number_of(wish: int | Literal["auto"], *, batch_size: int, ranks: int, least: int, multiple_of: int) -> int:
    """Micro-batches of a rank's share of `batch_size` samples.

    wish: `auto` takes the largest number that cuts the share without a rest, up to 4 a rank of the pipeline.
    least, multiple_of: what the schedule asks for.
    """
    if wish != "auto":
        return wish
    most = max(WISH * ranks, least)
    fitting = [count for count in range(least, most + 1) if count % multiple_of == 0]
    even = [count for count in fitting if batch_size % count == 0]
    return even[-1] if even else fitting[0]


def micro_batches(data: Any, *, size: int, count: int) -> list[MicroBatch]:
    """`size` samples in `count` micro-batches of one size. Where they do not come out even, the last ones are filled
    up with the last sample."""
    each = -(-size // count)
    found = []
    for place in range(count):
        start = min(place * each, size)
        stop = min(start + each, size)
        found.append(MicroBatch(data=_slice(data, start=start, stop=stop, size=size, each=each), size=stop - start))
    return found


def shares(data: Any, *, size: int, count: int) -> list[Any]:
    """The samples in at most `count` pieces, as even as it goes: for an evaluation, which asks for no equal sizes."""
    count = min(size, count)
    stops = [size * place // count for place in range(count + 1)]
    return [
        _slice(data, start=start, stop=stop, size=size, each=stop - start) for start, stop in itertools.pairwise(stops)
    ]


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of pieces of a batch as the output of the batch: tensors one behind the other."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs)).mean()
    if isinstance(first, Mapping):
        return {name: joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, list | tuple):
        return rebuilt(first, [joined(items) for items in zip(*outputs, strict=True)])
    return first


def cut(output: Any, size: int) -> Any:
    """The first `size` samples of an output."""
    return mapped(output, lambda tensor: tensor[:size] if tensor.dim() else tensor)


def _slice(data: Any, *, start: int, stop: int, size: int, each: int) -> Any:
    def sliced(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        piece = tensor[start:stop]
        missing = each - (stop - start)
        return torch.cat([piece, tensor[size - 1 :].expand(missing, *tensor.shape[1:])]) if missing else piece

    return mapped(data, sliced)
