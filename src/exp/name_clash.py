"""Raise an error if the unrelated distribution `exp` from PyPI is installed next to exp-framework.

Both distributions install files into the folder `exp`. The distribution installed last overwrites `__init__.py` and
`run.py` of the other one. Uninstalling one distribution also removes files of the other one. In both cases the folder
contains a broken mixture of the two packages.
"""

from __future__ import annotations

import os
import sys

DISTRIBUTION = "exp-framework"
FIX = f"pip uninstall -y exp {DISTRIBUTION}, then install {DISTRIBUTION} again: the two share one folder"


def refuse_a_second_exp(site: str) -> None:
    """Raise ImportError if the distribution `exp` is installed in the same folder.

    Args:
        site: Folder that contains the package exp, such as site-packages.
    """
    try:
        names = os.listdir(site)
    except OSError:  # exp is imported from an archive, or the folder cannot be listed
        return
    for name in names:
        # The metadata of exp-framework is exp_framework-*.dist-info.
        if name[:4] == "exp-" and name[4:5].isdigit() and name.endswith((".dist-info", ".egg-info")):
            raise ImportError(f"{name.rpartition('.')[0]} is installed in {site} next to {DISTRIBUTION}. {FIX}")


def refuse_a_foreign_init() -> None:
    """Raise ImportError if the distribution `exp` has overwritten or removed `exp/__init__.py`."""
    found = sys.modules["exp"]
    if "compose" not in vars(found).get("__all__", ()):
        place = found.__file__ or os.path.join(next(iter(found.__path__)), "__init__.py")
        raise ImportError(f"{place} is not {DISTRIBUTION}'s: the distribution exp has overwritten it. {FIX}")
