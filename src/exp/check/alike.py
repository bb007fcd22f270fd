"""Check the jobs of a sweep: one that differs from a checked one in its seed and in numbers of its optimizer alone is
looked at in these alone.

A check builds the network and runs it once, 40 ms of a job that may train for 60; whether a rate is one has nothing to
do with that. What differs in more is checked whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from exp.check.plan import Plan, refuse_changed, validated
from exp.config.freeze import COMPOSITION
from exp.config.reading import KeyPath, are_referred, changes

# Of whose numbers nothing follows for the network, its data and what runs beside it.
NUMBERS = ("optimizer", "scheduler")
# Of what is no concern of the job's own run.
FREE = "sweep"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A config without a fault. raw: its unresolved values."""

    raw: Mapping[str, Any]
    decided: Plan


def check_job(config: DictConfig, before: Checked | None) -> Checked:
    """Check a config; before: what this gave for another job, whose first stage this one has passed, too.

    Raises: ConfigError with all faults.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    del raw[COMPOSITION]
    if before is not None:
        changed = changes(before.raw, raw)
        if changed is not None and _is_beside(before, changed, raw):
            refuse_changed(config, changed, checked=before.decided)
            return before
    return Checked(raw=raw, decided=validated(config))


def _is_beside(before: Checked, changed: Mapping[KeyPath, Any], raw: Mapping[str, Any]) -> bool:
    """Whether nothing but the optimizer, the schedule and random draws follows from what has changed."""
    from exp.check.first_samples import is_shipped

    decided = before.decided
    if decided.own is not None or decided.network is None or decided.plain["phases"]:
        return False
    if ("seed",) in changed and not is_shipped(decided.plain["data"]):
        return False  # which of the samples are the first ones, follows from it
    kept = {path: value for path, value in changed.items() if path[0] != FREE}
    return not are_referred(changed, raw) and all(
        path == ("seed",) or (path[0] in NUMBERS and _are_numbers(value)) for path, value in kept.items()
    )


def _are_numbers(value: Any) -> bool:
    return all(type(one) in (int, float) for one in (value if isinstance(value, list) else [value]))
