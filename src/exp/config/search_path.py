"""Directories in which config files are searched: the user's ./conf, exp's directory, and directories of plug-ins.

The directory of a plug-in is found without importing code of the plug-in.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exp.errors import COMMAND_LINE, config_error

ENTRY_POINTS = "exp.conf"
OWN_CONF = Path(__file__).parent.parent / "conf"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory in which config files are searched.

    Args:
        provider: Name of the directory for Hydra: "user", "command-line", "exp" or the name of a plug-in.
        directory: Path of the directory.
    """

    provider: str
    directory: Path


def search_places(*, config_dir: str | None = None) -> list[Place]:
    """Return the directories of configs, in the order of decreasing precedence.

    The order is: the user's ./conf, `config_dir`, exp's own directory, and the directories of plug-ins.

    Args:
        config_dir: Directory of --config-dir. Default: None, the flag is not given.

    Raises:
        ConfigError: `config_dir` is not a directory.
    """
    places = []
    own = users_conf()
    if own is not None:
        places.append(Place(provider="user", directory=own))
    if config_dir is not None:
        directory = Path(config_dir)
        if not os.path.isdir(directory):  # Path.is_dir raises for a name that is too long
            raise config_error(
                "--config-dir", got=f"{config_dir} is not a directory", expected="a directory of config groups",
                source=COMMAND_LINE,
            )  # fmt: skip
        places.append(Place(provider="command-line", directory=directory.absolute()))
    places.append(Place(provider="exp", directory=OWN_CONF))
    return places + plugin_places()


def own_groups(places: Sequence[Place]) -> list[str]:
    """Return the names of config groups that only users and plug-ins have.

    A config group is a folder with YAML files. Folders that also exist in exp's own directory of configs are left out.
    """
    folders = [path for place in places if place.directory != OWN_CONF for path in _folders(place.directory)]
    own = {path.name for path in OWN_CONF.iterdir()}
    return sorted({path.name for path in folders if path.name not in {*own, "local", "module", "hydra"}})


def options_in(folder: Path) -> list[str]:
    """Return the options in the folder of a config group.

    Files with a leading `_`, such as `_loader.yaml`, are not options. They contain values that options share.
    """
    paths = folder.glob("*.yaml") if folder.is_dir() else ()
    return sorted(path.stem for path in paths if not path.name.startswith(("_", ".")))


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and any(path.rglob("*.yaml"))]


def users_conf() -> Path | None:
    """Return the path of ./conf if it contains configs for exp; otherwise None."""
    directory = Path.cwd() / "conf"
    return directory if is_users_conf(directory) else None


def is_users_conf(directory: Path) -> bool:
    """Return whether a directory contains configs of a user for exp.

    The directory must contain a folder or file with a name that also exists in exp's own directory of configs. exp's
    own directory does not count.
    """
    if not directory.is_dir() or directory.resolve() == OWN_CONF.resolve():
        return False
    known = {path.name for path in OWN_CONF.iterdir()} | {"local", "module"}
    return any(path.name in known for path in directory.iterdir())


def make_importable() -> None:
    """Add the working directory to sys.path, so that the user's modules can be imported.

    The directory is added only if it contains a ./conf for exp. It becomes the last entry of sys.path, so that a module
    in the directory does not hide an installed package.
    """
    here = str(Path.cwd())
    if users_conf() is not None and here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def conf_points() -> Sequence[importlib.metadata.EntryPoint]:
    """Return the `exp.conf` entry points of installed packages, sorted by name."""
    return _points(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _points(_path: tuple[str, ...]) -> Sequence[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def plugin_places() -> list[Place]:
    """Return the directories of configs of installed plug-ins, sorted by the name of the plug-in.

    A plug-in has an `exp.conf` entry point that names a package. The configs are in the directory `conf` of the
    package. If this directory does not exist, the configs are in the directory of the package.
    """
    places = []
    for point in conf_points():
        directory = _conf_of(point.module)
        if directory is not None:
            places.append(Place(provider=point.name, directory=directory))
    return places


def _conf_of(dotted: str) -> Path | None:
    top, *rest = dotted.split(".")
    # Only the top-level package is looked up, because find_spec imports the parents of a dotted name.
    found = importlib.util.find_spec(top)
    if found is None or found.submodule_search_locations is None:
        return None
    for location in found.submodule_search_locations:
        package = Path(location).joinpath(*rest)
        for directory in (package / "conf", package):
            if directory.is_dir():
                return directory
    return None


def display_path(path: Path | str) -> str:
    """Return the path of a config file for messages.

    If the file is in the working directory, the path is relative to this directory. If the file is one of exp's own
    configs, the path begins with `exp/conf`.
    """
    path = Path(path)
    for candidate in (path, path.resolve()):
        for base in (Path.cwd(), Path.cwd().resolve()):
            if candidate.is_relative_to(base):
                return str(candidate.relative_to(base))
    if path.is_relative_to(OWN_CONF):
        return str("exp/conf" / path.relative_to(OWN_CONF))
    return str(path)
