"""Heat maps of a run, drawn from table.csv: values of each layer or parameter by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exp.hooks.panels import Column, Healthy, Image, Panel
from exp.loggers.step_table import STEP, StepTable
from exp.output import warn_not_written

TABLE = "table.csv"
# Minimum seconds between two pictures of a heat map. A picture is drawn when the number of columns has doubled.
SECONDS_BETWEEN_PICTURES = 20.0
SECONDS_BETWEEN_WRITES = 5.0
# Maximum number of columns, because a column needs at least one pixel. With more columns, every second one is left out.
MOST_COLUMNS = 190


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Heat map of one tag, with a row for each layer or parameter, and a column for each step.

    Attributes:
        names: Names of the R rows.
        steps: Steps of the S columns, in increasing order.
        numbers: Values, `[R, S]`: nan if a row has no value at a step, infinite if the value was not finite.
    """

    names: list[str]
    steps: list[int]
    numbers: np.ndarray

    def picture(self, *, healthy: Healthy, title: str) -> np.ndarray:
        """Return the heat map as a picture, uint8 `[H, W, 3]`.

        Args:
            healthy: Bounds of healthy numbers.
            title: Text above the map.
        """
        # Imported within the function, because importing Pillow takes as long as a validation.
        from exp.hooks.figures import heat_map

        return heat_map(self.numbers, names=self.names, steps=self.steps, healthy=healthy, title=title)


def kept_heat_map(directory: Path, tag: str) -> HeatMap | None:
    """Return the heat map of a tag from the table of a run; None if the table has no value of the tag.

    For a long run, columns are left out at equal distances. The last column is always kept.

    Raises:
        OSError: The table cannot be read.
        ValueError: The table is damaged.
    """
    beginning = f"{tag}/"
    columns: list[tuple[int, list[str]]] = []
    names: list[str] = []
    for row in StepTable(directory / TABLE).read():
        names = names or [name for name in row if name.startswith(beginning)]
        cells = [row[name] for name in names]
        if any(cells):
            columns.append((int(row[STEP]), cells))
    if not columns:
        return None
    kept = columns[:: -(-len(columns) // MOST_COLUMNS)]
    if kept[-1] is not columns[-1]:
        kept[-1] = columns[-1]
    # A value that is not finite is marked as infinite, to distinguish it from a missing value.
    numbers = np.array([[float(cell) if cell else np.nan for cell in cells] for _, cells in kept]).T
    is_lost = np.array([[bool(cell) for cell in cells] for _, cells in kept]).T & ~np.isfinite(numbers)
    numbers[is_lost] = np.inf
    return HeatMap([name.removeprefix(beginning) for name in names], [step for step, _ in kept], numbers)


@dataclass(frozen=True, slots=True, eq=False)
class _Picture(Panel):
    """Heat map that is read from the table when it is drawn."""

    directory: Path
    tag: str
    healthy: Healthy

    def draw(self) -> Image:
        found = kept_heat_map(self.directory, self.tag)
        assert found is not None
        return Image(torch.from_numpy(found.picture(healthy=self.healthy, title=self.tag)).permute(2, 0, 1)[None])


@dataclass(slots=True)
class _Tag:
    """Columns and pictures of a tag so far.

    Attributes:
        healthy: Bounds of healthy numbers.
        count: Number of columns.
        step: Step of the last column.
        drawn: Number of columns in the last picture.
        drawn_at: Time of the last picture, by time.monotonic.
    """

    healthy: Healthy
    count: int = 0
    step: int = 0
    drawn: int = 0
    drawn_at: float = 0.0


class HeatMaps:
    """Writer of the run's table.csv, which contains the columns of hooks, and source of the heat maps drawn from it.

    The table has a row for each step, and a column for each part of each tag, such as `gradients/norm/hidden.weight`.

    Args:
        directory: Run directory. If None, nothing is written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._tags: dict[str, _Tag] = {}
        self._table = None if directory is None else StepTable(directory / TABLE)
        self._last_write = time.monotonic()

    def begin(self, step: int) -> None:
        """Remove an earlier process's rows from step `step` onward, because training starts at this step."""
        self._guard(lambda table: table.purge(step))

    def replace_columns(self, panels: Mapping[str, Panel], step: int) -> dict[str, Panel]:
        """Add the columns of a step to the table, and return the other panels of the step.

        A column has one value for each layer or parameter. If the heat map of a tag is due, the result contains it.

        Args:
            panels: Panels by tag.
            step: Number of completed optimizer steps.
        """
        shown = {tag: panel for tag, panel in panels.items() if not isinstance(panel, Column)}
        for tag, column in panels.items():
            if not isinstance(column, Column) or self._table is None:
                continue
            named = zip(column.names, column.values.double().tolist(), strict=True)
            self._table.add({f"{tag}/{name}": float(f"{value:.7g}") for name, value in named}, step)
            now = time.monotonic()
            known = self._tags.setdefault(tag, _Tag(column.healthy, drawn_at=now))
            known.count, known.step = known.count + 1, step
            # The time since the first column also counts, so that a short run draws only at its end.
            if known.count >= 2 * known.drawn and now - known.drawn_at > SECONDS_BETWEEN_PICTURES:
                shown |= self._draw(tag)
        if time.monotonic() - self._last_write > SECONDS_BETWEEN_WRITES:
            self.save()
        return shown

    def save(self) -> None:
        """Write the table."""
        self._last_write = time.monotonic()
        self._guard(StepTable.write)

    def end(self) -> dict[int, dict[str, Panel]]:
        """Write the table. Return the heat maps with columns that are not yet drawn, by their last step."""
        self.save()
        found: dict[int, dict[str, Panel]] = {}
        for tag, known in self._tags.items():
            if known.drawn != known.count:
                found.setdefault(known.step, {}).update(self._draw(tag))
        return {step: pictures for step, pictures in found.items() if pictures}

    def _draw(self, tag: str) -> dict[str, Panel]:
        known = self._tags[tag]
        known.drawn, known.drawn_at = known.count, time.monotonic()
        self.save()
        if self._table is None or self._directory is None:
            return {}
        return {tag: _Picture(self._directory, tag, known.healthy)}

    def _guard(self, work: Callable[[StepTable], None]) -> None:
        if self._table is None:
            return
        try:
            work(self._table)
        except (OSError, ValueError, LookupError) as error:  # ValueError and LookupError: a damaged table
            self._table = None
            warn_not_written(TABLE, error)
