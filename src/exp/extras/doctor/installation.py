"""Checks the versions of the installed packages without importing the packages."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

import exp
from exp.extras.doctor.finding import Finding

PACKAGE = Path(exp.__file__).parent
DISTRIBUTION = "exp-framework"


def findings() -> Iterator[Finding]:
    """Yield the versions of Python and exp, and the findings about the versions of packages."""
    yield Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}, {platform.platform()}")
    yield Finding("ok", "exp", f"{exp.__version__}, {PACKAGE}")
    yield from versions(declared_requirements())


def declared_requirements() -> list[str]:
    """Return the requirements of exp and of its extras.

    If exp is imported from a checkout, the requirements are read from pyproject.toml. Otherwise they are read from the
    metadata of the installation. The metadata of an editable installation changes only with `pip install`.
    """
    file = PACKAGE.parents[1] / "pyproject.toml"
    if PACKAGE.parent.name != "src" or not file.is_file():
        return importlib.metadata.requires(DISTRIBUTION) or []
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f"{line}; extra == '{name}'" for name, lines in extras for line in lines)]


def torch_requirement() -> str:
    """Return the argument of `pip install` for a supported version of torch, in quotes, such as 'torch>=2.6'."""
    return next((f"'{line}'" for line in declared_requirements() if re.match(r"torch\b", line)), "torch")


def versions(requirements: Sequence[str]) -> Iterator[Finding]:
    """Yield an error for each package that is missing or has an unsupported version.

    After the errors, yield one finding that lists all other packages. Packages of extras may be missing.

    Args:
        requirements: Requirements in the format of pip, such as `torch>=2.6`.
    """
    within = []
    for one in map(Requirement, requirements):
        is_needed = one.marker is None or one.marker.evaluate({"extra": ""})
        wanted = f"{one.name}{one.specifier}"
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            if is_needed:
                yield Finding("error", "packages", f"{one.name} is not installed", f"pip install '{wanted}'")
            continue
        # The version is empty if a package was only partly removed.
        if not version or not one.specifier.contains(version, prereleases=True):
            found = f"{one.name} {version}; expected {one.specifier}"
            yield Finding("error", "packages", found, f"pip install --force-reinstall '{wanted}'")
        elif is_needed:
            within.append(f"{one.name} {version}")
    yield Finding("ok", "packages", f"within the declared ranges: {', '.join(within)}")
