"""Find the files of a data set: at a path, by a pattern, or among those that scikit-learn ships."""

from __future__ import annotations

import glob
import importlib.util
import logging
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from exp.data.data_errors import data_error, name_fix

log = logging.getLogger(__name__)


def data_file(path: str, *, directory: str) -> Path:
    """The file at path, or else at path below the data directory.

    Raises: ConfigError where neither is there.
    """
    return _place(path, directory, Path.is_file, "file")


def data_folder(path: str, *, directory: str) -> Path:
    """The folder at path, or else at path below the data directory.

    Raises: ConfigError where neither is there.
    """
    return _place(path, directory, Path.is_dir, "folder")


def _place(path: str, directory: str, is_there: Callable[[Path], bool], kind: str) -> Path:
    given = Path(path).expanduser()
    places = [given] if given.is_absolute() else [given, Path(directory).expanduser() / given]
    for place in places:
        if is_there(place):
            return place
    neighbours = [other.name for place in places if place.parent.is_dir() for other in place.parent.iterdir()]
    raise data_error(
        "dataset.path",
        got=f"no {kind} at {' nor at '.join(str(place.absolute()) for place in places)}",
        expected=f"a {kind} to read",
        fix=name_fix(given.name, neighbours),
    )


def find_files(files: str | Sequence[str] | None, *, directory: str, key: str = "dataset.files") -> list[Path]:
    """The files of a pattern, or of several, sorted by name; None is the top level of Python's standard library.

    key: of the config, below `data.`, that says them.
    Raises: ConfigError where a pattern finds none.
    """
    if files is None:
        files = f"{sysconfig.get_path('stdlib')}/*.py"
    found: set[Path] = set()
    for pattern in [files] if isinstance(files, str) else files:
        given = Path(pattern).expanduser()
        matches = _matches(given) or _matches(Path(directory).expanduser() / given)
        if not matches:
            raise data_error(
                key,
                got=f"{pattern}, which finds no file in {Path.cwd()} nor in {Path(directory).absolute()}",
                expected="a file, or a glob that finds some",
            )
        found.update(matches)
    return sorted(found, key=str)


def shipped_columns(
    loader: str, *files: str, delimiter: str | None = ",", skip_lines: int = 0, **options: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A data set that scikit-learn ships: features `[rows, columns]` and targets `[rows]`, float64.

    Its files are read without importing scikit-learn, which takes longer than a whole run on digits may. Where they
    have moved, scikit-learn itself is asked, and that is logged.

    loader: its function in sklearn.datasets. files: its files in the data folder, side by side, the target last.
    """
    package = importlib.util.find_spec("sklearn")
    for place in (package.submodule_search_locations or []) if package else []:
        paths = [Path(place, "datasets", "data", name) for name in files]
        if all(path.is_file() for path in paths):
            tables = [np.loadtxt(path, delimiter=delimiter, skiprows=skip_lines, ndmin=2) for path in paths]
            table = np.hstack(tables)
            return table[:, :-1], table[:, -1]
    log.warning("scikit-learn does not keep %s where it used to; importing sklearn.datasets to load it", files[0])
    from sklearn import datasets

    features, targets = getattr(datasets, loader)(return_X_y=True, **options)
    return features, targets


def _matches(pattern: Path) -> list[Path]:
    return [path for path in map(Path, glob.glob(str(pattern), recursive=True)) if path.is_file()]
