"""Pictures of a comparison: curves with bands, values against keys, parallel coordinates, importance, Pareto front.

Each is drawn once, by Matplotlib without a window, and given twice: as SVG for a page, light or dark, and as PNG.
Matplotlib is an extra, and imported by who draws.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exp.errors import MissingExtraError, is_installed
from exp.extras.report.analysis import LEAST_RUNS, band, numbers, pareto_front, share_explained, spans_decades, thinned
from exp.extras.report.run_comparison import Comparison, finite_pairs
from exp.shared_types import compared_tag
from exp.spelling import among
from exp.sweeps.results import FINISHED, Repeats, Row
from exp.sweeps.run_records import is_of_validation

# Of one picture; what is more is told.
MOST_CURVES, MOST_KEYS, MOST_AXES = 8, 12, 10
# Of a line, and of all lines of a picture, which a page would else be large and slow with.
MOST_POINTS, MOST_POINTS_OF_ALL, LEAST_POINTS = 400, 40_000, 50
# Of the axis of a key: values that are all written, columns that are all named, how near two of its length 1 may stand.
MOST_TICKS, MOST_COLUMNS, LEAST_GAP = 8, 16, 0.06
FEW_POINTS = 30
# Kinds of points that the legend beside a title has room for.
MOST_ABOVE = 3
MOST_LETTERS = 56
# Okabe and Ito's colours but black and yellow: told apart by the colour-blind, on white and on black.
BEST, GOOD, GREY = "#d55e00", "#1787d1", "#8f8f8f"
# Of more groups than these, and the best, all but the best are grey.
COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31", "#7570b3")
# What a page has colours of its own for: text and axes, lines of the grid, what is behind them.
INK, RULE, PAPER = "#202124", "#d5d6d8", "#fefefd"
STATUS = {
    "completed": ("o", "#0072b2"),
    "pruned": ("v", "#009e73"),
    "failed": ("X", "#b2182b"),
    "interrupted": ("s", "#cc79a7"),
    "running": (">", "#56b4e9"),
}
OTHER_STATUS = ("d", GREY)
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
    "svg.hashsalt": "exp",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture. name: of its file. text: what it shows, for who cannot see it. caption: how it is read.

    width: in pixels, at which its letters are as large as those of the others.
    """

    name: str
    title: str
    text: str
    caption: str
    svg: str
    png: bytes
    width: int
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Charts:
    """The pictures, and what is not drawn, a line each."""

    drawn: Sequence[Chart]
    notes: Sequence[str]


def draw(comparison: Comparison, *, tags: Sequence[str] = ()) -> Charts:
    """Every picture of a comparison.

    tags: whose curves are drawn first.
    Raises: MissingExtraError without Matplotlib.
    """
    if not is_installed("matplotlib"):
        raise MissingExtraError(feature="a report with pictures", package="matplotlib", extra="report")
    import matplotlib

    notes: list[str] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        drawn = [
            *_curves(comparison, tags, notes),
            *_against_keys(comparison, notes),
            *_parallel(comparison, notes),
            *_importance(comparison, notes),
            *_pareto(comparison, notes),
        ]
    # Such as of a letter that its font does not have, which is a box in the PNGs.
    notes += dict.fromkeys(f"of the pictures: {warning.message}" for warning in warned)
    return Charts(drawn=drawn, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Around the axes of a picture, in inches: what its labels and its legend need."""

    left: float = 0.72
    right: float = 0.15
    top: float = 0.32
    bottom: float = 0.48


def _chart(
    plot: Callable[[Any], None],
    *,
    name: str,
    size: tuple[float, float] = (5.2, 3.2),
    margins: Margins = Margins(),
    **words: Any,
) -> Chart:
    """plot: draws on the axes that it is given. size: of the whole, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, facecolor="white")
    # Said, not measured: Matplotlib's own layouts draw everything once more.
    figure.subplots_adjust(
        left=margins.left / size[0],
        right=1 - margins.right / size[0],
        top=1 - margins.top / size[1],
        bottom=margins.bottom / size[1],
    )
    axes = figure.add_subplot()
    plot(axes)
    png, svg = io.BytesIO(), io.StringIO()
    FigureCanvasAgg(figure).print_png(png)
    figure.patch.set_alpha(0.0)
    axes.patch.set_alpha(0.0)
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    file = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")
    width = round(118 * size[0])
    return Chart(name=file, svg=_inline(svg.getvalue(), file), png=png.getvalue(), width=width, **words)


def _inline(svg: str, name: str) -> str:
    """The picture as a part of a page: its colours are the page's, its names its own, and nothing else is in it."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)

    def changed(found: re.Match[str]) -> str:
        tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", found[0]).replace("xlink:href", "href")
        tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", tag)
        if tag.startswith("<svg"):  # as large as its place
            tag = re.sub(r' (width|height)="[\d.]+pt"', "", tag)
        return tag.replace(INK, "var(--ink)").replace(RULE, "var(--rule)").replace(PAPER, "var(--paper)")

    # In tags alone: what stands between them is text, and may be anybody's.
    return re.sub(r"<[^>]+>", changed, svg)


# --- curves ---


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
        notes.append(f"curves of {left} are left out, behind the first {MOST_CURVES}. --metric TAG puts one first")
    for tag in ordered[:MOST_CURVES]:
        yield _curve(comparison, tag)


def _curve(comparison: Comparison, tag: str) -> Chart:
    groups = [group for group in comparison.groups if any(_has(comparison, row, tag) for row in group.rows)]
    best = comparison.best_group
    few = len(groups) - bool(best) <= len(COLOURS)
    over = comparison.repeat_over

    labels = [_label(comparison, group) for group in groups if few or group.rows == best]
    labels += [] if few else [_others(len(groups) - bool(best))]

    def plot(axes: Any) -> None:
        colours = iter(COLOURS)
        for group in sorted(groups, key=lambda one: one.rows == best):
            is_best = group.rows == best
            colour = BEST if is_best else next(colours) if few else GREY
            label = _label(comparison, group)
            style = {"color": colour, "linewidth": 2.0 if is_best else 1.2, "label": label}
            shade = 1.0 if few or is_best else 0.35
            _draw_group(axes, comparison, group, tag, style, alpha=shade, has_band=few or is_best)
        axes.set(xlabel="optimizer step", title=tag)
        _log_where_wide(axes)
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        _legend(axes, [] if few else labels)

    # Of what is not drawn nothing is said.
    drawn = [[row for row in group.rows if _has(comparison, row, tag)] for group in groups]
    has_band = any(sum(row.status in FINISHED for row in rows) > 1 for rows in drawn)
    shown = f"the mean of runs over {over} with a band of one standard deviation" if has_band else "a line a run"
    others = _others(len(groups) - bool(best))
    dropped = "" if few else f" The best is orange, {others} grey." if best else f" {others} grey."
    repeats = (
        f" A line is the mean of completed runs that differ in {over} alone, the band one standard deviation (over"
        " n - 1) to each side, both where all of them have been."
        if has_band
        else ""
    )
    if any(row.status not in FINISHED for rows in drawn for row in rows):
        repeats += " A dashed line is a run that was not completed."
    return _chart(
        plot,
        name=f"curve-{tag}",
        size=(5.2, 3.2 + _beneath(labels)),
        margins=Margins(bottom=0.5 + _beneath(labels)),
        title=tag,
        text=f"{tag} by optimizer step, {len(groups)} line{'s' if len(groups) != 1 else ''}: {shown}.",
        caption=f"{tag} by optimizer step.{repeats}{dropped}{_thinning(comparison, tag)}",
    )


def _most_points(comparison: Comparison) -> int:
    """Of a line, where all runs are drawn."""
    return max(LEAST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_ALL // len(comparison.rows)))


def _thinning(comparison: Comparison, tag: str) -> str:
    most = _most_points(comparison)
    longest = max(len(record.curves[tag].steps) for record in comparison.records if tag in record.curves)
    if longest <= most:
        return ""
    return f" Of up to {longest:,} points {most} at most are drawn, each the mean of neighbours."


def _has(comparison: Comparison, row: Row, tag: str) -> bool:
    return tag in comparison.records[row.job].curves


def _draw_group(
    axes: Any, comparison: Comparison, group: Repeats, tag: str, style: dict[str, Any], *, alpha: float, has_band: bool
) -> None:
    most = _most_points(comparison)
    rows = [row for row in group.rows if _has(comparison, row, tag)]
    done = [row for row in rows if row.status in FINISHED]
    curves = [comparison.records[row.job].curves[tag] for row in done]
    joint = band([(curve.steps, curve.values) for curve in curves])
    alone = rows if joint is None else [row for row in rows if row not in done]
    if joint is not None:
        steps, mean = thinned(joint.steps, joint.mean, most=most)
        _line(axes, steps, mean, {**style, "alpha": alpha})
        if joint.count > 1 and has_band:
            _, deviation = thinned(joint.steps, joint.deviation, most=most)
            axes.fill_between(steps, mean - deviation, mean + deviation, color=style["color"], alpha=0.18, linewidth=0)
        style = {**style, "label": "_"}
    for row in alone:
        curve = comparison.records[row.job].curves[tag]
        steps, values = thinned(curve.steps, curve.values, most=most)
        dashed = {} if row.status in FINISHED else {"linestyle": "--", "linewidth": 1.0}
        _line(axes, steps, values, {**style, "alpha": alpha, **dashed})
        style = {**style, "label": "_"}


def _line(axes: Any, steps: np.ndarray, values: np.ndarray, style: Mapping[str, Any]) -> None:
    few = len(steps) <= FEW_POINTS
    shown = np.where(np.isfinite(values), values, np.nan)
    axes.plot(steps, shown, marker="o" if few else None, markersize=3.0, **style)


def _label(comparison: Comparison, group: Repeats) -> str:
    """What a line is called: by what was swept; where nothing was, by its run."""
    label = comparison.label(group.swept) or ("all" if comparison.repeat_over else comparison.names[group.rows[0].job])
    return f"{_shortened(label)} (best)" if group.rows == comparison.best_group else _shortened(label)


def _log_where_wide(axes: Any) -> None:
    """A logarithmic axis for positive values that are decades apart, such as of a run that diverged."""
    drawn = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    if drawn and spans_decades(np.concatenate(drawn)):
        _make_log(axes, "y")
        found = np.concatenate(drawn)
        axes.set_ylim(bottom=float(np.nanmin(found)) / 1.3)  # a band that reaches zero has no end there


def _make_log(axes: Any, axis: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set(**{f"{axis}scale": "log"})
    which = axes.xaxis if axis == "x" else axes.yaxis
    # Matplotlib's own are mathematics, which no text of a picture is read as.
    which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    which.set_minor_formatter(NullFormatter())


def _legend(axes: Any, chosen: Sequence[str]) -> None:
    """Beneath the axes, where it covers no line, the best first. chosen: of many lines, those that are named."""
    pairs = list(zip(*axes.get_legend_handles_labels(), strict=True))[::-1]
    if chosen:
        from matplotlib.lines import Line2D

        pairs = [pair for pair in pairs if pair[1] in chosen]
        pairs.append((Line2D([], [], color=GREY, alpha=0.6), chosen[-1]))
    if pairs:
        lines, labels = zip(*pairs, strict=True)
        axes.figure.legend(lines, labels, loc="lower left", ncols=_columns(labels))


def _others(count: int) -> str:
    return f"{count} other{'s' if count != 1 else ''}"


def _columns(labels: Sequence[str]) -> int:
    return 1 if max(map(len, labels), default=0) > 24 else 2


def _beneath(labels: Sequence[str]) -> float:
    """The height of a legend of so many lines, in inches."""
    return 0.12 + 0.17 * math.ceil(len(labels) / _columns(labels))


def _legend_of_points(axes: Any) -> None:
    """At the right of the title; of many kinds, beneath the axes."""
    points, labels = axes.get_legend_handles_labels()
    style = {"ncols": len(labels), "handletextpad": 0.1, "columnspacing": 1.0}
    if len(labels) <= MOST_ABOVE:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.97), **style)
    else:
        axes.figure.legend(points, labels, loc="lower left", **style)


def _shortened(label: str, most: int = MOST_LETTERS) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in label).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


# --- values against keys ---


def _against_keys(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    if comparison.tag is None or not any(map(math.isfinite, comparison.values)):
        notes.append("no values against keys: no run has a value by which all are compared")
        return
    keys = comparison.keys if len(comparison.rows) > 1 else []
    if not keys:
        notes.append("no values against keys: the runs do not differ in what was typed, or there is one alone")
    if len(keys) > MOST_KEYS:
        notes.append(f"values against {', '.join(keys[MOST_KEYS:])} are left out, behind the first {MOST_KEYS} keys")
    for key in keys[:MOST_KEYS]:
        yield _against(comparison, key)


def _against(comparison: Comparison, key: str) -> Chart:
    shown = [
        (row, row.swept[key], value)
        for row, value in zip(comparison.rows, comparison.values, strict=True)
        if key in row.swept and math.isfinite(value)
    ]
    scale = Scale.of(comparison, key)
    best, medians = comparison.best, _medians(comparison, key, scale)
    has_star = best is not None and key in best.swept
    kinds = list(dict.fromkeys(row.status for row, _, _ in shown))
    beneath = 0.26 if len(kinds) + (best is not None) > MOST_ABOVE else 0.0

    def plot(axes: Any) -> None:
        axes.plot(*medians, color=GREY, linewidth=1.0, alpha=0.7)
        for status in kinds:
            marker, colour = STATUS.get(status, OTHER_STATUS)
            own = [(text, value) for row, text, value in shown if row.status == status]
            xs, ys = scale.places([text for text, _ in own]), [value for _, value in own]
            face = colour if status == "completed" else "none"
            axes.scatter(xs, ys, marker=marker, s=26, facecolors=face, edgecolors=colour, alpha=0.75, label=status)
        if best is not None and has_star:
            place = scale.places([best.swept[key]])
            axes.scatter(
                place, [best.value], marker="*", s=190, color=BEST, edgecolors=INK, linewidths=0.6, label="best"
            )
        axes.set(xlabel=key, ylabel=comparison.tag, title=f"{comparison.tag} against {comparison.short(key)}")
        if spans_decades(np.array([value for *_, value in shown])):
            _make_log(axes, "y")
        scale.label(axes)
        _legend_of_points(axes)

    star = ", the best a star" if has_star else ""
    sentences = [f"{comparison.tag} against {key}: a point a run, its shape its status{star}."]
    if len(medians[0]):
        sentences.append("The grey line joins the medians of the completed runs.")
    if len(comparison.keys) > 1:
        sentences.append("Other keys differ, too, from point to point.")
    kind = "each value a column" if scale.names else "a logarithmic axis" if scale.is_log else "a linear axis"
    return _chart(
        plot,
        name=f"value-{key}",
        size=(5.2, 3.2 + beneath),
        margins=Margins(bottom=scale.bottom + beneath),
        title=f"{comparison.tag} against {key}",
        text=f"{comparison.tag} of {len(shown)} runs against {key}, {kind}.",
        caption=" ".join(sentences),
    )


def _medians(comparison: Comparison, key: str, scale: Scale) -> tuple[np.ndarray, list[float]]:
    """Return places of a key and the medians of the completed runs there; none where they would say nothing."""
    texts, values = finite_pairs(comparison, key)
    places = scale.places(texts)
    there = np.unique(places)
    is_drawn = 1 < len(there) <= 12 and len(there) < len(places)
    there = there if is_drawn else there[:0]
    return there, [np.median(values[places == place]) for place in there]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where the values of a key stand on an axis.

    names: where each value has a column, such as words, by place; else none. ticks: values that are written beside it;
    is_whole: whether they are all.
    """

    names: Sequence[str]
    is_log: bool
    ticks: Sequence[str]
    is_whole: bool = True

    @classmethod
    def of(cls, comparison: Comparison, key: str) -> Scale:
        texts = list(dict.fromkeys(row.swept[key] for row in comparison.rows if key in row.swept))
        found = numbers(texts)
        if found is None:
            return cls(names=sorted(texts), is_log=False, ticks=sorted(texts))
        ordered = [texts[place] for place in np.argsort(found)]
        is_few = len(ordered) <= MOST_TICKS
        some = ordered if is_few else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
        scale = cls(names=[], is_log=comparison.is_log(key), ticks=some, is_whole=is_few)
        if is_few and len(ordered) > 1 and np.diff(scale.heights(ordered)).min() < LEAST_GAP:
            return cls(names=ordered, is_log=False, ticks=ordered)  # 0, 1e-4, 1e-3: no axis tells them apart
        return scale

    def places(self, texts: Sequence[str]) -> np.ndarray:
        """The coordinate of each value, before the axis takes its logarithm."""
        if self.names:
            columns = {name: place for place, name in enumerate(self.names)}
            return np.array([columns[text] for text in texts], np.float64)
        return np.array([float(text) for text in texts], np.float64)

    def heights(self, texts: Sequence[str]) -> np.ndarray:
        """From 0 to 1, the first value to the last."""
        places = self.places(texts)
        ends = self.places([self.ticks[0], self.ticks[-1]])
        if self.is_log:
            places, ends = np.log(places), np.log(ends)
        span = float(ends[1] - ends[0])
        return (places - ends[0]) / span if span else np.full(len(places), 0.5)

    def words(self) -> list[str]:
        """The ticks as they are written."""
        if self.names:
            return [_shortened(name, 16) for name in self.ticks]
        return [tick if len(tick) <= 6 else f"{float(tick):.3g}" for tick in self.ticks]

    def label(self, axes: Any) -> None:
        """Give the horizontal axis its ticks."""
        if self.names:
            shown = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if self._is_wordy else {}
            step = math.ceil(len(self.names) / MOST_COLUMNS)
            axes.set_xticks(range(0, len(self.names), step), self.words()[::step], **shown)
            axes.set_xlim(-0.5, len(self.names) - 0.5)
            return
        if self.is_log:
            _make_log(axes, "x")
        first, last = self.places([self.ticks[0], self.ticks[-1]])
        # Of an axis without two powers of ten, Matplotlib would write none.
        if self._has_room and (self.is_whole or (self.is_log and last / first < 100)):
            axes.set_xticks(self.places(self.ticks), self.words())
            axes.minorticks_off()

    @property
    def _has_room(self) -> bool:
        """Whether the ticks have room."""
        heights = self.heights(self.ticks)
        return bool(len(heights) < 2 or np.diff(heights).min() >= 0.11)

    @property
    def _is_wordy(self) -> bool:
        """Whether the names of the columns have no room side by side."""
        return sum(len(word) + 2 for word in self.words()) > 54

    @property
    def bottom(self) -> float:
        """What the ticks and the name of the axis need, in inches."""
        return 0.48 if not self._is_wordy else 0.5 + 0.045 * max(map(len, self.words()))


# --- all keys at once ---


def _parallel(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    keys = list(comparison.keys)[:MOST_AXES]
    done = [row for row in comparison.rows if row.has_value and all(key in row.swept for key in keys)]
    if not keys or len(done) < 2 or comparison.tag is None:
        notes.append("no parallel coordinates: they need two completed runs that differ in a key")
        return
    if len(comparison.keys) > MOST_AXES:
        notes.append(
            f"parallel coordinates leave out {', '.join(comparison.keys[MOST_AXES:])}, behind {MOST_AXES} keys"
        )
    scales = [Scale.of(comparison, key) for key in keys]
    values = np.array([row.value for row in done], np.float64)
    orange = "; the best is orange" if any(row is comparison.best for row in done) else ""
    is_log = spans_decades(values)
    low, high = float(values.min()), float(values.max())
    heights = _heights(values, is_log=is_log)
    paths = np.column_stack(
        [*(scale.heights([row.swept[key] for row in done]) for key, scale in zip(keys, scales, strict=True)), heights]
    )

    def plot(axes: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        good = 1 - heights if comparison.mode == "min" else heights
        # On white and on black alike what is good stands out.
        colours = LinearSegmentedColormap.from_list("good", [GREY, GOOD])(good)
        for place in np.argsort(good):
            is_best = done[place] is comparison.best
            axes.plot(
                paths[place],
                color=BEST if is_best else colours[place],
                linewidth=2.6 if is_best else 1.1,
                alpha=1.0 if is_best else 0.3 + 0.6 * float(good[place]),
                label="best" if is_best else "_",
            )
        for place, scale in enumerate(scales):
            axes.axvline(place, color=INK, linewidth=0.8)
            _tick_texts(axes, place, scale.heights(scale.ticks), scale.words())
        axes.axvline(len(keys), color=INK, linewidth=0.8)
        shown = [low, math.sqrt(low * high) if is_log else (low + high) / 2, high]
        _tick_texts(axes, len(keys), np.array([0.0, 0.5, 1.0]), [f"{value:.4g}" for value in shown])
        labels = [*(_shortened(comparison.short(key), 22) for key in keys), str(comparison.tag)]
        axes.set_xticks(range(len(labels)), labels)
        axes.set(xlim=(-0.15, len(keys) + 0.45), ylim=(-0.06, 1.06), yticks=[])
        axes.tick_params(axis="x", length=0, pad=6)
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title("all keys at once")

    yield _chart(
        plot,
        name="parallel",
        margins=Margins(left=0.1, right=0.1, bottom=0.34),
        size=(min(12.0, 2.2 + 1.7 * (len(keys) + 1)), 3.8),
        title="All keys at once",
        text=f"Parallel coordinates of {len(done)} completed runs: {', '.join(keys)} and {comparison.tag}.",
        caption=f"A line a completed run, from key to key, to its {comparison.tag} at the right. The bluer a line,"
        f" the better{orange}. Where blue lines meet on an axis, its value is one to choose.",
        is_wide=True,
    )


def _heights(values: np.ndarray, *, is_log: bool) -> np.ndarray:
    scaled = np.log(values) if is_log else values
    span = float(scaled.max() - scaled.min())
    return np.asarray((scaled - scaled.min()) / span if span else np.full(len(values), 0.5))


def _tick_texts(axes: Any, place: float, heights: np.ndarray, texts: Sequence[str]) -> None:
    """Values beside a vertical axis, those left out that would cover another."""
    last = -math.inf
    for height, text in zip(heights, texts, strict=True):
        if height - last >= 0.05:
            box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.75}
            axes.text(place + 0.04, height, text, va="center", ha="left", fontsize=8, bbox=box)
            last = float(height)


# --- importance ---


def _importance(comparison: Comparison, notes: list[str]) -> Iterator[Chart]:
    shares = {}
    for key in comparison.keys:
        texts, values = finite_pairs(comparison, key)
        share = share_explained(texts, values.tolist())
        if share is not None:
            shares[key] = share
    done = sum(row.has_value for row in comparison.rows)
    if comparison.tag is None or done < LEAST_RUNS:
        notes.append(
            f"no importance: it needs {LEAST_RUNS} completed runs that are compared by one tag; completed are {done}"
        )
        return
    if not shares:
        notes.append("no importance: no key has values that come again")
        return
    ordered = sorted(shares, key=lambda key: shares[key])

    def plot(axes: Any) -> None:
        bars = axes.barh(
            [_shortened(key, 30) for key in ordered], [shares[key] for key in ordered], color=COLOURS[0], height=0.6
        )
        axes.bar_label(bars, [f"{shares[key]:.2f}" for key in ordered], padding=3)
        axes.set(
            xlim=(0, 1.12), xticks=[0, 0.25, 0.5, 0.75, 1.0], xlabel=f"share of the ranks of {comparison.tag} explained"
        )
        axes.set_title("importance of each key alone")
        axes.grid(visible=False, axis="y")

    told = ", ".join(f"{key} {shares[key]:.2f}" for key in reversed(ordered))
    yield _chart(
        plot,
        name="importance",
        margins=Margins(left=0.3 + 0.068 * max(len(_shortened(key, 30)) for key in ordered)),
        size=(5.2, min(8.0, 1.2 + 0.42 * len(ordered))),
        title="Importance of each key alone",
        text=f"Share of the variance of the ranks of {comparison.tag} that each key explains alone: {told}.",
        caption=f"The share of the variance of the ranks of {comparison.tag} over {done} completed runs that a key"
        " explains alone: 0 nothing, 1 all (Kelley's epsilon squared; numbers of many values in bins). Keys that"
        " matter only together may have 0 each, the shares need not add up to 1, and of few runs they are rough.",
    )


# --- Pareto front ---


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
    points = points[there]
    front = pareto_front(points, [one.mode for one in objectives])
    names = [comparison.names[place] for place in there.tolist()]
    across, up = objectives[0], objectives[1]

    def plot(axes: Any) -> None:
        axes.scatter(points[~front, 0], points[~front, 1], s=22, color=GREY, alpha=0.45, label="dominated")
        order = np.flatnonzero(front)[np.argsort(points[front, 0], kind="stable")].tolist()
        if len(objectives) == 2:
            axes.plot(
                points[order, 0], points[order, 1], color=BEST, linewidth=1.0, drawstyle=_steps(across.mode, up.mode)
            )
        axes.scatter(points[order, 0], points[order, 1], s=34, color=BEST, label="front", zorder=3)
        if len(order) <= 8:
            for place in order:
                axes.annotate(
                    _shortened(names[place], 14), points[place, :2], (4, 4), textcoords="offset points", fontsize=8
                )
        words = {"min": "less is better", "max": "more is better"}
        axes.set(
            xlabel=f"{across.name}, {words[across.mode]}", ylabel=f"{up.name}, {words[up.mode]}", title="Pareto front"
        )
        for place, axis in enumerate("xy"):
            if spans_decades(points[:, place]):
                _make_log(axes, axis)
        axes.margins(0.08)
        _legend_of_points(axes)

    listed = ", ".join(names[place] for place in np.flatnonzero(front)[:20].tolist())
    others = (
        ""
        if len(objectives) == 2
        else f" The front is of all {len(objectives)} objectives, and the first two are drawn."
    )
    yield _chart(
        plot,
        name="pareto",
        title="Pareto front",
        text=f"{up.name} against {across.name} of {len(names)} runs; on the front: {listed}.",
        caption=f"{' against '.join(one.name for one in reversed(objectives))}. No run is better than one on the front"
        f" in one of them without being worse in another. On it: {listed}.{others}",
    )


def _steps(across: str, up: str) -> str:
    """Between two neighbours of a front, the corner that both dominate."""
    return "steps-post" if across == "min" else "steps-pre"
