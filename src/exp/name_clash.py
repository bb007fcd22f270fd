"""An error if the distribution `exp` of the package index is installed as well.

Both distributions install the folder `exp`. The second one overwrites `__init__.py` and `run.py` of the first, and
uninstalling one removes files of both, so that the imported package is neither of the two.
"""

from __future__ import annotations

import os
import sys

DISTRIBUTION = "exp-framework"
FIX = f"pip uninstall -y exp {DISTRIBUTION}, then install {DISTRIBUTION} again: the two share one folder"


def refuse_a_second_exp(site: str) -> None:
    """Raise ImportError if the distribution `exp` is installed in the same folder.

    Args:
        site: The folder of this package, such as site-packages.
    """
    try:
        names = os.listdir(site)
    except OSError:  # an archive, or a folder that cannot be listed
        return
    for name in names:
        # The metadata of exp-framework is exp_framework-*.dist-info.
        if name[:4] == "exp-" and name[4:5].isdigit() and name.endswith((".dist-info", ".egg-info")):
            raise ImportError(f"{name.rpartition('.')[0]} is installed in {site} next to {DISTRIBUTION}. {FIX}")


def refuse_a_foreign_init() -> None:
    """Raise ImportError if `exp/__init__.py` is another distribution's, or was removed with it."""
    found = sys.modules["exp"]
    if "compose" not in vars(found).get("__all__", ()):
        place = found.__file__ or os.path.join(next(iter(found.__path__)), "__init__.py")
        raise ImportError(f"{place} is not {DISTRIBUTION}'s: the distribution exp has overwritten it. {FIX}")
