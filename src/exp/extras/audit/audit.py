"""python -m exp.audit FILE_OR_DIR: what a config, a checkpoint or a folder from elsewhere would do.

It reports imports, calls, environment variables that are read, and paths that are written, and does none of it. YAML is
read as text, a checkpoint by torch.serialization.get_unsafe_globals_in_checkpoint, and git's settings as lines.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import stat
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from exp.errors import ConfigError, one_line
from exp.output import exit_status

CLEAN, OUTSIDE, UNREADABLE = 0, 1, 2
MAX_FILES = 20_000
MAX_PICKLE_BYTES = 200_000_000
# A dtype of Python objects in the header of a .npy file, or an escape that could hide one.
OBJECTS = re.compile(rb"O|object|\\")
SKIPPED = (".git", "__pycache__", ".venv", "node_modules")
CONFIGS = (".yaml", ".yml")
# Members of a zip file that a loader would run.
ARCHIVED = (".pkl", ".npy", ".py")
PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
# Of git's settings, the last words of those that name a program, or a file with more of them.
GIT_PROGRAMS = re.compile(
    r"fsmonitor|pager|editor|sshcommand|gitproxy|askpass|hookspath|alternaterefscommand|external|textconv|command|clean"
    r"|smudge|process|helper|program|uploadpack|receivepack|packobjectshook|vcs|path|cmd|worktree"
    r"|driver|proxy|attributesfile"
)
# What Python imports of the folder where `python -m exp.train` starts, before exp can leave it out.
BEFORE_EXP = ("exp", "importlib", "runpy", "pkgutil", "__future__", "types", "warnings", "contextlib", "collections")

Kind = Literal["calls", "allows", "reads", "path", "hydra", "env", "git", "imports", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that would be done. where: the file, and the key or line in it; is_outside: more than exp allows."""

    kind: Kind
    what: str
    where: str
    is_outside: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found, what is outside the allow list first.

    Returns: 0 where nothing is outside, 1 where something is, 2 where something cannot be read.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv), fault=UNREADABLE)


def _command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m exp.audit", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE_OR_DIR", help="a YAML file, a checkpoint, a folder of them")
    parser.add_argument("--json", action="store_true", help="a list of {kind, what, where, is_outside}")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="as security.allow would")
    arguments = parser.parse_args(argv)
    found = audit(arguments.path, allow=arguments.allow)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print(_text(found, arguments.path))
    if any(finding.kind == "unreadable" for finding in found):
        return UNREADABLE
    return OUTSIDE if any(finding.is_outside for finding in found) else CLEAN


def audit(path: Path, *, allow: Sequence[str] = ()) -> list[Finding]:
    """Everything that is found in a file, or in a folder at any depth; links are not followed."""
    if not path.exists():
        return [Finding(kind="unreadable", what="there is no such file or folder", where=str(path), is_outside=True)]
    root = path if path.is_dir() else path.parent
    files = _files(path) if path.is_dir() else [path]
    found = [finding for file in files for finding in _of_file(file, root=root, allow=allow)]
    if path.is_dir():
        found += _of_folder(path)
    if len(files) >= MAX_FILES:
        found.append(Finding(kind="unreadable", what=f"more than {MAX_FILES} files", where=str(path), is_outside=True))
    return sorted(dict.fromkeys(found), key=lambda finding: not finding.is_outside)


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        found += [Path(place, name) for name in sorted(names)]
        if len(found) >= MAX_FILES:
            return found[:MAX_FILES]
    return found


def _of_file(path: Path, *, root: Path, allow: Sequence[str]) -> Iterator[Finding]:
    where = str(path)
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        yield Finding(kind="path", what=f"a link to {os.readlink(path)}", where=where, is_outside=True)
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            yield Finding(kind="path", what="a pipe, a socket or a device", where=where, is_outside=True)
        elif path.suffix in CONFIGS:
            yield from _of_yaml(path, root=root, allow=allow)
        elif path.name == ".env":
            yield from _of_env(path, root=root)
        elif path.suffix in PICKLES or path.name == ".metadata":
            yield from _of_pickle(path)
    except (OSError, ValueError, zipfile.BadZipFile, IndexError) as error:
        yield Finding(kind="unreadable", what=str(error) or type(error).__name__, where=where, is_outside=True)
    except ConfigError as error:
        for fault in error.faults:
            what = f"{fault.got}; expected {fault.expected}"
            yield Finding(kind="unreadable", what=what, where=where, is_outside=True)


def _of_yaml(path: Path, *, root: Path, allow: Sequence[str]) -> Iterator[Finding]:
    from exp.config.env_file import READ
    from exp.config.hydra_node import settings_of, unused_settings
    from exp.config.plain_tree import leaves
    from exp.config.yaml_files import read_yaml, split
    from exp.redaction import is_secret

    content = read_yaml(path)
    for key, value in leaves(content):
        where, name = f"{path}, {key}", key.rpartition(".")[2]
        if name == "_target_" or (key.split(".")[-2:-1] == ["functions"] and isinstance(value, str)):
            yield _target(value, where=where, root=root, allow=allow)
        elif isinstance(value, str):
            for variable in READ.findall(value):
                yield Finding(kind="reads", what=variable, where=where, is_outside=is_secret(variable))
            if "oc.env:${" in value.replace(" ", ""):
                yield Finding(kind="reads", what=f"a variable by {value}", where=where, is_outside=True)
            # A defaults list names groups, and those from the root with a slash.
            if _leads_away(value) and not key.startswith("defaults."):
                yield Finding(kind="path", what=value, where=where, is_outside=True)
            for typed in re.findall(r"_target_\s*[=:]\s*['\"]?([\w.]+)", value):
                yield _target(typed, where=where, root=root, allow=allow)
        if key.endswith("security.allow") and isinstance(value, list) and set(map(str, value)) - set(allow):
            yield Finding(kind="allows", what=", ".join(map(str, value)), where=where, is_outside=True)
    header = re.match(r"\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8")[:512])
    package = split(header[1]) if header and header[1] != "_global_" else ()
    for key, value in settings_of(content, package):
        if key.startswith(("hydra.run.", "hydra.sweep.")):
            yield Finding(kind="path", what=str(value), where=f"{path}, {key}", is_outside=_leads_away(str(value)))
    for fault in unused_settings(content, package):
        yield Finding(kind="hydra", what=f"{fault.key}: {fault.got}", where=str(path), is_outside=True)


def _leads_away(text: str) -> bool:
    """Whether a text is a path out of the working directory, or an address."""
    parts = re.split(r"[/\\]", text)
    is_address = re.match(r"[a-z][a-z0-9+.-]*:(//|:)", text, re.IGNORECASE) is not None
    return is_address or ("\n" not in text and (text.startswith(("/", "~")) or ".." in parts))


def _target(dotted: Any, *, where: str, root: Path, allow: Sequence[str]) -> Finding:
    from exp.config.targets import is_listed

    is_outside = not is_listed(dotted, allow=allow)
    top = str(dotted).partition(".")[0]
    own = next((path for path in (root / f"{top}.py", root / top, root.parent / f"{top}.py") if path.exists()), None)
    what = str(dotted) if own is None or not is_outside else f"{dotted}, code of {own}"
    return Finding(kind="calls", what=what, where=where, is_outside=is_outside)


def _of_env(path: Path, *, root: Path) -> Iterator[Finding]:
    from exp.config.env_file import read_env_file

    values, faults = read_env_file(path, configs=[root])
    for name in values:
        yield Finding(kind="env", what=f"sets {name}", where=str(path), is_outside=False)
    for fault in faults:
        yield Finding(kind="env", what=f"{fault.key}: {fault.got}", where=fault.source or str(path), is_outside=True)


def _of_pickle(path: Path) -> Iterator[Finding]:
    """List the names that torch.load(weights_only=True), which exp uses, refuses. Any other pickle is outside."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield from _of_member(file, where=str(path))
        return
    with zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if path.suffix == ".npz" or one.filename.endswith(ARCHIVED)]
        if any(member.filename.endswith(".py") for member in members):
            yield Finding(kind="calls", what="a program of TorchScript", where=str(path), is_outside=True)
            return
        for member in members:
            if not member.filename.endswith("/data.pkl"):
                with archive.open(member) as file:
                    yield from _of_member(file, where=f"{path}, {member.filename}")
            elif member.file_size > MAX_PICKLE_BYTES:
                raise ValueError(f"{member.filename} would be {member.file_size} bytes")
            else:
                yield from _of_checkpoint(path)


def _of_checkpoint(path: Path) -> Iterator[Finding]:
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        names = sorted(get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, EOFError, struct.error, pickle.UnpicklingError) as error:
        raise ValueError(f"no checkpoint that torch reads: {one_line(error)}") from error
    for name in names:
        yield Finding(kind="calls", what=name, where=str(path), is_outside=True)


def _of_member(file: IO[bytes], *, where: str) -> Iterator[Finding]:
    """Report a pickle that is no checkpoint. An array of numbers is none."""
    start = file.read(10)  # magic, version, and size of the header
    if start.startswith(b"\x93NUMPY\x01") and not OBJECTS.search(file.read(int.from_bytes(start[8:], "little"))):
        return
    what = "a pickle outside of torch's zip format, which runs any code when it is loaded"
    yield Finding(kind="calls", what=what, where=where, is_outside=True)


def _of_folder(folder: Path) -> Iterator[Finding]:
    """Files that Python would run, and what git would: exp asks git for nothing that runs a program."""
    for name in BEFORE_EXP:
        for place in (folder / f"{name}.py", folder / name / "__init__.py"):
            if place.exists():
                yield Finding(kind="imports", what=f"{name}, by python -m from here", where=str(place), is_outside=True)
    for parent, folders, names in os.walk(folder):
        if ".git" in (*folders, *names):
            yield from _of_git(Path(parent, ".git"))
        folders[:] = [name for name in folders if name not in SKIPPED]


def _of_git(git: Path) -> Iterator[Finding]:
    if not git.is_dir():
        what = f"another folder is the repository: {git.read_text(encoding='utf-8', errors='replace')[:200].strip()}"
        yield Finding(kind="git", what=what, where=str(git), is_outside=True)
        return
    for file in (git / "config", git / "config.worktree", *git.glob("modules/**/config")):
        if not file.is_file():
            continue
        section = ""
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            head = re.match(r"\s*\[([^\]\s]+)[^\]]*\](.*)", line)
            section, line = (head[1].lower(), head[2]) if head else (section, line)
            key, _, value = (part.strip() for part in line.partition("="))
            word = key.lower()
            is_program = GIT_PROGRAMS.fullmatch(word) is not None and value.lower() not in ("", "false", "true")
            if is_program or (section == "alias" and value.startswith("!")) or "ext::" in value:
                what = f"{section}.{key}={value}"
                yield Finding(kind="git", what=what, where=f"{file}, line {number}", is_outside=True)
    for hook in sorted((git / "hooks").glob("*")):
        if hook.is_file() and os.access(hook, os.X_OK) and hook.suffix != ".sample":
            yield Finding(kind="git", what=f"the hook {hook.name}", where=str(hook), is_outside=True)


def _text(found: Sequence[Finding], path: Path) -> str:
    outside = sum(finding.is_outside for finding in found)
    lines = [f"{path}: {outside} outside of what exp allows, {len(found) - outside} inside; nothing was run"]
    for finding in found:
        mark = "OUTSIDE" if finding.is_outside else ""
        # Of others' making: a line stays a line.
        what = finding.what.encode("unicode_escape").decode()[:200]
        lines.append(f"  {mark:<8}{finding.kind:<11}{what}  [{finding.where.encode('unicode_escape').decode()}]")
    return "\n".join(lines)
