"""A shell in a pseudo-terminal, as a person at a keyboard has it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# As pip makes it of [project.scripts].
SCRIPT = """#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from exp.__main__ import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
# What a key shows of the line that is typed.
SHOW = "\x18\x04"
STARTS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        """PS1='ready> '; bind 'set enable-bracketed-paste off'; bind 'set page-completions off'
        bind -x '"\\C-x\\C-d": printf "<<%s>>\\n" "$READLINE_LINE"'""",
    ),
    "zsh": (
        ["-f", "-i"],
        """PS1='ready> '; unsetopt beep; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D
        show() { zle -I; print -r -- "<<$BUFFER>>" }; zle -N show; bindkey '^X^D' show""",
    ),
}
SECONDS = 30.0


def installed(folder: Path) -> Path:
    """The folder with the script `exp`, as an installation has it beside its Python."""
    folder.mkdir(exist_ok=True)
    script = folder / "exp"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class Terminal:
    """What is typed is sent at once; what the shell writes is read until it waits."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Read until a pattern was written."""
        ends = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._unread)) is None:
            left = ends - time.monotonic()
            assert left > 0, f"{pattern!r} did not come in {SECONDS} s, but {self._unread!r}"
            if select.select([self._master], [], [], left)[0]:
                self._unread += os.read(self._master, 65536).decode(errors="replace").replace("\r", "")
        self._unread = self._unread[found.end() :]
        return found

    def completed(self, line: str) -> str:
        """The line behind a tab at its end."""
        return self._behind(f"{line}\t")[1]

    def listed(self, line: str) -> list[str]:
        """What a second tab lists."""
        return self._behind(f"{line}\t\t")[0].split()

    def _behind(self, keys: str) -> tuple[str, str]:
        """What was written behind some keys, and the line that is typed then."""
        self.type(f"\x15{keys}{SHOW}")
        found = self.until(r"(?s)^(.*)<<(.*?)>>\n.*?ready> ")
        return found[1], found[2]


@contextmanager
def terminal(shell: str, *, folder: Path, here: Path) -> Iterator[Terminal]:
    """A shell whose PATH begins with a folder, with exp's completion as its users install it."""
    flags, start = STARTS[shell]
    program = shutil.which(shell)
    assert program is not None
    master, slave = pty.openpty()
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "HOME": str(folder), "COLUMNS": "500",
        "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    process = subprocess.Popen(
        [program, *flags], stdin=slave, stdout=slave, stderr=slave, cwd=here, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        found = Terminal(master)
        found.type(f"stty columns 500; {start}\n")
        found.type(f'eval "$(exp completion {shell})"; echo com""plete\n')
        found.until("complete\n.*?ready> ")
        yield found
    finally:
        process.kill()
        process.wait()
        os.close(master)
