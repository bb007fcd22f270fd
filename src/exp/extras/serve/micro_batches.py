"""Make one call of a model out of requests that come at nearly the same time, and give each its own part of the answer.

A request waits `wait_ms` at most for others, and no longer than until `most` samples are together. Only requests whose
samples have the same shapes go together. Where a call fails, its requests are called alone, so that one bad request
takes no other one with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from exp.errors import ExpError, RunError

Arrays = Mapping[str, np.ndarray]


class QueueFull(ExpError):
    """More samples wait than may: ask again later."""


class Closed(ExpError):
    """The server ends and takes nothing new."""


@dataclass(eq=False, kw_only=True)
class Waiting:
    """A request in the queue. size: its samples. shapes: of one of them, which others must have to go with it."""

    inputs: Arrays
    size: int
    shapes: tuple[object, ...]
    answer: asyncio.Future[Arrays]
    since: float = field(default_factory=time.perf_counter)


@dataclass(kw_only=True)
class Counts:
    """What has been done: calls of the model, samples in them, and how many samples wait."""

    calls: int = 0
    samples: int = 0
    waiting: int = 0


class MicroBatches:
    """A queue before a model, read by one task. It belongs to one event loop.

    call: the model, inputs `[B, ...]` by name to outputs. It runs in a thread, one call at a time.
    most: samples of one call. wait_ms: for others. limit: samples that may wait.
    joins: false calls each request alone, for a model whose batch is fixed.
    observe: is told the samples and the seconds of each call.
    """

    def __init__(
        self,
        call: Callable[[Arrays], Arrays],
        *,
        most: int = 64,
        wait_ms: float = 2.0,
        limit: int = 1024,
        joins: bool = True,
        observe: Callable[[int, float], None] = lambda samples, seconds: None,
    ) -> None:
        self._call, self._observe = call, observe
        self.most, self.wait_ms, self.limit, self.joins = most, wait_ms, limit, joins
        self.counts = Counts()
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._pending: list[Waiting] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, inputs: Arrays) -> Arrays:
        """The model's outputs for a request's samples.

        Raises: QueueFull; Closed; RunError where the model refuses these very samples.
        """
        if self._closed:
            raise Closed("the server ends")
        size = len(next(iter(inputs.values())))
        if self.counts.waiting and self.counts.waiting + size > self.limit:
            raise QueueFull(f"{self.counts.waiting} samples wait, and {self.limit} may")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        shapes = tuple((name, one.shape[1:]) for name, one in sorted(inputs.items()))
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.counts.waiting += size
        self._queue.put_nowait(Waiting(inputs=inputs, size=size, shapes=shapes, answer=answer))
        try:
            return await answer
        finally:
            self.counts.waiting -= size

    async def close(self) -> None:
        """Answer what waits, and end. Safe to call twice."""
        self._closed = True
        while self._task is not None and self.counts.waiting:
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._thread.shutdown(wait=True)

    async def _work(self) -> None:
        while True:
            group = await self._gather()
            # Whoever has gone, or timed out, is not computed.
            group = [one for one in group if not one.answer.done()]
            if group:
                await self._answer(group)

    async def _gather(self) -> list[Waiting]:
        """The requests of the next call: the oldest, and those that fit to it and come in time."""
        if not self._pending:
            self._pending.append(await self._queue.get())
        first = self._pending[0]
        ends = first.since + self.wait_ms / 1000
        while self.joins:
            while not self._queue.empty():
                self._pending.append(self._queue.get_nowait())
            left = ends - time.perf_counter()
            if left <= 0 or sum(one.size for one in self._pending if one.shapes == first.shapes) >= self.most:
                break
            with contextlib.suppress(TimeoutError):
                self._pending.append(await asyncio.wait_for(self._queue.get(), left))
        group, others, size = [first], [], first.size
        for one in self._pending[1:]:
            if self.joins and one.shapes == first.shapes and size + one.size <= self.most:
                group.append(one)
                size += one.size
            else:
                others.append(one)
        self._pending = others
        return group

    async def _answer(self, group: list[Waiting]) -> None:
        try:
            outputs = await self._run(group)
        except RunError as error:
            if len(group) == 1:
                _fail(group[0], error)
                return
            for one in group:
                await self._answer([one])
            return
        except Exception as error:  # a fault of the model's or of this server's: each request is told, none hangs
            for one in group:
                _fail(one, error)
            return
        start = 0
        for one in group:
            # An output of a request alone may be of any shape.
            mine = (
                {name: part[start : start + one.size] for name, part in outputs.items()} if len(group) > 1 else outputs
            )
            if not one.answer.done():
                one.answer.set_result(mine)
            start += one.size

    async def _run(self, group: list[Waiting]) -> Arrays:
        """Raises: RunError where the model refuses the samples, or answers with another number of them."""
        names = group[0].inputs
        alone = len(group) == 1
        inputs = names if alone else {name: np.concatenate([one.inputs[name] for one in group]) for name in names}
        size = sum(one.size for one in group)
        start = time.perf_counter()
        outputs = await asyncio.get_running_loop().run_in_executor(self._thread, self._call, inputs)
        self._observe(size, time.perf_counter() - start)
        self.counts.calls += 1
        self.counts.samples += size
        for name, one in outputs.items():
            if not alone and (one.ndim == 0 or len(one) != size):
                raise RunError(f"the output {name} is of shape {list(one.shape)} for {size} samples")
        return outputs


def _fail(one: Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
