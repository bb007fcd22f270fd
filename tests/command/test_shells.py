"""Tab completion in bash and zsh in a pseudo-terminal, with the script that users install."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Keys that print the line that is typed.
SHOW = "\x18\x04"
STARTS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        "PS1='ready> '; bind 'set enable-bracketed-paste off'; bind 'set page-completions off'; "
        """bind -x '"\\C-x\\C-d": printf "<<%s>>\\n" "$READLINE_LINE"'""",
    ),
    "zsh": (
        ["-f", "-i"],
        "PS1='ready> '; unsetopt beep; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; "
        """show() { zle -I; print -r -- "<<$BUFFER>>" }; zle -N show; bindkey '^X^D' show""",
    ),
}
# Longer than a busy machine takes.
SECONDS = 120.0


class Terminal:
    """Types into a shell and reads what the shell writes."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        ends = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._unread)) is None:
            left = ends - time.monotonic()
            assert left > 0, f"{pattern!r} did not come in {SECONDS} s, but {self._unread!r}"
            if select.select([self._master], [], [], left)[0]:
                self._unread += os.read(self._master, 65536).decode(errors="replace").replace("\r", "")
        self._unread = self._unread[found.end() :]
        return found

    def completed(self, line: str) -> str:
        """Return the line after the tab key."""
        return self._after(f"{line}\t")[1]

    def _after(self, keys: str) -> tuple[str, str]:
        self.type(f"\x15{keys}{SHOW}")
        found = self.until(r"(?s)^(.*)<<(.*?)>>\n.*?ready> ")
        return found[1], found[2]


@contextmanager
def terminal(shell: str, *, scripts: Path, here: Path) -> Iterator[Terminal]:
    flags, start = STARTS[shell]
    program = shutil.which(shell)
    assert program is not None
    master, slave = pty.openpty()
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "HOME": str(here.parent),
        "XDG_CACHE_HOME": str(here.parent / "cache"),
    }  # fmt: skip
    process = subprocess.Popen(
        [program, *flags], stdin=slave, stdout=slave, stderr=slave, cwd=here, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        found = Terminal(master)
        found.type(f"stty columns 500; {start}\n")
        found.type(f'eval "$(exp completion {shell})"; echo evalu""ated\n')
        found.until("(?s)evaluated\n.*?ready> ")
        yield found
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.fixture(scope="module", params=["bash", "zsh"])
def shell(request, tmp_path_factory, scripts):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed on this machine")
    here = tmp_path_factory.mktemp("home") / "here"
    (here / "conf" / "model").mkdir(parents=True)
    (here / "conf" / "model" / "mine.yaml").write_text("# Mine: model=mine\n_target_: torch.nn.Flatten\n")
    (here / "notes").mkdir()
    (here / "other notes").mkdir()
    # Files of the folder, which a tab must not run.
    for name in ("exp", "python3"):
        (here / name).write_text("#!/bin/sh\ncase \"$*\" in *' zsh '*) echo ;; esac\necho train\n")
        (here / name).chmod(0o755)
    # A module that exp must not import.
    (here / "json.py").write_text("raise SystemExit('the folder was imported')")
    with terminal(request.param, scripts=scripts, here=here) as found:
        yield found


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("exp tr", "exp train "),
        ("exp train -m model=mlp,le", "exp train -m model=mlp,lenet "),
        ("exp train 'hooks=[gradients,me", "exp train 'hooks=[gradients,memory"),
        ("exp train hooks=[gradients,me", "exp train hooks=[gradients,memory"),
        ('exp train "model=le', 'exp train "model=lenet" '),
        ("exp train '~hooks.gr", "exp train '~hooks.gradients' "),
        ("exp train trainer.max_ep", "exp train trainer.max_epochs="),
        ("exp train resume=no", "exp train resume=notes/"),
        ("exp train weights.from=other\\ n", "exp train weights.from=other\\ notes/"),
        ("exp train --cfg j", "exp train --cfg job "),
        ("python -m exp.train model=le", "python -m exp.train model=lenet "),
        # Other commands complete as without exp.
        ("python no", "python notes/"),
        ("./exp tr", "./exp tr"),
        ("./python3 -m exp.tr", "./python3 -m exp.tr"),
    ],
)
def test_a_tab_completes_the_line(shell, line, completed):
    assert shell.completed(line) == completed


def test_a_program_is_completed_by_its_path(shell, scripts):
    assert shell.completed(f"{scripts}/exp tr") == f"{scripts}/exp train "
    assert shell.completed(f"{scripts}/python -m exp.ev") == f"{scripts}/python -m exp.evaluate "
