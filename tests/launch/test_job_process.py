"""Job processes, which are forked from a server: several at a time, results, exits, and the exit of the parent."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exp.launch.job_process import JobProcess, wait

# Module of the test, which the processes import to find their functions.
FUNCTIONS = """
import ctypes, os, subprocess, sys, time
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

def hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield os.getpid(), child.pid
    ctypes.PyDLL(None).sleep(600)  # holds the lock of the interpreter
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions_of_jobs.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield __import__("functions_of_jobs")
    del sys.modules["functions_of_jobs"]


def test_processes_run_at_the_same_time_and_report_their_deaths(functions):
    first = JobProcess(functions.meets, "a", "b", output=Path("a.log"), environment={"SETTING": "1"})
    while not (first.values or first.died):
        wait([first], 60)
    assert first.died is None
    second, dies = JobProcess(functions.meets, "b", "a"), JobProcess(functions.crashes)
    while not all(process.died for process in (first, second, dies)):
        wait([first, second, dies], 60)
    assert [process.values[1:] for process in (first, second)] == [["met"], ["met"]]
    assert len({first.values[0][0], second.values[0][0], os.getpid()}) == 3
    assert (first.values[0][1], second.values[0][1]) == ("1", None)
    assert Path("a.log").read_text() == "printed by a\n"
    assert (dies.values, str(dies.died)) == ([1], "was killed by SIGSEGV")


PARENT = """
import time
import functions_of_jobs
from exp.launch.job_process import JobProcess, start_server, wait

if __name__ == "__main__":
    start_server("exp.errors")
    process = JobProcess(functions_of_jobs.hangs)
    wait([process], 60)
    print(*process.values[0], flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_a_killed_parent_leaves_no_process(functions):
    Path("parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        left += psutil.Process(parent.pid).children()
        assert len(left) == 4, "a job, its child, the server and the resource tracker"
        parent.kill()
    assert psutil.wait_procs(left, timeout=60)[1] == []
