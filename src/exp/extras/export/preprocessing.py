"""Makes the standardization of a run's inputs a part of the graph, so that raw numbers go in.

Standardization by the training split's mean and deviation, fills of missing numbers and the normalization of pixels
are arithmetic. Words, classes, texts, decoding and Python functions are not, and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exp.config.settings import Settings
from exp.data.data import Data
from exp.data.tables import FITTED as TABLE
from exp.data.text import FITTED as CHARACTERS
from exp.data.tokens import FITTED as TOKENIZER
from exp.data.value_names import value_names
from exp.data.windows import FITTED as WINDOWS
from exp.errors import ConfigError, ErrorDetails, raise_errors
from exp.spelling import among

TEXTS = {CHARACTERS: "characters, which a vocabulary numbers", TOKENIZER: "texts, which a tokenizer numbers"}
TRANSFORMS = ("tv_tensors", "transforms", "eval_transforms", "batch_transforms", "collate")


class Standardization(nn.Module):
    """Fills, centers and scales raw numbers `[B, ...]` in float64, and returns float32.

    Float64, as the data does it: in float32 nothing is left of 1e8 + 1.

    Args:
        means, deviations: Float64, of a shape that broadcasts with a sample.
        fills: Of missing numbers; without them the answer to an input with nan is nan.
        raw_dtype: The dtype of the raw numbers.
        unit: A description of the raw numbers.
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor | None

    def __init__(
        self, means: Tensor, deviations: Tensor, *, fills: Tensor | None, raw_dtype: torch.dtype, unit: str
    ) -> None:
        super().__init__()
        self.register_buffer("means", means.double())
        self.register_buffer("deviations", deviations.double())
        self.register_buffer("fills", None if fills is None else fills.double())
        self.raw_dtype, self.unit = raw_dtype, unit

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        if self.fills is not None:
            x = torch.where(x.isnan(), self.fills, x)
        return ((x - self.means) / self.deviations).float()

    def raw(self, prepared: Tensor) -> Tensor:
        """Return the raw numbers of prepared ones, `[B, ...]`."""
        return (prepared.double() * self.deviations + self.means).to(self.raw_dtype)


def preparations(settings: Settings, data: Data) -> dict[str, Standardization]:
    """Return the preparation of each input by name.

    Args:
        settings: The run's settings.
        data: The run's data.

    Raises:
        ConfigError: No graph can prepare the data.
    """
    node = settings.data
    errors = [_error(f"data.{key}", got="Python functions", expected="none") for key in TRANSFORMS if node.get(key)]
    errors += [
        _error("data.dataset", got=told, expected="numbers") for kind, told in TEXTS.items() if kind in data.fitted
    ]
    table, windows = data.fitted.get(TABLE), data.fitted.get(WINDOWS)
    if isinstance(table, Mapping) and table.get("words"):
        got = f"the columns {among(table['words'])}, whose words are numbered by training"
        errors.append(_error("data.dataset", got=got, expected="columns of numbers"))
    raise_errors(errors)
    if isinstance(table, Mapping):
        fills = _option(node, "impute", otherwise=None)
        unit = f"the columns {among(table['numbers'], count=len(table['numbers']))}"
        if table.get("dates"):  # checkpoints of earlier versions have none
            unit += f", {among(table['dates'])} in days since 1970"
        unit += ", without missing numbers" if fills is None else ", nan for a missing number"
        return {"input": _of_columns(node, table, ..., fills=None if fills is None else table["fills"], unit=unit)}
    if isinstance(windows, Mapping):
        seen = value_names(data.part(data.stages[0])).columns["input"]
        places = [list(windows["columns"]).index(name) for name in seen]
        unit = f"rows of the columns {among(seen, count=len(seen))}"
        return {"input": _of_columns(node, windows, places, fills=None, unit=unit)}
    pictures = [name for name, one in data.spec.inputs.items() if len(one.shape) == 3 and one.dtype.startswith("float")]
    if data.input_mean is None or data.input_std is None or not pictures:
        got = "no preparation that is known"
        fix = "Leave preprocessing out, or state data.input_mean and data.input_std of pixels that were normalized"
        expected = "a table, windows of a series, or pixels"
        raise ConfigError([_error("data.dataset", got=got, expected=expected, fix=fix)])
    mean, deviation = (torch.as_tensor(one).reshape(-1, 1, 1) for one in (data.input_mean, data.input_std))
    unit = "pixels from 0 (black) to 1 (white), of the size that the network takes"
    return {name: Standardization(mean, deviation, fills=None, raw_dtype=torch.float32, unit=unit) for name in pictures}


def _option(node: Mapping[str, Any], name: str, *, otherwise: object) -> object:
    """Return an option of the training data set. otherwise: its default."""
    nodes = [node.get(part) for part in ("dataset", "train")]
    return next((one[name] for one in nodes if isinstance(one, Mapping) and name in one), otherwise)


def _of_columns(
    node: Mapping[str, Any], fitted: Mapping[str, Any], places: Any, *, fills: Tensor | None, unit: str
) -> Standardization:
    """Return the standardization of columns. places: the index of the columns in those that training has seen."""
    means, deviations = fitted["means"][places], fitted["deviations"][places]
    if not _option(node, "standardise", otherwise=True):  # the default of the data sets with this option
        means, deviations = torch.zeros_like(means), torch.ones_like(deviations)
    return Standardization(means, deviations, fills=fills, raw_dtype=torch.float64, unit=unit)


def _error(key: str, *, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    return ErrorDetails(
        key="preprocessing",
        got=f"true, and {key} has {got}",
        expected=f"{expected} there, which a graph can prepare",
        fix=fix or "Leave preprocessing out: the inputs are then those that the network was trained with",
        source="command line",
    )
