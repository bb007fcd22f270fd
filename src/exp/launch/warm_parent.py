"""The warm parent: it has imported what a run needs and nothing of a user's, and commands become forks of it.

Beside it stands the one socket of launch/handover.py, which says what is said there. Each command gets a keeper, a fork
that lives as long as the run: it starts the run, passes signals on to it, tells how it ended, and ends it where the
command was killed. So what becomes of the parent is nothing to a run that has begun.

It waits behind its socket until nobody has come for a while, and no longer than what it has imported is what is on
disk, it has one thread, and CUDA is not initialised: else a fork of it were another process than a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import io
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from exp.command_clock import began_at, now, process_began
from exp.errors import ExpError
from exp.interpreter_exit import SITES, finish, without_teardown
from exp.launch.handover import (
    MESSAGE,
    SECONDS,
    Reply,
    UnsafeFolderError,
    address,
    became,
    conditions,
    connected,
    folder,
    peer,
    receive,
    send,
)
from exp.launch.lifecycle import end_with_parent
from exp.launch.zygote import is_single_threaded, may_fork, preload
from exp.output import outliving_output

# What a keeper wakes up at: the end of the run, and a word of the command.
WAKING = (signal.SIGCHLD, signal.SIGIO)


HOW = {os.CLD_EXITED: Reply.ENDED, os.CLD_STOPPED: Reply.STOPPED}
READY = "ready"


class WarmParentError(ExpError):
    """No warm parent can be started here."""

    exit_status = 1


@dataclass(frozen=True, kw_only=True)
class WarmParent:
    """One that waits.

    commands: how many it has run. differs: the conditions of this process that it does not meet, by their names.
    """

    pid: int
    commands: int
    differs: Sequence[str]


def found() -> Iterator[WarmParent]:
    """The warm parents of this user.

    Raises: WarmParentError where the folder of their sockets is not safe.
    """
    here = conditions()
    for path in _sockets():
        answer = _asked(path, "status")
        if answer is not None:
            there = answer["conditions"]
            differs = sorted(name for name in {**here, **there} if here.get(name) != there.get(name))
            yield WarmParent(pid=answer["pid"], commands=answer["commands"], differs=differs)


def stop() -> int:
    """End the warm parents of this user; runs that have begun go on. Returns: how many there were.

    Raises: WarmParentError, as `found`.
    """
    return sum(_asked(path, "stop") is not None for path in _sockets())


def _sockets() -> list[str]:
    place = _folder()
    return [str(path) for path in sorted(Path(place).iterdir())] if os.path.isdir(place) else []


def _folder() -> str:
    try:
        return folder()
    except UnsafeFolderError as error:
        raise WarmParentError(str(error)) from error


def _asked(path: str, what: str) -> Mapping[str, Any] | None:
    """The answer of the warm parent behind a socket; None where there is none, and then its socket goes, too."""
    connection = connected(path)
    if connection is None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return None
    with connection:
        try:
            send(connection, {"ask": what})
            return receive(connection)[0]
        except (OSError, ValueError):  # it ends at this moment
            return None


def start(modules: Sequence[str], *, idle_seconds: float) -> WarmParent | Run | None:
    """Start the warm parent of commands with this process's conditions, and return once it waits.

    modules: what it imports. idle_seconds: how long it waits for a command before it ends.
    Returns: the one that waits already, None where this call started it; in a process that has become the run of a
        command, that, to be called where as few frames as can be hold what it leaves at its end.
    Raises: WarmParentError where it cannot be started.
    """
    if sys.platform != "linux":
        raise WarmParentError(
            "exp.warm needs Linux: elsewhere the system's own libraries forbid a fork without an exec"
        )
    if None in (sys.stdin, sys.stdout, sys.stderr):
        raise WarmParentError("exp.warm was started with a closed standard stream; it needs all three")
    place = _folder()
    os.makedirs(place, mode=0o700, exist_ok=True)
    under = conditions()
    path = address(under)
    with _only_one_starts(place):
        if os.path.lexists(path) and (answer := _asked(path, "status")) is not None:
            return WarmParent(pid=answer["pid"], commands=answer["commands"], differs=())
        ours, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        is_parent = os.fork() == 0
        os.close(ours if is_parent else theirs)
        said = "" if is_parent else _all_of(ours)
    if is_parent:
        return _live(path, under, modules, idle_seconds=idle_seconds, starter=theirs)
    if said != READY:
        raise WarmParentError(said or "the warm parent ended while it was importing; what it said is above")
    return None


def _all_of(pipe: int) -> str:
    with open(pipe, "rb") as words:
        return words.read().decode()


@contextlib.contextmanager
def _only_one_starts(place: str) -> Iterator[None]:
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _live(path: str, under: Mapping[str, Any], modules: Sequence[str], *, idle_seconds: float, starter: int) -> Run:
    """The parent's life. Returns: in a process that is to become a run, that; in the parent it does not return."""
    run = None
    try:
        os.setsid()
        for number in _descriptors():
            if number > 2 and number != starter:
                os.close(number)
        os.chdir("/")
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        with outliving_output():  # as of a command, for modules that keep the streams which they find
            imported = Imported.of(modules, begun=_beginning_of(os.getppid()))
        with _listening(path) as listener:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
            os.close(nowhere)
            _tell(starter, READY)
            run = _serve(listener, path, under, imported, idle_seconds=idle_seconds)
    except WarmParentError as error:
        _tell(starter, str(error))
    except Exception:
        traceback.print_exc()
    if run is None:
        os._exit(0)
    return run


def _beginning_of(pid: int) -> float:
    """When a process began, in seconds since the epoch, a hundredth early at most."""
    return time.time() - (now() - process_began(pid))


def _tell(starter: int, words: str) -> None:
    os.write(starter, words.encode())
    os.close(starter)


def _descriptors() -> list[int]:
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # of the listing itself
            os.fstat(number)
            found.append(number)
    return found


@contextlib.contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Where nobody can connect to it yet: whoever finds its name finds it listening.
        early = f"{path}.{os.getpid()}"
        try:
            listener.bind(early)
            listener.listen(64)
            os.rename(early, path)
        except OSError as error:  # a path that is too long for a socket
            raise WarmParentError(f"no socket can be made at {path}: {error.strerror or error}") from error
        yield listener


Stamp = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What this process has imported, as it was on disk.

    modules: their names. environment: the variables that they set, each with its value before and since. files: theirs,
        and the interpreter's. folders: of sys.path, each with what of it says whether the same would be imported again.
    """

    modules: frozenset[str]
    environment: Mapping[str, tuple[str | None, str | None]]
    files: Mapping[str, Stamp]
    folders: Mapping[str, object]

    @classmethod
    def of(cls, modules: Sequence[str], *, begun: float) -> Imported:
        """Import modules.

        begun: when this process began to import, in seconds since the epoch.
        Raises: WarmParentError where no fork of this process would be as a fresh interpreter.
        """
        before = dict(os.environ)
        preload(modules)
        since = dict(os.environ)
        names = {name for name, _ in before.items() ^ since.items()}
        environment = {name: (before.get(name), since.get(name)) for name in names}
        if os.fork() == 0:
            os._exit(0)
        os.wait()  # OpenBLAS ends its threads at a fork, until somebody multiplies
        if not is_single_threaded():
            raise WarmParentError("a module that is imported for every run starts a thread: what is forked may hang")
        paths = {sys.executable, *(str(getattr(module, "__file__", None)) for module in tuple(sys.modules.values()))}
        files = {path: _stamp(path) for path in paths if os.path.isabs(path)}
        young = [path for path, stamp in files.items() if stamp[0] >= begun * 1e9]
        if young:
            raise WarmParentError(f"{young[0]} changed while it was imported. Start exp.warm once more")
        return cls(modules=frozenset(sys.modules), environment=environment, files=files, folders=_folders(sys.modules))

    def set_variables(self) -> None:
        """Set what the modules would set in this process. Raises: ValueError where it began with another value."""
        for name, (before, since) in self.environment.items():
            if os.environ.get(name) != before:
                raise ValueError(f"{name} is {os.environ.get(name)!r}, and was {before!r} before the imports")
            if since is None:
                del os.environ[name]
            else:
                os.environ[name] = since

    def is_on_disk(self) -> bool:
        """Whether a fresh interpreter would import the same."""
        return _folders(self.modules) == self.folders and all(
            _stamp(path) == stamp for path, stamp in self.files.items()
        )


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _folders(modules: Collection[str]) -> dict[str, object]:
    """Of each folder of sys.path: when something was installed there; elsewhere, what of its names is imported."""
    tops = {name.partition(".")[0] for name in modules}
    found: dict[str, object] = {}
    for entry in sys.path:
        if os.path.basename(entry) in SITES:
            found[entry] = _stamp(entry)
        elif os.path.isdir(entry):
            found[entry] = frozenset(name for name in os.listdir(entry) if name.partition(".")[0] in tops)
    return found


def _serve(
    listener: socket.socket, path: str, under: Mapping[str, Any], imported: Imported, *, idle_seconds: float
) -> Run | None:
    """Wait for commands until the parent has to end; in a process that has become a run: that."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the keepers
    listener.settimeout(idle_seconds)
    about: dict[str, Any] = {"pid": os.getpid(), "commands": 0, "conditions": dict(under)}
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        connection.settimeout(SECONDS)
        reply, keeper = Reply.COLD, -1
        descriptors: list[int] = []
        try:
            if peer(connection)[1] == os.getuid():
                request, descriptors = receive(connection)
                reply = _answer(connection, request, about, imported)
            if reply == Reply.RUNNING:
                keeper = os.fork()
                about["commands"] += 1
        except (OSError, ValueError, KeyError):  # it has left, or no process can be made: it goes on by itself
            pass
        if keeper == 0:
            listener.close()
            return _keep(connection, request, descriptors, imported)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if reply == Reply.ENDED:
            break
    with suppress(FileNotFoundError):
        os.unlink(path)
    return None


def _answer(
    connection: socket.socket, request: Mapping[str, Any], about: Mapping[str, Any], imported: Imported
) -> Reply:
    """Answer a request. Returns: RUNNING where a run is to be started, ENDED where this process has to end."""
    if request["ask"] != "run":
        send(connection, about)
        return Reply.ENDED if request["ask"] == "stop" else Reply.COLD
    is_for_here = request["conditions"] == about["conditions"]
    if is_for_here and may_fork() and is_single_threaded() and imported.is_on_disk():
        return Reply.RUNNING
    connection.sendall(MESSAGE.pack(Reply.COLD, 0))
    return Reply.ENDED if is_for_here else Reply.COLD


def _keep(
    connection: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int], imported: Imported
) -> Run | None:
    """A keeper's life; in the process that it starts, the run."""
    keeper = os.getpid()
    os.setsid()  # the run's group is in it beside the keeper's, for the system stops no group that is alone
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    run = os.fork()
    if run == 0:
        os.setpgid(0, 0)
        end_with_parent(keeper)
        return Run(request, descriptors, connection, imported)
    with suppress(OSError):  # it has done so itself, and gone on to another program
        os.setpgid(run, run)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        _watch(connection, run)
    finally:
        # Where the command is gone the run is, too, as if the command were the run.
        with suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)
        os._exit(0)


def _watch(connection: socket.socket, run: int) -> None:
    """Pass signals on and tell what becomes of a run, until it has ended or the command has."""
    connection.setblocking(False)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    while True:
        with suppress(BlockingIOError):
            while True:
                text = connection.recv(MESSAGE.size)
                if len(text) < MESSAGE.size:
                    return
                of_terminal, signum = MESSAGE.unpack(text)
                send_to = os.killpg if of_terminal or signum == signal.SIGCONT else os.kill
                with suppress(ProcessLookupError):
                    send_to(run, signum)
        while (came := os.waitid(os.P_PID, run, os.WEXITED | os.WSTOPPED | os.WNOHANG)) is not None:
            kind = HOW.get(came.si_code, Reply.KILLED)
            connection.sendall(MESSAGE.pack(kind, came.si_status))
            if kind != Reply.STOPPED:
                return
        signal.sigtimedwait(WAKING, 60.0)


@dataclass(frozen=True)
class Run:
    """A process that is to be as a fresh interpreter which was asked for a command, but has imported much already."""

    request: Mapping[str, Any]
    descriptors: Sequence[int]
    connection: socket.socket
    imported: Imported

    def __call__(self) -> int:
        """Run the command.

        Returns: the exit status where the interpreter has to end this process: it takes apart what was imported once
            no frame holds it any more. Else this ends it.
        """
        self._become_like_it()
        status, signum = 1, None
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.request["blocked"])
            # Private to Python, and tested: what `python -m` itself calls.
            vars(runpy)["_run_module_as_main"](self.request["module"])
            status = 0
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                status = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        except BaseException as error:
            trace = error.__traceback__
            sys.excepthook(type(error), error, None if trace is None else trace.tb_next)
            signum = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
        return self._ended(status, signum)

    def _become_like_it(self) -> None:
        """Make this process like the one that asked; where that cannot be, let that one go on by itself."""
        request = self.request
        try:
            with self.connection:
                channel = _take_descriptors(request["descriptors"], self.descriptors, self.connection)
            os.umask(request["umask"])
            if os.getpriority(os.PRIO_PROCESS, 0) != request["nice"]:
                os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
            for kind, limit in request["limits"].items():
                if resource.getrlimit(kind) != limit:
                    resource.setrlimit(kind, limit)
            _open_streams(is_unbuffered=request["unbuffered"])
            _take_words(request)
            self.imported.set_variables()
            _answer_signals(request["ignored"])
            os.write(channel, MESSAGE.pack(Reply.RUNNING, 0))
            os.close(channel)
        except (OSError, ValueError):
            os._exit(1)  # of which the command hears before a word of a run

    def _ended(self, status: int, signum: int | None) -> int:
        if signum is not None:
            finish()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        return without_teardown(status)


def _take_descriptors(numbers: Sequence[int], descriptors: Sequence[int], connection: socket.socket) -> int:
    """Give open files the numbers that they had, and enter the working directory, which is the last of them.

    Returns: the connection's new number.
    Raises: ValueError where this process has another file of such a number.
    """
    free = max(numbers) + 1
    *moved, here, channel = (
        fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, free) for one in (*descriptors, connection.fileno())
    )
    os.fchdir(here)
    os.close(here)
    for one in (*descriptors, connection.detach()):
        os.close(one)
    taken = set(_descriptors()) - {0, 1, 2}
    if taken & set(numbers):
        raise ValueError(f"{sorted(taken & set(numbers))} are in use")
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    return channel


def _open_streams(*, is_unbuffered: bool) -> None:
    """Make sys.stdin, stdout and stderr as a fresh interpreter makes them for what they are now.

    The same objects, for handlers of the log and others hold them.
    """
    for number, (stream, mode) in enumerate(((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb"))):
        assert isinstance(stream, io.TextIOWrapper)
        buffer: Any = open(number, mode, buffering=0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        raw = buffer if isinstance(buffer, io.FileIO) else buffer.raw
        raw.name = stream.name
        io.TextIOWrapper.__init__(
            stream,
            buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=not is_unbuffered and (raw.isatty() or number == 2),
            write_through=is_unbuffered,
        )


def _take_words(request: Mapping[str, Any]) -> None:
    """The command line, the environment, and what was read of it or drawn once for all."""
    sys.argv, sys.orig_argv[:] = request["argv"], request["orig_argv"]
    sys.executable = request["executable"]
    multiprocessing.set_executable(sys.executable)  # which it keeps from its import
    became(request["orig_argv"], request["environment"])
    began_at(request["began"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()  # its own draw of the start, which every fork has
    sys.modules["__main__"] = ModuleType("__main__")


def _answer_signals(ignored: Sequence[int]) -> None:
    """As a fresh interpreter does. They are blocked until the run begins."""
    faulthandler.disable()
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
