"""Draw the pictures of a run's report.md: losses, metrics and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from exp.hooks.figures import COLOURS, curves
from exp.hooks.gradients import HEALTHY_NORM, NORM
from exp.hooks.panels import png
from exp.loggers.heat_maps import kept_heat_map
from exp.shared_types import EPOCH_LOSS, split_tag
from exp.tensorboard.event_file import Curve, read_curves

TOTAL_NORM = f"{NORM}total"
# Maximum number of points of a drawn curve, one per pixel. Longer curves are averaged.
MOST_POINTS = 400


def draw_report_pictures(directory: Path, *, tags: Iterable[str]) -> dict[str, bytes]:
    """Draw the pictures of a run from its event files and its table of gradient norms.

    Args:
        directory: Run directory.
        tags: Tags in the run's report.

    Returns:
        Contents of PNG files by the name of the picture: "loss", "metrics" and "gradients".

    Raises:
        OSError: The files of the run cannot be read.
    """
    groups: dict[str, list[str]] = {"loss": [], "metrics": []}
    for tag in sorted(tags):
        name, stage = split_tag(tag)
        if tag == EPOCH_LOSS or (stage in ("train", "val") and name.partition("/")[0].startswith("loss")):
            groups["loss"].append(tag)
        elif stage in ("train", "val"):
            groups["metrics"].append(tag)
    wanted = {tag for group in groups.values() for tag in group[: len(COLOURS)]}
    found = read_curves(directory / "tensorboard", wants=lambda tag: tag in wanted or tag == TOTAL_NORM).by_tag
    drawn = {
        name: _draw({tag: found[tag] for tag in group if tag in found}, title=name) for name, group in groups.items()
    }
    tag = NORM.rstrip("/")
    heat_map = kept_heat_map(directory, tag)
    if heat_map is not None:
        drawn["gradients"] = heat_map.picture(
            healthy=HEALTHY_NORM, title=f"{tag}, the norm of each parameter's gradient"
        )
    elif TOTAL_NORM in found:
        drawn["gradients"] = _draw({TOTAL_NORM: found[TOTAL_NORM]}, title="gradients")
    return {name: png(sheet) for name, sheet in drawn.items() if sheet is not None}


def _draw(named: Mapping[str, Curve], *, title: str) -> np.ndarray | None:
    """Draw several curves in one picture.

    Args:
        named: Curves by tag.
        title: Title of the picture.

    Returns:
        Picture, uint8 `[H, W, 3]`. None if no curve has two points.
    """
    thinned = {tag: _thin_out(curve) for tag, curve in named.items()}
    if not any(len(steps) > 1 for steps, _ in thinned.values()):
        return None
    x = np.unique(np.concatenate([steps for steps, _ in thinned.values()]))
    # All curves get the same steps. A curve is interpolated between its points, and is NaN before its first point and
    # after its last point.
    lines = {
        tag: np.interp(x, steps, values, left=np.nan, right=np.nan).tolist() for tag, (steps, values) in thinned.items()
    }
    return curves(x.tolist(), lines, title=title, along="step")


def _thin_out(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of a curve with at most MOST_POINTS points.

    A longer curve is shortened by averaging groups of neighboring points.

    Shape:
        Both arrays: `[N]`, where N is the number of points.
    """
    every = -(-len(curve.steps) // MOST_POINTS)
    if every == 1:
        return curve.steps, curve.values
    firsts = np.arange(0, len(curve.steps), every)
    counts = np.diff([*firsts, len(curve.steps)])
    return np.add.reduceat(curve.steps, firsts) / counts, np.add.reduceat(curve.values, firsts) / counts
