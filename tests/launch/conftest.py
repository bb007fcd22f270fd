"""`launched(program)`: a program lived by every rank of a fresh run directory, through the real launcher."""

import textwrap

import pytest

from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement

HEAD = """
import json, os, pathlib, signal, sys, time
from exp.launch.lifecycle import live
from exp.errors import ConfigError, Fault, Interrupted, RunError
directory = pathlib.Path(sys.argv[1])

def note(rank, value):
    (directory / f"note{rank.global_rank}").write_text(json.dumps(value))

def joined(rank, timeout_seconds=60):
    import torch
    from exp.strategies.process_group import join
    from exp.strategies.placement import Machine, adopted
    join(rank, adopted(rank, "ddp", machine=Machine(gpus=0)), timeout_seconds=timeout_seconds)
    return torch

def meet(rank):
    # Ranks that import at different speeds go on together.
    import torch
    (directory / f"here{rank.global_rank}").touch()
    while not all((directory / f"here{other}").exists() for other in range(rank.world_size)):
        time.sleep(0.01)

def body(rank):
"""


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


@pytest.fixture
def write_program(tmp_path):
    """A function that writes `rank_program`, a module of the test's own whose body every rank lives."""

    def write_program(body: str) -> None:
        text = HEAD + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n\nlive(body)\n"
        (tmp_path / "rank_program.py").write_text(text)

    return write_program


@pytest.fixture
def launched(tmp_path, run_directory, write_program, monkeypatch):
    """A function that launches a program's ranks in `run_directory`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def launched(body: str, *, ranks: int = 2, **options) -> None:
        write_program(body)
        placed = placement("ddp", devices=ranks, machine=Machine(gpus=0))
        launch(run_directory, placement=placed, worker="rank_program", **options)

    return launched
