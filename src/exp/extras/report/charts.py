"""Draws the pictures of a comparison with Matplotlib: curves, values against keys, parallel coordinates, importance,
and the Pareto front.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exp.errors import MissingExtraError, is_installed
from exp.extras.report.analysis import LEAST_RUNS, band, numbers, pareto_front, share_explained, spans_decades
from exp.extras.report.run_comparison import Comparison, finite_pairs
from exp.shared_types import compared_tag
from exp.spelling import among
from exp.sweeps.results import FINISHED, Repeats
from exp.sweeps.run_records import is_of_validation

MOST_CURVES, MOST_KEYS, MOST_AXES = 8, 12, 10
# Different values of a key that have a column each; more numbers have an axis.
MOST_COLUMNS = 8
# Curves with at most so many points have a mark at each point.
FEW_POINTS = 30
# Okabe and Ito's colors except black and yellow: readers with color blindness can tell them apart.
BEST, GREY = "#d55e00", "#8f8f8f"
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
    "legend.fontsize": 8.0,
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture. name: of its file. caption: what it shows and how it is read."""

    name: str
    caption: str
    png: bytes


@dataclass(frozen=True, kw_only=True)
class Charts:
    """The pictures, and one line for each picture that is not drawn."""

    drawn: Sequence[Chart]
    notes: Sequence[str]


def draw(comparison: Comparison, *, tags: Sequence[str] = ()) -> Charts:
    """Draw every picture of a comparison.

    Args:
        comparison: The runs.
        tags: The tags whose curves are drawn first.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    if not is_installed("matplotlib"):
        raise MissingExtraError(feature="a report with pictures", package="matplotlib", extra="report")
    import matplotlib

    notes: list[str] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = [
            *_curves(comparison, tags, notes),
            *_against_keys(comparison, notes),
            *_parallel(comparison, notes),
            *_importance(comparison, notes),
            *_pareto(comparison, notes),
        ]
    # For example a letter that the font does not have.
    notes += dict.fromkeys(f"of the pictures: {warning.message}" for warning in caught)
    return Charts(drawn=drawn, notes=notes)


def _blank(width: float = 5.2, height: float = 3.6) -> tuple[Any, Any]:
    """Return a figure of a size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def _chart(figure: Any, *, name: str, caption: str, columns: int = 2) -> Chart:
    """Return a figure as a picture. columns: of the legend below the axes."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower left", ncols=columns)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    file = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")
    return Chart(name=file, caption=caption, png=png.getvalue())


def _make_log(axes: Any, axis: str) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set(**{f"{axis}scale": "log"})
    which = axes.xaxis if axis == "x" else axes.yaxis
    # Matplotlib's default labels are mathematics, which STYLE switches off.
    which.set_major_formatter(LogFormatter())
    which.set_minor_formatter(LogFormatter())


def _short(text: str, most: int = 40) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _curves(comparison: Comparison, tags: Sequence[str], notes: list[str]) -> Iterator[Chart]:
    found = dict.fromkeys(tag for record in comparison.records for tag in record.curves)
    first = [*tags, *([] if comparison.tag is None else [compared_tag(comparison.tag)]), "loss/train", "loss/val"]
    ordered = [tag for tag in dict.fromkeys([*first, *sorted(filter(is_of_validation, found))]) if tag in found]
    if not ordered:
        notes.append("no curves: no run has TensorBoard events of a loss or of a metric of the validation")
    without = [name for name, one in zip(comparison.names, comparison.records, strict=True) if not one.curves]
    if ordered and without:
        notes.append(f"no curves of {among(without)}: no TensorBoard events of a loss or of a metric of the validation")
    if len(ordered) > MOST_CURVES:
        left = ", ".join(ordered[MOST_CURVES:])
        notes.append(f"curves of {left} are left out, after the first {MOST_CURVES}. --metric TAG puts one first")
    for tag in ordered[:MOST_CURVES]:
        yield _curve(comparison, tag)


def _curve(comparison: Comparison, tag: str) -> Chart:
    records, best = comparison.records, comparison.best_group
    groups = [group for group in comparison.groups if any(tag in records[row.job].curves for row in group.rows)]
    others = [group for group in groups if group.rows != best]
    figure, axes = _blank()
    kinds: set[str] = set()
    for place, group in enumerate(others):
        if len(others) <= len(COLORS):
            kinds |= _draw_group(axes, comparison, group, tag, color=COLORS[place], label=_label(comparison, group))
        else:
            kinds |= _draw_group(
                axes, comparison, group, tag, color=GREY, label="" if place else f"{len(others)} others"
            )
    for group in groups:
        if group.rows == best:
            label = f"{_label(comparison, group)} (best)"
            kinds |= _draw_group(axes, comparison, group, tag, color=BEST, label=label, width=2.0)
    axes.set(xlabel="optimizer step", title=tag)
    axes.locator_params(axis="x", integer=True)
    drawn = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    if spans_decades(np.concatenate(drawn)):
        _make_log(axes, "y")
        # A band that reaches zero has no lower end on a logarithmic axis.
        axes.set_ylim(bottom=float(np.nanmin(np.concatenate(drawn))) / 1.3)
    caption = f"{tag} by optimizer step."
    if "band" in kinds:
        caption += (
            f" A line is the mean of completed runs that differ only in {comparison.repeat_over}, the band one standard"
            " deviation (over n - 1) to each side."
        )
    if "dashed" in kinds:
        caption += " A dashed line is a run that was not completed."
    return _chart(figure, name=f"curve-{tag}", caption=caption)


def _draw_group(
    axes: Any, comparison: Comparison, group: Repeats, tag: str, *, color: str, label: str, width: float = 1.2
) -> set[str]:
    """Draw repeats as their mean with a band, and each run that was not completed as a dashed line.

    Returns:
        `band` and `dashed`, if such are drawn.
    """
    style: dict[str, Any] = {"color": color, "linewidth": width}
    curves = [(row.status in FINISHED, comparison.records[row.job].curves.get(tag)) for row in group.rows]
    joint = band([(curve.steps, curve.values) for is_done, curve in curves if is_done and curve is not None])
    labels = iter([label])
    kinds: set[str] = set()
    if joint is not None:
        mark = "." if len(joint.steps) <= FEW_POINTS else None
        axes.plot(joint.steps, joint.mean, marker=mark, label=next(labels), **style)
    if joint is not None and joint.count > 1:
        low, high = joint.mean - joint.deviation, joint.mean + joint.deviation
        axes.fill_between(joint.steps, low, high, color=color, alpha=0.18, linewidth=0)
        kinds.add("band")
    for is_done, curve in curves:
        if curve is not None and not (is_done and joint is not None):
            values = np.where(np.isfinite(curve.values), curve.values, np.nan)
            axes.plot(curve.steps, values, linestyle="-" if is_done else "--", label=next(labels, "_"), **style)
            kinds |= set() if is_done else {"dashed"}
    return kinds


def _label(comparison: Comparison, group: Repeats) -> str:
    """Return what was swept; if nothing was, the name of the run."""
    swept = comparison.label(group.swept)
    return _short(swept or ("all" if comparison.repeat_over else comparison.names[group.rows[0].job]))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where the values of a key are on an axis.

    Args:
        names: The values if each has a column: words, and few numbers; empty for a numeric axis.
        is_log: Whether a numeric axis is logarithmic.
    """

    names: Sequence[str]
    is_log: bool

    @classmethod
    def of(cls, comparison: Comparison, key: str) -> Scale:
        texts = sorted({row.swept[key] for row in comparison.rows if key in row.swept})
        found = numbers(texts)
        if found is None:
            return cls(names=texts, is_log=False)
        if len(texts) <= MOST_COLUMNS:
            return cls(names=[texts[place] for place in np.argsort(found)], is_log=False)
        return cls(names=[], is_log=comparison.is_log(key))

    def places(self, texts: Sequence[str]) -> np.ndarray:
        """Return the coordinate of each value."""
        columns = {name: place for place, name in enumerate(self.names)}
        return np.array([columns[text] if self.names else float(text) for text in texts], np.float64)

    def label(self, axes: Any) -> None:
        """Set the ticks of the horizontal axis."""
        if self.is_log:
            _make_log(axes, "x")
        if self.names:
            names = [_short(name, 16) for name in self.names]
            is_long = sum(map(len, names)) > 40
            axes.set_xticks(range(len(names)), names, **({"rotation": 30, "ha": "right"} if is_long else {}))
            axes.set_xlim(-0.5, len(names) - 0.5)


def _against_keys(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    if comparison.tag is None or not any(map(math.isfinite, comparison.values)):
        why = "the runs are not compared by one tag" if comparison.tag is None else "no run has a value"
        notes.append(f"no values against keys: {why}")
        return
    keys = comparison.keys if len(comparison.rows) > 1 else []
    if not keys:
        notes.append("no values against keys: the runs do not differ in what was typed, or there is only one")
    if len(keys) > MOST_KEYS:
        notes.append(f"values against {', '.join(keys[MOST_KEYS:])} are left out, after the first {MOST_KEYS} keys")
    for key in keys[:MOST_KEYS]:
        yield _against(comparison, key)


def _against(comparison: Comparison, key: str) -> Chart:
    scale, best = Scale.of(comparison, key), comparison.best
    shown = [
        (row.status, row.swept[key], value)
        for row, value in zip(comparison.rows, comparison.values, strict=True)
        if key in row.swept and math.isfinite(value)
    ]
    figure, axes = _blank()
    for place, status in enumerate(dict.fromkeys(status for status, _, _ in shown)):
        xs = scale.places([text for one, text, _ in shown if one == status])
        ys = [value for one, _, value in shown if one == status]
        axes.scatter(
            xs, ys, marker=MARKERS.get(status, "d"), s=26, color=COLORS[place % len(COLORS)], alpha=0.75, label=status
        )
    if best is not None and key in best.swept:
        axes.scatter(
            scale.places([best.swept[key]]),
            [best.value],
            marker="*",
            s=190,
            color=BEST,
            edgecolors="black",
            label="best",
        )
    axes.set(xlabel=key, ylabel=comparison.tag, title=f"{comparison.tag} against {comparison.short(key)}")
    if spans_decades(np.array([value for *_, value in shown])):
        _make_log(axes, "y")
    scale.label(axes)
    caption = f"{comparison.tag} against {key}: one point for each run, its shape the run's status."
    caption += " Other keys differ too, from point to point." if len(comparison.keys) > 1 else ""
    return _chart(figure, name=f"value-{key}", caption=caption, columns=4)


def _parallel(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    keys = list(comparison.keys)[:MOST_AXES]
    done = [row for row in comparison.rows if row.has_value and all(key in row.swept for key in keys)]
    if not keys or len(done) < 2 or comparison.tag is None:
        needed = "they need two completed runs that differ in a key"
        why = "the runs are not compared by one tag" if comparison.tag is None else needed
        notes.append(f"no parallel coordinates: {why}")
        return
    if len(comparison.keys) > MOST_AXES:
        left = ", ".join(comparison.keys[MOST_AXES:])
        notes.append(f"parallel coordinates leave out {left}, after {MOST_AXES} keys")
    scales = [Scale.of(comparison, key) for key in keys]
    places = [scale.places([row.swept[key] for row in done]) for scale, key in zip(scales, keys, strict=True)]
    values = np.array([row.value for row in done], np.float64)
    is_log = [*(scale.is_log for scale in scales), spans_decades(values)]
    heights = [_heights(one, is_log=log) for one, log in zip([*places, values], is_log, strict=True)]
    good = 1 - heights[-1] if comparison.mode == "min" else heights[-1]
    figure, axes = _blank(min(12.0, 3.0 + 1.5 * len(heights)), 4.0)
    for line, share, row in sorted(zip(np.stack(heights, 1), good, done, strict=True), key=lambda one: float(one[1])):
        is_best = row is comparison.best
        color, width = (BEST, 2.6) if is_best else (COLORS[0], 1.1)
        axes.plot(line, color=color, linewidth=width, alpha=1.0 if is_best else 0.1 + 0.8 * float(share))
    for place, (one, scale) in enumerate(zip(places, scales, strict=True)):
        texts = scale.names or [f"{one.min():.3g}", f"{one.max():.3g}"]
        _write_beside(axes, place, _heights(np.arange(len(texts)), is_log=False), texts)
    _write_beside(axes, len(keys), np.array([0.0, 1.0]), [f"{values.min():.4g}", f"{values.max():.4g}"])
    labels = [*(_short(comparison.short(key), 22) for key in keys), comparison.tag]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlim=(-0.15, len(keys) + 0.45), yticks=[], title="all keys at once")
    caption = (
        f"One line for each completed run, from key to key, to its {comparison.tag} at the right. The darker a line,"
        " the better; the best is orange. If dark lines meet on an axis, choose its value there."
    )
    yield _chart(figure, name="parallel", caption=caption)


def _heights(values: np.ndarray, *, is_log: bool) -> np.ndarray:
    """Return the values scaled to 0 to 1; 0.5 if all are equal."""
    scaled = np.log(values) if is_log else values
    span = np.ptp(scaled)
    return np.asarray((scaled - scaled.min()) / span if span else np.full(len(values), 0.5))


def _write_beside(axes: Any, place: int, heights: np.ndarray, texts: Sequence[str]) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.75}
    for height, text in zip(heights.tolist(), texts, strict=True):
        axes.text(place + 0.04, height, _short(text, 16), va="center", fontsize=8, bbox=box)


def _importance(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    done = sum(row.has_value for row in comparison.rows)
    if comparison.tag is None:
        notes.append("no importance: the runs are not compared by one tag")
        return
    if done < LEAST_RUNS:
        notes.append(f"no importance: it needs {LEAST_RUNS} completed runs, and {done} completed")
        return
    shares = {}
    for key in comparison.keys:
        texts, values = finite_pairs(comparison, key)
        share = share_explained(texts, values.tolist())
        if share is not None:
            shares[key] = share
    if not shares:
        notes.append("no importance: no key has a value that two runs share")
        return
    ordered = sorted(shares, key=shares.__getitem__)
    figure, axes = _blank(5.2, min(8.0, 1.2 + 0.42 * len(ordered)))
    bars = axes.barh([_short(key, 30) for key in ordered], [shares[key] for key in ordered], color=COLORS[0])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(xlim=(0, 1.12), xlabel=f"share of the ranks of {comparison.tag} explained", title="importance of each key")
    caption = (
        f"The share of the variance of the ranks of {comparison.tag} over {done} completed runs that a key explains"
        " alone: 0 nothing, 1 all (Kelley's epsilon squared). Keys that matter only together can have 0 each, the"
        " shares need not add up to 1, and they are rough for few runs."
    )
    yield _chart(figure, name="importance", caption=caption)


def _pareto(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    objectives = comparison.objectives
    if len(objectives) < 2:
        notes.append("no Pareto front: the runs are not compared by one tag")
        return
    points = np.array([one.values for one in objectives], np.float64).T
    there = np.flatnonzero(np.isfinite(points).all(axis=1))
    if len(there) < 2:
        wanted = " and ".join(one.name for one in objectives)
        notes.append(f"no Pareto front: fewer than two completed runs have {wanted}")
        return
    points, names = points[there], [comparison.names[place] for place in there.tolist()]
    front = pareto_front(points, [one.mode for one in objectives])
    across, up = objectives[0], objectives[1]
    figure, axes = _blank()
    axes.scatter(points[~front, 0], points[~front, 1], s=22, color=GREY, alpha=0.45, label="dominated")
    axes.scatter(points[front, 0], points[front, 1], s=34, color=BEST, label="front")
    listed = np.flatnonzero(front)[:20].tolist()
    for place in listed[:8]:
        axes.annotate(_short(names[place], 14), points[place, :2], (4, 4), textcoords="offset points", fontsize=8)
    better = {"min": "less is better", "max": "more is better"}
    axes.set(
        xlabel=f"{across.name}, {better[across.mode]}", ylabel=f"{up.name}, {better[up.mode]}", title="Pareto front"
    )
    for axis, values in zip("xy", points.T, strict=False):
        if spans_decades(values):
            _make_log(axes, axis)
    caption = (
        f"{' against '.join(one.name for one in reversed(objectives))}. No run is better than one on the front in one"
        f" of them without being worse in another. On the front: {', '.join(names[place] for place in listed)}."
    )
    caption += f" The first two of {len(objectives)} objectives are drawn." if len(objectives) > 2 else ""
    yield _chart(figure, name="pareto", caption=caption)
