"""Hand a command over to the warm parent, a process that has imported torch and Lightning already, and end as it does.

    the command                          the warm parent: launch/warm_parent.py
    conditions, arguments, streams  ->   the same conditions, and nothing changed on disk: fork     -> a keeper
    Reply.COLD                      <-   else; the command then goes on by itself                      fork -> the run
    Reply.RUNNING                   <-   ...                                                        <- the keeper
    signals                         ->   ...                                                        -> passes them on
    Reply.ENDED, KILLED, STOPPED    <-   ...                                                        <- the keeper

Whatever a fresh interpreter would have otherwise than the warm parent, and a fork cannot be given, is a condition:
where one differs, the command begins as ever. Imports here take longer than all the rest, so there are few.
"""

from __future__ import annotations

import enum
import fcntl
import marshal
import os
import re
import resource
import signal
import socket
import stat
import struct
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from exp.command_clock import process_began
from exp.interpreter_exit import is_program

# Of the interpreter that takes the place of a run whose config says runtime.warm=false.
COLD = "EXP_COLD"
SWITCH = "runtime.warm="
# Read by the loader, the interpreter or a library as it is loaded, or by a module as it is imported.
READ_AT_IMPORT = re.compile(
    r"(PYTHON|LD_|GCONV|GLIBC|MALLOC|OMP_|GOMP_|KMP_|MKL_|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|ATEN_|TORCH|PYTORCH|"
    r"C10_|CUDA|CUDNN|CUBLAS|NVIDIA|NCCL|GLOO|UCX|HIP|HSA|ROC|AMD|ONEDNN|DNNL|TRITON|XLA|PJRT|TPU|TF_|PL_|LIGHTNING|"
    r"HYDRA|NPY_|NUMPY|SCIPY|SKLEARN|JOBLIB|LOKY|MPL|SYMPY|PROTOCOL_BUFFERS|LC_|KINETO|DISABLE_)\w*"
    r"|EXP_PLAIN_IMPORTS|LANG|LANGUAGE|LOCPATH|HOME|DEBUG|NO_COLOR|FORCE_COLOR"
)
# What the kernel lets a process do, and where.
STATUS = re.compile(r"^(?:Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):.*$", re.MULTILINE)
STATE = ("cgroup", "oom_score_adj", "personality", "attr/current")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
# That are not passed on: they cannot be caught, are the process's own, or are how it hears of the others.
OWN_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGIO, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU}
    | {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
SI_KERNEL = 0x80  # of siginfo: from the terminal, to a whole process group
MESSAGE = struct.Struct("!Bi")
LENGTH = struct.Struct("!I")
# The request of a command, and how long either side may take over one.
MOST_BYTES = 16_000_000
MOST_DESCRIPTORS = 200
SECONDS = 2.0
GONE = "the process that ran this command for it, started by `python -m exp.warm`, was killed"


class Reply(enum.IntEnum):
    """What the other side says, each with a number: of the exit status or the signal, else 0."""

    COLD = 0
    RUNNING = 1
    ENDED = 2
    KILLED = 3
    STOPPED = 4


class UnsafeFolderError(Exception):
    """The folder of the socket is not this user's alone. The message names it, and the cure."""


def folder() -> str:
    """The path of the folder in which warm parents of this user have their sockets; it may not be there.

    Raises: UnsafeFolderError where others could reach what is in it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_private(runtime):
        path = os.path.join(runtime, "exp-warm")
    else:
        path = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"exp-warm-{os.getuid()}")
    if os.path.lexists(path) and not _is_private(path):
        raise UnsafeFolderError(f"{path} must be a directory of your own that nobody else can enter (0700). Remove it")
    return path


def _is_private(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def conditions() -> dict[str, Any]:
    """What a command and the warm parent that runs it must have in common, of plain types."""
    # An environment has its interpreter under several names; which of them was typed is told in the request.
    executable = os.path.dirname(sys.executable), os.path.realpath(sys.executable)
    found: dict[str, Any] = {
        "Python": (sys.version, executable, sys.prefix, sys.base_prefix, sys.pycache_prefix, __file__),
        "flags of Python": (tuple(sys.flags), tuple(sys.warnoptions), tuple(sorted(sys._xoptions.items()))),
        "sys.path": tuple(sys.path),
        "root directory": _identity("/"),
        "status": tuple(STATUS.findall(_state("status"))),
        "scheduler": os.sched_getscheduler(0),
    }
    found |= {name: _state(name) for name in STATE}
    for name in NAMESPACES:
        found[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    return found | {name: text for name, text in os.environ.items() if READ_AT_IMPORT.fullmatch(name)}


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _state(name: str) -> str:
    """A file of /proc/self; nothing where this kernel has none, or does not show it."""
    try:
        with open(f"/proc/self/{name}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def address(under: Mapping[str, Any]) -> str:
    """The path of the socket of the warm parent with these conditions.

    Raises: UnsafeFolderError, as `folder`.
    """
    return os.path.join(folder(), f"{zlib.crc32(repr(sorted(under.items())).encode('utf-8', 'surrogatepass')):08x}")


def connected(path: str) -> socket.socket | None:
    """A connection to whoever waits behind a socket, where that is this user; None where nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SECONDS)
    try:
        connection.connect(path)
        if peer(connection)[1] == os.getuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the other side."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(connection: socket.socket, content: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send plain values and open files. Of marshal, for both sides are the same Python, and it is there already."""
    text = marshal.dumps(dict(content))
    socket.send_fds(connection, [LENGTH.pack(len(text))], descriptors)
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What the other side sent by `send`.

    Raises: OSError where it left, or is too slow; ValueError for anything else than a request.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MOST_DESCRIPTORS)
    try:
        if len(head) < LENGTH.size:
            raise ConnectionResetError("it left")
        (left,) = LENGTH.unpack(head)
        if left > MOST_BYTES:
            raise ValueError(f"{left} bytes")
        parts = []
        while left:
            part = connection.recv(min(left, 1 << 20))
            if not part:
                raise ConnectionResetError("it left")
            parts.append(part)
            left -= len(part)
        content = marshal.loads(b"".join(parts))
        if not isinstance(content, dict):
            raise ValueError("no request")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return content, descriptors


def hand_over(module: str) -> None:
    """Let the warm parent run this command, where one waits for such a one, and end this process as that ends.

    It returns where none does: the command goes on by itself, and nobody sees a difference but in time.

    module: that this interpreter was started for.
    """
    if os.environ.pop(COLD, None) is not None or not _is_a_fresh_command(module):
        return
    try:
        if not os.path.isdir(folder()):
            return  # mostly nobody waits, and what would be asked of the kernel takes milliseconds
        under = conditions()
        connection = connected(address(under))
    except (OSError, UnsafeFolderError):
        return
    if connection is None:
        return
    inherited = _inherited(but=connection.fileno())
    # Closed streams, and files that this process has open of itself, are the fresh interpreter's.
    if inherited[:3] != [0, 1, 2] or len(inherited) >= MOST_DESCRIPTORS:
        connection.close()
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ignored = {signum for signum in sorted(signal.valid_signals()) if signal.getsignal(signum) == signal.SIG_IGN}
    passed_on = signal.valid_signals() - OWN_SIGNALS - blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGIO})
    # Those that are ignored, too, for which a run may have handlers.
    restored = ignored & (passed_on | {signal.SIGIO})
    for signum in restored:
        signal.signal(signum, signal.SIG_DFL)
    if _is_taken(connection, module, under, inherited, ignored=ignored, blocked=blocked):
        _follow(connection, passed_on, inherited)
    connection.close()
    for signum in restored:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _is_a_fresh_command(module: str) -> bool:
    """Whether nothing but the command has been in this interpreter."""
    words = sys.argv[1:]
    return (
        sys.platform == "linux"
        and "torch" not in sys.modules
        and _is_called_so(module, words)
        and is_program()
        and not any(word.lstrip("+").startswith(SWITCH) and not word.endswith("=auto") for word in words)
    )


def _is_called_so(module: str, words: Sequence[str]) -> bool:
    """Whether the interpreter was started for this command: by its module, by exp's, or by the script `exp`."""
    before = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    name = module.removeprefix("exp.")
    is_by_module = before[-2:] == ["-m", module] or before[-3:] == ["-m", "exp", name]
    is_by_script = before[-1:] == [name] and [os.path.basename(word) for word in before[-2:-1]] == ["exp"]
    return sys.orig_argv[len(before) :] == list(words) and (is_by_module or is_by_script)


def _inherited(*, but: int) -> list[int]:
    """The descriptors that whoever started this process left open to it: those of Python's own are closed by exec."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # of the listing itself
            if number != but and not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.append(number)
    return found


def _is_taken(
    connection: socket.socket,
    module: str,
    under: Mapping[str, Any],
    inherited: Sequence[int],
    *,
    ignored: Collection[int],
    blocked: Collection[int],
) -> bool:
    umask = os.umask(0o077)
    os.umask(umask)
    request = {
        "ask": "run",
        "conditions": dict(under),
        "module": module,
        "argv": list(sys.argv),
        "orig_argv": list(sys.orig_argv),
        "executable": sys.executable,
        "environment": dict(os.environ),
        # Of python -u, which is no flag that can be asked for.
        "unbuffered": bool(getattr(sys.stdout, "write_through", False)),
        "began": process_began(),
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {kind: resource.getrlimit(kind) for kind in _limits()},
        "ignored": [int(signum) for signum in ignored],
        "blocked": [int(signum) for signum in blocked],
        "descriptors": list(inherited),
    }
    try:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            send(connection, request, [*inherited, here])
        finally:
            os.close(here)
        return _said(connection)[0] == Reply.RUNNING
    except (OSError, ValueError):
        return False


def _limits() -> list[int]:
    return sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


def _said(connection: socket.socket) -> tuple[int, int]:
    """The next word of the other side, whole or not at all.

    Raises: ConnectionError where it has gone.
    """
    text = connection.recv(MESSAGE.size, socket.MSG_WAITALL)
    if len(text) < MESSAGE.size:
        raise ConnectionResetError(GONE)
    kind, number = MESSAGE.unpack(text)
    return kind, number


def _follow(connection: socket.socket, passed_on: set[signal.Signals], inherited: Sequence[int]) -> NoReturn:
    """Pass signals on, stop where the run stops, and end as it ends. A word of the other side is a signal, too."""
    for number in inherited:
        if number != 2:
            os.close(number)  # a reader of the run's output sees its end, and not this process's
    connection.setblocking(False)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        while True:
            with suppress(BlockingIOError):
                _obey(connection, *_said(connection))
                continue
            came = signal.sigtimedwait([*passed_on, signal.SIGIO], 60.0)
            if came is not None and came.si_signo != signal.SIGIO:
                # Of the terminal it is for all that the run has started, too, as it is for a job of the shell.
                connection.sendall(MESSAGE.pack(came.si_code == SI_KERNEL, came.si_signo))
    except OSError:
        os.write(2, f"{GONE}\n".encode())
    os._exit(1)


def _obey(connection: socket.socket, kind: int, number: int) -> None:
    if kind == Reply.ENDED:
        os._exit(number)
    if kind == Reply.KILLED:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the run has left its own
        _meet(number)
        os._exit(128 + number)
    if kind == Reply.STOPPED:
        _meet(number)
        # A process whose group nobody would continue is not stopped by a terminal, and the run is not to be, either.
        if signal.SIGCONT not in signal.sigpending():
            connection.sendall(MESSAGE.pack(False, signal.SIGCONT))


def _meet(signum: int) -> None:
    """Let the system do to this process what a signal does to one without a handler."""
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


# What this process was asked to be, where it is a fork of the warm parent.
_original: tuple[list[str], Mapping[str, str]] | None = None


def became(orig_argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Keep the command line and the environment of the command that this process runs for another one."""
    global _original
    _original = list(orig_argv), dict(environment)


def begin_again_cold() -> None:
    """Let a fresh interpreter take the place of this process where it is a fork of the warm parent; else return."""
    if _original is None:
        return
    words, environment = _original
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, words, {**environment, COLD: "1"})
