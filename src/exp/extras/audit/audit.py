"""python -m exp.audit FILE_OR_DIR: lists what a received config, checkpoint or folder would do, and runs no part of it.

The command reports calls, environment variables, and paths outside the working directory. It parses YAML files without
resolving their values. It inspects checkpoints with torch.serialization.get_unsafe_globals_in_checkpoint. Other pickles
are reported without reading them, because a pickle can run any code.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import stat
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from exp.errors import ConfigError, one_line
from exp.output import command

CLEAN, OUTSIDE, UNREADABLE = 0, 1, 2
# Matches an interpolation that reads an environment variable, and captures the name of the variable.
VARIABLE = re.compile(r"oc\.env\s*:\s*[\"']?([A-Za-z_][A-Za-z0-9_]*)")
MAX_PICKLE_BYTES = 200_000_000
SKIPPED = (".git", "__pycache__", ".venv", "node_modules")
CONFIGS = (".yaml", ".yml")
# Suffixes of the files in a zip archive that may contain code.
ARCHIVED = (".pkl", ".npy", ".py")
PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
Kind = Literal["calls", "allows", "reads", "path", "hydra", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An action that a file would cause.

    Args:
        kind: The kind of the action.
        what: Name of the called object, path, or name of the environment variable.
        where: Path of the file, followed by the config key or by the name in the archive.
        is_outside: Whether exp's allow list forbids the action. It is also true for files that cannot be read.
    """

    kind: Kind
    what: str
    where: str
    is_outside: bool


@command(error_status=UNREADABLE)
def main(argv: Sequence[str]) -> int:
    """Print the findings. Findings outside the allow list come first.

    Returns:
        Exit status: 0 if all findings are in the allow list, 1 if a finding is outside, or 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m exp.audit", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE_OR_DIR", help="a YAML file, a checkpoint, a folder of them")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="as in security.allow")
    arguments = parser.parse_args(argv)
    found = audit(arguments.path, allow=arguments.allow)
    print(_text(found, arguments.path))
    if any(finding.kind == "unreadable" for finding in found):
        return UNREADABLE
    return OUTSIDE if any(finding.is_outside for finding in found) else CLEAN


def audit(path: Path, *, allow: Sequence[str] = ()) -> list[Finding]:
    """Return the findings of a file, or of all files below a folder.

    Links to folders are not followed.

    Args:
        path: The file or folder.
        allow: Packages with classes that exp may import, as in security.allow.
    """
    if not path.exists():
        return [Finding(kind="unreadable", what="no such file or folder", where=str(path), is_outside=True)]
    root = path if path.is_dir() else path.parent
    files = _files(path) if path.is_dir() else [path]
    found = [finding for file in files for finding in _of_file(file, root=root, allow=allow)]
    return sorted(dict.fromkeys(found), key=lambda finding: not finding.is_outside)


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        found += [Path(place, name) for name in sorted(names)]
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
        elif path.suffix in PICKLES or path.name == ".metadata":
            yield from _of_pickle(path)
    except (OSError, ValueError, zipfile.BadZipFile, IndexError) as error:
        yield Finding(kind="unreadable", what=str(error) or type(error).__name__, where=where, is_outside=True)
    except ConfigError as error:
        for detail in error.errors:
            what = f"{detail.got}; expected {detail.expected}"
            yield Finding(kind="unreadable", what=what, where=where, is_outside=True)


def _of_yaml(path: Path, *, root: Path, allow: Sequence[str]) -> Iterator[Finding]:
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
            for variable in VARIABLE.findall(value):
                yield Finding(kind="reads", what=variable, where=where, is_outside=is_secret(variable))
            if "oc.env:${" in value.replace(" ", ""):
                yield Finding(kind="reads", what=f"a variable by {value}", where=where, is_outside=True)
            # An entry of a defaults list may be a group with a leading slash, which is no path.
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
    for error in unused_settings(content, package):
        yield Finding(kind="hydra", what=f"{error.key}: {error.got}", where=str(path), is_outside=True)


def _leads_away(text: str) -> bool:
    """Return whether a text is a URL, an absolute path, or a path that contains `..`."""
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


def _of_pickle(path: Path) -> Iterator[Finding]:
    """Yield findings of a pickle or checkpoint.

    A finding is yielded for each class or function that torch.load(weights_only=True) rejects. Pickles in other formats
    than torch's zip format also give a finding, and are not read.
    """
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
                raise ValueError(f"{member.filename} has {member.file_size} bytes; expected at most {MAX_PICKLE_BYTES}")
            else:
                yield from _of_checkpoint(path)


def _of_checkpoint(path: Path) -> Iterator[Finding]:
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        names = sorted(get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, EOFError, struct.error, pickle.UnpicklingError) as error:
        raise ValueError(f"torch cannot read the checkpoint: {one_line(error)}") from error
    for name in names:
        yield Finding(kind="calls", what=name, where=str(path), is_outside=True)


def _of_member(file: IO[bytes], *, where: str) -> Iterator[Finding]:
    """Yield a finding if the file may contain a pickle. A NumPy array of numbers contains no pickle."""
    header = np.lib.format
    if file.peek(6).startswith(header.MAGIC_PREFIX):  # type: ignore[attr-defined]  # files and members of archives
        is_first = header.read_magic(file) == (1, 0)
        _, _, dtype = (header.read_array_header_1_0 if is_first else header.read_array_header_2_0)(file)
        if not dtype.hasobject:
            return
    what = "a pickle that is not in torch's zip format, which can run any code when it is loaded"
    yield Finding(kind="calls", what=what, where=where, is_outside=True)


def _text(found: Sequence[Finding], path: Path) -> str:
    outside = sum(finding.is_outside for finding in found)
    lines = [f"{path}: {outside} outside the allow list of exp, {len(found) - outside} inside; nothing was run"]
    for finding in found:
        mark = "OUTSIDE" if finding.is_outside else ""
        # A name may contain line breaks and control characters.
        what = finding.what.encode("unicode_escape").decode()[:200]
        lines.append(f"  {mark:<8}{finding.kind:<11}{what}  [{finding.where.encode('unicode_escape').decode()}]")
    return "\n".join(lines)
