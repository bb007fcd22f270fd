"""Where a data set's file is."""

from __future__ import annotations

from pathlib import Path

from exp.data.faults import data_fault, name_cure


def data_file(path: str, *, directory: str) -> Path:
    """The file at path, or else at path below the data directory.

    Raises: ConfigError where neither is there.
    """
    given = Path(path).expanduser()
    places = [given] if given.is_absolute() else [given, Path(directory).expanduser() / given]
    for place in places:
        if place.is_file():
            return place
    neighbours = [file.name for place in places if place.parent.is_dir() for file in place.parent.iterdir()]
    raise data_fault(
        "dataset.path",
        got=f"no file at {' nor at '.join(str(place.absolute()) for place in places)}",
        expected="a file to read",
        cure=name_cure(given.name, neighbours),
    )
