"""Draws the pictures of a comparison with Matplotlib: curves by optimizer step, and values against keys."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from exp.errors import MissingExtraError, is_installed
from exp.extras.report.run_comparison import Comparison, numbers
from exp.extras.report.run_records import is_of_validation
from exp.shared_types import compared_tag
from exp.spelling import among
from exp.sweeps.results import FINISHED, Repeats
from exp.tensorboard.curves import Curve

MOST_CURVES, MOST_KEYS = 8, 12
# Different values of a key that have a column each; more numbers have an axis.
MOST_COLUMNS = 8
# Okabe and Ito's colors except black and yellow: readers with color blindness can tell them apart.
BEST, GRAY = "#d55e00", "#8f8f8f"
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31", "#7570b3")
MARKERS = {"completed": "o", "pruned": "v", "failed": "X", "interrupted": "s", "running": ">"}
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "text.parse_math": False,  # a key or a run may be named with a $
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture. name: of its file. caption: what it shows and how it is read."""

    name: str
    caption: str
    png: bytes


class Band(NamedTuple):
    """The mean of curves and their deviation over n - 1, `[N]` each: nan if a curve is not finite or alone."""

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def draw(comparison: Comparison, *, tags: Sequence[str] = ()) -> tuple[list[Chart], list[str]]:
    """Draw the pictures of a comparison.

    Args:
        comparison: The runs.
        tags: The tags whose curves are drawn first.

    Returns:
        The pictures, and one line for each picture that is not drawn.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    if not is_installed("matplotlib"):
        raise MissingExtraError(feature="a report with pictures", package="matplotlib", extra="report")
    import matplotlib

    notes: list[str] = []
    curves = _tags(comparison, tags, notes)
    keys = _keys(comparison, notes)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = [*(_curve(comparison, tag) for tag in curves), *(_against(comparison, key) for key in keys)]
    # For example a letter that the font does not have.
    notes += dict.fromkeys(f"of the pictures: {warning.message}" for warning in caught)
    return drawn, notes


def band(curves: Sequence[Curve]) -> Band | None:
    """Return the mean and deviation of curves at each step of a curve that lies within all curves; None without one.

    A curve without a value at such a step is interpolated linearly.
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
    """Return the tags whose curves are drawn."""
    found = dict.fromkeys(tag for record in comparison.records for tag in record.curves)
    first = [*tags, *([] if comparison.tag is None else [compared_tag(comparison.tag)]), "loss/train", "loss/val"]
    ordered = [tag for tag in dict.fromkeys([*first, *sorted(filter(is_of_validation, found))]) if tag in found]
    without = [row.name for row in comparison.rows if not comparison.records[row.job].curves]
    if without:
        notes.append(f"no curves of {among(without)}: no TensorBoard events of a loss or of a metric of the validation")
    if len(ordered) > MOST_CURVES:
        left = ", ".join(ordered[MOST_CURVES:])
        notes.append(f"curves of {left} are left out, after the first {MOST_CURVES}. --metric TAG puts one first")
    return ordered[:MOST_CURVES]


def _keys(comparison: Comparison, notes: list[str]) -> Sequence[str]:
    """Return the keys against which values are drawn."""
    keys = comparison.keys if len(comparison.rows) > 1 else []
    why = "" if keys else "the runs do not differ in what was typed, or there is only one"
    if comparison.tag is None:
        why = "the runs are not compared by one tag"
    elif not any(map(math.isfinite, comparison.values)):
        why = "no run has a value"
    if why:
        notes.append(f"no values against keys: {why}")
        return []
    if len(keys) > MOST_KEYS:
        notes.append(f"values against {', '.join(keys[MOST_KEYS:])} are left out, after the first {MOST_KEYS} keys")
    return keys[:MOST_KEYS]


def _curve(comparison: Comparison, tag: str) -> Chart:
    """Draw the curves of a tag: the best run last, up to seven others in a color each, more in gray."""
    groups = [group for group in comparison.groups if _curves_of(comparison, group, tag)]
    others = [group for group in groups if group.rows != comparison.best_group]
    axes = _axes(xlabel="optimizer step", title=tag)
    axes.locator_params(axis="x", integer=True)
    for place, group in enumerate(others):
        if len(others) <= len(COLORS):
            _draw_group(axes, comparison, group, tag, color=COLORS[place], label=_label(comparison, group))
        else:
            label = "_" if place else f"{len(others)} others"
            _draw_group(axes, comparison, group, tag, color=GRAY, label=label)
    for group in groups:
        if group.rows == comparison.best_group:
            label = f"{_label(comparison, group)} (best)"
            _draw_group(axes, comparison, group, tag, color=BEST, label=label, width=2.0)
    drawn = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()])
    if _spans_decades(drawn):
        _make_log(axes, "y")
        # A band that reaches zero has no lower end on a logarithmic axis.
        axes.set_ylim(bottom=float(np.nanmin(drawn)) / 1.3)
    caption = f"{tag} by optimizer step. A dashed line is a run that was not completed."
    if comparison.repeat_over is not None:
        caption += (
            f" A line is the mean of completed runs that differ only in {comparison.repeat_over}, the band one standard"
            " deviation (over n - 1) to each side."
        )
    return _chart(axes, name=f"curve-{tag}", caption=caption)


def _curves_of(comparison: Comparison, group: Repeats, tag: str) -> list[tuple[bool, Curve]]:
    """Return the curves of repeats, and whether each run was completed."""
    curves = [(row.status in FINISHED, comparison.records[row.job].curves.get(tag)) for row in group.rows]
    return [(is_done, curve) for is_done, curve in curves if curve is not None]


def _draw_group(
    axes: Any, comparison: Comparison, group: Repeats, tag: str, *, color: str, label: str, width: float = 1.2
) -> None:
    """Draw repeats as their mean with a band, and each run that was not completed as a dashed line."""
    style: dict[str, Any] = {"color": color, "linewidth": width}
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
    """Return what was swept; if nothing was, the name of the run."""
    swept = comparison.label(group.swept)
    return _short(swept or ("all" if comparison.repeat_over else group.rows[0].name))


def _against(comparison: Comparison, key: str) -> Chart:
    """Draw one point for each run: words and few numbers of the key have a column each."""
    shown = [
        (row, row.swept[key], value)
        for row, value in zip(comparison.rows, comparison.values, strict=True)
        if key in row.swept and math.isfinite(value)
    ]
    texts = sorted({text for _, text, _ in shown})
    found = numbers(texts)
    names = texts if found is None else [texts[place] for place in np.argsort(found)]
    has_columns = found is None or len(texts) <= MOST_COLUMNS
    places = {name: float(place) if has_columns else float(name) for place, name in enumerate(names)}
    axes = _axes(xlabel=key, ylabel=comparison.tag, title=f"{comparison.tag} against {comparison.short(key)}")
    for color, status in enumerate(dict.fromkeys(row.status for row, _, _ in shown)):
        points = [(places[text], value) for row, text, value in shown if row.status == status]
        style = {"marker": MARKERS.get(status, "d"), "color": COLORS[color % len(COLORS)], "label": status}
        axes.scatter(*zip(*points, strict=True), s=26, alpha=0.75, **style)
    for row, text, value in shown:
        if row is comparison.best:
            axes.scatter(places[text], value, marker="*", s=190, color=BEST, edgecolors="black", label="best")
    if _spans_decades(np.array([value for *_, value in shown])):
        _make_log(axes, "y")
    if has_columns:
        turned = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > 40 else {}
        axes.set_xticks(range(len(names)), [_short(name, 16) for name in names], **turned)
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif found is not None and _spans_decades(found):
        _make_log(axes, "x")
    caption = f"{comparison.tag} against {key}: one point for each run, its shape the run's status."
    caption += " Other keys differ too, from point to point." if len(comparison.keys) > 1 else ""
    return _chart(axes, name=f"value-{key}", caption=caption)


def _axes(**texts: str | None) -> Any:
    """Return the axes of a new figure. texts: their title and labels."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5.2, 3.6), dpi=120, layout="constrained").add_subplot()
    axes.set(**texts)
    return axes


def _chart(axes: Any, *, name: str, caption: str) -> Chart:
    axes.figure.legend(loc="outside lower left", ncols=2)
    png = io.BytesIO()
    axes.figure.savefig(png, format="png")
    file = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")
    return Chart(name=file, caption=caption, png=png.getvalue())


def _make_log(axes: Any, axis: str) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set(**{f"{axis}scale": "log"})
    which = axes.xaxis if axis == "x" else axes.yaxis
    # Matplotlib's default labels are mathematics, which STYLE switches off.
    which.set_major_formatter(LogFormatter())
    which.set_minor_formatter(LogFormatter())


def _spans_decades(values: np.ndarray) -> bool:
    """Return whether positive values are more than two decades apart, so that a logarithmic axis shows more."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() / finite.min() > 100)


def _finite(curve: Curve) -> np.ndarray:
    return np.where(np.isfinite(curve.values), curve.values, np.nan)


def _short(text: str, most: int = 40) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
