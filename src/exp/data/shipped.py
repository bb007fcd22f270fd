"""The files of the small data sets that the installed scikit-learn package ships, read without importing it.

`import sklearn.datasets` takes longer than a whole run on digits may.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)


def shipped_table(name: str, *, delimiter: str | None = ",", skip_lines: int = 0) -> np.ndarray | None:
    """The numbers of a file in scikit-learn's data folder, float64 `[rows, columns]`; None where it is not there.

    A None is logged: the caller then asks scikit-learn itself, which takes a second to import.
    """
    package = importlib.util.find_spec("sklearn")
    places = (package.submodule_search_locations or []) if package else []
    for place in places:
        path = Path(place, "datasets", "data", name)
        if path.is_file():
            return np.loadtxt(path, delimiter=delimiter, skiprows=skip_lines, ndmin=2)
    log.warning("scikit-learn does not keep %s where it used to; importing sklearn.datasets to load it", name)
    return None
