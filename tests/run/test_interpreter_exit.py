"""A command's process ends before its interpreter has taken modules apart, and what somebody would miss is done.

`python -v` says what an interpreter takes apart at its end: `# cleanup`.
"""

import os
import pstats
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SHORT = ("trainer.max_steps=2", "trainer.max_epochs=null", "trainer.limit_val_batches=1", "test=false")
OWN = """
import atexit, threading, time
from pathlib import Path
import lightning.pytorch as pl

class Kept:
    def __del__(self):
        print("taken apart")

KEPT = Kept()
atexit.register(lambda: print("registered"))

class Own(pl.Callback):
    def on_fit_end(self, *_):
        threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
"""

THEIRS = """
import lightning.pytorch as pl

FILE = open("theirs.txt", "w")

class Theirs(pl.Callback):
    def on_fit_end(self, *_):
        FILE.write("written")
"""
COUNTING = """
import gc, os
from pathlib import Path
import lightning.pytorch as pl

class Own(pl.Callback):
    def on_fit_end(self, *_):
        Path(f"collects{os.getpid()}").write_text(f"{gc.isenabled()} {gc.get_freeze_count()}")
"""
AROUND = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__")
finally:
    print("written")
"""


def command(*line: str, cwd: Path, words: tuple[str, ...] = (), **given) -> subprocess.CompletedProcess:
    whole = [sys.executable, *line, "exp.train", *SHORT, *words]
    return subprocess.run(whole, cwd=cwd, capture_output=True, text=True, check=False, **given)


@pytest.mark.parametrize("flags", [(), ("-X", "frozen_modules=off")])
def test_modules_are_not_taken_apart_where_nobody_sees_it(tmp_path, flags):
    done = command("-v", *flags, "-m", cwd=tmp_path)
    assert done.returncode == 0
    assert "dashboard  python -m exp.dashboard" in done.stdout
    assert "# cleanup" not in done.stderr


def test_what_the_users_modules_do_at_the_end_is_done(tmp_path):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "own.yaml").write_text("# callbacks=[own]\nown:\n  _target_: own.Own\n")
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    done = command("-m", cwd=tmp_path, words=("callbacks=[own]",))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-3:] == ["thread", "registered", "taken apart"]


def test_what_an_installed_package_does_at_the_end_is_done(tmp_path):
    package = tmp_path / "site-packages" / "theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(THEIRS))
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    words = ("+callbacks.theirs={_target_: theirs.Theirs}", "security.allow=[theirs]")
    done = command("-m", cwd=tmp_path, words=words, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs.txt").read_text() == "written"


def test_the_jobs_of_a_sweep_collect_garbage_but_not_what_is_imported(tmp_path):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "own.yaml").write_text("# callbacks=[own]\nown:\n  _target_: own.Own\n")
    (tmp_path / "own.py").write_text(textwrap.dedent(COUNTING))
    words = ("-m", "callbacks=[own]", "seed=0,1", "sweep.stack=false")
    done = command("-m", cwd=tmp_path, words=words, env={**os.environ, "EXP_COLD": "1"})
    assert done.returncode == 0, done.stderr
    told = [path.read_text().split() for path in sorted(tmp_path.glob("collects*"))]
    assert [one[0] for one in told] == ["True", "True"]
    assert all(int(one[1]) > 100_000 for one in told)


def test_in_a_program_of_somebody_else_nothing_is_left_out_of_collections(tmp_path):
    lines = (
        "import gc",
        "from exp.train import main",
        f"main({[*SHORT]})",
        "print(gc.isenabled(), gc.get_freeze_count())",
    )
    (tmp_path / "theirs.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "theirs.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "True 0"


def test_a_profiler_around_the_command_writes_its_figures(tmp_path):
    done = command("-m", "cProfile", "-o", "profile", "-m", cwd=tmp_path)
    assert done.returncode == 0
    functions = {name for _, _, name in vars(pstats.Stats(str(tmp_path / "profile")))["stats"]}
    assert "training_step" in functions


@pytest.mark.parametrize("name", ["around.py", "exp"])
def test_another_program_around_the_command_comes_to_its_end(tmp_path, name):
    (tmp_path / name).write_text(textwrap.dedent(AROUND))
    done = command(name, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "written")


def test_an_interpreter_that_is_to_go_on_does(tmp_path):
    done = command("-i", "-m", cwd=tmp_path, input="print('gone on')\n")
    assert done.stdout.splitlines()[-1] == "gone on"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_where_output_cannot_be_written_the_status_says_so(tmp_path):
    with open("/dev/full", "w") as full:
        whole = [sys.executable, "-m", "exp.check"]
        done = subprocess.run(whole, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
