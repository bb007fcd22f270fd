"""All scalars of a run by optimizer step, as a table that a plot or a data frame is made of."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from exp.files import write_whole
from exp.spelling import among
from exp.tensorboard.curves import Curve

STEP = "step"


class History(Mapping[str, Curve]):
    """The curves of a run by tag: `history["loss/val"].steps` and `.values`, int64 and float64 `[N]`.

    curves: by tag. problems: what of the event files could not be read, a line each.
    """

    def __init__(self, *, curves: Mapping[str, Curve], problems: tuple[str, ...] = ()) -> None:
        self._curves, self.problems = dict(sorted(curves.items())), problems

    def __getitem__(self, tag: str) -> Curve:
        """Raises: KeyError for a tag that the run did not log, naming those like it."""
        if tag not in self._curves:
            raise KeyError(f"the run logged no {tag}; expected one of {among(self._curves, word=tag)}")
        return self._curves[tag]

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def table(self) -> dict[str, np.ndarray]:
        """One row a step at which anything was logged: `step`, int64 `[N]`, and a column a tag, float64 `[N]`.

        nan where a tag has no value at a step. `pandas.DataFrame(run.history.table())` takes it.
        """
        steps = np.unique(np.concatenate([np.empty(0, np.int64), *(curve.steps for curve in self._curves.values())]))
        columns = {STEP: steps}
        for tag, curve in self._curves.items():
            columns[tag] = np.full(len(steps), np.nan)
            columns[tag][np.searchsorted(steps, curve.steps)] = curve.values
        return columns

    def to_csv(self, path: str | Path) -> None:
        """Write the table, with an empty field where a tag has no value. Raises: OSError."""
        columns = self.table()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*(column.tolist() for column in columns.values()), strict=True):
            writer.writerow("" if value != value else repr(value) for value in row)
        write_whole(Path(path), text.getvalue())
