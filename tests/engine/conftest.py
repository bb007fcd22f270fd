"""Fixtures that start small runs in this process and in others."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "small_run.py"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_run() -> ModuleType:
    """The module small_run.py, loaded by its path."""
    spec = importlib.util.spec_from_file_location("small_run", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_run"] = module
    spec.loader.exec_module(module)
    return module


class Elsewhere:
    """Starts small runs in processes forked from one with all imports, which takes 0.1 s each."""

    def __init__(self, fork: Callable[..., BaseProcess]) -> None:
        self._fork = fork
        self._started: list[BaseProcess] = []

    def start(self, directory: Path, **settings: Any) -> BaseProcess:
        given = {"directory": str(directory), **settings}
        process = self._fork(PROGRAM, given, of_ranks=given.get("world_size", 1) > 1)
        self._started.append(process)
        return process

    def run(self, directory: Path, **settings: Any) -> int:
        """Run to the end, and return the exit status, which is negative if a signal killed the process."""
        return self.end(self.start(directory, **settings))

    def ranks(self, directory: Path, world_size: int, **settings: Any) -> list[BaseProcess]:
        directory.mkdir(parents=True, exist_ok=True)
        store = directory / f"store-{time.monotonic_ns()}"
        return [
            self.start(directory, rank=rank, world_size=world_size, store=str(store), **settings)
            for rank in range(world_size)
        ]

    def end(self, process: BaseProcess, *, seconds: float = 200) -> int:
        process.join(seconds)
        assert process.exitcode is not None, "the run does not end"
        return process.exitcode

    def close(self) -> None:
        for process in self._started:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def elsewhere(fork: Callable[..., BaseProcess]) -> Iterator[Elsewhere]:
    runs = Elsewhere(fork)
    with contextlib.closing(runs):
        yield runs


@pytest.fixture
def logged() -> Callable[..., dict[tuple[str, int], float]]:
    """A function that reads the values of a run by (tag, step), and asserts that values logged twice are equal."""

    def read(directory: Path, *, rank: int = 0) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        for line in (directory / f"values.{rank}.jsonl").read_text().splitlines():
            tag, step, value = json.loads(line)
            assert found.setdefault((tag, step), value) == value, f"{tag} differs at step {step}"
        return found

    return read
