"""Processes forked from a warm one: several at a time, what they give as they give it, signals, and nothing left."""

import contextlib
import os
import pickle
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from exp.launch import zygote
from exp.launch.zygote import Zygote

# A module of the test's own, by whose name the processes find their functions.
FUNCTIONS = """
import ctypes, os, signal, sys, time
from pathlib import Path

def steps(here, other):
    # Goes on only where the other one runs at the same time.
    yield os.getpid()
    Path(here).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    yield "met"

def waits(found, left):
    def leave(*_):
        Path(left).touch()
        os._exit(3)
    signal.signal(signal.SIGTERM, leave)
    Path(found).touch()
    yield "begun"
    time.sleep(600)

def says(words):
    print(words)
    print("error of", words, file=sys.stderr)
    os.write(1, b"of C\\n")
    yield os.environ.get("SAID")

def crashes():
    yield 1
    ctypes.string_at(0)

def leaves_a_child(found):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    Path(found).write_text(str(pid))
    yield pid

def large(size):
    yield "x" * size
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions_of_jobs.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield __import__("functions_of_jobs")
    del sys.modules["functions_of_jobs"]


@pytest.fixture
def started():
    with contextlib.closing(Zygote(["exp.errors"])) as started:
        yield started


def ended(started, *processes):
    while not all(process.is_over for process in processes):
        started.wait(60)


def test_processes_run_at_the_same_time_and_give_what_they_have_before_their_end(functions, started):
    first = started.begin(functions.steps, "a", "b")
    while not first.values:
        started.wait(0.05)
    assert not first.is_over
    second = started.begin(functions.steps, "b", "a")
    ended(started, first, second)
    assert (first.values[1:], second.values[1:]) == (["met"], ["met"])
    assert len({first.values[0], second.values[0], os.getpid()}) == 3
    assert first.died is second.died is None


def test_a_death_is_told_with_the_values_before_it_and_the_others_go_on(functions, started):
    dies = started.begin(functions.crashes)
    lives = started.begin(functions.large, 30_000_000)
    ended(started, dies, lives)
    assert (dies.values, str(dies.died)) == ([1], "was killed by SIGSEGV")
    assert (len(lives.values[0]), lives.died) == (30_000_000, None)


def test_a_signal_reaches_one_process_alone_even_one_that_has_just_begun(functions, started):
    started.start()
    waiting = started.begin(functions.waits, "found0", "left0")
    while not Path("found0").exists():
        time.sleep(0.01)
    new = started.begin(functions.waits, "found1", "left1")
    started.signal(new, signal.SIGTERM)
    ended(started, new)
    assert new.died is not None
    assert not waiting.is_over
    started.signal(waiting, signal.SIGTERM)
    ended(started, waiting)
    assert str(waiting.died) == "ended with status 3 without a word"
    assert Path("left0").exists()


def test_the_output_of_a_process_is_its_own_file_and_its_environment_its_own(functions, started, capfd):
    processes = [
        started.begin(functions.says, words, output=Path(f"{words}.log"), environment={"SAID": words})
        for words in ("one", "two")
    ]
    ended(started, *processes)
    assert [process.values for process in processes] == [["one"], ["two"]]
    for words in ("one", "two"):
        assert Path(f"{words}.log").read_text().splitlines() == [words, f"error of {words}", "of C"]
    assert capfd.readouterr() == ("", "")
    assert "SAID" not in os.environ


def test_what_a_process_left_behind_ends_with_it(functions, started):
    process = started.begin(functions.leaves_a_child, "child")
    ended(started, process)
    assert process.values == [int(Path("child").read_text())]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process.values[0]).wait(timeout=60)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left_of_a_zygote_that_is_closed_or_killed(functions, started, end):
    processes = [started.begin(functions.waits, f"found{number}", f"left{number}") for number in range(2)]
    while not all(Path(f"found{number}").exists() for number in range(2)):
        time.sleep(0.01)
    (server,) = [child for child in psutil.Process().children() if len(child.children()) == 2]
    jobs = server.children()
    descriptors = psutil.Process().num_fds()
    if end == "close":
        started.close()
    else:
        server.kill()
        ended(started, *processes)
    assert psutil.wait_procs(jobs, timeout=60)[1] == []
    assert [str(process.died) for process in processes] == [str(zygote._gone())] * 2
    assert psutil.Process().num_fds() == descriptors - 3
    again = started.begin(functions.large, 3)
    ended(started, again)
    assert again.values == ["xxx"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked at all")
def test_where_a_process_cannot_be_forked_it_is_an_interpreter_of_its_own(functions, tmp_path, monkeypatch):
    # As after an import that initialised CUDA: every child that is forked from there on would fail with it.
    Path("torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)\n")
    with contextlib.closing(Zygote(["torch"])) as started:
        first = started.begin(functions.steps, "a", "b", output=Path("a.log"), environment={"SAID": "a"})
        second = started.begin(functions.steps, "b", "a")
        dies = started.begin(functions.crashes, output=Path("crash.log"))
        says = started.begin(functions.says, "one", output=Path("one.log"), environment={"SAID": "one"})
        ended(started, first, second, dies, says)
    assert (first.values[1:], second.values[1:]) == (["met"], ["met"])
    assert str(dies.died) == "was killed by SIGSEGV"
    assert "Segmentation fault" in Path("crash.log").read_text()
    assert says.values == ["one"]
    assert Path("one.log").read_text().splitlines() == ["one", "error of one", "of C"]


def test_a_copy_has_a_zygote_of_its_own(started):
    assert pickle.loads(pickle.dumps(started))._modules == ("exp.errors",)


def test_what_modules_do_at_their_end_costs_no_process_time_and_what_a_process_registers_is_done(
    functions, monkeypatch
):
    Path("registers.py").write_text(
        "import weakref\n\nclass Kept: pass\n\nkept = Kept()\n"
        "def note(words):\n    print(words, flush=True)\n\n"
        "finalizer = weakref.finalize(kept, note, 'of the import')\n"
        "def own():\n    import atexit\n    weakref.finalize(kept, note, 'of the job')\n"
        "    atexit.register(note, 'at exit')\n    yield 1\n"
    )
    import registers

    with contextlib.closing(Zygote(["registers"])) as started:
        ended(started, started.begin(registers.own, output=Path("own.log")))
    assert Path("own.log").read_text().splitlines() == ["at exit", "of the job"]
    registers.finalizer.detach()
    del sys.modules["registers"]
