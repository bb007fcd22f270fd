"""The revision of the working directory, and what is not committed: read so that nothing configured there can run.

A folder from elsewhere may bring a `.git` that names programs: `core.fsmonitor`, filters, `textconv`, hooks, a remote
to fetch a missing object from. So git is asked for its own records alone, with the switches below, and never looks at
the working tree. The files are read and compared here, by the time stamps in git's index, as `git diff HEAD` does it.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# A diff is for reading beside the figures; one that holds a data file by accident would fill the disk run by run.
MAX_DIFF_CHARACTERS = 1_000_000
MAX_FILE_BYTES = 1_000_000
# Of all that is done here.
MAX_SECONDS = 5.0
# Of the outer GIT_* variables these alone stay, for they can but end the search for a repository.
KEPT = frozenset({"GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM"})
SAFE = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    # Nothing is fetched for a partial clone; git before 2.44 knows only that no protocol is allowed.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",
}
SWITCHES = (
    "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.sshCommand=false",
    "-c", "core.gitProxy=", "-c", "credential.helper=", "-c", "gc.auto=0", "-c", "maintenance.auto=false",
)  # fmt: skip
LEAF = re.compile(rb"(\d+) blob ([0-9a-f]+)\t([^\0]+)\0")
# What the index holds of a file: mode, name of the content, path; when it was modified, size, flags.
ENTRY = re.compile(
    rb"(\d+) ([0-9a-f]+) \d\t([^\0]+)\0"
    rb"  ctime: [^\n]*\n  mtime: (\d+):(\d+)\n  dev: [^\n]*\n  uid: [^\n]*\n  size: (\d+)\tflags: ([0-9a-f]+)\n"
)
# Assumed unchanged, or left out of a sparse checkout: nobody looks at the file.
UNSEEN = 0x8000 | 1 << 30
SUBMODULE = b"160000"


class _TooLongError(Exception):
    """The time for all of this is over."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A file that is not as in the revision. old: the name of its content there; new: what it holds now, or None."""

    path: str
    old: str | None
    new: bytes | None
    size: int


def revision(*, seconds: float = MAX_SECONDS) -> dict[str, str] | None:
    """Return the revision and the uncommitted diff of the working directory; None outside a repository or without git.

    seconds: the limit for all of it.
    """
    program = shutil.which("git")
    if program is None or not os.path.isabs(program):
        return None
    git = _Git(program, seconds)
    try:
        root, index, head = git("rev-parse", "--show-toplevel", "--git-path", "index", "HEAD").decode().splitlines()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    here = Path.cwd().resolve()
    if Path(root) not in (here, *here.parents) or not Path(root, ".git").exists():
        return {"revision": head, "diff": f"not looked for: the files of this repository are elsewhere, in {root}\n"}
    try:
        diff = "".join(_shown(git, list(_changes(git, Path(root), index=Path(index)))))
    except (OSError, subprocess.SubprocessError, _TooLongError) as error:
        is_late = isinstance(error, _TooLongError | subprocess.TimeoutExpired)
        reason = f"it takes more than {seconds:g} s" if is_late else str(error)
        return {"revision": head, "diff": f"not known, for the files could not be compared: {reason}\n"}
    if len(diff) > MAX_DIFF_CHARACTERS:
        diff = diff[:MAX_DIFF_CHARACTERS] + f"\n... cut here: the diff has {len(diff)} characters\n"
    return {"revision": head, "diff": diff}


class _Git:
    """git, asked for its own records, within the time that all questions share."""

    def __init__(self, program: str, seconds: float) -> None:
        self.program, self.until = program, time.monotonic() + seconds
        outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in KEPT}
        self.environment = outer | SAFE

    def __call__(self, *arguments: str, given: bytes = b"") -> bytes:
        return subprocess.run(
            [self.program, *SWITCHES, *arguments],
            input=given,
            capture_output=True,
            timeout=self.left(),
            check=True,
            env=self.environment,
        ).stdout

    def left(self) -> float:
        """Seconds that are left. Raises: _TooLongError."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise _TooLongError
        return left


def _changes(git: _Git, root: Path, *, index: Path) -> Iterator[_Change]:
    """Each file that is not as in the revision, by path. Submodules and files that git does not know are left out."""
    listed = git("ls-tree", "-r", "-z", "--full-tree", "HEAD")
    old = {path: (mode, name.decode()) for mode, name, path in LEAF.findall(listed)}
    written = index.stat().st_mtime_ns if index.is_file() else 0
    # --debug says what the index knows of the file; of all files below the root, wherever this process stands.
    listed = git("-C", str(root), "ls-files", "-z", "--stage", "--debug")
    staged = {entry[2]: entry for entry in ENTRY.findall(listed)}
    folders: dict[str, bool] = {}
    for path in sorted(old.keys() | staged.keys()):
        git.left()
        mode, name = old.get(path, (b"", None))
        entry = staged.get(path)
        if entry is not None and (entry[0] == SUBMODULE or int(entry[6], 16) & UNSEEN):
            continue
        place = os.path.join(root, os.fsdecode(path))
        status = os.lstat(place) if _is_own_folder(os.path.dirname(place), folders) and os.path.lexists(place) else None
        if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            if name is not None:
                yield _Change(path=os.fsdecode(path), old=name, new=None, size=0)
            continue
        if entry is not None and (entry[0][:3], entry[1].decode()) == (mode[:3], name):
            modified, size = int(entry[3]) * 10**9 + int(entry[4]), int(entry[5])
            # Written in the same moment as the index, a file may have been changed behind it.
            if (status.st_mtime_ns, status.st_size) == (modified, size) and modified < written:
                continue
        content = _content(place, status)
        if name is None or _name_of(content, place, size=status.st_size, length=len(name), git=git) != name:
            yield _Change(path=os.fsdecode(path), old=name, new=content or b"", size=status.st_size)


def _is_own_folder(folder: str, known: dict[str, bool]) -> bool:
    """Whether no link leads to a folder: what is behind one is not the repository's."""
    if folder not in known:
        known[folder] = os.path.realpath(folder) == folder
    return known[folder]


def _content(place: str, status: os.stat_result) -> bytes | None:
    """What a file holds, or the text of a link; None of a file that is too large to be shown."""
    if stat.S_ISLNK(status.st_mode):
        return os.fsencode(os.readlink(place))
    return Path(place).read_bytes() if status.st_size <= MAX_FILE_BYTES else None


def _name_of(content: bytes | None, place: str, *, size: int, length: int, git: _Git) -> str:
    """The name that git gives to a content. length: of such a name, in hexadecimal digits."""
    made = hashlib.new("sha1" if length == 40 else "sha256", usedforsecurity=False)
    made.update(b"blob %d\0" % size)
    if content is not None:
        made.update(content)
        return made.hexdigest()
    with open(place, "rb") as file:
        while piece := file.read(1 << 20):
            git.left()
            made.update(piece)
    return made.hexdigest()


def _shown(git: _Git, changes: list[_Change]) -> Iterator[str]:
    """Each change as git prints it."""
    old = _contents(git, [change.old for change in changes if change.old is not None])
    for change in changes:
        git.left()
        yield f"diff --git a/{change.path} b/{change.path}\n"
        before, after = old.get(change.old or "", b""), change.new or b""
        if before is None or change.size > MAX_FILE_BYTES or b"\0" in before + after:
            yield f"Binary or large files differ, {change.size} bytes now\n"
            continue
        was = f"a/{change.path}" if change.old is not None else "/dev/null"
        now = f"b/{change.path}" if change.new is not None else "/dev/null"
        for line in difflib.unified_diff(_lines(before), _lines(after), was, now):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _contents(git: _Git, names: list[str]) -> Mapping[str, bytes | None]:
    """What the revision holds under these names; None of what is too large to be shown, or not on this machine."""
    asked = "\n".join(dict.fromkeys(names)).encode()
    found: dict[str, bytes | None] = {}
    for line in git("cat-file", "--batch-check", given=asked).decode().splitlines():
        name, kind, *rest = line.split()
        found[name] = b"" if kind == "blob" and int(rest[0]) <= MAX_FILE_BYTES else None
    small = [name for name, content in found.items() if content is not None]
    answer = git("cat-file", "--batch", given="\n".join(small).encode())
    for name in small:
        head, _, answer = answer.partition(b"\n")
        size = int(head.split()[2])
        found[name], answer = answer[:size], answer[size + 1 :]
    return found


def _lines(content: bytes) -> list[str]:
    # Not splitlines, which ends a line at more than its newline.
    found: list[str] = re.findall(r"[^\n]*\n|[^\n]+", content.decode(errors="replace"))
    return found
