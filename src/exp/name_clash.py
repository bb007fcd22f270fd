"""Refuse to run together with the other distribution of this import name: `exp`, which the package index has.

Both install the folder `exp`. Whichever comes second overwrites `__init__.py` and `run.py` of the first, and whichever
is uninstalled takes them away, so that what is imported is neither of the two.
"""

from __future__ import annotations

import os
import sys

DISTRIBUTION = "exp-framework"
FIX = f"pip uninstall -y exp {DISTRIBUTION}, then install {DISTRIBUTION} again: the two share one folder"


def refuse_a_second_exp(site: str) -> None:
    """Raise ImportError where the distribution `exp` was installed into the same folder.

    site: the folder that holds this package, such as site-packages.
    """
    try:
        names = os.listdir(site)
    except OSError:  # an archive, or a folder that may be entered and not listed
        return
    for name in names:
        # The metadata of exp-framework is exp_framework-*.dist-info.
        if name[:4] == "exp-" and name[4:5].isdigit() and name.endswith((".dist-info", ".egg-info")):
            raise ImportError(f"{name.rpartition('.')[0]} is installed in {site} beside {DISTRIBUTION}. {FIX}")


def refuse_a_foreign_init() -> None:
    """Raise ImportError where `exp/__init__.py` is another distribution's, or was taken away with it."""
    found = sys.modules["exp"]
    if "compose" not in vars(found).get("__all__", ()):
        place = found.__file__ or os.path.join(next(iter(found.__path__)), "__init__.py")
        raise ImportError(f"{place} is not {DISTRIBUTION}'s: the distribution exp has written over it. {FIX}")
