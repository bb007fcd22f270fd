"""The directories of configs: the user's ./conf, exp's own, and those of plug-ins. No file is run."""

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
    """A directory of configs. An earlier place takes precedence over a later one."""

    provider: str
    directory: Path


def search_places(*, config_dir: str | None = None) -> list[Place]:
    """Return the places for this working directory, the first with the highest precedence.

    config_dir: The value of --config-dir, between the user's ./conf and exp's own.

    Raises:
        ConfigError: config_dir is not a directory.
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
    """Return the config groups, folders with YAML files, that exp does not have."""
    folders = [path for place in places if place.directory != OWN_CONF for path in _folders(place.directory)]
    own = {path.name for path in OWN_CONF.iterdir()}
    return sorted({path.name for path in folders if path.name not in {*own, "local", "module", "hydra"}})


def options_in(folder: Path) -> list[str]:
    """Return the options in a folder of a group. `_loader` is a part that options include, not an option."""
    paths = folder.glob("*.yaml") if folder.is_dir() else ()
    return sorted(path.stem for path in paths if not path.name.startswith(("_", ".")))


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and any(path.rglob("*.yaml"))]


def users_conf() -> Path | None:
    """Return the user's ./conf, or None."""
    directory = Path.cwd() / "conf"
    return directory if is_users_conf(directory) else None


def is_users_conf(directory: Path) -> bool:
    """Return whether a ./conf is a user's: it has a group or file with a name of exp's, and is not exp's own."""
    if not directory.is_dir() or directory.resolve() == OWN_CONF.resolve():
        return False
    known = {path.name for path in OWN_CONF.iterdir()} | {"local", "module"}
    return any(path.name in known for path in directory.iterdir())


def make_importable() -> None:
    """Make the modules next to the user's ./conf importable, when a config first names one.

    The working directory is appended to the path, so that no file in it hides an installed package.
    """
    here = str(Path.cwd())
    if users_conf() is not None and here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def conf_points() -> Sequence[importlib.metadata.EntryPoint]:
    """Return the `exp.conf` entry points of installed packages, by name."""
    return _points(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _points(_path: tuple[str, ...]) -> Sequence[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def plugin_places() -> list[Place]:
    """Return the conf directories of installed packages with an `exp.conf` entry point, by name.

    An entry point names a package. Its directory `conf` is used or, without one, the package.
    """
    places = []
    for point in conf_points():
        directory = _conf_of(point.module)
        if directory is None:
            print(f"exp: the plug-in {point.name} has no directory of configs in {point.value}", file=sys.stderr)
        else:
            places.append(Place(provider=point.name, directory=directory))
    return places


def _conf_of(dotted: str) -> Path | None:
    top, *rest = dotted.split(".")
    # find_spec of a dotted name would import the parents.
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
    """Return the path of a config file for messages: relative to the working directory, or `exp/conf/...`."""
    path = Path(path)
    for candidate in (path, path.resolve()):
        for base in (Path.cwd(), Path.cwd().resolve()):
            if candidate.is_relative_to(base):
                return str(candidate.relative_to(base))
    if path.is_relative_to(OWN_CONF):
        return str("exp/conf" / path.relative_to(OWN_CONF))
    return str(path)
