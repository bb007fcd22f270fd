"""Heat maps of a run, drawn from table.csv: a row for each layer or parameter, and a column for each step."""

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
# Minimum seconds between two pictures of the same heat map. A new picture also needs twice as many columns as the last.
SECONDS_BETWEEN_PICTURES = 20.0
SECONDS_BETWEEN_WRITES = 5.0
# Maximum number of columns in a picture, because a column needs at least one pixel. Further columns are left out at
# equal distances.
MOST_COLUMNS = 190


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Heat map of one tag, with a row for each layer or parameter, and a column for each step.

    Attributes:
        names: Name of each row: a layer or a parameter.
        steps: Optimizer step of each column, in increasing order.
        numbers: Values, `[R, S]`, for R rows and S columns. A missing value is nan. A value that was not finite is
            infinite.
    """

    names: list[str]
    steps: list[int]
    numbers: np.ndarray

    def picture(self, *, healthy: Healthy, title: str) -> np.ndarray:
        """Return the heat map as a picture, uint8 `[H, W, 3]`.

        Args:
            healthy: Bounds of the values that count as healthy.
            title: Text above the heat map.
        """
        # Imported late, because importing Pillow takes as long as a validation.
        from exp.hooks.figures import heat_map

        return heat_map(self.numbers, names=self.names, steps=self.steps, healthy=healthy, title=title)


def kept_heat_map(directory: Path, tag: str) -> HeatMap | None:
    """Return the heat map of a tag from a run's table.csv; None if the table has no value of the tag.

    If there are more than MOST_COLUMNS columns, some are left out at equal distances. The last column is always kept.

    Args:
        directory: Run directory.
        tag: Tag such as `gradients/norm`.

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
    """Panel with the heat map of a tag. The values are read from table.csv when the panel is drawn."""

    directory: Path
    tag: str
    healthy: Healthy

    def draw(self) -> Image:
        found = kept_heat_map(self.directory, self.tag)
        assert found is not None
        return Image(torch.from_numpy(found.picture(healthy=self.healthy, title=self.tag)).permute(2, 0, 1)[None])


@dataclass(slots=True)
class _Tag:
    """Progress of the heat map of one tag.

    Attributes:
        healthy: Bounds of the values that count as healthy.
        count: Number of columns written so far.
        step: Optimizer step of the last column.
        drawn: Number of columns in the last picture. 0: no picture was drawn.
        drawn_at: Time of the last picture, or of the first column before any picture, by time.monotonic.
    """

    healthy: Healthy
    count: int = 0
    step: int = 0
    drawn: int = 0
    drawn_at: float = 0.0


class HeatMaps:
    """Writer of the run's table.csv and of the heat maps that are drawn from this table.

    The table contains the values that hooks log for each layer or parameter. It has a row for each step. A column is
    named by the tag and the layer or parameter, such as `gradients/norm/hidden.weight`.

    Args:
        directory: Run directory. None: nothing is written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._tags: dict[str, _Tag] = {}
        self._table = None if directory is None else StepTable(directory / TABLE)
        self._last_write = time.monotonic()

    def begin(self, step: int) -> None:
        """Remove the rows from step `step` onward, because training starts at this step and writes them again."""
        self._guard(lambda table: table.purge(step))

    def replace_columns(self, panels: Mapping[str, Panel], step: int) -> dict[str, Panel]:
        """Add the Column panels of a step to the table, and return the panels that loggers receive instead.

        A Column panel has one value for each layer or parameter.

        Args:
            panels: Panels by tag.
            step: Number of completed optimizer steps.

        Returns:
            Panels by tag: all panels that are not a Column, and the heat maps that are due for a new picture.
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
            # The time is also measured from the first column, so that a short run draws only at its end.
            if known.count >= 2 * known.drawn and now - known.drawn_at > SECONDS_BETWEEN_PICTURES:
                shown |= self._draw(tag)
        if time.monotonic() - self._last_write > SECONDS_BETWEEN_WRITES:
            self.save()
        return shown

    def save(self) -> None:
        """Write the buffered rows to the table."""
        self._last_write = time.monotonic()
        self._guard(StepTable.write)

    def end(self) -> dict[int, dict[str, Panel]]:
        """Write the table, and return the heat maps with columns that are not in a picture yet.

        Returns:
            Heat maps by tag, by the optimizer step of their last column.
        """
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
