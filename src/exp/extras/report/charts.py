"""Draws the curves of a comparison by optimizer step with Matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from exp.errors import MissingExtraError, is_installed
from exp.extras.report.run_comparison import Comparison
from exp.extras.report.run_records import is_of_validation
from exp.shared_types import compared_tag
from exp.spelling import among
from exp.sweeps.results import FINISHED, Repeats
from exp.tensorboard.event_file import Curve

MOST_CURVES = 8
# Color-blind readers can distinguish the colors of Okabe and Ito. Their black and yellow are left out.
BEST, GRAY = "#d55e00", "#8f8f8f"
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31", "#7570b3")
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "text.parse_math": False,  # names may contain a $
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Picture of a report.

    Args:
        name: Name of the file, without the suffix.
        caption: Text below the picture.
        png: Content of the PNG file.
    """

    name: str
    caption: str
    png: bytes


class Band(NamedTuple):
    """Mean and standard deviation of curves at N steps. A value is nan if a curve is not finite at its step.

    Args:
        steps: Optimizer steps `[N]`.
        mean: Mean of the curves `[N]`.
        deviation: Standard deviation of the curves with divisor n - 1, `[N]`; nan for a single curve.
    """

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def draw(comparison: Comparison, *, tags: Sequence[str] = ()) -> tuple[list[Chart], list[str]]:
    """Return the pictures of a comparison, one for each tag.

    Args:
        comparison: The compared runs.
        tags: Tags that are drawn first, followed by losses and validation metrics.

    Returns:
        The pictures, and notes about omitted pictures and warnings, one line each.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    if not is_installed("matplotlib"):
        raise MissingExtraError(feature="a report with pictures", package="matplotlib", extra="report")
    import matplotlib

    notes: list[str] = []
    curves = _tags(comparison, tags, notes)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = [_curve(comparison, tag) for tag in curves]
    # Matplotlib warns, for example, about characters that the font lacks.
    notes += dict.fromkeys(f"of the pictures: {warning.message}" for warning in caught)
    return drawn, notes


def band(curves: Sequence[Curve]) -> Band | None:
    """Return the mean and standard deviation of curves over their common range of steps.

    If a curve lacks a step, its value is interpolated linearly. If the curves have no common range, the result is None.
    """
    curves = [curve for curve in curves if len(curve.steps)]
    if not curves:
        return None
    first, last = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    values = np.stack([np.interp(steps, curve.steps, _finite(curve)) for curve in curves])
    deviation = values.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(steps), np.nan)
    return Band(steps, values.mean(axis=0), deviation)


def _tags(comparison: Comparison, tags: Sequence[str], notes: list[str]) -> list[str]:
    """Return the tags to draw, at most MOST_CURVES, and add notes about omitted tags and runs to `notes`."""
    found = dict.fromkeys(tag for record in comparison.records for tag in record.curves)
    first = [*tags, *([] if comparison.tag is None else [compared_tag(comparison.tag)]), "loss/train", "loss/val"]
    ordered = [tag for tag in dict.fromkeys([*first, *sorted(filter(is_of_validation, found))]) if tag in found]
    without = [row.name for row in comparison.rows if not comparison.records[row.job].curves]
    if without:
        notes.append(f"no curves of {among(without)}: no TensorBoard events of a loss or of a metric of the validation")
    if len(ordered) > MOST_CURVES:
        left = ", ".join(ordered[MOST_CURVES:])
        notes.append(f"no pictures of {left}: a page has at most {MOST_CURVES} pictures. --metric TAG puts a tag first")
    return ordered[:MOST_CURVES]


def _curve(comparison: Comparison, tag: str) -> Chart:
    """Return the picture with the curves of a tag.

    The best run is drawn last. Up to seven other runs have different colors. If there are more than seven, all of them
    are gray.
    """
    from matplotlib.figure import Figure

    groups = [group for group in comparison.groups if _curves_of(comparison, group, tag)]
    others = [group for group in groups if group.rows != comparison.best_group]
    figure = Figure(figsize=(5.2, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="optimizer step", title=tag)
    axes.locator_params(axis="x", integer=True)
    for place, group in enumerate(others):
        is_named = len(others) <= len(COLORS)
        label = _label(comparison, group) if is_named else "_" if place else f"{len(others)} others"
        _draw_group(axes, comparison, group, tag, color=COLORS[place] if is_named else GRAY, label=label)
    for group in groups:
        if group.rows == comparison.best_group:
            label = f"{_label(comparison, group)} (best)"
            _draw_group(axes, comparison, group, tag, color=BEST, label=label, width=2.0)
    caption = f"{tag} by optimizer step. A dashed line is a run that was not completed."
    if comparison.repeat_over is not None:
        caption += (
            f" A line is the mean of completed runs that differ only in {comparison.repeat_over}, the band one standard"
            " deviation (over n - 1) to each side."
        )
    figure.legend(loc="outside lower left", ncols=2)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    name = re.sub(r"[^\w.-]+", "-", f"curve-{tag}", flags=re.ASCII).strip("-.")
    return Chart(name=name, caption=caption, png=png.getvalue())


def _curves_of(comparison: Comparison, group: Repeats, tag: str) -> list[tuple[bool, Curve]]:
    """Return a pair for each run in a group of repeats that has the tag.

    The pair contains whether the run was completed, and the curve of the run.
    """
    curves = [(row.status in FINISHED, comparison.records[row.job].curves.get(tag)) for row in group.rows]
    return [(is_done, curve) for is_done, curve in curves if curve is not None]


def _draw_group(
    axes: Any, comparison: Comparison, group: Repeats, tag: str, *, color: str, label: str, width: float = 1.2
) -> None:
    """Draw the mean of the completed runs of a group, and draw each other run as a dashed line.

    A band shows one standard deviation on each side of the mean.
    """
    style: dict[str, object] = {"color": color, "linewidth": width}
    curves = _curves_of(comparison, group, tag)
    joint = band([curve for is_done, curve in curves if is_done])
    labels = iter([label])
    if joint is not None:
        axes.plot(joint.steps, joint.mean, marker=".", label=next(labels), **style)
        low, high = joint.mean - joint.deviation, joint.mean + joint.deviation
        axes.fill_between(joint.steps, low, high, color=color, alpha=0.18, linewidth=0)
    for is_done, curve in curves:
        if not is_done or joint is None:
            line = "-" if is_done else "--"
            axes.plot(curve.steps, _finite(curve), linestyle=line, label=next(labels, "_"), **style)


def _label(comparison: Comparison, group: Repeats) -> str:
    """Return the label of a group: its swept values, or the name of its run if no key differs between runs."""
    swept = comparison.label(group.swept)
    return _short(swept or ("all" if comparison.repeat_over else group.rows[0].name))


def _finite(curve: Curve) -> np.ndarray:
    return np.where(np.isfinite(curve.values), curve.values, np.nan)


def _short(text: str, most: int = 40) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
