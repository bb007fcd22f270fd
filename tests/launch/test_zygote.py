"""Processes that are forked from a warm one: several at a time, their values, and their ends."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from exp.launch.zygote import Zygote

# A module of the test, by whose name the processes find their functions.
FUNCTIONS = """
import ctypes, os, sys, time
from pathlib import Path

def meets(here, other):
    # Ends only if the other process runs at the same time.
    print("printed by", here)
    yield os.getpid(), os.environ.get("SETTING")
    Path(here).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    yield "met"

def crashes():
    yield 1
    ctypes.string_at(0)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions_of_jobs.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield __import__("functions_of_jobs")
    del sys.modules["functions_of_jobs"]


def wait_for(zygote, *processes):
    while not all(process.is_over for process in processes):
        zygote.wait(60)


# A process that has initialised CUDA cannot be forked: each job is then a new interpreter.
CUDA = "class cuda:\n    is_initialized = staticmethod(lambda: True)\n"


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "started"])
def test_processes_run_at_the_same_time_and_report_their_deaths(functions, forks):
    if not forks:
        Path("torch.py").write_text(CUDA)
    with contextlib.closing(Zygote(["exp.errors"] if forks else ["torch"])) as zygote:
        first = zygote.begin(functions.meets, "a", "b", output=Path("a.log"), environment={"SETTING": "1"})
        while not first.values:
            zygote.wait(0.05)
        assert not first.is_over
        second = zygote.begin(functions.meets, "b", "a")
        dies = zygote.begin(functions.crashes)
        wait_for(zygote, first, second, dies)
    assert [process.values[1:] for process in (first, second)] == [["met"], ["met"]]
    assert len({first.values[0][0], second.values[0][0], os.getpid()}) == 3
    assert (first.values[0][1], second.values[0][1]) == ("1", None)
    assert first.died is second.died is None
    assert Path("a.log").read_text() == "printed by a\n"
    assert (dies.values, str(dies.died)) == ([1], "was killed by SIGSEGV")
