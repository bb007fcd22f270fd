"""exp: declarative experiments on Hydra, Lightning and TensorBoard. Public names are resolved on first use."""

from __future__ import annotations

import os
import sys


def _leave_out_the_working_directory() -> None:
    """`python -m exp.train` puts it first: any file there called like a package, installed or not, would be imported.

    What a config names of it is found all the same, by exp.config.targets, behind all that is installed.
    """
    asked = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    here = os.getcwd()
    is_command = asked != [] and asked[0].partition(".")[0] == "exp" and not sys.flags.safe_path
    # In src/ of a checkout it is the place of exp itself.
    if is_command and sys.path[:1] == [here] and os.path.dirname(os.path.dirname(__file__)) != here:
        del sys.path[0]


_leave_out_the_working_directory()

# Behind it, for these are files, too, which the working directory may shadow.
import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from exp.lighter_imports import install as _install_lighter_imports  # noqa: E402
from exp.name_clash import refuse_a_second_exp as _refuse_a_second_exp  # noqa: E402

_refuse_a_second_exp(os.path.dirname(os.path.dirname(__file__)))
_install_lighter_imports()

if TYPE_CHECKING:
    from exp.check.plan import validate
    from exp.check.stages import compose
    from exp.errors import ConfigError, ExpError, Fault, Interrupted, MissingExtraError, RankError, RunError
    from exp.run import fit
    from exp.run_report import Report
    from exp.saved_runs.saved_run import load

__version__ = "0.1.0"

_HOMES = {
    "compose": "exp.check.stages",
    "validate": "exp.check.plan",
    "fit": "exp.run",
    "Report": "exp.run_report",
    "load": "exp.saved_runs.saved_run",
    **dict.fromkeys(
        ("ExpError", "ConfigError", "Fault", "Interrupted", "MissingExtraError", "RankError", "RunError"), "exp.errors"
    ),
}

__all__ = [
    "ConfigError",
    "ExpError",
    "Fault",
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
