"""exp: declarative experiments on Hydra, Lightning and TensorBoard. Public names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exp.check.plan import validate
    from exp.check.stages import compose
    from exp.errors import ConfigError, ExpError, Fault, Interrupted, MissingExtraError, RankError, RunError
    from exp.report import Report
    from exp.run import fit

__version__ = "0.1.0"

_HOMES = {
    "compose": "exp.check.stages",
    "validate": "exp.check.plan",
    "fit": "exp.run",
    "Report": "exp.report",
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
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'exp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
