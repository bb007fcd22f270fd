"""Encoder of table columns in a request to exp.serve. The encoding is the same as for the training data of the run."""

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
from exp.saved_runs.prediction import unlabelled_node
from exp.saved_runs.run_files import RunFiles

# Keys of the statistics of the training split that are needed to encode inputs. The values of the keys in TENSORS are
# tensors.
USED = ("numbers", "dates", "means", "deviations", "fills", "words", "most_frequent")
TENSORS = ("means", "deviations", "fills")
# Keys below `data.` in the config with functions that change samples after their encoding.
TRANSFORMS = ("transforms", "eval_transforms", "batch_transforms", "collate")


def table_form(run: RunFiles) -> dict[str, object] | None:
    """Return the argument of ServedTable.of for a run. All values can be written as JSON.

    Return None if the inputs of the network are not the encoded columns of a table.
    """
    if run.settings.has_own_loaders:
        return None
    node, fitted = unlabelled_node(run, Path("the request")), run.data.fitted
    is_changed = any(run.settings.data.get(key) for key in TRANSFORMS)
    if node["_target_"] != Table.unlabelled or FITTED not in fitted or is_changed:
        return None
    used = {"words": {}, "dates": {}, **{name: one for name, one in fitted[FITTED].items() if name in USED}}
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in used.items()}
    options = {name: value for name, value in node["options"].items() if name not in ("delimiter", "header")}
    return {"fitted": plain, "options": options}


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """Encoder that converts table columns to the inputs of a network.

    Args:
        fitted: Statistics of the training split.
        options: Arguments of the run's data set that `trained_table` needs to encode rows, by name. They may also
            contain `decimal` and `missing_values`.
    """

    fitted: Fitted
    options: Mapping[str, Any]

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> ServedTable:
        """Return the encoder that the metadata of an exported file describes.

        Args:
            form: The result of `table_form`, which may have been written as JSON and read again.
        """
        used = {
            name: torch.tensor(value, dtype=torch.float64) if name in TENSORS else value
            for name, value in form["fitted"].items()
        }
        return cls(fitted={FITTED: {"classes": {}, **used}}, options=form["options"])

    @property
    def columns(self) -> list[str]:
        """The names of the columns that a request must contain."""
        used = self.fitted[FITTED]
        return [*used["numbers"], *used["words"]]

    def encode(self, columns: Mapping[str, Sequence[object]]) -> tuple[dict[str, np.ndarray], Mapping[str, object]]:
        """Return the encoded columns, and the words that are not in the training split.

        Args:
            columns: Values of each column by name: numbers, texts, or None for a missing value. All columns must have
                the same length.

        Returns:
            Two mappings. The first maps the names of the network's inputs to arrays. The second maps columns to the
            number of rows with each unknown word.

        Raises:
            ConfigError: A value is invalid. exp.predict rejects the same values in a file.
        """
        given = {name: columns[name] for name in self.columns}
        options = dict(self.options)
        decimal, missing = options.pop("decimal", "."), options.pop("missing_values", None) or ()
        source = ColumnSource(file=Path("the request"), columns=given, missing_values=missing, decimal=decimal)
        table = trained_table(source, self.fitted[FITTED], **options)
        entries: Any = table.prepare(self.fitted).entries
        return {name: value.numpy() for name, value in entries.items()}, table.unknown_words(self.fitted)
