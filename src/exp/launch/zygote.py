"""A zygote: a process that has imported what a run needs and nothing of a user's, from which the jobs are forked.

A job then starts in some 20 ms where an interpreter takes seconds, and what a job does to its process (seeds, threads,
environment, what it compiled, its end) reaches no other one. Several run at a time. No CUDA is initialised in the
zygote, or no job could be.

    the sweep                            the zygote                      a job
    begin(function, ...)  -> number      fork                      ->    function(...): a generator
    wait(timeout)         <- the values, which the job writes into a file that it shares with the sweep alone
      signal(number, ..)  -> passes it on                                saves, leaves
      a Process is over   <- exit status   ends what the job left  <-    os._exit
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
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from exp.config.freeze import versions
from exp.errors import INTERRUPTED_BY_KEY, Interrupted
from exp.launch.failure import death
from exp.launch.lifecycle import end_with_parent, leave
from exp.launch.spawn import import_path
from exp.launch.supervision import POLL_SECONDS, collected_signals
from exp.signals import ENDING, SUPERVISED

Result = TypeVar("Result")
# How long a zygote may take to end its jobs and leave.
LEAVE_SECONDS = 5.0


class Died(Exception):
    """A process ended without a word. The message says how: `was killed by SIGSEGV`."""


@dataclass(kw_only=True)
class Process(Generic[Result]):
    """A process that was begun, as far as whoever began it has heard of it.

    values: what its function gave, those that nobody has taken yet.
    is_over: whether it has ended, and all of its values are here.
    died: how it ended before it had given all of them; None where it did not.
    """

    number: int
    values: list[Result] = field(default_factory=list)
    is_over: bool = False
    died: Died | None = None


class Zygote:
    """Starts processes forked from one that is warm.

    Made before torch is imported, it is a fork of this very process; else, for threads do not live through a fork, an
    interpreter of its own. It imports while this process goes on. A copy in another process, such as a launcher's, has
    a zygote of its own.

    modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._connection: Connection | None = None
        self._pid = 0
        self._interpreter: subprocess.Popen[bytes] | None = None
        self._home = os.getpid()
        self._count = 0
        self._running: dict[int, tuple[Process[Any], _Values]] = {}

    def __reduce__(self) -> tuple[type[Zygote], tuple[tuple[str, ...]]]:
        return Zygote, (self._modules,)

    def start(self) -> None:
        """Start it where it is not alive: a fork while this process has one thread, else an interpreter of its own."""
        if self._connection is not None and self._home == os.getpid():
            return
        is_first, self._home = self._pid == 0, os.getpid()
        self._running = {}
        ours, theirs = multiprocessing.Pipe()
        if is_first and is_single_threaded():
            self._pid = _forked(theirs, self._modules, other=ours)
        else:
            self._interpreter = _spawned(theirs, self._modules)
            self._pid = self._interpreter.pid
        theirs.close()
        self._connection = ours

    def close(self) -> None:
        """End it, and with it the jobs that it may have."""
        if self._connection is None or self._home != os.getpid():
            return
        # Without jobs there is nothing to end, and it may still be importing.
        ends = time.monotonic() + (LEAVE_SECONDS if self._running else 0.0)
        with suppress(ConnectionError):
            self._connection.send(None)
        self._connection.close()
        self._connection = None
        while not self._has_left():
            if time.monotonic() > ends:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.002)
        for process, values in self._running.values():
            values.close()
            process.is_over, process.died = True, _gone()
        self._running = {}

    def _has_left(self) -> bool:
        if self._interpreter is not None:
            return self._interpreter.poll() is not None
        return os.waitpid(self._pid, os.WNOHANG)[0] != 0

    def begin(
        self,
        function: Callable[..., Iterator[Result]],
        *arguments: object,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process[Result]:
        """Start a generator function in a process of its own, and return at once; all of it is pickled.

        output: the file to whose end its standard output and error are written; None leaves them this process's.
        environment: variables beside those that the zygote has.
        """
        self.start()
        assert self._connection is not None
        self._count += 1
        process: Process[Result] = Process(number=self._count)
        values = _Values((function, arguments))
        self._running[process.number] = process, values
        try:
            self._connection.send(_Start(process.number, None if output is None else str(output), environment or {}))
            with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                socket.send_fds(channel, [b"\0"], [values.descriptor])
        except ConnectionError:
            pass  # `wait` sees that it is gone, and tells so of every process
        return process

    def signal(self, process: Process[Any], signum: int) -> None:
        """Send a signal to a process that was begun here, where it has not ended."""
        if self._connection is not None and not process.is_over:
            with suppress(ConnectionError):
                self._connection.send(_Signal(process.number, signum))

    def wait(self, timeout: float, *, beside: Sequence[int] = ()) -> bool:
        """Take in what processes gave and which of them ended: wait for the next end, so many seconds at most.

        beside: descriptors that end the waiting, too, where there is something to read.
        Returns: whether one of those did.
        """
        ready: list[Any] = []
        if self._connection is None:
            ready = wait_for(beside, timeout)
        else:
            ready = wait_for([self._connection, *beside], timeout)
            try:
                while self._connection in ready and self._connection.poll():
                    number, end = self._connection.recv()
                    process, values = self._running.pop(number)
                    is_whole = values.read(process.values)
                    values.close()
                    process.died = None if is_whole else Died(end if isinstance(end, str) else _reason(end))
                    process.is_over = True
            except (EOFError, ConnectionError):
                self.close()
        for process, values in self._running.values():
            values.read(process.values)
        return any(one in ready for one in beside)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """function(*arguments) in a process of its own; all of it is pickled.

        A signal that ends a run is passed on to it, a second one kills it.
        Raises: Died where it ended otherwise than by returning; Interrupted where it was killed by a signal to here, or
            would have begun behind one.
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
        Raises: Interrupted where it was ended by a signal to here, or would have begun behind one.
        """
        with collected_signals() as received:
            if received:
                raise Interrupted(signum=received[0], checkpoint=None)
            process = self.begin(function, *arguments)
            passed_on = 0
            while not process.is_over:
                self.wait(POLL_SECONDS)
                if len(received) > passed_on:
                    self.signal(process, received[0] if passed_on == 0 else signal.SIGKILL)
                    passed_on = len(received)
        if process.died is not None and received:
            raise Interrupted(signum=received[0], checkpoint=None)
        return process.values, process.died


def _reason(returncode: int) -> str:
    return death(rank=0, returncode=returncode, detail="").reason


def _gone() -> Died:
    return Died("ended with the process that starts the jobs, which is gone")


class _Values:
    """A file that a job and whoever began it share, and nobody else: the request, then values as the job gives them.

    Not a pipe: neither waits for the other, and what a job leaves half-written is no reason to wait.
    """

    def __init__(self, request: object) -> None:
        # Of memory where there is such a thing: a full disk is one of the ends of which a job is to tell.
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("exp-job", os.MFD_CLOEXEC)
        else:
            self.descriptor, name = tempfile.mkstemp(prefix="exp-job-")
            os.unlink(name)
        text = pickle.dumps(request)
        self._place = len(text)
        self._is_whole = False
        while text:
            text = text[os.write(self.descriptor, text) :]

    def read(self, values: list[Any]) -> bool:
        """Add the values that are new. Returns: whether the last one has come."""
        new = os.fstat(self.descriptor).st_size - self._place
        if new and not self._is_whole:
            with io.BytesIO(os.pread(self.descriptor, new, self._place)) as text:
                end = 0
                with suppress(EOFError, pickle.UnpicklingError):  # a value that is not whole yet
                    while not self._is_whole:
                        given = pickle.load(text)
                        values += given
                        self._is_whole, end = not given, text.tell()
            self._place += end
        return self._is_whole

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class _Start:
    number: int
    output: str | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class _Signal:
    number: int
    signum: int


def preload(modules: Sequence[str]) -> None:
    """Import what is to be there in every process that is forked from this one, and make such forks cheap."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    versions()  # once for all jobs
    # What modules tear down at their end ends with the process all the same, and took each job of torch's 30 ms.
    for finalizer in tuple(vars(weakref.finalize)["_registry"]):  # private to Python, and tested
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # what is collected in a job would be copied into it first
    gc.enable()  # whatever it was in the process that this one was forked from


def serve(connection: Connection, modules: Sequence[str]) -> NoReturn:
    """The zygote's life: it starts jobs and tells of their ends, until whoever started it is gone."""
    # A cluster signals every process, and the jobs are to save before this one ends. Blocked, and not ignored: one that
    # is passed on to a job which has just begun waits until that can answer it.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    preload(modules)
    # The end of a job is a byte to read: only a signal with a handler of Python's writes it.
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    status = 1
    try:
        while True:
            ready = wait_for([connection, wakes])
            if wakes in ready:
                wakes.recv(4096)
            for pid in tuple(running):
                returncode = _ended(pid)
                if returncode is not None:
                    connection.send((running.pop(pid), returncode))
            if connection not in ready:
                continue
            message = connection.recv()
            if message is None:
                raise EOFError
            if isinstance(message, _Start):
                with socket.socket(fileno=os.dup(connection.fileno())) as channel:
                    _, (descriptor,), _, _ = socket.recv_fds(channel, 1, 1)
                try:
                    running[_started(message, descriptor, [connection, wakes, woken])] = message.number
                except OSError as error:  # no memory, or as many processes as are allowed
                    connection.send((message.number, f"could not be started: {error.strerror or error}"))
                finally:
                    os.close(descriptor)
            else:
                for pid, number in running.items():
                    if number == message.number:
                        os.kill(pid, message.signum)  # not reaped yet, so its number is nobody else's
    except (EOFError, ConnectionError):
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        for pid in running:
            _end_group(pid)
        os._exit(status)


def _started(start: _Start, descriptor: int, others: Sequence[Connection | socket.socket]) -> int:
    """The process id of a new job. others: what of the zygote's a job must not have."""
    zygote = os.getpid()
    if not may_fork():
        os.set_inheritable(descriptor, True)
        command = [sys.executable, "-P", "-m", "exp.launch.zygote", "job", str(descriptor), str(zygote)]
        command += [] if start.output is None else [start.output]
        return os.posix_spawn(sys.executable, command, {**_environment(), **start.environment}, setsigmask=())
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in others:
            other.close()
        os.environ.update(start.environment)
        _work(descriptor, parent=zygote, output=start.output)
    return pid


def may_fork() -> bool:
    """Whether a job can be a fork of this process: elsewhere than on Linux the system's own libraries forbid it, and
    CUDA does where it is initialised."""
    torch = sys.modules.get("torch")
    return sys.platform == "linux" and (torch is None or not torch.cuda.is_initialized())


def _ended(pid: int) -> int | None:
    """The exit status of a process that has ended, with the end of what it left behind; None while it runs."""
    if sys.platform == "linux":
        # Before it is reaped, for then its number may be another process's.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        _end_group(pid)
        _, status = os.waitpid(pid, 0)
    else:  # Python has waitid on macOS from 3.13 on
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _end_group(pid)
    return os.waitstatus_to_exitcode(status)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says so of a group of zombies
        os.killpg(pid, signal.SIGKILL)


def _work(descriptor: int, *, parent: int, output: str | None) -> NoReturn:
    """A job's life. It is left by os._exit, as a rank's: threads of libraries may keep an interpreter from ending."""
    status = 1
    try:
        os.setsid()  # signals of the terminal come from the sweep alone, and leftovers are found
        end_with_parent(parent)
        os.environ[SUPERVISED] = "1"
        _answer_signals()
        _attach(0, os.devnull, os.O_RDONLY)
        if output is not None:
            _write_output(output)
        faulthandler.enable(2)  # whatever stands in the place of sys.stderr
        with open(descriptor, "r+b", buffering=0, closefd=False) as file:
            size = os.fstat(descriptor).st_size
            function, arguments = pickle.loads(os.pread(descriptor, size, 0))
            file.seek(size)
            if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            for value in function(*arguments):
                file.write(pickle.dumps((value,)))
            file.write(pickle.dumps(()))  # that was all
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED_BY_KEY
    except BaseException as error:
        traceback.print_exception(error)  # into the job's own output, of which the sweep tells the last words
    finally:
        leave(status)


def _answer_signals() -> None:
    """Let the signals that end a run end this process, where they are not ignored; one may have come already.

    Ctrl-C, too, without a traceback, until its function begins.
    """
    for signum in ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _write_output(path: str) -> None:
    """Let standard output and error be a file, line by line, for a process may end at any moment."""
    for number in (1, 2):
        _attach(number, path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # New ones, for those of this process may be lost already, or hold another's text.
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(number: int) -> io.TextIOWrapper:
    file = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _attach(number: int, path: str, flags: int) -> None:
    file = os.open(path, flags, 0o666)
    os.dup2(file, number)
    os.close(file)


def _alone(function: Callable[..., Result], arguments: Sequence[object]) -> Iterator[Result]:
    yield function(*arguments)


def _forked(theirs: Connection, modules: Sequence[str], *, other: Connection) -> int:
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
        serve(theirs, modules)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _spawned(theirs: Connection, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "exp.launch.zygote", "serve", str(theirs.fileno()), str(os.getpid())]
    return subprocess.Popen(
        [*command, *modules], env=_environment(), pass_fds=[theirs.fileno()], start_new_session=True
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}


def is_single_threaded() -> bool:
    """Whether a fork of this process would lose no thread."""
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task")) == 1
    return False  # elsewhere the system's own libraries forbid a fork without an exec


def main() -> NoReturn:
    """python -m exp.launch.zygote serve DESCRIPTOR PARENT MODULES..., or job DESCRIPTOR PARENT [OUTPUT]."""
    role, descriptor, parent, *others = sys.argv[1:]
    if role == "job":
        os.set_inheritable(int(descriptor), False)
        _work(int(descriptor), parent=int(parent), output=next(iter(others), None))
    end_with_parent(int(parent))
    serve(Connection(int(descriptor)), others)


if __name__ == "__main__":
    # Of the module's own name, by which others send it what it is to do.
    from exp.launch import zygote

    zygote.main()
