"""Whether `mode` is the side on which the monitored metric is better, as the metric's own class says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exp.config.kinds import is_node
from exp.config.targets import resolve
from exp.errors import ConfigError, Fault


def direction_faults(plain: dict[str, Any], *, allow: Sequence[str]) -> list[Fault]:
    """The fault of a best checkpoint that would be the worst; none where the metric does not say."""
    monitor, mode, metrics = plain.get("monitor"), plain.get("mode"), plain.get("metrics")
    if not isinstance(monitor, str) or not isinstance(metrics, dict) or mode not in ("min", "max"):
        return []
    node = metrics.get(monitor.partition("/")[0])
    if not is_node(node):
        return []
    try:
        metric = resolve(node["_target_"], base="torchmetrics.Metric", allow=allow)
    except ConfigError:
        return []  # told as the target's own fault
    better = {True: "max", False: "min", None: None}[_higher_is_better(metric)]
    if better in (None, mode):
        return []
    side = "higher" if better == "max" else "lower"
    return [
        Fault(key="mode", got=repr(mode), expected=f"{better}: a {side} {monitor} is better", cure=f"Add mode={better}")
    ]


def _higher_is_better(metric: Any) -> bool | None:
    said = next((vars(base)["higher_is_better"] for base in metric.__mro__ if "higher_is_better" in vars(base)), None)
    # A property says it of an instance alone.
    return said if isinstance(said, bool) else None
