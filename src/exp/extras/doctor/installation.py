"""What is installed: Python, the packages and their versions, and whose the package `exp` is. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import exp
from exp.extras.doctor.finding import Finding, fault, note, ok
from exp.name_clash import DISTRIBUTION

PACKAGE = Path(exp.__file__).parent
# The least as pyproject.toml has it, for where neither that nor the metadata is there.
LEAST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What exp says that it needs. requirements: as in pyproject.toml. extras: the same by the name of the extra."""

    source: str
    requirements: Sequence[str]
    extras: dict[str, Sequence[str]]


def findings() -> Iterator[Finding]:
    """Look at Python, at the clash with another package called exp, and at every version."""
    yield python()
    yield from clashes()
    yield from versions(declared())


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Hold Python's version against the least that exp runs on. version: in numbers."""
    bits = "" if sys.maxsize > 2**32 else ", 32 bits"
    found = f"{'.'.join(map(str, version))}{bits}, {sys.executable}"
    if version[:2] < LEAST_PYTHON or bits:
        least = ".".join(map(str, LEAST_PYTHON))
        cure = f"Make an environment with Python {least} or newer, of 64 bits: python{least} -m venv .venv"
        return fault("Python", found, cure)
    return ok("Python", f"{found}, {platform.platform()}")


def clashes(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Look for another package that is imported by the name `exp`, such as the one that PyPI has under that name.

    path: where modules are looked for; None for sys.path.
    """
    others = sorted(name for name in _owners() if _plain(name) != DISTRIBUTION)
    if others:
        cure = f"pip uninstall -y {' '.join(others)}, then install {DISTRIBUTION} again: the two share one folder"
        yield fault("exp", f"{', '.join(others)} installs a package that is called exp, too", cure)
    hidden = [place for place in _places(sys.path if path is None else path) if place != PACKAGE]
    if hidden:
        cure = (
            f"Take it away: from another directory, or in another order, it would be imported in the place of {PACKAGE}"
        )
        yield note("exp", f"a second exp is at {', '.join(map(str, hidden))}", cure)
    if not others:
        yield ok("exp", f"{exp.__version__}, {PACKAGE}")


def _owners() -> Sequence[str]:
    """The installed distributions that bring a module or package `exp`."""
    found = []
    for one in importlib.metadata.distributions():
        tops = (one.read_text("top_level.txt") or "").split()
        files = [] if tops else [file.parts[0] for file in one.files or [] if file.parts]
        if {"exp", "exp.py"} & {*tops, *files}:
            found.append(one.name)
    return list(dict.fromkeys(found))


def _places(path: Sequence[str]) -> Iterator[Path]:
    """Every file or folder that an import of exp could find."""
    for folder in dict.fromkeys(path):
        for candidate in (Path(folder or ".", "exp"), Path(folder or ".", "exp.py")):
            # A folder of a user's own results is no package, but Python takes it for one where nothing better is found.
            if candidate.is_file() or (candidate / "__init__.py").is_file():
                yield candidate.absolute()


def declared() -> Declared:
    """What exp needs: by the checkout's pyproject.toml where this is one, else by what was installed."""
    file = PACKAGE.parents[1] / "pyproject.toml"
    if PACKAGE.parent.name == "src" and file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return Declared(
            source="pyproject.toml",
            requirements=project["dependencies"],
            extras=project.get("optional-dependencies", {}),
        )
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Declared(source="", requirements=(), extras={})
    extras: dict[str, list[str]] = {}
    for line in lines:
        named = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if named:
            extras.setdefault(named[1], []).append(line.partition(";")[0].strip())
    plain = [line for line in lines if "extra ==" not in line]
    return Declared(source=f"the metadata of {DISTRIBUTION}", requirements=plain, extras=dict(extras))


def requirement(package: str) -> str:
    """Return what to give to `pip install` for a package that exp needs, in quotes, with its range of versions."""
    lines = [line for line in declared().requirements if re.match(rf"{package}\b", line)]
    return f"'{lines[0]}'" if lines else package


def versions(needed: Declared) -> Iterator[Finding]:
    """Hold the installed versions against the declared ranges, those of extras where they are installed."""
    if not needed.requirements:
        cure = "pip install -e . in the checkout, or pip install the wheel"
        yield fault("packages", f"{DISTRIBUTION} is not installed, so nobody knows which versions it needs", cure)
        return
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ImportError:
        yield fault("packages", "the package packaging is not installed", "pip install packaging")
        return

    def judged(lines: Sequence[str], extra: str = "") -> Iterator[Finding | str]:
        for line in lines:
            one = Requirement(line)
            if _plain(one.name) == DISTRIBUTION or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
                continue
            try:
                found = importlib.metadata.version(one.name)
            except importlib.metadata.PackageNotFoundError:
                if extra:
                    yield extra
                else:
                    yield fault("packages", f"{one.name} is not installed", f"pip install '{one.name}{one.specifier}'")
                continue
            if not found:  # what a half removed package leaves
                again = f"pip install --force-reinstall --no-deps '{one.name}{one.specifier}'"
                yield fault("packages", f"{one.name} has no version: it is half installed", again)
            elif not one.specifier.contains(Version(found), prereleases=True):
                words = f"{one.name} {found}; {needed.source} asks for {one.specifier}"
                yield fault("packages", words, f"pip install '{one.name}{one.specifier}'")
            else:
                yield ok("packages", f"{one.name} {found}")

    core = [one for one in judged(needed.requirements) if isinstance(one, Finding)]
    yield from (one for one in core if one.state == "fault")
    within = [one.found for one in core if one.state == "ok"]
    if within:
        yield ok("packages", f"within the ranges of {needed.source}: {', '.join(within)}")
    missing: list[str] = []
    for extra, lines in needed.extras.items():
        for one in judged(lines, extra) if extra != "dev" else ():
            if isinstance(one, str):
                missing.append(one)
            elif one.state == "fault":
                yield one
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        cure = f"pip install '{DISTRIBUTION}[NAME]' for what you want of them"
        yield note("extras", f"not installed, or in part: {names}", cure)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_torch() -> Path | None:
    """Where pip has installed torch, whatever an import would find; None where it has not."""
    try:
        return Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    except importlib.metadata.PackageNotFoundError:
        return None
