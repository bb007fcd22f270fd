"""Processes for the jobs of a sweep.

Each process is forked from a server that has already imported torch, Lightning and exp. It therefore starts in about 20
ms instead of seconds. Jobs run in separate processes, so that their seeds, threads, environment and exit do not affect
the sweep or other jobs.

The server is the fork server of Python's standard library. It imports no code of users and does not initialize CUDA.
Forking such a process is safe only on Linux. On other systems, each job starts a new interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
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
from exp.launch.lifecycle import end_with_parent, leave
from exp.launch.spawn import import_path
from exp.launch.supervision import POLL_SECONDS, collect_signals
from exp.signals import ENDING, SUPERVISED

Result = TypeVar("Result")
CONTEXT = multiprocessing.get_context("forkserver") if sys.platform == "linux" else multiprocessing.get_context("spawn")


class Died(Exception):
    """Error of a process that ended without a result. The message is the reason, such as `was killed by SIGSEGV`."""


class JobProcess(Generic[Result]):
    """A new process that runs a generator function and sends each yielded value to this process.

    Args:
        function: Generator function. The function and its arguments must be picklable.
        *arguments: Arguments of the function.
        output: File to which standard output and standard error are appended. None: the output of this process.
        environment: Environment variables in addition to those of this process.

    Attributes:
        values: Values that have arrived. The caller may remove them from the list.
        died: Exception that states how the process ended. None: the process is running.
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
        self._results, theirs = CONTEXT.Pipe(duplex=False)
        variables = {**os.environ, **(environment or {})}
        with nullcontext() if output is None else output.open("ab") as file, theirs:
            streams = [_Descriptor(number if file is None else file.fileno()) for number in (1, 2)]
            self._process = CONTEXT.Process(target=_work, args=(function, arguments, theirs, streams, variables))
            try:
                self._process.start()
            except (EOFError, ConnectionError):  # the server ends if it cannot fork
                self.died = Died("could not be started: the system allows no more processes, or has no more memory")
            except OSError as error:  # no descriptor is left, or the server's socket was removed
                self.died = Died(f"could not be started: {describe_exception(error)}")

    def signal(self, signum: int) -> None:
        """Send a signal to the process if it is running."""
        if self.died is None and self._process.is_alive():
            assert self._process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Kill the process and its children if it is running, and wait until it has ended."""
        if self.died is None:
            self.signal(signal.SIGKILL)
            wait_for([self._process.sentinel])
            self.receive()

    @property
    def handles(self) -> list[Connection | int]:
        """Handles for `multiprocessing.connection.wait`, which returns when a value arrives or the process ends."""
        if self.died is not None:
            return []
        return [self._process.sentinel, *([] if self._results.closed else [self._results])]

    def receive(self) -> None:
        """Append the values that have arrived to `values`. If the process has ended, set `died` and free resources."""
        if self.died is not None:
            return
        has_ended = bool(wait_for([self._process.sentinel], 0))
        if has_ended:
            assert self._process.pid is not None
            with suppress(ProcessLookupError, PermissionError):  # macOS raises PermissionError for a group of zombies
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            while not self._results.closed and self._results.poll():
                self.values.append(self._results.recv())
        except (EOFError, ConnectionError):  # the process was killed, perhaps while it sent a value
            self._results.close()
        if has_ended:
            # The server reports the exit status. If the server has ended, the status is 255, and its jobs were killed
            # above.
            self._process.join()
            assert self._process.exitcode is not None
            self.died = Died(death(rank=0, returncode=self._process.exitcode, detail="").reason)
            self._process.close()
            self._results.close()


class _Descriptor:
    """A file descriptor that can be pickled for a new process. Unpickling returns the number of a duplicate."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (DupFd(self._number),)


def _detach(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def start_server(module: str) -> None:
    """Start the fork server if it is not running, and return before the server has finished its imports.

    The server blocks the signals that end a run. A cluster sends such signals to all processes, and the server must
    continue until the jobs have saved their state.

    Args:
        module: Module that the server imports.

    Raises:
        RunError: The server cannot be started.
    """
    if sys.platform != "linux":
        return
    CONTEXT.set_forkserver_preload([module])
    variables = {"PYTHONPATH": os.pathsep.join(import_path()), "PYTHONSAFEPATH": "1"}
    before = {name: value for name, value in os.environ.items() if name in variables}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        # The resource tracker is started first, because starting it unblocks signals (Python 3.11).
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        os.environ.update(variables)
        forkserver.ensure_running()
    except OSError as error:
        # The path of a socket has at most 107 bytes, and multiprocessing appends 32 bytes to TMPDIR (Python 3.11).
        what = f"the process that starts the jobs cannot be started: {describe_exception(error)}"
        raise RunError(f"{what}. If a path is too long, set the environment variable TMPDIR=/tmp") from error
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def wait(processes: Sequence[JobProcess[Any]], timeout: float) -> None:
    """Wait until a value arrives or a process ends, and receive the values of all processes.

    Args:
        processes: Processes to wait for.
        timeout: Largest waiting time in seconds.
    """
    wait_for([handle for process in processes for handle in process.handles], timeout)
    for process in processes:
        process.receive()


def collect(function: Callable[..., Iterator[Result]], *arguments: object) -> tuple[list[Result], Died]:
    """Run a generator function in a new process until the process ends.

    If this process receives a signal that ends a run, this function sends the signal to the new process. A second
    signal kills the new process.

    Args:
        function: Generator function.
        *arguments: Arguments of the function.

    Returns:
        The values that the function yielded, and the exception that states how the process ended.

    Raises:
        Interrupted: A signal arrived before the process started.
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
    """Call a function in a new process, and return its result. See `collect` for the handling of signals.

    Args:
        function: Function to call.
        *arguments: Arguments of the function.

    Raises:
        Died: The process ended without a result.
        Interrupted: A signal ended the process, or arrived before the process started.
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
    """Run the generator function in the new process, and end the process.

    The process ends by os._exit, because threads of libraries may prevent a normal exit.

    Args:
        function: Generator function.
        arguments: Arguments of the function.
        results: Connection that sends the yielded values.
        streams: File descriptors for standard output and standard error.
        variables: Environment variables of the process.
    """
    status = 1
    try:
        gc.freeze()  # otherwise a garbage collection would copy the memory of all imported modules
        os.setsid()  # the terminal signals only the sweep, which passes signals on; killpg also kills the children
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
    """Replace standard input, standard output and standard error by file descriptors.

    Output is flushed after each line, because the process may be killed at any moment.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(2)


def _end_with_parent() -> None:
    """Make the kernel kill this process and its children when the parent ends, even if the parent ends by SIGKILL.

    On Linux, the parent has one end of a pipe. When the parent ends, the pipe is closed, and the kernel sends SIGKILL
    to the process group. On other systems, a thread watches the parent, which is the sweep.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    else:
        end_with_parent(os.getppid())
    if not parent.is_alive():
        os._exit(1)
