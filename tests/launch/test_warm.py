"""Commands that a warm parent runs: signals and ends in both directions, and when there is to be no such parent.

That their bytes are those of commands without one is the claim of tests/attacks/warm_commands.py.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from exp.launch import handover
from exp.launch.warm_parent import Imported

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked at all")

CALLBACK = """
import os, time
from pathlib import Path
import lightning.pytorch as pl

class Own(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            Path("command").write_text(Path("/proc/self/cmdline").read_text())
            Path("pid").write_text(str(os.getpid()))
            while not Path("go_on").exists():
                time.sleep(0.01)
"""
OWN_YAML = "# Waits at its second step: callbacks=[own]\nown:\n  _target_: own.Own\n"
COLD_YAML = "# @package _global_\n# Wants a fresh interpreter: experiment=cold\nruntime: {warm: false}\n"
SHORT = (
    *("trainer.max_steps=4", "trainer.limit_val_batches=1", "test=false", "hydra.run.dir=outputs/run"),
    *("callbacks=[own]", "trainer.enable_progress_bar=false"),
)
# More than any machine takes: a test that waits for longer has failed.
SECONDS = 200.0


def until(condition):
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.02)


def environment(runtime: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime), **variables}


def manage(runtime: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "exp.warm", *words]
    return subprocess.run(line, env=environment(runtime, **variables), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The runtime directory of a user with a warm parent."""
    place = tmp_path_factory.mktemp("runtime")
    place.chmod(0o700)
    started = manage(place, "--idle", "20m")
    assert (started.returncode, started.stderr) == (0, "")
    yield place
    manage(place, "stop")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "experiment").mkdir()
    (tmp_path / "conf" / "callbacks" / "own.yaml").write_text(OWN_YAML)
    (tmp_path / "conf" / "experiment" / "cold.yaml").write_text(COLD_YAML)
    (tmp_path / "own.py").write_text(textwrap.dedent(CALLBACK))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands_of(runtime: Path) -> int:
    return int(re.search(r"(\d+) command", manage(runtime, "status").stdout)[1])


def started(runtime: Path, *words: str, **given) -> subprocess.Popen:
    line = [sys.executable, "-m", "exp.train", *SHORT, *words]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given}
    return subprocess.Popen(line, env=environment(runtime), text=True, **given)


def waiting() -> psutil.Process:
    """The process of a run that has come to its second step."""
    until(lambda: Path("pid").exists() and Path("pid").read_text())
    return psutil.Process(int(Path("pid").read_text()))


@pytest.mark.parametrize("words", [("exp", "train"), ("python", "-m", "exp", "train")])
def test_the_one_command_is_taken_too_and_the_time_told_is_its_own(runtime, here, scripts, words):
    began = time.monotonic()
    # A second passes in this very process before Python begins, and the run's own is forked from another.
    line = f"sleep 1; exec {scripts / words[0]} {shlex.join([*words[1:], *SHORT])}"
    process = subprocess.Popen(["sh", "-c", line], env=environment(runtime), stdout=subprocess.PIPE, text=True)
    run = waiting()
    assert run.pid != process.pid
    assert "exp.warm" in Path("command").read_text()
    waited = time.monotonic() - began
    Path("go_on").touch()
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    # A start is known to a hundredth of a second.
    assert waited - 0.1 < float(re.search(r"completed in ([\d.]+) s", output)[1]) < time.monotonic() - began + 0.1


LEAVING = """
import os
import lightning.pytorch as pl

class Kept:
    def __del__(self):
        os.write(1, b"taken apart\\n")

KEPT = Kept()

class Own(pl.Callback):
    # By which what exp keeps of the class leads to the module.
    def __init__(self, what):
        self.what = what
"""


NAMING = """
import multiprocessing.spawn, os, sys
import lightning.pytorch as pl

class Own(pl.Callback):
    def on_fit_start(self, *_):
        print("called", sys.executable, os.fsdecode(multiprocessing.spawn.get_executable()))
"""


def test_objects_of_a_users_module_are_deleted_at_the_end_as_of_any_interpreter(runtime, here):
    Path("own.py").write_text(LEAVING)
    Path("conf/callbacks/own.yaml").write_text(f"{OWN_YAML}  what: nothing\n")
    before = commands_of(runtime)
    warm = started(runtime).communicate(timeout=SECONDS)[0]
    assert commands_of(runtime) == before + 1
    cold = started(runtime, "runtime.warm=false").communicate(timeout=SECONDS)[0]
    assert [text.splitlines()[-1] for text in (cold, warm)] == ["taken apart"] * 2


def test_a_command_may_call_its_interpreter_by_another_of_its_names(runtime, here):
    names = [Path(sys.executable).with_name(name) for name in ("python", "python3")]
    other = next((path for path in names if path != Path(sys.executable) and path.exists()), None)
    if other is None:
        pytest.skip("this interpreter has one name")
    Path("own.py").write_text(NAMING)
    before = commands_of(runtime)
    line = [str(other), "-m", "exp.train", *SHORT]
    done = subprocess.run(line, env=environment(runtime), capture_output=True, text=True, check=True)
    assert commands_of(runtime) == before + 1
    assert f"called {other} {other}\n" in done.stdout


def test_a_second_parent_is_not_started_and_status_tells_of_the_first(runtime):
    again = manage(runtime)
    assert re.fullmatch(r"one waits already: process \d+\n", again.stdout)
    assert re.fullmatch(r"process \d+ waits, \d+ commands? so far\n", manage(runtime, "status").stdout)
    other = manage(runtime, "status", OMP_NUM_THREADS="2")
    assert "not for commands of here, which differ in: OMP_NUM_THREADS" in other.stdout
    assert manage(runtime, "--idle", "soon").stderr == (
        "1 fault in the config; nothing was started.\n"
        "  --idle: soon; expected a time such as 90s, 30m or 8h, more than none and at most a year  [command line]\n"
    )


@pytest.mark.filterwarnings("ignore:.*preexec_fn.*")
def test_a_key_of_the_terminal_reaches_a_run_once(runtime, here):
    ours, theirs = pty.openpty()
    process = started(
        runtime, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    run = waiting()
    assert run.pid != process.pid
    # Nobody could continue the only group of a session, so that Ctrl-Z stops none of it.
    os.write(ours, b"\x1a")
    os.write(ours, b"\x03")
    time.sleep(0.5)  # on their way
    Path("go_on").touch()
    seen = b""
    with contextlib.suppress(OSError):  # the terminal's last process has left
        while select.select([ours], [], [], SECONDS)[0]:
            seen += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(timeout=SECONDS) == 128 + signal.SIGINT
    assert seen.count(b"interrupted by signal 2") == 1, seen
    assert b"loading torch" not in seen
    assert not run.is_running()


def test_a_job_that_is_stopped_and_continued_takes_its_run_along(runtime, here):
    process = started(runtime, process_group=0)
    run, command = waiting(), psutil.Process(process.pid)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTSTP)
        until(lambda: {run.status(), command.status()} == {psutil.STATUS_STOPPED})
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: psutil.STATUS_STOPPED not in (run.status(), command.status()))
    Path("go_on").touch()
    output, errors = process.communicate(timeout=SECONDS)
    assert ("completed" in output, errors, process.returncode) == (True, "", 0)


def test_a_run_ends_with_its_command_and_a_command_with_its_run(runtime, here):
    command = started(runtime)
    run = waiting()
    command.kill()
    command.communicate()
    run.wait(timeout=SECONDS)
    Path("pid").unlink()

    command = started(runtime)
    run = waiting()
    run.kill()
    command.communicate(timeout=SECONDS)
    assert command.returncode == -signal.SIGKILL
    Path("pid").unlink()

    command = started(runtime)
    run = waiting()
    keeper = run.parent()
    keeper.kill()
    assert command.communicate(timeout=SECONDS)[1].endswith(f"{handover.GONE}\n")
    assert command.returncode == 1
    run.wait(timeout=SECONDS)


def test_a_yaml_can_ask_for_a_fresh_interpreter(runtime, here):
    before = commands_of(runtime)
    Path("go_on").touch()
    # The first is the fork itself; the second has another program in the same process.
    for word, program in (("seed=1", "exp.warm"), ("experiment=cold", "exp.train")):
        output, errors = started(runtime, word).communicate()
        assert "completed" in output, errors
        assert f"-m\0{program}" in Path("command").read_text()
    assert started(runtime, "runtime.warm=false", "--version").communicate()[0].startswith("exp ")
    assert commands_of(runtime) - before == 2


def test_a_run_outlives_the_parent_which_ends_where_a_file_of_it_changes(tmp_path, here):
    place = tmp_path / "runtime"
    place.mkdir(mode=0o700)
    imported = tmp_path / "imported"
    imported.mkdir()
    (imported / "sitecustomize.py").write_text("")  # which every interpreter imports
    os.utime(imported / "sitecustomize.py", (1, 1))
    assert manage(place, "--idle", "20m", PYTHONPATH=str(imported)).returncode == 0
    line = [sys.executable, "-m", "exp.train", *SHORT]
    given = {"env": environment(place, PYTHONPATH=str(imported)), "text": True, "stdin": subprocess.DEVNULL}
    command = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **given)
    run = waiting()
    parent = run.parent().parent()
    assert parent.pid == int(re.search(r"process (\d+)", manage(place, "status", PYTHONPATH=str(imported)).stdout)[1])
    (imported / "sitecustomize.py").write_text("changed = True")
    done = subprocess.run(
        [sys.executable, "-m", "exp.train", "--version"], capture_output=True, check=True, **given
    )  # fmt: skip
    assert done.stdout.startswith("exp ")
    with contextlib.suppress(psutil.NoSuchProcess):
        parent.wait(timeout=SECONDS)
    assert manage(place, "status").stdout == "none waits\n"
    assert run.is_running()
    Path("go_on").touch()
    output, _ = command.communicate(timeout=SECONDS)
    assert ("completed" in output, command.returncode) == (True, 0), output


def test_what_is_imported_is_held_against_what_is_on_disk(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    module = tmp_path / "module.py"
    module.write_text("1")

    def imported() -> Imported:
        from exp.launch.warm_parent import _folders, _stamp

        names = frozenset({"module"})
        return Imported(
            modules=names, environment={}, files={str(module): _stamp(str(module))}, folders=_folders(names)
        )

    before = imported()
    assert before.is_on_disk()
    (folder / "other.py").touch()
    assert before.is_on_disk()
    (folder / "module.py").touch()  # found before the one that was imported
    assert not before.is_on_disk()
    before = imported()
    os.utime(module, (1, 1))
    assert not before.is_on_disk()
    before = imported()
    module.unlink()
    assert not before.is_on_disk()


def test_a_folder_that_others_can_enter_or_replace_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = Path(handover.folder())
    assert place == tmp_path / f"exp-warm-{os.getuid()}"
    place.mkdir(mode=0o700)
    assert handover.folder() == str(place)
    place.chmod(0o750)
    with pytest.raises(handover.UnsafeFolderError, match=re.escape(f"{place} must be a directory of your own")):
        handover.folder()
    place.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to("elsewhere")
    with pytest.raises(handover.UnsafeFolderError):
        handover.folder()
    refused = subprocess.run(
        [sys.executable, "-m", "exp.warm"], env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stderr) == (1, f"{place} must be a directory of your own that nobody else "
                                                      "can enter (0700). Remove it\n")  # fmt: skip
    # A runtime directory that others may enter is none.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o755)
    place.unlink()
    assert handover.folder() == str(place)
    if os.getuid() == 0:
        place.mkdir(mode=0o700)
        os.chown(place, 1, 1)
        with pytest.raises(handover.UnsafeFolderError):
            handover.folder()


ASKING = """
import sys
from exp.launch import handover, warm_parent
try:
    warm_parent.start(["torch"], idle_seconds=float(sys.argv[1]))
except warm_parent.WarmParentError as error:
    sys.exit(str(error))
under = handover.conditions()
connection = handover.connected(handover.address(under))
print(handover._is_taken(connection, "exp.train", under, [0, 1, 2], ignored=[], blocked=[]))
"""


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("class cuda:\n    is_initialized = staticmethod(lambda: True)\n", "False\n"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
            "a module that is imported for every run starts a thread: what is forked may hang\n",
        ),
        ("raise ImportError('no torch')", "the warm parent ended while it was importing; what it said is above\n"),
    ],
    ids=["CUDA", "threads", "broken"],
)
def test_what_could_not_be_forked_safely_is_not_forked(tmp_path, torch, said):
    (tmp_path / "torch.py").write_text(torch)
    os.utime(tmp_path / "torch.py", (1, 1))
    tmp_path.chmod(0o700)
    line = [sys.executable, "-c", ASKING, "600"]
    done = subprocess.run(
        line, env=environment(tmp_path, PYTHONPATH=str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert said in (done.stdout, done.stderr, done.stderr[-len(said) :])
    until(lambda: manage(tmp_path, "status").stdout == "none waits\n")


def test_a_parent_to_whom_nobody_comes_ends(tmp_path):
    (tmp_path / "torch.py").touch()
    os.utime(tmp_path / "torch.py", (1, 1))
    tmp_path.chmod(0o700)
    line = [sys.executable, "-c", ASKING.partition("under =")[0], "0.2"]
    subprocess.run(line, env=environment(tmp_path, PYTHONPATH=str(tmp_path)), check=True)
    until(lambda: not any((tmp_path / "exp-warm").iterdir()))
