"""Functions that find the files of a data set: at a path, by a glob pattern, or in scikit-learn's package."""

from __future__ import annotations

import glob
import importlib.util
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from exp.data.data_errors import data_error, name_fix


def data_file(path: str, *, directory: str) -> Path:
    """Return the file at a path in the current folder or in `directory`.

    Raise ConfigError if neither folder contains the file.
    """
    return _place(path, directory, Path.is_file, "file")


def data_folder(path: str, *, directory: str) -> Path:
    """Return the folder at a path in the current folder or in `directory`.

    Raise ConfigError if neither of the two contains the folder.
    """
    return _place(path, directory, Path.is_dir, "folder")


def _place(path: str, directory: str, is_there: Callable[[Path], bool], kind: str) -> Path:
    given = Path(path).expanduser()
    places = [given] if given.is_absolute() else [given, Path(directory).expanduser() / given]
    for place in places:
        if is_there(place):
            return place
    neighbours = [other.name for place in places if place.parent.is_dir() for other in place.parent.iterdir()]
    got = f"no {kind} at {' or at '.join(str(place.absolute()) for place in places)}"
    raise data_error("dataset.path", got=got, expected=f"an existing {kind}", fix=name_fix(given.name, neighbours))


def find_files(files: str | Sequence[str] | None, *, directory: str, key: str = "dataset.files") -> list[Path]:
    """Return the files that match one or several glob patterns, sorted by path.

    Args:
        files: The patterns. None means the modules at the top level of Python's standard library.
        directory: The folder that is searched if a pattern matches no file in the current folder.
        key: The config key below `data.` that contains the patterns. Default: `dataset.files`.

    Raises:
        ConfigError: A pattern matches no file.
    """
    if files is None:
        files = f"{sysconfig.get_path('stdlib')}/*.py"
    found: set[Path] = set()
    for pattern in [files] if isinstance(files, str) else files:
        given = Path(pattern).expanduser()
        matches = _matches(given) or _matches(Path(directory).expanduser() / given)
        if not matches:
            got = f"{pattern}, which matches no file in {Path.cwd()} or in {Path(directory).absolute()}"
            raise data_error(key, got=got, expected="an existing file, or a pattern that matches files")
        found.update(matches)
    return sorted(found, key=str)


def shipped_columns(*files: str, delimiter: str | None, skip_lines: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and targets of a data set that is included in scikit-learn's package.

    scikit-learn is not imported, because the import may take longer than a whole run on digits.

    Args:
        files: The names of files in scikit-learn's data folder. Their columns are joined. The last column is the
            target.
        delimiter: The character between values. None means white space.
        skip_lines: The number of lines before the values. Default: 0.

    Returns:
        The features, float64 `[rows, columns]`, and the targets, float64 `[rows]`.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    folder = Path(str(package.origin)).parent / "datasets" / "data"
    table = np.hstack([np.loadtxt(folder / name, delimiter=delimiter, skiprows=skip_lines, ndmin=2) for name in files])
    return table[:, :-1], table[:, -1]


def _matches(pattern: Path) -> list[Path]:
    return [path for path in map(Path, glob.glob(str(pattern), recursive=True)) if path.is_file()]
