"""A command exits without the interpreter's teardown of modules, but after exit functions, threads and open files.

`python -v` prints `# cleanup` for each module in the teardown.
"""

import os
import pstats
import subprocess
import sys

import pytest

SHORT = ("trainer.max_steps=2", "trainer.max_epochs=null", "trainer.limit_val_batches=1", "test=false")
OWN = """
import atexit, threading, time
from lightning.pytorch import Callback

class Kept:
    def __del__(self):
        print("deleted")

class Own(Callback):
    pass

def wait_for_the_end():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("thread")

KEPT = Kept()
atexit.register(lambda: print("registered"))
threading.Thread(target=wait_for_the_end).start()
"""
INSTALLED = """
from lightning.pytorch import Callback

FILE = open("installed.txt", "w")

class Installed(Callback):
    def on_fit_end(self, *_):
        FILE.write("written")
"""
AROUND = """
import gc, runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__")
finally:
    print("ended", gc.isenabled(), gc.get_freeze_count())
"""


def run(*line: str, **given) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *line], capture_output=True, text=True, check=False, **given)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-X", "frozen_modules=off")])
def test_a_command_ends_without_taking_modules_apart(flags):
    done = run("-v", *flags, "-m", "exp.check")
    assert done.returncode == 0
    assert done.stdout.startswith("ok: ")
    assert "# cleanup" not in done.stderr


@pytest.mark.slow
def test_a_command_ends_after_what_the_users_modules_registered(write):
    write("conf/callbacks/own.yaml", "# callbacks=[own]\nown:\n  _target_: own.Own\n")
    write("own.py", OWN)
    done = run("-m", "exp.check", "callbacks=[own]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["thread", "registered", "deleted"]


@pytest.mark.slow
def test_a_run_ends_after_what_an_installed_package_writes(place, write):
    write("site-packages/installed/__init__.py", INSTALLED)
    words = ("+callbacks.mine={_target_: installed.Installed}", "security.allow=[installed]")
    environment = {**os.environ, "PYTHONPATH": str(place / "site-packages")}
    done = run("-m", "exp.train", *SHORT, *words, env=environment)
    assert done.returncode == 0, done.stderr
    assert (place / "installed.txt").read_text() == "written"


@pytest.mark.slow
def test_a_profiler_around_a_command_writes_its_figures(place):
    assert run("-m", "cProfile", "-o", "profile", "-m", "exp.train", *SHORT).returncode == 0
    assert "training_step" in {name for _, _, name in vars(pstats.Stats(str(place / "profile")))["stats"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["around.py", "exp"])
def test_a_program_around_a_command_continues_unchanged(write, name):
    write(name, AROUND)
    done = run(name, "exp.train", *SHORT)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ended True 0")
