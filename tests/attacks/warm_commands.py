"""Random commands, each with a warm parent and without one: the same bytes, exit statuses and files.

    python tests/attacks/warm_commands.py [--commands 200] [--seed 0]

Drawn are runs, faults, failures in code of a user's own, sweeps, questions, signals at a known step, readers that
leave, full disks, closed streams, interpreters' flags and the state that a shell hands on. Both run in a folder of the
same path. Times, dates, memory and process numbers are no difference. Of commands that have to be handed over the
parent counts every one. tests/attacks/test_warm_commands.py does the same with a few.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CALLBACK = """
import atexit, ctypes, faulthandler, locale, os, resource, signal, sys, threading, time, warnings
from pathlib import Path
import lightning.pytorch as pl

print("imported", __name__, "main is", sys.modules["__main__"].__spec__.name)
unflushed = open("unflushed.txt", "w")
class Kept:
    def __del__(self):
        os.write(1, b"the interpreter takes modules apart\\n")
kept = Kept()

class Own(pl.Callback):
    def __init__(self, what):
        self.what = what
    def on_train_batch_end(self, trainer, *_):
        getattr(self, self.what)(trainer.global_step)
    def nothing(self, step):
        pass
    def waits(self, step):
        if step == 2:
            Path("here").touch()
            while not Path("sent").exists():
                time.sleep(0.01)
    def raises(self, step):
        raise RuntimeError("of the user's own")
    def raises_base(self, step):
        raise GeneratorExit("of the user's own")
    def leaves(self, step):
        sys.exit(7)
    def says_and_leaves(self, step):
        sys.exit("words of the user's own")
    def leaves_at_once(self, step):
        os._exit(9)
    def crashes(self, step):
        ctypes.string_at(0)
    def is_killed(self, step):
        os.kill(os.getpid(), signal.SIGKILL)
    def is_aborted(self, step):
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    def writes(self, step):
        print("to stdout", step)
        print("to stderr", step, file=sys.stderr)
        os.write(1, b"past Python\\n")
        warnings.warn("of the user's own")
        unflushed.write("never flushed\\n")
    def reads(self, step):
        print("read", sys.stdin.readline())
    def registers(self, step):
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread ends"))).start()
    def says_where(self, step):
        print(sys.argv, sys.orig_argv, sys.flags, sys.path, os.getcwd(), sys.executable, sys.warnoptions)
        print(sorted((name, value) for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"))
        print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdout.encoding)
        print([(one.line_buffering, one.write_through, one.name, one.mode, one.errors, one.newlines)
               for one in (sys.__stdin__, sys.__stdout__, sys.__stderr__)])
        umask = os.umask(0)
        print(oct(umask), os.getpriority(os.PRIO_PROCESS, 0), time.tzname, locale.setlocale(locale.LC_ALL))
        os.umask(umask)
        Path("made").touch()
        print([resource.getrlimit(number) for number in range(16)])
        print({int(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()})
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), faulthandler.is_enabled(), threading.enumerate()[0].name)
        print([number for number in range(3, 30) if Path(f"/proc/self/fd/{number}").exists()
               and not os.get_inheritable(number) is False])
"""
OWN_YAML = """\
# What a user's own code may do: callbacks=[own]
own:
  _target_: own.Own
  what: nothing
"""
COLD_YAML = """\
# @package _global_
# A config that wants a fresh interpreter: experiment=cold
runtime: {warm: false}
"""
SHORT = (
    *("trainer.max_steps=2", "trainer.limit_val_batches=1", "test=false", "hydra.run.dir=outputs/run"),
    "trainer.enable_progress_bar=false",
)
RUNS = (
    (),
    ("model=mlp",),
    ("model=lenet", "precision=bf16"),
    ("optimizer=sgd", "scheduler=cosine", "trainer.max_steps=5"),
    ("data=wine",),
    ("hooks=[gradients,memory]", "print_config=true"),
    ("data.num_workers=2", "trainer.limit_train_batches=4"),
    ("test=true", "seed=7"),
    ("debug=one_batch",),
    ("trainer.enable_progress_bar=true",),
    ("experiment=cold",),
    ("runtime.warm=false",),
    ("runtime.warm=auto", "model=rnn"),
)
FAULTS = (
    ("optimizer.lrr=1",),
    ("modell=mlp",),
    ("model=mlpp",),
    ("+precison=bf16",),
    ("optimizer.lr=many", "trainer.max_steps=-7"),
    ("data.batch_size=0",),
    ("runtime.warm=perhaps",),
    ("model.layers.hidden.out_features=-1",),
    ("model.layers.hidden._target_=os.system",),
    ("resume=nowhere.ckpt",),
    ("--nonsense",),
    ("--cfg", "job", "--help"),
    ("=",),
)
QUESTIONS = (
    *(("--help",), ("--version",), ("--cfg", "job"), ("--cfg", "hydra"), ("--info", "defaults-tree")),
    ("--shell-completion", "install=bash"),
)
# Of which a module is imported, and what it does is said in the output.
DEEDS = (
    *("nothing", "raises", "raises_base", "leaves", "says_and_leaves", "leaves_at_once", "crashes", "is_killed"),
    *("is_aborted", "writes", "reads", "registers", "says_where"),
)
SWEEPS = (
    ("-m", "seed=0,1"),
    ("-m", "seed=0,1", "sweep.jobs=2"),
    ("-m", "optimizer.lr=0.1,many"),
    ("-m", "seed=0,1", "callbacks=[own]", "callbacks.own.what=raises"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT, signal.SIGKILL, signal.SIGUSR2)
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")} | {
    "OMP_NUM_THREADS": "1"
}
# What is as it is said to be, but differs from one run of the same command to the next.
TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[ /T_]\d\d[-:]\d\d[-:]\d\d(?:[.,]\d+)?(?:[+-]\d\d:?\d\d)?"
    rb"|[\d.,]+ (?:ms|us|s|min|h|MiB|GiB|KiB|kB|MB)\b|[\d.]+ ?it/s|0x[0-9a-f]+|events\.out\.tfevents\.\S+|\d+\.\d+ ?%"
    rb"|[\d.]+ steps/s|\d+\.\d +\xe2\x94\x82(?: +\d+ +\xe2\x94\x82)?"
    rb"|\d+:\d\d(?::\d\d)?|process \d+|\d+ +(?=Killed|Segm|Abort|Quit|Done)"
    rb"|pid[=: ]\d+|Thread [0-9a-f]+|tmp\w{8}|\.launch-\w+"
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """words: of exp.train. flags: of Python. shell: a line in which {command} stands; None for none.

    signals: that are sent one after another once the run is at its second step. ignored: signals that it begins with.
    terminal: whether its streams are one. is_handed_over: whether a warm parent must take it.
    """

    words: Sequence[str]
    flags: Sequence[str] = ()
    shell: str | None = None
    signals: Sequence[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_handed_over: bool = True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a command left."""

    status: int
    output: bytes
    errors: bytes
    files: Mapping[str, str]


SHELLS = (
    "{command} 2>&1",
    "{command} | head -n 1",
    "{command} 2>&1 | head -c 10",
    "{command} > /dev/full",
    "{command} 2> /dev/full",
    "{command} > out.txt 2> err.txt",
    "{command} < /dev/null",
    "echo words | {command}",
    "umask 077; {command}",
    "ulimit -n 200; {command}",
    "ulimit -c 0; {command}",
    "exec 7> seven.txt; {command}",
    "trap '' HUP; {command}",
    "trap '' INT; {command}",
    "mkdir -p elsewhere; ln -sfn elsewhere link; cd link; {command}",
    "TZ=Asia/Tokyo COLUMNS=40 {command}",
    "{command} & wait $!",
    "nice -n 3 {command}",
)
COLD_SHELLS = (
    "{command} >&-",
    "{command} 2>&-",
    "{command} <&-",
    "OMP_NUM_THREADS=2 {command}",
    "LC_ALL=C {command}",
    "taskset 1 {command}",
    "EXP_PLAIN_IMPORTS=1 {command}",
)
FLAGS = (("-O",), ("-W", "ignore"), ("-X", "utf8"), ("-P",), ("-u",), ("-B",))


def drawn(draw: random.Random) -> Command:
    """One of the commands."""
    deed = draw.choice(DEEDS)
    own = ("callbacks=[own]", f"callbacks.own.what={deed}")
    run = draw.choice((draw.choice(RUNS), own))
    is_cold = any(word in ("experiment=cold", "runtime.warm=false", "runtime.warm=perhaps") for word in run)
    kind = draw.choice(("run", "run", "own", "fault", "fault", "question", "sweep", "signal", "shell", "shell", "cold"))
    if kind == "run":
        # By a YAML it is known later, and the parent has taken it by then.
        return Command(words=(*SHORT, *run), is_handed_over=not is_cold or "experiment=cold" in run)
    if kind == "own":
        return Command(words=(*SHORT, *own))
    if kind == "fault":
        fault = draw.choice(FAULTS)
        return Command(words=(*SHORT, *fault), is_handed_over="runtime.warm=perhaps" not in fault)
    if kind == "question":
        return Command(words=draw.choice(QUESTIONS))
    if kind == "sweep":
        return Command(words=(*SHORT[:-2], "hydra.sweep.dir=outputs/sweep", *draw.choice(SWEEPS)))
    if kind == "signal":
        waiting = (*SHORT, "callbacks=[own]", "callbacks.own.what=waits", "trainer.max_steps=4")
        return Command(words=waiting, signals=[draw.choice(SIGNALS)])
    if kind == "shell":
        words = draw.choice(((*SHORT, *own), SHORT, (*SHORT, "optimizer.lrr=1"), ("--help",)))
        return Command(words=words, shell=draw.choice(SHELLS))
    words = draw.choice(((*SHORT, "callbacks=[own]", "callbacks.own.what=says_where"), ("--help",)))
    if draw.random() < 0.5:
        return Command(words=words, shell=draw.choice(COLD_SHELLS), is_handed_over=False)
    flags = draw.choice(FLAGS)
    return Command(words=words, flags=flags, is_handed_over=flags == ("-u",))


def run(command: Command, place: Path, runtime: Path) -> Seen:
    """Run it in an empty folder, with the warm parents of one runtime directory."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "conf" / "callbacks").mkdir(parents=True)
    (place / "conf" / "experiment").mkdir()
    (place / "conf" / "callbacks" / "own.yaml").write_text(OWN_YAML)
    (place / "conf" / "experiment" / "cold.yaml").write_text(COLD_YAML)
    (place / "own.py").write_text(textwrap.dedent(CALLBACK))
    # Each of the two ways to call it, whatever is drawn.
    called = ["exp.train"] if len(command.words) % 2 else ["exp", "train"]
    line = [sys.executable, *command.flags, "-m", *called, *command.words]
    if command.shell is not None:
        text = command.shell.format(command='"$@"')
        line = ["bash", "-o", "pipefail", "-c", text, "bash", *line]
    environment = {**ENVIRONMENT, **command.environment, "XDG_RUNTIME_DIR": str(runtime)}
    process = subprocess.Popen(
        line, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for signum in command.signals:
        ends = time.monotonic() + 120
        while not (place / "here").exists() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        process.send_signal(signum)
        time.sleep(1.0)  # on its way to the run
        (place / "sent").touch()
    output, errors = process.communicate(timeout=300)
    if command.signals and command.signals[0] == signal.SIGKILL:
        time.sleep(0.5)  # for a run that has lost its command
    return Seen(status=process.returncode, output=plain(output), errors=plain(errors), files=files_of(place))


def plain(text: bytes) -> bytes:
    """Without what two runs of one command never share.

    Spaces and rules are as wide as the figures among them, and jobs side by side end in any order.
    """
    # How far it has come is told when so much time has gone by.
    text = re.sub(rb"(?m)^.*\bepoch \d+/\d+  step \d+ .*\n", b"", text)
    jobs = sorted(re.findall(rb"(?m)^job \d+ .*\n", text))
    text = b"".join(jobs) + re.sub(rb"(?m)^job \d+ .*\n", b"", text)
    # Where a process crashes, all frames are told, those below the command too, and what is imported in its order.
    text = re.sub(rb"(?m)(?<=in _run_module_as_main\n)(?:  File .*\n)+|^Extension modules: .*", b"", text)
    return re.sub(rb"[ \xe2\x94\x80\xe2\x94\x81]{2,}", b"  ", TIMES.sub(b"#", text))


def files_of(place: Path) -> dict[str, str]:
    """The files that there are, with their modes, and the text of those that are a text to be read."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = plain(str(path.relative_to(place)).encode()).decode()
        if "__pycache__" in name or path.name in ("here", "sent"):
            continue
        mode = stat.filemode(path.lstat().st_mode)
        is_text = path.name in ("config.yaml", "overrides.yaml", "out.txt", "err.txt", "unflushed.txt", "seven.txt")
        if path.is_file() and (is_text or path.name in ("train.log", "output.log", "metrics.csv")):
            mode += "\n" + plain(path.read_bytes()).decode("utf-8", "replace")
        found[name] = mode
    return found


def differences(one: Seen, other: Seen) -> str:
    """What differs; empty where nothing does."""
    found = [f"status {one.status} {other.status}"] if one.status != other.status else []
    for name in ("output", "errors"):
        here, there = getattr(one, name), getattr(other, name)
        if here != there:
            found.append("\n".join((f"{name}:", *difflib.unified_diff(lines(here), lines(there), "cold", "warm", n=0))))
    for name in sorted({*one.files, *other.files}):
        here, there = one.files.get(name), other.files.get(name)
        if here != there:
            texts = ((one or "not there").splitlines() for one in (here, there))
            found.append("\n".join((f"file {name}:", *difflib.unified_diff(*texts, "cold", "warm", n=1))))
    return "\n".join(found)


def lines(text: bytes) -> list[str]:
    return text.decode(errors="replace").splitlines()


def attack(place: Path, *, commands: int, seed: int, tell: Callable[[str], object] = str) -> list[str]:
    """Run random commands both ways. Returns: what differed, with its command."""
    draw = random.Random(seed)
    with_parent, without = place / "warm", place / "cold"
    for folder in (with_parent, without):
        folder.mkdir(mode=0o700)
    manage = [sys.executable, "-m", "exp.warm"]
    environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": str(with_parent)}

    def ask(*words: str) -> str:
        return subprocess.run([*manage, *words], env=environment, check=True, capture_output=True, text=True).stdout

    ask("--idle", "1h")
    found, seconds, expected = [], [0.0, 0.0], 0
    try:
        for number in range(commands):
            command = drawn(draw)
            begun = time.monotonic()
            cold = run(command, place / "folder", without)
            between = time.monotonic()
            warm = run(command, place / "folder", with_parent)
            seconds[0] += between - begun
            seconds[1] += time.monotonic() - between
            expected += command.is_handed_over
            told = differences(cold, warm)
            if told:
                found.append(f"{command}\n{told}")
            tell(f"{number + 1}: {'differs' if told else 'same'} ({cold.status}) {command}{told and chr(10)}{told}")
        count = int(re.search(r"(\d+) command", ask("status"))[1])
        if count != expected:
            found.append(f"{count} commands were handed over, and not {expected}")
    finally:
        ask("stop")
    tell(f"{commands} commands, {expected} of them handed over: cold {seconds[0]:.0f} s, warm {seconds[1]:.0f} s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory() as directory:
        found = attack(
            Path(directory), commands=arguments.commands, seed=arguments.seed, tell=lambda line: print(line, flush=True)
        )
    print("\n\n".join(found) or "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
