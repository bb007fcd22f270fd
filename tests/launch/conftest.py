"""Fixtures that launch a program in every rank of a new run directory with exp's launcher."""

import json
import textwrap

import pytest

from exp.errors import RankError
from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement

HEAD = """
import json, os, pathlib, signal, sys, time
from exp.launch.lifecycle import live
from exp.errors import ConfigError, ErrorDetails, Interrupted, RunError
directory = pathlib.Path(sys.argv[1])

def note(rank, value):
    (directory / f"note{rank.global_rank}").write_text(json.dumps(value))

def joined(rank, timeout_seconds=60):
    import torch
    from exp.strategies.process_group import join
    from exp.strategies.placement import Machine, adopt_placement
    join(rank, adopt_placement(rank, "ddp", machine=Machine(gpus=0)), timeout_seconds=timeout_seconds)
    return torch

def meet(rank):
    # Waits for ranks that import at different speeds.
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
    """A function that writes the module `rank_program`, which every rank runs."""

    def write_program(body: str) -> None:
        text = HEAD + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n\nlive(body)\n"
        (tmp_path / "rank_program.py").write_text(text)

    return write_program


# Module of the process that launches the ranks.
LAUNCHING = """
import json, pathlib, sys
from exp.errors import Interrupted, RankError
from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement

def main():
    arguments = sys.argv[1:]
    directory, ranks, options = pathlib.Path(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    try:
        placed = placement("ddp", devices=ranks, machine=Machine(gpus=0))
        launch(directory, placement=placed, worker="rank_program", **options)
    except RankError as error:
        found = {"rank": error.rank, "reason": error.reason, "detail": error.detail}
        (directory / "error").write_text(json.dumps(found))
        print(error)
        return error.exit_status
    except Interrupted as error:
        print(error)
        return error.exit_status
    return 0
"""


@pytest.fixture
def launch_command(tmp_path, run_directory, write_program, commands):
    """A function that starts a process that launches ranks, which are forked from it and have imported torch."""

    def launch_command(body: str, *, ranks: int = 2, **options):
        write_program(body)
        (tmp_path / "launching.py").write_text(LAUNCHING)
        arguments = [str(run_directory), str(ranks), json.dumps(options)]
        return commands.start(*arguments, module="launching", cwd=tmp_path)

    return launch_command


@pytest.fixture
def launched(tmp_path, run_directory, write_program, monkeypatch, launch_command):
    """A function that launches the ranks of a program in `run_directory`.

    With warm=True, the ranks are forked from a process that has imported torch.
    """
    monkeypatch.syspath_prepend(str(tmp_path))

    def launched(body: str, *, ranks: int = 2, warm: bool = False, **options) -> None:
        if not warm:
            write_program(body)
            placed = placement("ddp", devices=ranks, machine=Machine(gpus=0))
            launch(run_directory, placement=placed, worker="rank_program", **options)
            return
        done = launch_command(body, ranks=ranks, **options).end()
        error = run_directory / "error"
        if error.is_file():
            raise RankError(**json.loads(error.read_text()))
        assert done.returncode == 0, done.stderr

    return launched
