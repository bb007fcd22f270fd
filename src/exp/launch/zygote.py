"""A zygote: a process that has imported what a run needs and nothing of a user's, from which the jobs are forked.

A job then starts in some 20 ms where an interpreter takes seconds, and what a job does to its process (seeds, threads,
environment, what it compiled, its end) reaches no other one. No CUDA is initialised in the zygote, or no job could be.

    the sweep                          the zygote                       a job
    call(function, ...)  -> request    fork                       ->    function(...), its result into a file
      passes signals on  <- its pid    waits, ends what it left   <-    os._exit
      returns, or Died   <- result, exit status
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, NoReturn, TypeVar

from exp.errors import Interrupted
from exp.launch.failure import death
from exp.launch.lifecycle import end_with_parent, leave
from exp.launch.spawn import import_path
from exp.launch.supervision import POLL_SECONDS, collected_signals
from exp.signals import SUPERVISED, Handler, heed, heeded

Result = TypeVar("Result")


class Died(Exception):
    """A process ended without a word. The message says how: `was killed by SIGSEGV`."""


class Zygote:
    """Starts processes forked from one that is warm, one at a time.

    Made before torch is imported, it is a fork of this very process; else, for threads do not live through a fork, an
    interpreter of its own. A copy in another process, such as a launcher's, has a zygote of its own.

    modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._connection: Connection | None = None
        self._pid = 0
        self._interpreter: subprocess.Popen[bytes] | None = None
        self._home = os.getpid()

    def __reduce__(self) -> tuple[type[Zygote], tuple[tuple[str, ...]]]:
        return Zygote, (self._modules,)

    def start(self) -> None:
        """Start it where it is not alive: a fork while this process has one thread, else an interpreter of its own."""
        if self._connection is not None and self._home == os.getpid():
            return
        is_first, self._home = self._pid == 0, os.getpid()
        ours, theirs = multiprocessing.Pipe()
        if is_first and _is_single_threaded():
            _import(self._modules)
            self._pid = _forked(theirs, other=ours)
        else:
            self._interpreter = _spawned(theirs, self._modules)
            self._pid = self._interpreter.pid
        theirs.close()
        self._connection = ours

    def close(self) -> None:
        """End it, and with it the job that it may have."""
        if self._connection is None or self._home != os.getpid():
            return
        self._connection.close()
        self._connection = None
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        if self._interpreter is not None:
            self._interpreter.wait()
        else:
            os.waitpid(self._pid, 0)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """function(*arguments) in a process of its own; all of it is pickled.

        A signal that ends a run is passed on to it, a second one kills it.
        Raises: Died where it ended otherwise than by returning; Interrupted where it was killed by a signal to here.
        """
        values: list[Result]
        values, died = self.collect(_alone, function, arguments)
        if died is not None:
            raise died
        return values[0]

    def collect(
        self, function: Callable[..., Iterator[Result]], *arguments: object
    ) -> tuple[list[Result], Died | None]:
        """What a generator function gives in a process of its own, as `call`.

        Returns: the values; and how the process ended before the last of them, None where it did not.
        Raises: Interrupted where it was ended by a signal to here.
        """
        self.start()
        assert self._connection is not None
        with collected_signals() as received:
            try:
                self._connection.send_bytes(pickle.dumps((function, arguments)))
                pid, passed_on = self._connection.recv(), 0
                while not self._connection.poll(POLL_SECONDS):
                    if len(received) > passed_on:
                        with suppress(ProcessLookupError):
                            os.kill(pid, received[0] if passed_on == 0 else signal.SIGKILL)
                        passed_on = len(received)
                returncode, result = self._connection.recv()
            except (EOFError, ConnectionError):
                self.close()
                return [], Died("ended with the process that starts the jobs, which is gone")
        values: list[Result] = []
        is_whole = False
        with io.BytesIO(result) as file, suppress(EOFError, pickle.UnpicklingError):
            while not is_whole:
                given = pickle.load(file)
                values += given
                is_whole = not given
        if is_whole:
            return values, None
        if received:
            raise Interrupted(signum=received[0], checkpoint=None)
        return values, Died(death(rank=0, returncode=returncode, detail="").reason)


def serve(connection: Connection) -> NoReturn:
    """The zygote's life: one job after another, until whoever started it is gone."""
    gc.collect()
    gc.freeze()  # what is collected in a job would be copied into it first
    handlers = {signum: signal.getsignal(signum) for signum in heeded()}
    heed(signal.SIG_IGN)  # a cluster signals every process, and the job is to save before this one ends
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        with tempfile.TemporaryFile() as result:
            zygote = os.getpid()
            pid = os.fork()
            if pid == 0:
                connection.close()
                _work(request, result, parent=zygote, handlers=handlers)
            connection.send(pid)
            # Its number is not given to another process before it is reaped.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):  # macOS says so of a group of zombies
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            result.seek(0)
            connection.send((os.waitstatus_to_exitcode(status), result.read()))


def _work(request: bytes, result: IO[bytes], *, parent: int, handlers: dict[int, Handler]) -> NoReturn:
    """A job's life. It is left by os._exit, as a rank's: threads of libraries may keep an interpreter from ending."""
    status = 1
    try:
        os.setsid()  # signals of the terminal come from the sweep alone, and leftovers are found
        end_with_parent(parent)
        os.environ[SUPERVISED] = "1"
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        faulthandler.enable(2)  # whatever stands in the place of sys.stderr
        function, arguments = pickle.loads(request)
        for value in function(*arguments):
            result.write(pickle.dumps((value,)))
            result.flush()
        result.write(pickle.dumps(()))  # that was all
        result.flush()
        status = 0
    except BaseException as error:
        traceback.print_exception(error)  # into the job's own output, of which the sweep tells the last words
    finally:
        leave(status)


def _alone(function: Callable[..., Result], arguments: Sequence[object]) -> Iterator[Result]:
    yield function(*arguments)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)


def _forked(theirs: Connection, *, other: Connection) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        other.close()
        os.setsid()
        end_with_parent(parent)
        serve(theirs)
    finally:
        os._exit(1)


def _spawned(theirs: Connection, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
    command = [sys.executable, "-P", "-m", "exp.launch.zygote", str(theirs.fileno()), str(os.getpid()), *modules]
    return subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)


def _is_single_threaded() -> bool:
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task")) == 1
    return False  # elsewhere the system's own libraries forbid a fork without an exec


def main() -> NoReturn:
    """python -m exp.launch.zygote DESCRIPTOR PARENT MODULES, as `Zygote` starts it."""
    end_with_parent(int(sys.argv[2]))
    _import(sys.argv[3:])
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
