"""Encodes the columns of a table in a request as the training of a run encoded its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exp.data.column_source import ColumnSource
from exp.data.in_memory import Fitted
from exp.data.tables import FITTED, Table
from exp.data.unlabelled import trained_table
from exp.extras.export.preprocessing import TRANSFORMS
from exp.saved_runs.prediction import unlabelled_node
from exp.saved_runs.run_files import RunFiles

# The statistics of the training split that encode inputs, and those of them that are tensors.
USED = ("numbers", "dates", "means", "deviations", "fills", "words", "most_frequent")
TENSORS = ("means", "deviations", "fills")


def table_form(run: RunFiles, *, is_raw: bool = False) -> dict[str, Any] | None:
    """Return the arguments of ServedTable in plain values; None if the inputs are not columns of a table.

    Args:
        run: The run.
        is_raw: Whether the network itself standardizes its inputs.
    """
    if run.settings.has_own_loaders:
        return None
    node, fitted = unlabelled_node(run, Path("the request")), run.data.fitted
    is_changed = any(run.settings.data.get(key) for key in TRANSFORMS)
    if node["_target_"] != Table.unlabelled or FITTED not in fitted or is_changed:
        return None
    told = {"words": {}, "dates": {}, **{name: one for name, one in fitted[FITTED].items() if name in USED}}
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in told.items()}
    options = {name: value for name, value in node.items() if name not in ("_target_", "path", "delimiter", "header")}
    return {"told": plain, "options": options, "is_raw": is_raw}


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """The columns of which a network's inputs are made.

    Args:
        fitted: The statistics of the training split.
        options: The options of trained_table.
        is_raw: Whether the network itself standardizes its inputs.
    """

    fitted: Fitted
    options: Mapping[str, Any]
    is_raw: bool

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> ServedTable:
        """Return the table of a form that was read from JSON."""
        told = {
            name: torch.tensor(value, dtype=torch.float64) if name in TENSORS else value
            for name, value in form["told"].items()
        }
        fitted: Fitted = {FITTED: {"classes": {}, **told}}
        return cls(fitted=fitted, options=form["options"], is_raw=form["is_raw"])

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        told = self.fitted[FITTED]
        return [*told["numbers"], *told["words"]]

    def encode(self, columns: Mapping[str, Sequence[object]]) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
        """Return the network's inputs by name, and by column how many rows have each word that training does not know.

        Args:
            columns: Values of one length: numbers or texts, None for a missing one.

        Raises:
            ConfigError: exp.predict refuses such columns in a file.
        """
        given = {name: columns[name] for name in self.columns}
        options = dict(self.options)
        decimal, missing = options.pop("decimal", "."), options.pop("missing_values", None) or ()
        source = ColumnSource(file=Path("the request"), columns=given, missing_values=missing, decimal=decimal)
        table = trained_table(source, self.fitted[FITTED], **options)
        entries: Any = table.prepare(self.fitted).entries
        if self.is_raw:
            entries = table.in_own_units(torch.arange(len(table)), self.fitted)
        return {name: value.numpy() for name, value in entries.items()}, table.unknown_words(self.fitted)
