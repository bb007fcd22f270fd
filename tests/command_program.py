"""Program of a forked process of the fixture `commands`, which runs a command without a new Python interpreter.

The ranks of the command are forked from it, unless it has threads, which a fork loses. The jobs of a sweep are
forked from the server of this process.

SETTINGS is a mapping: module, arguments, directory, environment, output and error (files), fresh_ranks.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn


class ForkedRank:
    """Forked child of this process, with the methods of subprocess.Popen that exp.launch.supervision calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._collect(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends = None if timeout is None else time.monotonic() + timeout
        while ends is not None and self.poll() is None:
            if time.monotonic() > ends:
                raise TimeoutError(f"rank process {self.pid} still runs after {timeout} s")
            time.sleep(0.01)
        self._collect(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, options: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)


def fork_ranks() -> None:
    """Make the launcher fork its ranks, which saves five seconds of imports per rank."""
    import tqdm

    from exp.launch import spawn

    # Otherwise the first progress bar starts a monitor thread.
    tqdm.tqdm.monitor_interval = 0
    fresh = spawn._start

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> Any:
        if len(os.listdir("/proc/self/task")) > 1:
            return fresh(command, environment, log)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        return ForkedRank(pid) if pid else live(command, environment, log)

    spawn._start = start


def share_server() -> None:
    """Make multiprocessing use the fork server of this process, because a new one imports for three seconds."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def live(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> NoReturn:
    """Run `python -P -u -m MODULE ...` in this process, in a new session with the given environment."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        os.environ.clear()
        os.environ.update(environment)
        attach(0, os.devnull, os.O_RDONLY)
        if log is not None:
            for number in (1, 2):
                attach(number, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
        put_first(os.environ["EXP_IMPORT_PATH"].splitlines())
        module, *sys.argv[1:] = command
        program(module)()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # exp.worker ends its process itself


def program(module: str) -> Callable[[], int]:
    """Return the function that `python -m MODULE` calls."""
    from exp.cli.commands import COMMANDS
    from exp.cli.dispatch import main

    if module == "exp":
        return main
    if not module.startswith("exp."):
        return importlib.import_module(module).main
    return importlib.import_module(f"exp.{COMMANDS[module.removeprefix('exp.')].module}").main


def attach(number: int, name: str, flags: int) -> None:
    file = os.open(name, flags)
    os.dup2(file, number)
    os.close(file)


def put_first(folders: Sequence[str]) -> None:
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def main(settings: dict[str, Any]) -> None:
    # A fork server ignores modules that it cannot import. Then every command takes ten times as long.
    assert "exp.run" in sys.modules, "this process was not forked from one that has imported exp"
    gc.freeze()  # as in a command: a collection would copy the memory of all imported modules
    os.chdir(settings["directory"])
    os.environ.clear()
    os.environ.update(settings["environment"])
    # As in a new interpreter: the working directory because of `-m`, then PYTHONPATH.
    folders = [settings["directory"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    put_first(folders)
    attach(0, os.devnull, os.O_RDONLY)
    attach(1, settings["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    attach(2, settings["error"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if settings["fresh_ranks"]:
        del globals()["__file__"]  # so that jobs of a sweep do not import this program
    else:
        fork_ranks()
        share_server()
    sys.argv = [settings["module"], *settings["arguments"]]
    status = 1
    try:
        status = program(settings["module"])()  # of sys.argv, as the shell calls it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


if __name__ == "__main__":
    main(globals()["SETTINGS"])
elif __name__ == "__mp_main__":  # in a job of a sweep
    fork_ranks()
