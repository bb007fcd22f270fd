"""Joins requests that arrive at nearly the same time into one call of a model.

A request waits at most `wait_ms` for others, and no longer than until `most` samples are together. Only requests whose
samples have the same shapes are joined. If a joined call fails, each of its requests is called alone, so that one bad
request fails no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from exp.errors import ExpError, RunError

Arrays = Mapping[str, np.ndarray]


class UnavailableError(ExpError):
    """The queue is full, or the server ends."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A request in the queue. size: its samples. shapes: of one sample, by input."""

    inputs: Arrays
    size: int
    shapes: tuple[object, ...]
    since: float
    answer: asyncio.Future[Arrays]


class MicroBatches:
    """A queue in front of a model, which one task of an event loop reads.

    Args:
        call: The model, from inputs `[B, ...]` by name to outputs. It runs in a thread, one call at a time.
        most: The samples of one call.
        wait_ms: The time for which a request waits for others.
        limit: The samples that may wait.
        joins: False calls each request alone, for a model with a fixed batch.
    """

    def __init__(
        self,
        call: Callable[[Arrays], Arrays],
        *,
        most: int = 64,
        wait_ms: float = 2.0,
        limit: int = 1024,
        joins: bool = True,
    ) -> None:
        self._call, self._most, self._wait, self._limit, self._joins = call, most, wait_ms / 1000, limit, joins
        self._queue: list[Request] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._waiting = self._requests = self._calls = 0

    def counts(self) -> dict[str, int]:
        """Return the number of requests and calls so far, and the number of samples that wait."""
        return {"requests": self._requests, "calls": self._calls, "waiting_samples": self._waiting}

    async def submit(self, inputs: Arrays) -> Arrays:
        """Return the model's outputs for the samples of a request.

        Raises:
            UnavailableError: The queue is full, or the server ends.
            RunError: The model refuses the samples.
        """
        size = len(next(iter(inputs.values())))
        if self._is_closed:
            raise UnavailableError("the server ends")
        if self._waiting and self._waiting + size > self._limit:
            raise UnavailableError(f"{self._waiting} samples wait, at most {self._limit} may")
        shapes = tuple((name, one.shape[1:]) for name, one in sorted(inputs.items()))
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self._queue.append(Request(inputs=inputs, size=size, shapes=shapes, since=time.perf_counter(), answer=answer))
        self._arrived.set()
        self._task = self._task or asyncio.create_task(self._work())
        self._requests, self._waiting = self._requests + 1, self._waiting + size
        try:
            return await answer
        finally:
            self._waiting -= size

    async def close(self) -> None:
        """Answer the requests that wait, and refuse new ones."""
        self._is_closed = True
        while self._waiting:
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=True)

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            first = self._queue[0]
            while self._joins and (left := first.since + self._wait - time.perf_counter()) > 0:
                if sum(one.size for one in self._queue if one.shapes == first.shapes) >= self._most:
                    break
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), left)
            await self._answer(self._take())

    def _take(self) -> list[Request]:
        """Take the oldest request and those that fit to it from the queue."""
        first, *others = self._queue
        group, left, size = [first], [], first.size
        for one in others:
            if self._joins and one.shapes == first.shapes and size + one.size <= self._most:
                group.append(one)
                size += one.size
            else:
                left.append(one)
        self._queue = left
        return group

    async def _answer(self, group: Sequence[Request]) -> None:
        try:
            answers = await self._run(group)
        except Exception as error:  # each request is answered, whatever the model raises
            if len(group) > 1:
                for one in group:
                    await self._answer([one])
            elif not group[0].answer.done():
                group[0].answer.set_exception(error)
            return
        for one, answer in zip(group, answers, strict=True):
            if not one.answer.done():  # the client of an answered request has gone
                one.answer.set_result(answer)

    async def _run(self, group: Sequence[Request]) -> list[Arrays]:
        """Return the outputs of each request.

        Raises:
            RunError: The model refuses the samples, or answers with another number of them.
        """
        inputs = {name: np.concatenate([one.inputs[name] for one in group]) for name in group[0].inputs}
        self._calls += 1
        outputs = await asyncio.get_running_loop().run_in_executor(self._thread, self._call, inputs)
        if len(group) == 1:
            return [outputs]
        sizes = [one.size for one in group]
        for name, one in outputs.items():
            if one.ndim == 0 or len(one) != sum(sizes):
                raise RunError(f"the output {name} is of shape {list(one.shape)} for {sum(sizes)} samples")
        parts = {name: np.split(one, np.cumsum(sizes)[:-1]) for name, one in outputs.items()}
        return [{name: each[place] for name, each in parts.items()} for place in range(len(group))]
