"""Processes for the jobs of a sweep, forked from a server that has imported torch, Lightning and exp.

A forked process starts in about 20 ms instead of seconds. What a job does to its process (seeds, threads, environment,
exit) does not reach the sweep or other jobs. The server is the fork server of the standard library. It imports no code
of users and initializes no CUDA. Only Linux permits forks of such a process: elsewhere each job is a new interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from exp.errors import INTERRUPTED_BY_KEY, Interrupted, RunError, describe_exception
from exp.launch.failure import death
from exp.launch.lifecycle import leave
from exp.launch.spawn import import_path
from exp.launch.supervision import POLL_SECONDS, collect_signals
from exp.signals import ENDING, SUPERVISED

Result = TypeVar("Result")
# A socket's path has at most 107 bytes. multiprocessing adds 32 to the folder of temporary files (Python 3.11).
MAX_FOLDER_BYTES = 70
CONTEXT = multiprocessing.get_context("forkserver") if sys.platform == "linux" else multiprocessing.get_context("spawn")


class Died(Exception):
    """A process ended without a result. The message states how, such as `was killed by SIGSEGV`."""


class JobProcess(Generic[Result]):
    """A process that runs a generator function. The function and its arguments are pickled.

    Args:
        output: The file to which standard output and error are appended. None is the output of this process.
        environment: Variables in addition to those of this process.

    Attributes:
        values: The results that have arrived. The caller may remove them.
        died: How the process ended. None while it runs.
    """

    def __init__(
        self,
        function: Callable[..., Iterator[Result]],
        *arguments: object,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.values: list[Result] = []
        self.died: Died | None = None
        self._pidfd: int | None = None
        self._results, theirs = CONTEXT.Pipe(duplex=False)
        variables = {**os.environ, **(environment or {})}
        with nullcontext() if output is None else output.open("ab") as file, theirs:
            streams = [_Descriptor(number if file is None else file.fileno()) for number in (1, 2)]
            self._process = CONTEXT.Process(target=_work, args=(function, arguments, theirs, streams, variables))
            try:
                self._process.start()
                self._pidfd = _pidfd(self._process.pid)
            except (EOFError, ConnectionError):  # the server ends when it cannot fork
                self.died = Died("could not be started: the system permits no more processes, or no more memory")
            except OSError as error:  # no descriptor is left, or the server's socket was removed
                self.died = Died(f"could not be started: {describe_exception(error)}")

    def signal(self, signum: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.died is not None:
            return
        with suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signum)
            elif self._process.is_alive():
                assert self._process.pid is not None
                os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Kill the process and its children if it still runs, and wait for its end."""
        if self.died is None:
            self.signal(signal.SIGKILL)
            wait_for([self._end])
            self.receive()

    @property
    def handles(self) -> list[Connection | int]:
        """Handles for `multiprocessing.connection.wait`: one is ready when a result arrives or the process ends."""
        if self.died is not None:
            return []
        return [self._end, *([] if self._results.closed else [self._results])]

    @property
    def _end(self) -> int:
        """The handle that is ready when the process has ended."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def receive(self) -> None:
        """Receive the results that have arrived, and release a process that has ended."""
        if self.died is not None:
            return
        has_ended = bool(wait_for([self._end], 0))
        if has_ended:
            assert self._process.pid is not None
            with suppress(ProcessLookupError, PermissionError):  # macOS reports the latter for a group of zombies
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            while not self._results.closed and self._results.poll():
                self.values.append(self._results.recv())
        except (EOFError, ConnectionError):  # the process was killed, perhaps while it wrote
            self._results.close()
        if has_ended:
            self._process.join()  # the server reports the status; 255 if it has ended
            assert self._process.exitcode is not None
            self.died = Died(death(rank=0, returncode=self._process.exitcode, detail="").reason)
            self._process.close()
            self._results.close()
            if self._pidfd is not None:
                os.close(self._pidfd)


def _pidfd(pid: int | None) -> int | None:
    """Return a descriptor that is ready when a process ends, even after the server. Return None without one.

    multiprocessing learns of the end from the server, and takes the end of the server for the end of all processes.
    """
    assert pid is not None
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # the process has ended already, or the kernel is older than Linux 5.3
        return None


class _Descriptor:
    """A file descriptor of this process. A new process receives the number of a duplicate instead."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (DupFd(self._number),)


def _detach(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def start_server(module: str) -> None:
    """Start the server, which imports a module, unless it runs. Return before the import is done.

    A cluster signals all processes of a job. The server blocks these signals, so that the jobs can save their state.
    """
    if sys.platform != "linux":
        return
    CONTEXT.set_forkserver_preload([module])
    variables = {"PYTHONPATH": os.pathsep.join(import_path()), "PYTHONSAFEPATH": "1"}
    before = {name: value for name, value in os.environ.items() if name in variables}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    folder = tempfile.tempdir
    try:
        if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
            tempfile.tempdir = "/tmp"
        # Otherwise the server starts the tracker, which unblocks signals (Python 3.11).
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        os.environ.update(variables)
        forkserver.ensure_running()
    except OSError as error:
        raise RunError(f"the process that starts the jobs cannot be started: {describe_exception(error)}") from error
    finally:
        tempfile.tempdir = folder
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def wait(processes: Sequence[JobProcess[Any]], timeout: float) -> None:
    """Wait at most `timeout` seconds for a result or the end of a process, and receive all results."""
    wait_for([handle for process in processes for handle in process.handles], timeout)
    for process in processes:
        process.receive()


def collect(function: Callable[..., Iterator[Result]], *arguments: object) -> tuple[list[Result], Died]:
    """Return the results of a generator function in a new process, and how the process ended.

    The first signal that ends a run is passed on to the process, the second kills it.

    Raises:
        Interrupted: A signal has arrived before the process started.
    """
    with collect_signals() as received:
        if received:
            raise Interrupted(signum=received[0], checkpoint=None)
        process = JobProcess(function, *arguments)
        try:
            passed_on = 0
            while process.died is None:
                wait([process], POLL_SECONDS)
                if len(received) > passed_on:
                    process.signal(received[0] if passed_on == 0 else signal.SIGKILL)
                    passed_on = len(received)
        finally:
            process.kill()
    return process.values, process.died


def call(function: Callable[..., Result], *arguments: object) -> Result:
    """Return the result of a function in a new process. Signals are passed on as by `collect`.

    Raises:
        Died: The process ended without a result.
        Interrupted: A signal ended the process, or has arrived before its start.
    """
    with collect_signals() as received:
        values: list[Result]
        values, died = collect(_yield_result, function, arguments)
        if values:
            return values[0]
        if received:
            raise Interrupted(signum=received[0], checkpoint=None)
    raise died


def _yield_result(function: Callable[..., Result], arguments: Sequence[object]) -> Iterator[Result]:
    yield function(*arguments)


def _work(
    function: Callable[..., Iterator[Result]],
    arguments: Sequence[object],
    results: Connection,
    streams: Sequence[int],
    variables: Mapping[str, str],
) -> NoReturn:
    """Run the function in the new process and end it by os._exit: threads of libraries may prevent a normal exit."""
    status = 1
    try:
        gc.freeze()  # a collection would copy the memory of all imported modules
        os.setsid()  # signals of the terminal arrive from the sweep alone, and the children form a group
        _end_with_parent()
        os.environ.clear()
        os.environ.update({**variables, SUPERVISED: "1"})
        _attach([os.open(os.devnull, os.O_RDONLY), *streams])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        for value in function(*arguments):
            results.send(value)
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED_BY_KEY
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        leave(status)


def _attach(descriptors: Sequence[int]) -> None:
    """Replace standard input, output and error. Output is written line by line: a process may end at any moment."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(2)


def _end_with_parent() -> None:
    """Have this process and its children killed when the process that asked for them ends, even by SIGKILL.

    That process holds one end of a pipe. When the end is closed, the kernel signals the group, whatever it executes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    else:
        threading.Thread(target=_watch, daemon=True).start()
    if not parent.is_alive():
        os._exit(1)


def _watch() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
