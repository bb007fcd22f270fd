"""exp: declarative experiments on Hydra, Lightning and TensorBoard. Public names are imported on first use."""

from __future__ import annotations

import os
import sys


def _drop_first_folder() -> None:
    """Remove the folder that Python adds to the import path, because a file there could hide an installed package.

    For `python -m exp.train`, Python adds the working directory. If a config names a module in the working directory,
    exp.config.targets adds this directory again at the end of the path.
    """
    if sys.flags.safe_path or not sys.path or "-m" not in sys.orig_argv:
        return
    package = os.path.dirname(__file__)
    named = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
    # In src/ of a checkout, the working directory is needed, because it contains the package exp.
    is_left_out = sys.path[0] == os.getcwd() != os.path.dirname(package)
    if is_left_out and named and named[0].partition(".")[0] == "exp":
        del sys.path[0]


_drop_first_folder()

# Imported after the folder is removed, because a file in the working directory could hide these modules, too.
import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from exp.lighter_imports import install as _install_lighter_imports  # noqa: E402

_install_lighter_imports()

if TYPE_CHECKING:
    from exp.check.examination import validate
    from exp.check.stages import compose
    from exp.errors import ConfigError, ErrorDetails, ExpError, Interrupted, MissingExtraError, RankError, RunError
    from exp.run_report import Report
    from exp.saved_runs.saved_run import load
    from exp.start import fit

__version__ = "0.1.0"

_HOMES = {
    "compose": "exp.check.stages",
    "validate": "exp.check.examination",
    "fit": "exp.start",
    "Report": "exp.run_report",
    "load": "exp.saved_runs.saved_run",
    **dict.fromkeys(
        ("ExpError", "ConfigError", "ErrorDetails", "Interrupted", "MissingExtraError", "RankError", "RunError"),
        "exp.errors",
    ),
}

__all__ = [
    "ConfigError",
    "ErrorDetails",
    "ExpError",
    "Interrupted",
    "MissingExtraError",
    "RankError",
    "Report",
    "RunError",
    "compose",
    "fit",
    "load",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'exp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
