"""Heat maps of a run: what there is of each layer or parameter, layers by steps, and its numbers in table.csv."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from exp.errors import RunError
from exp.hooks.panels import Column, Healthy, Image, Panel
from exp.loggers.step_table import STEP, StepTable
from exp.output import tell_not_written

TABLE = "table.csv"
# A picture of a long run is drawn as seldom as its number of columns doubles, and not oftener than this.
SECONDS_BETWEEN_PICTURES = 20.0
SECONDS_BETWEEN_WRITES = 5.0
# A pixel a column, at least: of more, every other one is shown from there on.
MOST_COLUMNS = 190


@dataclass(slots=True)
class HeatMap:
    """The columns of one tag so far.

    healthy: between which bounds numbers are healthy.
    names: of the rows, in the order in which they came.
    steps: of the columns, rising. columns: the numbers of each, by the first rows; later ones are missing there.
    """

    healthy: Healthy
    names: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)
    # Of the columns that came: how many, every how many-th stays, and which did.
    count: int = 0
    _every: int = 1
    _kept: list[int] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)
    _last: tuple[str, ...] = ()
    _rows: np.ndarray | None = None

    def add(self, step: int, names: tuple[str, ...], values: np.ndarray) -> None:
        """A column. values: `[R]`, of these names. A step that is there already gets its further rows."""
        if names != self._last or self._rows is None:
            for name in names:
                self._places.setdefault(name, len(self._places))
            self.names = list(self._places)
            self._last, self._rows = names, np.array([self._places[name] for name in names])
        column = np.full(len(self.names), np.nan)
        if self.steps and self.steps[-1] == step:
            self.count -= 1
            before = self._pop()
            column[: len(before)] = before
        elif self._kept and self._kept[-1] % self._every:
            self._pop()  # it was there as the newest one alone
        # A number that is lost is not one that is missing.
        column[self._rows] = np.where(np.isfinite(values), values, np.inf)
        self.steps.append(step)
        self.columns.append(column)
        self._kept.append(self.count)
        self.count += 1
        if len(self.steps) > MOST_COLUMNS:
            self._thin()

    def _pop(self) -> np.ndarray:
        """Take the newest column away."""
        self.steps.pop()
        self._kept.pop()
        return self.columns.pop()

    def _thin(self) -> None:
        """Keep every other column, and the newest one: the axis of a picture is even but for its end."""
        self._every *= 2
        last = self._kept[-1]
        stay = [place for place, number in enumerate(self._kept) if number % self._every == 0 or number == last]
        self.steps, self.columns, self._kept = (
            [self.steps[place] for place in stay],
            [self.columns[place] for place in stay],
            [self._kept[place] for place in stay],
        )

    def numbers(self) -> np.ndarray:
        """`[R, S]`: nan where a row has no number, infinite where it has lost it."""
        whole = np.full((len(self.names), len(self.steps)), np.nan)
        for place, column in enumerate(self.columns):
            whole[: len(column), place] = column
        return whole

    def picture(self, *, title: str) -> np.ndarray:
        """uint8 `[H, W, 3]`."""
        # Pillow takes as long to import as a validation; a run draws at its end.
        from exp.hooks.figures import heat_map

        return heat_map(self.numbers(), names=self.names, steps=self.steps, healthy=self.healthy, title=title)


@dataclass(frozen=True, slots=True, eq=False)
class _Picture(Panel):
    """A heat map as it stands, drawn when it is written, as every panel is."""

    of: HeatMap
    tag: str

    def drawn(self) -> Image:
        return Image(torch.from_numpy(self.of.picture(title=self.tag)).permute(2, 0, 1)[None])


class HeatMaps:
    """Collects the columns that hooks give in a run, draws them, and keeps their numbers in the run's table.csv.

    The table has a row a step, and a column for each part of each tag: `gradients/norm/hidden.weight`.

    directory: of the run; None keeps no table. is_drawn: whether there are pictures, and not the table alone.
    """

    def __init__(self, directory: Path | None, *, is_drawn: bool = True) -> None:
        self.by_tag: dict[str, HeatMap] = {}
        self._is_drawn = is_drawn
        cure = "leave out the hooks that give numbers of each layer"
        self._table = None if directory is None else StepTable(directory / TABLE, cure=cure)
        self._last_write = time.monotonic()
        # What an earlier process of this run has written, as far as a picture shows it.
        self._kept: list[tuple[int, dict[str, float]]] = []
        # Of each tag: how many columns the last picture had, and when it was drawn.
        self._drawn: dict[str, tuple[int, float]] = {}

    def begin(self, step: int) -> None:
        """Training begins with this step: take what an earlier process has kept of those before, and void the rest."""

        def take(table: StepTable) -> None:
            table.purge(step)
            self._kept = _thinned(table.read()) if self._is_drawn else []

        self._guarded(take)

    def shown(self, panels: Mapping[str, Panel], step: int) -> dict[str, Panel]:
        """The panels of a step, with a heat map in the place of a column, where one is due."""
        columns = {tag: panel for tag, panel in panels.items() if isinstance(panel, Column)}
        if not columns:
            return dict(panels)
        shown = {tag: panel for tag, panel in panels.items() if tag not in columns}
        for tag, column in columns.items():
            values = column.values.double().numpy()
            if self._is_drawn:
                self._map_of(tag, column.healthy).add(step, column.names, values)
            if self._table is not None:
                named = zip(column.names, values.tolist(), strict=True)
                self._table.add({f"{tag}/{name}": float(f"{value:.7g}") for name, value in named}, step)
            if self._is_drawn and self._is_due(tag):
                shown[tag] = self._picture(tag)
        if time.monotonic() - self._last_write > SECONDS_BETWEEN_WRITES:
            self.save()
        return shown

    def save(self) -> None:
        """Write the table."""
        self._last_write = time.monotonic()
        self._guarded(StepTable.write)

    def end(self) -> dict[int, dict[str, Panel]]:
        """Write the table, and give the pictures that have columns which were not drawn yet, by the last one's step."""
        self.save()
        found: dict[int, dict[str, Panel]] = {}
        for tag, one in self.by_tag.items():
            drawn, _ = self._drawn.get(tag, (0, 0.0))
            if drawn != one.count:
                found.setdefault(one.steps[-1], {})[tag] = self._picture(tag)
        return found

    def _map_of(self, tag: str, healthy: Healthy) -> HeatMap:
        known = self.by_tag.get(tag)
        if known is None:
            known = self.by_tag[tag] = HeatMap(healthy)
            _fill(known, tag, self._kept)
        return known

    def _is_due(self, tag: str) -> bool:
        now = time.monotonic()
        # From the first column on: a short run draws at its end alone.
        count, when = self._drawn.setdefault(tag, (0, now))
        return self.by_tag[tag].count >= 2 * count and now - when > SECONDS_BETWEEN_PICTURES

    def _picture(self, tag: str) -> Panel:
        one = self.by_tag[tag]
        self._drawn[tag] = (one.count, time.monotonic())
        return _Picture(one, tag)

    def _guarded(self, work: Callable[[StepTable], None]) -> None:
        if self._table is None:
            return
        try:
            work(self._table)
        except (RunError, OSError, ValueError, LookupError) as error:  # the last two of a table that is damaged
            self._table = None
            tell_not_written(TABLE, error)


def kept_heat_map(directory: Path, tag: str, *, healthy: Healthy) -> HeatMap | None:
    """The heat map of a tag by the table of a run; None where that has nothing of it.

    Raises: OSError where it cannot be read, ValueError where it is damaged.
    """
    found = HeatMap(healthy)
    _fill(found, tag, map(_numbers, StepTable(directory / TABLE, cure="").read()))
    return found if found.steps else None


def _fill(found: HeatMap, tag: str, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Add the columns of a tag from rows of a table."""
    beginning = f"{tag}/"
    for step, row in rows:
        own = {name.removeprefix(beginning): value for name, value in row.items() if name.startswith(beginning)}
        if own:
            found.add(step, tuple(own), np.array([*own.values()]))


def _numbers(row: Mapping[str, str]) -> tuple[int, dict[str, float]]:
    """The step of a row, and what it has, by tag. Raises: ValueError, LookupError."""
    return int(row[STEP]), {tag: float(value) for tag, value in row.items() if value and tag != STEP}


def _thinned(rows: Iterable[Mapping[str, str]]) -> list[tuple[int, dict[str, float]]]:
    """As many rows as a picture has columns, twice at most, evenly, and the last."""
    kept: list[tuple[int, dict[str, float]]] = []
    every, last = 1, None
    for place, row in enumerate(rows):
        last = row
        if place % every == 0:
            kept.append(_numbers(row))
            last = None
        if len(kept) > 2 * MOST_COLUMNS:
            every, kept = 2 * every, kept[::2]
    return kept if last is None else [*kept, _numbers(last)]
