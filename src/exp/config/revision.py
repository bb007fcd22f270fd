"""Read the git revision and the uncommitted changes of the working directory.

The `.git` of a downloaded folder may configure programs that git would run: `core.fsmonitor`, filters, `textconv`,
hooks, or a remote for missing objects. These programs must not run. Therefore, git compares the files in a temporary
repository without settings, which refers to the objects and the index of the original `.git`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

# Longer diffs are cut, because they usually contain a data file by accident and would fill the disk after many runs.
MAX_DIFF_CHARACTERS = 1_000_000
# For larger files, the diff contains only the name.
MAX_FILE_BYTES = 1_000_000
# The time limit for the sum of all calls of git.
MAX_SECONDS = 5.0
# The only GIT_* variables that are passed to git. They are safe, because they only limit the search for a repository.
KEPT = frozenset({"GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM"})
SAFE = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    # Missing objects of a partial clone are not fetched. Git before 2.44 ignores the first of these two variables.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",
}
SWITCHES = (
    "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.sshCommand=false",
    "-c", "core.gitProxy=", "-c", "credential.helper=", "-c", "gc.auto=0", "-c", "maintenance.auto=false",
    "-c", "core.fileMode=false", "-c", f"core.bigFileThreshold={MAX_FILE_BYTES}",
)  # fmt: skip
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--ignore-submodules=all", "HEAD")
PLACES = ("rev-parse", "--show-toplevel", "--git-path", "index", "--git-path", "objects", "HEAD")
SHA256 = "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = sha256\n"


def revision(*, seconds: float = MAX_SECONDS) -> dict[str, str] | None:
    """Return the git revision and the uncommitted diff of the working directory.

    Args:
        seconds: Time limit for the sum of all calls of git. Default: MAX_SECONDS.

    Returns:
        Dict with the keys `revision` and `diff`. If the diff cannot be read, the value of `diff` is the reason. None if
        the working directory is not in a repository, or git is not installed.
    """
    program = shutil.which("git")
    if program is None or not os.path.isabs(program):
        return None
    until = time.monotonic() + seconds
    try:
        root, index, objects, head = _git(program, PLACES, {}, seconds).splitlines()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    here = Path.cwd().resolve()
    if Path(root) not in (here, *here.parents) or not Path(root, ".git").exists():
        return {"revision": head, "diff": f"not read: the files of this repository are in another directory, {root}\n"}
    try:
        places = {"root": root, "index": os.path.abspath(index), "objects": os.path.abspath(objects)}
        diff = _diff(program, head, seconds=until - time.monotonic(), **places)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"git takes more than {seconds:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return {"revision": head, "diff": f"unknown, because git could not compare the files: {reason}\n"}
    if len(diff) > MAX_DIFF_CHARACTERS:
        diff = diff[:MAX_DIFF_CHARACTERS] + f"\n... cut here: the diff has {len(diff)} characters\n"
    return {"revision": head, "diff": diff}


def _diff(program: str, head: str, *, root: str, index: str, objects: str, seconds: float) -> str:
    """Return the output of `git diff HEAD`, run in a temporary repository without settings.

    Args:
        program: Path of git.
        head: Revision of HEAD.
        root: Top directory of the original repository, with the files to compare.
        index: Path of the index of the original repository.
        objects: Directory with the objects of the original repository.
        seconds: Time limit in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="exp-git-") as name:
        place = Path(name)
        (place / "refs").mkdir()
        (place / "objects" / "info").mkdir(parents=True)
        (place / "objects" / "info" / "alternates").write_bytes(os.fsencode(f"{objects}\n"))
        (place / "HEAD").write_text(f"{head}\n")
        (place / "config").write_text(SHA256 if len(head) == 64 else "")
        variables = {"GIT_DIR": name, "GIT_WORK_TREE": root, "GIT_INDEX_FILE": index}
        return _git(program, DIFF, {**variables, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}, seconds)


def _git(program: str, arguments: tuple[str, ...], variables: Mapping[str, str], seconds: float) -> str:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in KEPT}
    done = subprocess.run(
        [program, *SWITCHES, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=seconds,
        check=True,
        env={**outer, **SAFE, **variables},
    )
    return done.stdout.decode(errors="replace")
